"""Compiles what a host function would launch on a GPU, and counts what is in the machine code. Needs no GPU."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

KIBIBYTE = 1024
COLUMNS = 512
"""Columns of tensor memory that a program of sm_100 may have."""


class Device(NamedTuple):
    """A GPU: its target, the shared memory that one program may have, and how many programs run at a time."""

    target: GPUTarget
    shared: int
    processors: int


DEVICES = {
    "sm_80": Device(GPUTarget("cuda", 80, 32), 163 * KIBIBYTE, 108),
    "sm_89": Device(GPUTarget("cuda", 89, 32), 99 * KIBIBYTE, 142),
    "sm_90": Device(GPUTarget("cuda", 90, 32), 227 * KIBIBYTE, 132),
    "sm_100": Device(GPUTarget("cuda", 100, 32), 227 * KIBIBYTE, 148),
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), 64 * KIBIBYTE, 304),
}


class FakeDriver:
    """What triton asks a driver for before a launch. Each device has a number, as kernels are kept by it."""

    def __init__(self, name: str):
        self.device, self.number = DEVICES[name], list(DEVICES).index(name)
        properties = {"multiprocessor_count": self.device.processors, "max_shared_mem": self.device.shared}
        self.utils = SimpleNamespace(get_device_properties=lambda _: properties)

    def get_current_target(self) -> GPUTarget:
        return self.device.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.number)


class HostRead(AssertionError):
    """A host function asked for the value of a tensor, for which a GPU would have to finish all its work."""


class FakeCuda(TorchFunctionMode):
    """Tensors on `cuda` without values, on a torch that may be built without CUDA.

    What such a torch cannot do with them, as it first looks for the device, is done on tensors of device `meta`.
    """

    READS = ("item", "tolist", "numpy", "nonzero", "__int__", "__float__", "__bool__", "__index__")

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.READS and args[0].is_cuda:
            raise HostRead(f"{name} of {tuple(args[0].shape)}")
        if name == "__getitem__":
            return _view(*args)
        if name == "__setitem__":
            return _view(*args[:2]).copy_(torch.as_tensor(args[2]))
        if name == "contiguous":
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_cuda and any(isinstance(x, Tensor) and x.is_cuda for x in args):
            raise HostRead(f"{name} to {result.device}")
        return result


def _view(tensor: Tensor, index: Any) -> Tensor:
    """`tensor[index]` without tensors among the indices."""
    if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in (index, *_parts(index))):
        raise HostRead("an index that is a mask")
    with torch._C.DisableTorchFunction():
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        like = torch.empty(size, dtype=tensor.dtype, device="meta")
        view = like.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[index]
        assert view.untyped_storage()._cdata == like.untyped_storage()._cdata, "an index that copies"
        return tensor.as_strided(view.shape, view.stride(), view.storage_offset())


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else ()


class Pointer:
    """A tensor as a kernel sees it: `torch` starts every allocation at a multiple of 256 bytes."""

    ALLOCATION = 1 << 40

    def __init__(self, tensor: Tensor):
        self.dtype = tensor.dtype
        self.storage = tensor.untyped_storage()._cdata
        self.nbytes = tensor.untyped_storage().nbytes()
        self._offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self.ALLOCATION + self._offset

    def ptr_range(self) -> int:
        return self.nbytes


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: JITFunction[Any]
    grid: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compiled(self) -> Any:
        """What triton would run on the current fake device."""
        return _RUN(self.kernel, *self.args, grid=self.grid, warmup=True, **self.kwargs)

    @property
    def name(self) -> str:
        return self.kernel.__name__.lstrip("_")

    def reads(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of its arguments is one of these tensors, or a view of it."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        return any(isinstance(arg, Pointer) and arg.storage in storages for arg in (*self.args, *self.kwargs.values()))


_RUN = JITFunction.run


@dataclass(frozen=True)
class Recorder:
    """A fake device, and what was launched on it."""

    device: torch.device
    launches: list[Launch]


@contextlib.contextmanager
def fake_device(name: str) -> Iterator[Recorder]:
    """Inside, tensors on `device` have no values and no kernel runs."""
    driver, launches = FakeDriver(name), list[Launch]()

    def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = {key: _seen(value) for key, value in kwargs.items()}
        launches.append(Launch(kernel, grid, tuple(_seen(arg) for arg in args), named))

    no_guard = mock.patch.multiple(torch.cuda, device=contextlib.nullcontext, device_of=contextlib.nullcontext)
    with _active(driver), mock.patch.object(JITFunction, "run", run), no_guard, FakeTensorMode(), FakeCuda():
        yield Recorder(driver.get_active_torch_device(), launches)


@contextlib.contextmanager
def _active(driver: FakeDriver) -> Iterator[None]:
    config = triton.runtime.driver
    before = config._active
    config.set_active(driver)
    try:
        yield
    finally:
        config.set_active(before)


def _seen(value: Any) -> Any:
    return Pointer(value) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Code:
    """What is in the machine code of a kernel.

    `spilled`: bytes of stack (NVIDIA), or vector registers and bytes of scratch (AMD); `scalars`: scalar registers that
    moved into vector ones (AMD), which touches no memory; `local`: loads and stores of what was spilled. `shared`:
    bytes; `columns`: of the tensor memory of sm_100. `wide` and `narrow`: global loads of at least 16 and of at most 2
    bytes. `conversions` from integers to floats, and those of them in a `loop`.
    """

    name: str
    registers: int
    spilled: int
    scalars: int
    local: int
    shared: int
    columns: int
    wide: int
    narrow: int
    conversions: int
    loop: int


def compiled(name: str, launch: Launch) -> Code:
    """The code of a launch on the device `name`."""
    return inspect(kernel(name, launch), launch.name)


def kernel(name: str, launch: Launch) -> Any:
    """What a launch runs on the device `name`, compiled unless it was before."""
    with _active(FakeDriver(name)):
        found = launch.compiled()
    assert found.metadata.target == DEVICES[name].target
    return found


def inspect(kernel: Any, name: str) -> Code:
    """Counts of a compiled kernel."""
    memory = {"shared": kernel.metadata.shared, "columns": getattr(kernel.metadata, "tmem_size", None) or 0}
    if kernel.metadata.target.backend == "cuda":
        return Code(name, **memory, **_nvidia(kernel.asm["cubin"]))
    return Code(name, **memory, **_amd(kernel.asm["amdgcn"]))


@functools.cache
def _nvidia(cubin: bytes) -> dict[str, int]:
    tools = triton.knobs.nvidia
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools.cuobjdump.path, "--dump-resource-usage", file.name)
        text = _output(tools.nvdisasm.path, "--print-code", file.name)
    resources = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    conversion = r"\bU?I2FP?\.(?!\S*RP)"  # rounded up it is the reciprocal in a division of integers
    return dict(
        registers=resources["REG"],
        spilled=resources["STACK"] + resources["LOCAL"],
        scalars=0,
        local=_count(r"\b(?:LDL|STL)\b", text),
        wide=_count(r"\b(?:LDG|LDGSTS)\S*\.(?:128|ENL2\.256)|\bUTMALDG|\bUBLKCP", text),
        narrow=_count(r"\bLDG\S*\.[US](?:8|16)\b", text),
        conversions=_count(conversion, text),
        loop=_count(conversion, loops(text, r"(\.L_x_\d+):", r"BRA\S* .*?\(?(\.L_x_\d+)")),
    )


@functools.cache
def _amd(text: str) -> dict[str, int]:
    fields = {key: int(value) for key, value in re.findall(r"^ *-? *\.(\w+): +(\d+)$", text, re.MULTILINE)}
    conversion = r"\bv_cvt_(?:pk_)?f\d+_(?:u|i)\w+"
    memory = r"\b(?:global|buffer|flat)_load_"
    return dict(
        registers=fields["vgpr_count"],
        spilled=fields["vgpr_spill_count"] + fields["private_segment_fixed_size"],
        scalars=fields["sgpr_spill_count"],
        local=_count(r"\bscratch_(?:load|store)", text),
        wide=_count(memory + r"dwordx4", text),
        narrow=_count(memory + r"(?:u|s)?(?:byte|short)", text),
        conversions=_count(conversion, text),
        loop=_count(conversion, loops(text, r"(\.LBB\w+):", r"s_c?branch\w* (\.LBB\w+)")),
    )


def loops(text: str, label: str, branch: str) -> str:
    """The lines between a label and the last branch back to it."""
    lines, start, inside = text.splitlines(), {}, set()
    for number, line in enumerate(lines):
        if found := re.match(label, line):
            start[found[1]] = number
        elif (found := re.search(branch, line)) and found[1] in start:
            inside.update(range(start[found[1]], number + 1))
    return "\n".join(lines[number] for number in sorted(inside))


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
