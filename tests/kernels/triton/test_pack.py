"""Packing, decoding, rotating and moving rows: the bits of the definitions."""

import pytest
import torch
from kvcomp_kernels import pack as kernels
from kvcomp_kernels.launch import MOST_GROUPS

from kvcomp import ops

from .helpers import FLOATS, LAYOUTS, assert_same_bits, call, integers, laid, normal, on_device

HALF = torch.bfloat16
WIDTHS = [  # bits, width, group_size
    (4, 64, 64), (4, 64, 32), (4, 64, 16), (2, 128, 32), (8, 128, 128), (4, 80, 16), (4, 96, 64), (8, 67, 5),
    (2, 67, 16), (4, 67, 67), (4, 80, 5), (8, 8, 8), (2, 8, 1), (4, 8, 3), (2, 256, 256), (8, 256, 64),
]  # fmt: skip


def side(dtype):
    """Dtype of scale and zero point in a model of `dtype`."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def spread(*shape, seed=0, dtype=torch.float32):
    """Numbers of many magnitudes."""
    return (normal(*shape, seed=seed) * 2.0 ** integers(-9, 4, shape, seed, torch.float32)).to(dtype)


def assert_packs(x, bits, group_size, scale_dtype, layout="plain", **settings):
    """Checks the codes, and what they decode to in every dtype; `settings`: rotate and index."""
    want = ops.pack(x, bits, group_size, scale_dtype, **settings)
    given = {name: on_device(value) for name, value in settings.items()}
    got = call(kernels.pack, laid(x, layout), bits, group_size, scale_dtype, **given)
    assert_same_bits(got, want)
    assert_unpacks(want, bits, group_size, x.shape[-1], x.dtype, layout)


def assert_unpacks(parts, bits, group_size, width, dtype, layout="plain"):
    want = ops.unpack(*parts, bits, group_size, width, dtype)
    got = call(kernels.unpack, *on_device(parts, layout), bits, group_size, width, dtype)
    assert_same_bits(got, want)


@pytest.mark.parametrize("bits, width, group_size", WIDTHS)
def test_every_width_and_group(bits, width, group_size):
    dtype = FLOATS[WIDTHS.index((bits, width, group_size)) % 3]
    assert_packs(spread(1, 2, 9, width, seed=width, dtype=dtype), bits, group_size, side(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_dtype(bits, dtype):
    assert_packs(spread(1, 2, 9, 96, dtype=dtype), bits, 64, side(dtype))


@pytest.mark.parametrize(
    "rows, bits, width", [(1, 4, 64), (1, 2, 80), (63, 4, 64), (64, 4, 64), (16, 8, 128), (129, 2, 80), (1000, 4, 64)]
)
def test_every_number_of_rows(rows, bits, width):
    batch, heads = (1, 1) if rows > 64 else (2, 3)
    assert_packs(spread(batch, heads, rows, width, dtype=HALF), bits, 32, HALF)


@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 5), (3, 1), (2, 4)])
def test_every_number_of_heads(batch, heads):
    assert_packs(spread(batch, heads, 20, 64), 4, 32, HALF, index=integers(-1, 20, (batch, heads, 11)))


def test_no_rows():
    empty = normal(2, 3, 0, 64)
    assert_packs(empty, 4, 32, HALF)
    assert_packs(normal(2, 3, 5, 64), 4, 32, HALF, index=torch.zeros(2, 3, 0, dtype=torch.int64))
    assert_same_bits(call(kernels.hadamard, laid(empty)), ops.hadamard(empty))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch, heads, rows", [(2, 2, 21), (1, 2, 1), (2, 1, 7)])
def test_every_layout(layout, batch, heads, rows):
    x = spread(batch, heads, rows, 64, dtype=HALF)
    assert_packs(x, 4, 32, HALF, layout)
    assert_packs(x, 2, 64, HALF, layout, rotate=True, index=integers(-2, rows, (batch, heads, 9)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "width, group_size, bits",
    [(8, 8, 4), (64, 64, 2), (80, 32, 4), (96, 64, 8), (128, 128, 8), (128, 32, 4), (256, 64, 4)],
)
def test_rotated_rows(width, group_size, bits, dtype):
    x = spread(1, 2, 19, width, dtype=dtype)
    assert_packs(x, bits, group_size, side(dtype), rotate=True)


INDICES = {
    "repeats": [[[3, 3, 3, 0, 12, 3]], [[0, 0, 0, 0, 0, 0]]],
    "negatives": [[[-1, 4, -2, 5, -1, 12]], [[7, -1, -9, -1, 0, 1]]],
    "backwards": [[[12, 11, 10, 9, 1, 0]], [[5, 4, 3, 2, 1, 0]]],
    "nothing": [[[-1, -1]], [[-1, -1]]],
    "one": [[[12]], [[-1]]],
}


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_chosen_rows(indices, rotate):
    dtype, integer = (HALF, torch.int32) if rotate else (torch.float32, torch.int64)
    index = torch.tensor(indices, dtype=integer)
    assert_packs(spread(2, 1, 13, 80, dtype=dtype), 4, 16, HALF, rotate=rotate, index=index)


def test_an_index_may_be_a_view():
    x, index = spread(2, 3, 13, 64), integers(-2, 13, (2, 3, 6))
    want = ops.pack(x, 4, 32, HALF, index=index)
    for layout in ("rows", "heads_last", "every_second"):
        assert_same_bits(call(kernels.pack, laid(x), 4, 32, HALF, False, laid(index, layout)), want)
    one = index[:1, :1].expand(2, 3, 6)
    got = call(kernels.pack, laid(x), 4, 32, HALF, False, laid(index)[:1, :1].expand(2, 3, 6))
    assert_same_bits(got, ops.pack(x, 4, 32, HALF, index=one))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_halves_round_to_even(bits, dtype):
    levels = 2**bits - 1
    steps = torch.arange(64) % levels + 0.5
    steps[0], steps[1] = 0, levels  # zero point 0, scale 1
    shifted = torch.stack([steps, steps * 4 - 8, steps / 8 + 1, -steps])[None, None]
    assert_packs(shifted.to(dtype), bits, 64, side(dtype))
    few = integers(0, 40, (1, 1, 60, 64)).to(dtype)  # few numbers, so that many of them lie half-way
    assert_packs(few, bits, 16, side(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_constant_groups(dtype):
    values = torch.tensor([0.0, 1.0, -1.5, 1.2345, -1.2345, 0.1, -0.1, 3e-5, 60000.0, -60000.0])
    x = values[:, None].expand(10, 64)[None, None].to(dtype)
    assert_packs(x, 4, 32, side(dtype))
    assert_packs(x, 8, 64, side(dtype), rotate=True)
    x = x.clone()
    x[..., 7] += 1  # one channel apart
    assert_packs(x, 2, 32, side(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_numbers(dtype):
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    steps = integers(-8, 9, (1, 1, 6, 64), dtype=torch.float64) / 8
    rows = [steps[:, :, i] * factor for i, factor in enumerate([largest, least, least / 64, 1e-3 * largest])]
    rows.append(steps[:, :, 4].abs() * largest)
    rows.append(-steps[:, :, 5].abs() * largest)
    x = torch.stack(rows, dim=2).clamp(-largest, largest).to(dtype)
    for bits in (2, 4, 8):
        assert_packs(x, bits, 16, side(dtype))


def test_the_range_of_a_group_may_exceed_the_largest_number():
    for x in (torch.tensor([3e38, -3e38, 1e38, 0.0] * 16), torch.tensor([-3.389e38, 3.389e38] * 32)):
        assert_packs(x.expand(1, 1, 3, 64), 4, 64, HALF)
        assert_packs(x.expand(1, 1, 3, 64).to(HALF), 8, 16, HALF)
    lowest = torch.tensor([torch.finfo(torch.float32).min, torch.finfo(torch.float32).max] * 32)
    assert_packs(lowest.expand(1, 1, 3, 64), 8, 32, HALF)  # both are beyond bfloat16
    assert_packs(torch.tensor([65504.0, -65504.0] * 32, dtype=torch.float16).expand(1, 1, 3, 64), 8, 64, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_both_signs(dtype):
    plain, negative = torch.zeros(64), torch.full((64,), -0.0)
    above, below = negative.clone(), negative.clone()
    above[3], below[3] = 1.0, -1.0
    assert_packs(torch.stack([plain, negative, above, below]).expand(1, 1, 4, 64).to(dtype), 4, 64, side(dtype))


def test_any_float_bits():
    bits = integers(-(2**31), 2**31, (1, 1, 60, 64)).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.where(x.isfinite(), x, 1.0)
    assert_packs(x, 4, 16, HALF)
    assert_packs(x, 8, 48, HALF)
    half = integers(-(2**15), 2**15, (1, 1, 60, 64)).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = half.view(dtype)
        assert_packs(torch.where(x.isfinite(), x, 1.0), 2, 16, dtype)


@pytest.mark.parametrize(
    "dtype, scale_dtype", [(torch.float32, torch.float32), (HALF, torch.float16), (torch.float32, torch.float16)]
)
def test_other_dtypes_of_the_scale(dtype, scale_dtype):
    assert_packs(spread(1, 2, 9, 64, dtype=dtype), 4, 32, scale_dtype)


def test_a_nan_spoils_no_other_group_and_no_other_row():
    x = spread(1, 2, 9, 64)
    x[0, 1, 4, 40] = torch.nan
    clean = x.nan_to_num()
    got, want = call(kernels.pack, laid(x), 4, 32, HALF), ops.pack(clean, 4, 32, HALF)
    for left, right in zip(got, want, strict=True):
        left[0, 1, 4, left.shape[-1] // 2 :], right[0, 1, 4, right.shape[-1] // 2 :] = 0, 0
    for left, right in zip(got[1:], want[1:], strict=True):
        assert_same_bits(left, right)
    got[0][0, 1, 4], want[0][0, 1, 4] = got[0][0, 1, 4] & 15, want[0][0, 1, 4] & 15
    assert_same_bits(got[0], want[0])


@pytest.mark.parametrize("bits, width, group_size", [(4, 64, 64), (4, 67, 16), (2, 128, 32), (8, 80, 16)])
def test_any_codes_decode(bits, width, group_size):
    groups, size = -(-width // group_size), -(-width * bits // 8)
    codes = integers(0, 256, (1, 1, 20, size), dtype=torch.uint8)
    for scale_dtype in (torch.bfloat16, torch.float16):
        numbers = integers(-(2**15), 2**15, (2, 1, 1, 20, groups)).to(torch.int16).view(scale_dtype)
        scale, zero_point = torch.where(numbers.isfinite(), numbers, torch.finfo(scale_dtype).max)
        parts = codes, scale.abs(), zero_point
        for dtype in FLOATS:
            assert_unpacks(parts, bits, group_size, width, dtype)
        assert_unpacks(parts, bits, group_size, width, torch.float32, "rows")


def test_more_groups_than_a_kernel_unrolls_are_left_to_the_definition():
    width = 2 * MOST_GROUPS
    x = normal(1, 1, 3, width)
    parts = on_device(ops.pack(x, 4, 1, HALF))
    assert kernels.pack(laid(x), 4, 1, HALF) is NotImplemented
    assert kernels.unpack(*parts, 4, 1, width, HALF) is NotImplemented
    assert_packs(x, 4, 2, HALF)


def test_wide_rows_are_left_to_the_definition():
    wide = normal(1, 1, 3, 1536)  # three rotations of 512 channels
    assert kernels.pack(laid(wide), 8, 512, HALF, True) is NotImplemented
    parts = on_device(ops.pack(wide, 8, 512, HALF))
    assert kernels.unpack(*parts, 8, 512, 1536, HALF) is NotImplemented


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [8, 16, 24, 64, 80, 96, 128, 256])
def test_the_rotation(width, dtype):
    x = spread(2, 3, 33, width, seed=width, dtype=dtype)
    assert_same_bits(call(kernels.hadamard, laid(x)), ops.hadamard(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rotation_in_every_layout(layout):
    x = spread(2, 3, 33, 80)
    assert_same_bits(call(kernels.hadamard, laid(x, layout)), ops.hadamard(x))


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 5, 1, 16), (1000, 8), (0, 64)])
def test_the_rotation_of_any_axes(shape):
    x = normal(*shape)
    assert_same_bits(call(kernels.hadamard, laid(x)), ops.hadamard(x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_rotation_of_extreme_numbers(dtype):
    largest = torch.finfo(dtype).max
    signs = integers(0, 2, (6, 64), dtype=torch.float64) * 2 - 1
    factors = torch.tensor([largest / 8, largest, torch.finfo(dtype).smallest_normal, 1e-40, 6e-8, 0.0])
    x = (signs * factors[:, None]).to(dtype)
    assert_same_bits(call(kernels.hadamard, laid(x)), ops.hadamard(x))


def test_a_width_that_8_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="8 divides, got 67"):
        kernels.hadamard(laid(normal(2, 67)))


TAKEN = [  # shape, dtype
    ((2, 3, 50, 64), HALF), ((2, 3, 50, 32), torch.uint8), ((2, 3, 50, 5), torch.uint8), ((1, 2, 50, 1), HALF),
    ((2, 3, 50), torch.int32), ((2, 3, 50), torch.int64), ((2, 3, 50), torch.float32), ((1, 1, 50, 80), torch.float32),
    ((1, 2, 50, 67), torch.float16), ((2, 1, 1000, 128), HALF), ((1, 2, 50, 256), torch.float32),
]  # fmt: skip


def taken(shape, dtype):
    if dtype.is_floating_point:
        return normal(*shape, dtype=dtype)
    return integers(0, 256, shape, dtype=dtype) if dtype == torch.uint8 else integers(-(2**31), 2**31, shape).to(dtype)


@pytest.mark.parametrize("shape, dtype", TAKEN)
def test_taken_rows(shape, dtype):
    x = taken(shape, dtype)
    for kept, integer in ((1, torch.int64), (shape[2] // 2, torch.int32), (shape[2] + 30, torch.int64)):
        index = integers(0, shape[2], (*shape[:2], kept), seed=kept, dtype=integer)
        assert_same_bits(call(kernels.take_rows, laid(x), laid(index)), ops.take_rows(x, index))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_taken_rows_of_every_layout(layout):
    for shape, dtype in (((2, 3, 21, 64), HALF), ((2, 3, 21), torch.int32)):
        x, index = taken(shape, dtype), integers(0, 21, (2, 3, 30))
        assert_same_bits(call(kernels.take_rows, laid(x, layout), laid(index, layout)), ops.take_rows(x, index))


def test_taken_rows_of_what_heads_share():
    positions, index = torch.arange(40, dtype=torch.int32), integers(0, 40, (2, 3, 17))
    x = positions.expand(2, 3, 40)
    assert_same_bits(call(kernels.take_rows, laid(positions).expand(2, 3, 40), laid(index)), ops.take_rows(x, index))
    by_text = integers(0, 99, (2, 1, 40), dtype=torch.int32)
    got = call(kernels.take_rows, laid(by_text).expand(2, 3, 40), laid(index))
    assert_same_bits(got, ops.take_rows(by_text.expand(2, 3, 40), index))


def test_no_taken_rows():
    x, index = normal(2, 3, 5, 64), torch.zeros(2, 3, 0, dtype=torch.int64)
    assert_same_bits(call(kernels.take_rows, laid(x), laid(index)), ops.take_rows(x, index))


def test_nan_keep_their_bits_when_rows_are_taken():
    x = torch.full((1, 1, 4, 8), torch.nan)
    x.view(torch.int32)[0, 0, 1] += 5
    index = torch.tensor([[[1, 0, 1]]])
    assert_same_bits(call(kernels.take_rows, laid(x), laid(index)), ops.take_rows(x, index))
