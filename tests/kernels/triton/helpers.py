"""Inputs in every layout, calls that must leave them alone, and comparisons."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("plain", "rows", "heads_last", "rows_last", "every_second")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(low, high, shape, seed=0, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid(x, layout="plain"):
    """`x` on DEVICE as a view whose surroundings hold NaN, or 99: a part of the `rows` of a buffer, axes in another
    order, or `every_second` channel."""
    around = torch.nan if x.is_floating_point() else 99
    if layout == "plain":
        view = torch.empty_strided(x.shape, x.contiguous().stride(), dtype=x.dtype, device=DEVICE)
    elif layout == "rows":
        buffer = torch.full((*x.shape[:2], x.shape[2] + 12, *x.shape[3:]), around, dtype=x.dtype, device=DEVICE)
        view = buffer[:, :, 5 : 5 + x.shape[2]]
    elif layout == "heads_last":
        view = torch.full_like(x.transpose(1, 2).contiguous(), around, device=DEVICE).transpose(1, 2)
    elif layout == "rows_last":
        view = torch.full_like(x.transpose(-1, -2).contiguous(), around, device=DEVICE).transpose(-1, -2)
    else:
        view = torch.full((*x.shape, 2), around, dtype=x.dtype, device=DEVICE)[..., 1]
    return view.copy_(x)


def on_device(part, layout="plain"):
    """A tensor, or a list of them, with the layout; anything else as it is."""
    if isinstance(part, torch.Tensor):
        return laid(part, layout)
    return [laid(one, layout) for one in part] if isinstance(part, (list, tuple)) and _of_tensors(part) else part


def _of_tensors(parts):
    return all(isinstance(part, torch.Tensor) for part in parts)


def _tensors(parts):
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, (list, tuple)):
            yield from _tensors(part)


def call(kernel, *args, **settings):
    """What the kernel returns for `args`, on CPU; it must not decline them, change them or return one of them."""
    given = list(_tensors([*args, *settings.values()]))
    before = [tensor.clone() for tensor in given]
    result = kernel(*args, **settings)
    assert result is not NotImplemented, f"{kernel.__name__} left this case to the definition"
    for tensor, copy in zip(given, before, strict=True):
        assert same_bits(tensor, copy), f"{kernel.__name__} changed an argument"
    for part in _tensors([result]):
        assert part.device.type == DEVICE
    return tuple(part.cpu() for part in result) if isinstance(result, (list, tuple)) else result.cpu()


def same_bits(left, right):
    """NaN of the same bits are equal, zeros of different sign are not."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_floating_point():
        left, right = (part.contiguous().view(INTEGERS[part.element_size()]) for part in (left, right))
    return torch.equal(left, right)


def assert_same_bits(got, want):
    """One tensor each, or as many."""
    if isinstance(want, torch.Tensor):
        got, want = [got], [want]
    assert len(got) == len(want)
    for index, (left, right) in enumerate(zip(got, want, strict=True)):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        if not same_bits(left, right):
            where = (left != right).nonzero()
            first = f", first at {where[0].tolist()}: {left[tuple(where[0])]} for {right[tuple(where[0])]}"
            raise AssertionError(
                f"result {index}: {len(where)} of {left.numel()} elements differ{first if len(where) else ' in bits'}"
            )


def assert_close(got, want, tolerance):
    """Largest difference over largest absolute value of `want` (float64), beyond what rounding each element to the
    dtype of `got` takes; NaN where `want` has NaN, and only there."""
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan()), f"{int(got.isnan().sum())} NaN for {int(want.isnan().sum())}"
    if want.isnan().all():  # also if there is nothing to compare
        return
    want = want.nan_to_num(0.0)
    rounding = 0.5 * torch.finfo(got.dtype).eps * want.abs()
    error = ((got.nan_to_num(0.0).double() - want).abs() - rounding).max() / want.abs().max().clamp_min(1e-300)
    assert error <= tolerance, f"relative error {error:.2e} exceeds {tolerance}"
