"""The guard itself: it raises for what is planted here."""

import pytest
import torch
import triton
import triton.language as tl

from . import guard
from .helpers import INTERPRETED, assert_same_bits, normal

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the guard belongs to the interpreter")


@triton.jit
def copy_kernel(x, out, first, last, N: tl.constexpr):
    index = first + tl.arange(0, N)
    tl.store(out + tl.arange(0, N), tl.load(x + index, mask=index < last, other=0.0), mask=index < last)


@triton.jit
def write_kernel(out, first):
    tl.store(out + first + tl.arange(0, 4), tl.full((4,), 1.0, tl.float32))


@triton.jit
def add_kernel(out, first):
    tl.atomic_add(out + first + tl.arange(0, 4), tl.full((4,), 1.0, tl.float32))


@triton.jit
def exchange_kernel(out, index):
    tl.atomic_cas(out + index, 0, 1)


def copied(x, first=0, last=8):
    out = torch.zeros(8)
    copy_kernel[(1,)](x, out, first, last, 8)
    return out


def test_accesses_within_a_tensor_pass():
    x = torch.arange(8.0)
    assert torch.equal(copied(x), x)
    assert copied(x[:5], last=5).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]  # masked lanes may point anywhere
    write_kernel[(1,)](x, 4)
    add_kernel[(1,)](x, 4)
    assert x.tolist() == [0, 1, 2, 3, 2, 2, 2, 2]
    counts = torch.zeros(3, dtype=torch.int32)
    exchange_kernel[(1,)](counts, 2)
    assert counts.tolist() == [0, 0, 1]


@pytest.mark.parametrize("first", [-1, 1, 5, 1 << 20])
def test_reads_beyond_a_tensor_raise(first):
    x = torch.zeros(64)[16:24]
    with pytest.raises(Exception, match="OutOfBounds.*load"):
        copied(x, first, 1 << 30)


def test_reads_between_the_rows_of_a_view_raise():
    with pytest.raises(Exception, match="OutOfBounds.*load: 4 of 8"):
        copied(torch.zeros(16)[::2])


@pytest.mark.parametrize("first", [-1, 5, 1 << 20])
@pytest.mark.parametrize("kernel, what", [(write_kernel, "store"), (add_kernel, "atomic")])
def test_writes_beyond_a_tensor_raise_and_write_nothing(kernel, what, first):
    buffer = torch.zeros(24)
    with pytest.raises(Exception, match=f"OutOfBounds.*{what}"):
        kernel[(1,)](buffer[8:16], first)
    assert not buffer.any()


def test_an_exchange_beyond_a_tensor_raises():
    with pytest.raises(Exception, match="OutOfBounds.*atomic"):
        exchange_kernel[(1,)](torch.zeros(3, dtype=torch.int32), 3)


def test_a_tensor_of_an_earlier_launch_is_out_of_bounds():
    kept = torch.zeros(8)
    copied(kept)
    other = torch.zeros(8)
    with pytest.raises(Exception, match="OutOfBounds"):
        copied(other, (kept.data_ptr() - other.data_ptr()) // 4, 1 << 62)


@triton.jit
def cast_kernel(x, out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, tl.load(x + index).to(out.dtype.element_ty))


def cast(x, dtype):
    out = torch.zeros(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, out, x.numel())
    return out


def float32_bits(words):
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_casts_to_bfloat16_round_as_torch_does():
    random = normal(1024) * torch.logspace(-45, 38, 1024)
    ties = float32_bits([(high << 16) + low for high in (0x3F80, 0x3F81, 0xBF80, 0x0001) for low in (0x7FFF, 0x8000)])
    edges = float32_bits([0x0, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 1])
    for x in (random, ties, edges, random[:64].half(), random[:64].double()):
        assert_same_bits(cast(x, torch.bfloat16), x.to(torch.bfloat16))
    assert cast(float32_bits([0x7F800001, 0x7FFFFFFF]), torch.bfloat16).isnan().all()
    whole = torch.arange(-512, 512, dtype=torch.int32)
    assert_same_bits(cast(whole, torch.bfloat16), whole.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_casts_from_bfloat16_are_those_of_torch(dtype):
    x = 100 * normal(64, dtype=torch.bfloat16)
    assert_same_bits(cast(x, dtype), x.to(dtype))


@triton.jit
def dot_kernel(x, y, out, N: tl.constexpr):
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)
    tl.store(out + index, tl.dot(tl.load(x + index), tl.load(y + index)))


def test_the_dot_of_bfloat16_is_that_of_float32():
    x, y, out = normal(16, 16, dtype=torch.bfloat16), normal(16, 16, seed=1, dtype=torch.bfloat16), torch.zeros(16, 16)
    dot_kernel[(1,)](x, y, out, 16)
    torch.testing.assert_close(out, x.float() @ y.float())


@triton.jit
def compare_kernel(x, y, out, N: tl.constexpr):
    index = tl.arange(0, N)
    left, right = tl.load(x + index), tl.load(y + index)
    below, same = (left < right).to(tl.int32), (left == right).to(tl.int32)
    tl.store(out + index, below + 2 * same + 4 * (tl.where(left > right, left, right) == left).to(tl.int32))


def test_comparisons_see_the_numbers():
    values = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, torch.inf, torch.nan], dtype=torch.bfloat16)
    x, y = (part.flatten().contiguous() for part in torch.meshgrid(values, values, indexing="ij"))
    out = torch.zeros(64, dtype=torch.int32)
    compare_kernel[(1,)](x, y, out, 64)
    assert torch.equal(out, (x < y).int() + 2 * (x == y).int() + 4 * (torch.where(x > y, x, y) == x).int())


@triton.jit
def next_kernel(x, out, N: tl.constexpr):
    index = tl.arange(0, N)
    bits = tl.load(x + index).to(tl.int16, bitcast=True) + 1
    tl.store(out + index, bits.to(tl.int16).to(tl.bfloat16, bitcast=True))


def test_the_bits_of_bfloat16_can_be_worked_with():
    x, out = normal(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.bfloat16)
    next_kernel[(1,)](x, out, 16)
    assert_same_bits(out, (x.view(torch.int16) + 1).view(torch.bfloat16))


@triton.jit
def sum_kernel(x, out):
    value = tl.load(x + tl.arange(0, 4))
    tl.store(out + tl.arange(0, 4), value + value)


@triton.jit
def negative_kernel(x, out):
    tl.store(out + tl.arange(0, 4), -tl.load(x + tl.arange(0, 4)))


@triton.jit
def product_of_constant_kernel(x, out):
    tl.store(out + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)) * 2.0)


@triton.jit
def fma_kernel(x, out):
    value = tl.load(x + tl.arange(0, 4))
    tl.store(out + tl.arange(0, 4), tl.fma(value, value, value))


@triton.jit
def _first(left, right):
    return left


@triton.jit
def reduce_kernel(x, out):
    tl.store(out, tl.reduce(tl.load(x + tl.arange(0, 4)), 0, _first))


@triton.jit
def truncate_kernel(x, out):
    value = tl.load(x + tl.arange(0, 4)).to(tl.float32)
    tl.store(out + tl.arange(0, 4), value.to(tl.bfloat16, fp_downcast_rounding="rtz"))


@pytest.mark.parametrize(
    "kernel",
    [sum_kernel, negative_kernel, product_of_constant_kernel, fma_kernel, reduce_kernel, truncate_kernel],
    ids=lambda kernel: kernel.__name__,
)
def test_bfloat16_arithmetic_raises(kernel):
    x = normal(4, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="cast to float32 first|get_bf16"):  # 3.8 has no constants either
        kernel[(1,)](x, torch.zeros_like(x))


def test_an_unknown_interpreter_is_named(monkeypatch):
    monkeypatch.setitem(guard.PATCHED, "InterpreterBuilder", ["create_load", "create_something"])
    monkeypatch.setattr(guard.triton, "__version__", "9.9")
    with pytest.raises(RuntimeError, match=r"triton 9\.9 has no InterpreterBuilder\.create_something"):
        guard.install()
