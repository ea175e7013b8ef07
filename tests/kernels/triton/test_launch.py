import pytest
import torch
import triton
import triton.language as tl
from kvcomp_kernels.launch import offset, spaced

from .helpers import DEVICE, LAYOUTS, laid, normal


@triton.jit
def offsets_kernel(out, first, stride, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), offset(first + tl.arange(0, N), stride))


@triton.jit
def program_offsets_kernel(out, stride):
    tl.store(out + tl.program_id(0), offset(tl.program_id(0), stride))


@pytest.mark.parametrize("first, stride", [(0, 1), (70_000, 40_000), (2**31 - 4, 256), (3, 2**33 + 8), (5, -3)])
def test_offsets_have_64_bit(first, stride):
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    offsets_kernel[(1,)](out, first, stride, 4)
    assert out.tolist() == [(first + index) * stride for index in range(4)]


@pytest.mark.parametrize("stride", [1, 16, 2**31 - 1, 2**31 + 1])
def test_offsets_of_programs_have_64_bit(stride):
    out = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    program_offsets_kernel[(5,)](out, stride)
    assert out.tolist() == [index * stride for index in range(5)]


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 3, 5, 4), (2, 1, 5, 4), (1, 1, 5, 4), (2, 3, 5), (2, 3, 1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_where_the_strides_say(shape, layout):
    x = normal(*shape)
    spaced_x, head_stride, row_stride = spaced(laid(x, layout))
    assert torch.equal(spaced_x.cpu(), x)
    seen = spaced_x.as_strided((shape[0] * shape[1], *shape[2:]), (head_stride, row_stride, 1)[: len(shape) - 1])
    assert torch.equal(seen.cpu().reshape(shape), x)
