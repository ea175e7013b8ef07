"""Makes the Triton interpreter notice what it would otherwise pass over: wrong addresses and bfloat16 arithmetic.

The interpreter follows every address, and holds a bfloat16 as the integer of its bits, with which it then computes.
After `install`, an access that is not to an element of a tensor given to the kernel raises `OutOfBounds`, casts to
bfloat16 round to nearest even, comparisons and `tl.dot` see the numbers, and other bfloat16 arithmetic raises.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
PATCHED = {
    "GridExecutor": ["_init_args_hst"],
    "InterpreterBuilder": [
        "binary_op", "cast_impl", "create_atomic_cas", "create_atomic_rmw", "create_dot", "create_erf", "create_fma",
        "create_fp_to_fp", "create_masked_load", "create_masked_store", "create_rsqrt", "ternary_op", "unary_op",
    ],
    "ReduceScanOpInterface": ["apply"],
    "TensorHandle": ["get_element_ty"],
}  # fmt: skip
_reachable = []


class OutOfBounds(Exception):
    """A kernel reads or writes what is no element of its tensors."""


def install():
    """Patches the interpreter of this process. Raises RuntimeError where this Triton is not built as is expected."""
    missing = [
        f"{owner}.{name}"
        for owner, names in PATCHED.items()
        for name in names
        if not hasattr(getattr(interpreter, owner, None), name)
    ]
    if missing:
        raise RuntimeError(
            f"the interpreter of triton {triton.__version__} has no {', '.join(missing)}: this guard was written for "
            "triton 3.6 to 3.9"
        )
    _guard_memory()
    _guard_bfloat16()


def _patch(owner, name, function):
    """`function` in place of a method; it gets the original method, then the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(self, *args):
        return function(functools.partial(original, self), *args)

    setattr(owner, name, patched)


def _guard_memory():
    builder = interpreter.InterpreterBuilder

    def launch(original, args, kwargs):
        args, kwargs = original(args, kwargs)
        _reachable[:] = [Elements(tensor) for tensor in _tensors([*args, *kwargs.values()])]
        return args, kwargs

    def load(original, pointers, mask, *rest):
        _check("load", pointers, mask)
        return original(pointers, mask, *rest)

    def store(original, pointers, value, mask, *rest):
        _check("store", pointers, mask)
        return original(pointers, value, mask, *rest)

    def update(original, operation, pointers, value, mask, *rest):
        _check("atomic", pointers, mask)
        _refuse_bfloat16(value)
        return original(operation, pointers, value, mask, *rest)

    def exchange(original, pointers, *rest):
        _check("atomic", pointers, None)
        return original(pointers, *rest)

    _patch(interpreter.GridExecutor, "_init_args_hst", launch)
    _patch(builder, "create_masked_load", load)
    _patch(builder, "create_masked_store", store)
    _patch(builder, "create_atomic_rmw", update)
    _patch(builder, "create_atomic_cas", exchange)


def _tensors(args):
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from _tensors(arg)
        elif isinstance(arg, torch.Tensor):
            yield arg
        elif hasattr(arg, "base"):  # a tensor with another dtype, or a descriptor
            yield from _tensors([arg.base])


class Elements:
    """The addresses of the elements of a tensor; what lies between those of a view is not among them."""

    def __init__(self, tensor):
        self.start, self.size = tensor.data_ptr(), tensor.element_size()
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        self.length = 1 + sum((n - 1) * stride for n, stride in axes) if tensor.numel() else 0
        self.own = None
        if self.length > tensor.numel():
            self.own = torch.zeros(self.length, dtype=torch.bool)
            self.own.as_strided(tensor.shape, tensor.stride()).fill_(True)
            self.own = self.own.numpy()

    def hold(self, addresses, size):
        """Whether the `size` bytes from each address on are in this tensor."""
        first, last = ((addresses + byte - self.start) // self.size for byte in (0, size - 1))
        inside = (first >= 0) & (last < self.length)
        if self.own is not None:
            inside[inside] = self.own[first[inside]] & self.own[last[inside]]
        return inside


def _check(what, pointers, mask):
    addresses = pointers.data.astype(np.int64)
    addresses = addresses.ravel() if mask is None else addresses[np.broadcast_to(mask.data, addresses.shape)]
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    outside = np.ones(addresses.shape, dtype=bool)
    for elements in _reachable:
        if not outside.any():
            return
        outside[outside] = ~elements.hold(addresses[outside], size)
    if outside.any():
        raise OutOfBounds(
            f"{what}: {outside.sum()} of {outside.size} addresses are outside of every tensor in program "
            f"{interpreter.interpreter_builder.grid_idx}, the first is {addresses[outside][0]:#x}"
        )


def _guard_bfloat16():
    builder = interpreter.InterpreterBuilder

    def binary(original, left, right, operation):
        if operation in COMPARISONS:
            return original(_wide(left), _wide(right), operation)
        _refuse_bfloat16(left, right)
        return original(left, right, operation)

    def ternary(original, first, second, third, operation):
        if operation is not np.where:
            _refuse_bfloat16(first, second, third)
        return original(first, second, third, operation)

    def dot(original, left, right, total, *rest):
        _refuse_bfloat16(total)
        return original(_wide(left), _wide(right), total, *rest)

    def cast(original, source, target):
        if target.scalar == tl.bfloat16:
            return source if _is_bfloat16(source) else _narrow(source)
        return original(_wide(source), target)

    def cast_rounding(original, source, target, rounding):
        if not _is_bfloat16(source) and target.scalar != tl.bfloat16:
            return original(source, target, rounding)
        nearest = rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if nearest and source.dtype.primitive_bitwidth >= 16 and target.scalar.primitive_bitwidth >= 16:
            return original.args[0].cast_impl(source, target)
        raise NotImplementedError(f"bfloat16 in a cast with rounding {rounding}: cast to float32 first")

    def reduce(original, given):
        _refuse_bfloat16(*(part.handle for part in (given if isinstance(given, tuple) else (given,))))
        return original(given)

    def refuse(original, *args):
        _refuse_bfloat16(*(arg for arg in args if isinstance(arg, interpreter.TensorHandle)))
        return original(*args)

    _patch(builder, "binary_op", binary)
    _patch(builder, "ternary_op", ternary)
    _patch(builder, "create_dot", dot)
    _patch(builder, "cast_impl", cast)
    _patch(builder, "create_fp_to_fp", cast_rounding)
    _patch(interpreter.ReduceScanOpInterface, "apply", reduce)
    for name in ("unary_op", "create_fma", "create_erf", "create_rsqrt"):
        _patch(builder, name, refuse)


def _is_bfloat16(handle):
    return handle.dtype.scalar == tl.bfloat16


def _refuse_bfloat16(*handles):
    if any(map(_is_bfloat16, handles)):
        raise NotImplementedError("the interpreter has no bfloat16 arithmetic: cast to float32 first")


def _wide(handle):
    """A bfloat16 as the float32 of the same value; anything else as it is."""
    if not _is_bfloat16(handle):
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(handle):
    """Rounded to the nearest bfloat16, ties to even."""
    floats = np.ascontiguousarray(handle.data.astype(np.float32))
    bits = floats.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return interpreter.TensorHandle(np.where(np.isnan(floats), np.uint16(0x7FC0), rounded), tl.bfloat16)
