"""The packed format, version 1, against a plain loop over groups and channels, and what it promises about errors."""

import bisect
import functools
import importlib.util
import itertools
import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomp import dispatch, ops
from kvcomp.quant import AffineRows

BITS = (2, 4, 8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (64, 80, 96, 128, 256, 1, 3, 5, 7, 31, 33)
each_bits = pytest.mark.parametrize("bits", BITS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_width = pytest.mark.parametrize("width", WIDTHS)
f32 = numpy.float32


@pytest.fixture(params=["torch", "kernels"], autouse=True)
def path(request):
    """Every test runs the torch definitions, and the kernels where they are installed."""
    if request.param == "kernels":
        for module in ("numba", "kvcomp_kernels"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed, so there are no CPU kernels to compare")
    ops.use_kernels(request.param == "kernels")
    if request.param == "kernels":
        assert dispatch._kernels("cpu", "pack") is not None
    yield request.param
    ops.use_kernels(True)


# The format in plain Python ------------------------------------------------------------------------------------------


@functools.cache
def finite_numbers(dtype):
    """All finite numbers of a 16-bit dtype, ascending."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).double()
    return sorted(set(every[every.isfinite()].tolist()))


def largest_not_above(x, dtype):
    numbers = finite_numbers(dtype)
    return numbers[bisect.bisect_right(numbers, x) - 1]


def least_not_below(x, dtype):
    numbers = finite_numbers(dtype)
    return numbers[bisect.bisect_left(numbers, x)]


def scale_dtype_of(dtype):
    return torch.bfloat16 if dtype == torch.float32 else dtype


def group_by_hand(group, bits, dtype):
    """Codes, scale, zero point of one group of numbers."""
    levels, half = 2**bits - 1, f32(0.5)
    zero = largest_not_above(min(group), dtype)
    scale = least_not_below(float(2 * ((half * f32(max(group)) - half * f32(zero)) / f32(levels))), dtype)
    steps = [(half * f32(x) - half * f32(zero)) / (half * f32(scale)) if scale else f32(0) for x in group]
    return [min(max(round(float(step)), 0), levels) for step in steps], scale, zero


def row_by_hand(row, bits, group_size, dtype):
    """Bytes, scales, zero points of one row."""
    groups = [group_by_hand(row[i : i + group_size], bits, dtype) for i in range(0, len(row), group_size)]
    codes = [code for group in groups for code in group[0]]
    size = math.ceil(len(codes) * bits / 8)
    stored = [0] * size
    for channel, code in enumerate(codes):
        stored[channel % size] += code * 2 ** (bits * (channel // size))
    return stored, [group[1] for group in groups], [group[2] for group in groups]


def pack_by_hand(x, bits, group_size, dtype):
    rows = [row_by_hand(row, bits, group_size, dtype) for row in x.double().flatten(0, 2).tolist()]
    kinds = (torch.uint8, dtype, dtype)
    return [
        torch.tensor([row[part] for row in rows], dtype=torch.float64).to(kind).view(*x.shape[:3], -1)
        for part, kind in enumerate(kinds)
    ]


def unpack_by_hand(codes, scale, zero_point, bits, group_size, width, dtype):
    """`zero_point + code * scale` in float32, then one rounding."""
    size, decoded = codes.shape[-1], numpy.empty((*codes.shape[:3], width), dtype=f32)
    codes, scale, zero_point = (part.double().numpy() for part in (codes, scale, zero_point))
    for channel in range(width):
        field = codes[..., channel % size] // 2 ** (bits * (channel // size)) % 2**bits
        half_zero, half_scale = (0.5 * part[..., channel // group_size] for part in (zero_point, scale))
        decoded[..., channel] = 2 * (half_zero.astype(f32) + field.astype(f32) * half_scale.astype(f32))
    return torch.from_numpy(decoded).to(dtype)


def example(width, dtype=torch.float32, rows=5, heads=1, batch=1, seed=0):
    """Rows of very different magnitude, with some offsets and ties."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(batch, heads, rows, width, generator=generator)
    magnitude = 10.0 ** torch.randint(-4, 3, (batch, heads, rows, 1), generator=generator)
    offset = torch.randint(-2, 3, (batch, heads, rows, 1), generator=generator) * magnitude
    x = normal * magnitude + offset
    x[:, :, ::3] = (x[:, :, ::3] / magnitude[:, :, ::3]).round()  # small integers: quotients that end in one half
    return x.to(dtype)


def groups_of(width):
    return sorted({1, min(2, width), min(32, width), min(64, width), width})


def stored(x, bits, group_size):
    return ops.pack(x, bits, group_size, scale_dtype_of(x.dtype))


def assert_same_bits(one, other):
    assert one.dtype == other.dtype and one.shape == other.shape
    assert torch.equal(one, other)


def half_steps(scale, group_size, width):
    return scale.double().repeat_interleave(group_size, -1)[..., :width] / 2


def assert_within_bound(x, group_size, bits):
    """`|x - x'| <= scale / 2` and a rounding to the dtype of the rows; float32 rounds at 2**-24 of what it handles."""
    codes, scale, zero_point = stored(x, bits, group_size)
    decoded = ops.unpack(codes, scale, zero_point, bits, group_size, x.shape[-1], x.dtype)
    assert all(part.isfinite().all() for part in (scale, zero_point, decoded))
    assert (scale >= 0).all()
    info = torch.finfo(x.dtype)
    largest = torch.maximum(x.double().abs().amax(-1, keepdim=True), zero_point.double().abs().amax(-1, keepdim=True))
    rounding = (info.eps / 2 * decoded.double().abs()).clamp_min(info.smallest_normal * info.eps / 2)
    work = (2**-22 * largest).clamp_min(2.0**-149)
    bound = half_steps(scale, group_size, x.shape[-1]) + rounding + work
    assert ((x.double() - decoded.double()).abs() <= bound).all()
    return decoded


# Bytes ---------------------------------------------------------------------------------------------------------------


@each_bits
@each_width
def test_codes_scales_and_zero_points_are_those_of_the_format(width, bits):
    for dtype, group_size in itertools.product(DTYPES, groups_of(width)):
        x = example(width, dtype, seed=group_size)
        for part, expected in zip(
            stored(x, bits, group_size), pack_by_hand(x, bits, group_size, scale_dtype_of(dtype)), strict=True
        ):
            assert_same_bits(part, expected)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 129])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_any_number_of_rows_and_heads(heads, rows):
    x = example(5, torch.bfloat16, rows=rows, heads=heads, batch=2)
    parts = stored(x, 4, 2)
    assert [part.shape for part in parts] == [(2, heads, rows, size) for size in (3, 3, 3)]
    if rows:
        for part, expected in zip(parts, pack_by_hand(x, 4, 2, torch.bfloat16), strict=True):
            assert_same_bits(part, expected)
    assert ops.unpack(*parts, 4, 2, 5, torch.bfloat16).shape == x.shape


@each_bits
@each_width
def test_decoded_rows_are_those_of_the_format(width, bits):
    for dtype, group_size in itertools.product(DTYPES, groups_of(width)):
        parts = stored(example(width, dtype, heads=3), bits, group_size)
        for out in {dtype, torch.float32}:
            expected = unpack_by_hand(*parts, bits, group_size, width, out)
            assert_same_bits(ops.unpack(*parts, bits, group_size, width, out), expected)


@each_bits
@each_width
def test_every_code_comes_back(width, bits):
    """Rows whose channels are codes already, in every place of a byte."""
    codes = (torch.arange(3 * width) * 7 + torch.arange(3 * width) // 5) % 2**bits
    ends = torch.tensor([0.0, 2**bits - 1]).expand(1, 1, 3, 2)  # so that the scale is 1 and the zero point 0
    x = torch.cat([codes.view(1, 1, 3, width).float(), ends], dim=-1)
    parts = stored(x, bits, width + 2)
    assert (parts[1] == 1).all() and (parts[2] == 0).all()
    assert_same_bits(ops.unpack(*parts, bits, width + 2, width + 2, torch.float32), x)


@each_bits
@pytest.mark.parametrize("width", [64, 80, 33])
def test_strides_of_the_input_do_not_matter(width, bits):
    x = example(width, rows=9, heads=3, batch=2)
    tokens_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    channels_first = x.transpose(2, 3).contiguous().transpose(2, 3)
    within = torch.cat([x.flip(2), x, x], dim=2)[:, :, 9:18]
    channels = torch.cat([x, x.flip(-1)], dim=-1)[..., :width]
    parts = stored(x, bits, 32)
    for view in (tokens_first, channels_first, within, channels):
        assert not view.is_contiguous()
        for part, expected in zip(stored(view, bits, 32), parts, strict=True):
            assert_same_bits(part, expected)


@each_bits
@pytest.mark.parametrize("width", [64, 33])
def test_strides_of_the_codes_do_not_matter(width, bits):
    x, query = example(width, rows=9, heads=2, batch=2), torch.randn(2, 2, 3, width)
    parts = stored(x, bits, 32)
    views = [torch.cat([part, part.flip(2)], dim=2)[:, :, :9] for part in parts]
    transposed = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    weights = torch.rand(2, 2, 3, 9)
    for other in (views, transposed):
        assert_same_bits(
            ops.unpack(*other, bits, 32, width, torch.float32), ops.unpack(*parts, bits, 32, width, torch.float32)
        )
        torch.testing.assert_close(ops.packed_dot(query, *other, bits, 32), ops.packed_dot(query, *parts, bits, 32))
        sums = [ops.packed_weighted_sum(weights, *each, bits, 32, width) for each in (other, parts)]
        torch.testing.assert_close(*sums)


@each_dtype
@each_bits
def test_a_row_is_packed_independently_of_its_neighbours(bits, dtype):  # cases 11, 53
    x = example(80, dtype, rows=65, heads=3, batch=2)
    whole = stored(x, bits, 32)
    for batch, head, row in ((0, 0, 0), (0, 2, 31), (1, 1, 64), (1, 0, 1)):
        alone = stored(x[batch : batch + 1, head : head + 1, row : row + 1], bits, 32)
        for part, single in zip(whole, alone, strict=True):
            assert_same_bits(part[batch, head, row], single[0, 0, 0])
    louder = x.clone()
    louder[1] *= 50
    for part, other in zip(whole, stored(louder, bits, 32), strict=True):
        assert_same_bits(part[0], other[0])


@each_bits
def test_a_row_that_is_not_finite_harms_no_other(bits):
    x = example(64, torch.bfloat16, rows=9, heads=2)
    before = stored(x, bits, 32)
    others = torch.arange(9) != 4
    for bad in (torch.nan, torch.inf, -torch.inf, 3e38):
        spoilt = x.clone()
        spoilt[:, 1, 4, 7] = bad
        for part, other in zip(before, stored(spoilt, bits, 32), strict=True):
            assert_same_bits(part[:, :, others], other[:, :, others])
            assert_same_bits(part[:, 0], other[:, 0])


@each_bits
@each_width
def test_stored_bytes_are_those_of_the_formula(width, bits):
    for dtype, group_size in itertools.product(DTYPES, groups_of(width)):
        rows = AffineRows.of(example(width, dtype, rows=7, heads=3), bits, group_size)
        groups = math.ceil(width / group_size)
        held = list(rows.tensors.values())
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in held}
        assert sum(storages.values()) == 21 * (math.ceil(width * bits / 8) + 2 * 2 * groups)


def test_rows_of_a_wide_dtype_have_scales_of_16_bit():
    for dtype, expected in (
        (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)
    ):  # fmt: skip
        rows = AffineRows.of(example(8, dtype), 4, 4)
        assert rows.scale.dtype == rows.zero_point.dtype == expected and rows.unpack().dtype == dtype


# Errors --------------------------------------------------------------------------------------------------------------


@each_bits
@each_width
def test_errors_are_within_half_a_step(width, bits):
    for dtype, group_size in itertools.product(DTYPES, groups_of(width)):
        assert_within_bound(example(width, dtype, rows=63, heads=3), group_size, bits)


@each_dtype
@each_bits
def test_a_scale_is_at_most_one_16_bit_step_too_large(bits, dtype):
    x = example(64, dtype, rows=129)
    _, scale, zero_point = (part.double().flatten().tolist() for part in stored(x, bits, 64))
    for row, step, zero in zip(x.double().view(-1, 64).tolist(), scale, zero_point, strict=True):
        exact = (max(row) - zero) / (2**bits - 1)
        kind = scale_dtype_of(dtype)
        assert zero == largest_not_above(min(row), kind)
        assert exact * (1 - 1e-6) <= step <= least_not_below(exact * (1 + 1e-6), kind)


def numbers(dtype):
    """Finite numbers of a dtype: any, and offsets with a small spread; for float32 within the range of bfloat16."""
    top = float(torch.finfo(scale_dtype_of(dtype)).max)
    tiny = torch.finfo(dtype).smallest_normal
    any_number = st.floats(-top, top, width=16 if dtype == torch.float16 else 32)
    near = st.builds(
        lambda offset, spread, units: [offset + spread * unit for unit in units],
        st.sampled_from([0.0, 1.0, -1.0, 100.0, -3e3, tiny, top / 2]),
        st.sampled_from([0.0, tiny / 8, 1e-6, 1e-3, 1.0, 1e3]),
        st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20),
    )
    return st.one_of(st.lists(any_number, min_size=1, max_size=20), near)


@each_dtype
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_errors_are_within_half_a_step_for_any_numbers(dtype, data):
    values = torch.tensor(data.draw(numbers(dtype)), dtype=torch.float64)
    top = torch.finfo(scale_dtype_of(dtype)).max
    x = values.clamp(-top, top).to(dtype).view(1, 1, 1, -1)
    bits, group_size = data.draw(st.sampled_from(BITS)), data.draw(st.integers(1, x.shape[-1]))
    assert_within_bound(x, group_size, bits)


@each_bits
def test_huge_bfloat16_numbers_stay_finite_and_within_the_bound(bits):
    x = example(64, torch.bfloat16, rows=4)
    x[0, 0, 0, 3], x[0, 0, 0, 5] = 3e38, -3e38
    x[0, 0, 1] = torch.finfo(torch.bfloat16).max
    x[0, 0, 2] = -torch.finfo(torch.bfloat16).max
    decoded = assert_within_bound(x, 64, bits)
    assert torch.equal(decoded[0, 0, 1:3], x[0, 0, 1:3])


@each_bits
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_largest_numbers_of_a_dtype_are_within_the_bound(bits, dtype):
    """A scale that was rounded up must not carry the last code beyond the range of the dtype."""
    info = torch.finfo(dtype)
    for share in (1.0, 1 - info.eps, 0.9, 2 / 3):
        large = info.max * share
        for group in ([0.0, large], [large, large], [-large, 0.0], [large / 2, large], [-large / 8, large]):
            assert_within_bound(torch.tensor(group).to(dtype).view(1, 1, 1, 2), 2, bits)


@each_bits
def test_the_largest_float32_numbers_are_within_the_bound(bits):
    """Those above the range of bfloat16 too; below it there are none, as a zero point could not reach them."""
    largest, least = torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).min
    for group in ([largest, largest], [least, least], [least, largest], [least, 0.0], [0.0, largest]):
        assert_within_bound(torch.tensor(group).view(1, 1, 1, 2), 2, bits)


@each_dtype
@each_bits
def test_constant_groups_are_exact(bits, dtype):  # case 47
    for value in (0.0, 100.0, -100.0, 1e-30, -1e-30, 6e-8, 1.5):
        x = torch.full((1, 1, 2, 33), value).to(scale_dtype_of(dtype)).to(dtype)
        x[0, 0, 1, :8] = torch.arange(8.0)  # only the other group of this row is constant
        codes, scale, zero_point = stored(x, bits, 8)
        assert (scale[0, 0, 0] == 0).all() and (scale[0, 0, 1, 1:] == 0).all()
        decoded = ops.unpack(codes, scale, zero_point, bits, 8, 33, dtype)
        assert_same_bits(decoded[0, 0, 0], x[0, 0, 0])
        assert_same_bits(decoded[0, 0, 1, 8:], x[0, 0, 1, 8:])


@each_bits
def test_a_float32_constant_between_two_16_bit_numbers_is_off_by_a_sliver(bits):
    for value in (1e-30, -1e-30, 100.1, -math.pi, 1 / 3):
        x = torch.full((1, 1, 1, 16), value)
        decoded = assert_within_bound(x, 16, bits)
        assert (decoded == decoded[..., :1]).all()
        assert relative(decoded, x) <= 2**-7 / (2**bits - 1) / 2


@each_bits
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_neighbouring_numbers_are_exact(bits, dtype):
    for value in (100.0, -100.0, 1.0, 2e-5):
        low = torch.tensor(value).to(dtype)
        high = (low.view(torch.int16) + 1).view(dtype)
        x = torch.stack([low, high, high, low, low]).view(1, 1, 1, 5)
        assert_same_bits(ops.unpack(*stored(x, bits, 5), bits, 5, 5, dtype), x)


@each_dtype
@each_bits
def test_zeros_beside_one_number_stay_zero(bits, dtype):
    for hot in (1.0, -1.0, 100.0, 6e-8, 6e4):
        x = torch.zeros(1, 1, 1, 16, dtype=dtype)
        x[..., 5] = hot
        decoded = assert_within_bound(x, 16, bits)
        rest = torch.arange(16) != 5
        # a negative number is the zero point, and zero is the last code, which a rounded scale may miss by a step of 16
        # bit
        assert decoded[..., rest].abs().max() <= (0 if hot > 0 else abs(hot) * 2**-7)


@each_bits
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_subnormal_numbers_are_within_half_a_step(bits, dtype):
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = (torch.arange(-8, 8) * step).to(dtype).view(1, 1, 1, 16)
    assert_within_bound(x, 16, bits)
    assert_within_bound(x * 30, 4, bits)


# The two products ----------------------------------------------------------------------------------------------------


def relative(result, reference):
    return float((result.double() - reference.double()).abs().max() / reference.double().abs().max())


def rows_and_queries(width, bits, dtype, heads, rows, group_size, queries=2):
    generator = torch.Generator().manual_seed(width + rows)
    x = (torch.randn(2, heads, rows, width, generator=generator) + 0.5).to(dtype)
    parts = stored(x, bits, group_size)
    exact = unpack_by_hand(*parts, bits, group_size, width, torch.float64)
    return parts, exact, torch.randn(2, heads, queries, width, generator=generator)


@each_bits
@each_width
def test_products_equal_those_of_the_decoded_rows(width, bits):
    for group_size, heads, rows, dtype, queries in (
        (min(64, width), 1, 1, torch.float32, 1),
        (width, 3, 64, torch.bfloat16, 4),
        (min(32, width), 8, 63, torch.float16, 2),
        (2, 1, 129, torch.float32, 7),
    ):
        parts, exact, query = rows_and_queries(width, bits, dtype, heads, rows, group_size, queries)
        dot = ops.packed_dot(query, *parts, bits, group_size)
        assert dot.dtype == torch.float32
        assert relative(dot, query.double() @ exact.transpose(2, 3)) <= 1e-5
        weights = torch.rand(*dot.shape, generator=torch.Generator().manual_seed(1))
        total = ops.packed_weighted_sum(weights, *parts, bits, group_size, width)
        assert total.dtype == torch.float32
        assert relative(total, weights.double() @ exact) <= 1e-5


@each_bits
def test_products_over_more_rows_than_a_block(bits):
    parts, exact, query = rows_and_queries(80, bits, torch.bfloat16, 1, 2050, 64)
    assert relative(ops.packed_dot(query, *parts, bits, 64), query.double() @ exact.transpose(2, 3)) <= 1e-5
    weights = torch.randn(2, 1, 2, 2050, generator=torch.Generator().manual_seed(1)).softmax(-1)
    assert relative(ops.packed_weighted_sum(weights, *parts, bits, 64, 80), weights.double() @ exact) <= 1e-5


@each_bits
def test_products_without_rows(bits):
    parts, _, query = rows_and_queries(64, bits, torch.bfloat16, 3, 0, 64)
    assert ops.packed_dot(query, *parts, bits, 64).shape == (2, 3, 2, 0)
    assert torch.equal(ops.packed_weighted_sum(torch.ones(2, 3, 2, 0), *parts, bits, 64, 64), torch.zeros(2, 3, 2, 64))


@pytest.mark.parametrize("rotated", [False, True])
@each_bits
def test_packed_rows_multiply_as_what_they_decode_to(bits, rotated):
    x, query = example(80, rows=65, heads=3, batch=2), torch.randn(2, 3, 4, 80)
    rows = AffineRows.of(x, bits, 64, rotated)
    exact = rows.unpack().double()
    assert relative(rows.dot(query), query.double() @ exact.transpose(2, 3)) <= 1e-5
    weights = torch.rand(2, 3, 4, 65)
    assert relative(rows.weighted_sum(weights), weights.double() @ exact) <= 1e-5


# Rotation ------------------------------------------------------------------------------------------------------------


def sylvester(size):
    """Walsh-Hadamard matrix: entry (i, j) has the sign of the parity of `i & j`."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)


@pytest.mark.parametrize(("width", "block"), [(64, 64), (80, 16), (96, 32), (128, 128), (256, 256), (8, 8), (24, 8)])
def test_rotation_is_the_orthonormal_walsh_hadamard_matrix_of_each_block(width, block):  # case 49
    assert ops.hadamard_block(width) == block
    matrix = ops.hadamard(torch.eye(width)).double()
    expected = torch.block_diag(*[sylvester(block)] * (width // block))
    assert (matrix - expected).abs().max() <= 1e-6
    assert (matrix @ matrix.T - torch.eye(width)).abs().max() <= 1e-6
    x = torch.randn(2, 3, 9, width, generator=torch.Generator().manual_seed(0))
    assert relative(ops.hadamard(ops.hadamard(x)), x) <= 1e-6


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256, 8])
def test_scores_of_rotated_queries_and_keys_are_unchanged(width):
    query, key = torch.randn(2, 5, width), torch.randn(2, 33, width)
    rotated = ops.hadamard(query) @ ops.hadamard(key).transpose(1, 2)
    assert relative(rotated, query.double() @ key.double().transpose(1, 2)) <= 1e-5


@pytest.mark.parametrize(("width", "power"), [(7, 1), (100, 4), (33, 1), (12, 4)])
def test_a_width_that_cannot_be_rotated_is_refused(width, power):
    for call in (lambda: ops.hadamard(torch.zeros(1, width)), lambda: ops.hadamard_block(width)):
        with pytest.raises(ValueError, match=rf"\b{width}\b.*\b{power}\b.*rotate_keys=False"):
            call()


@each_dtype
def test_a_row_is_rotated_independently_of_its_batch(dtype):
    x = example(80, dtype, rows=33, heads=3, batch=2)
    whole = ops.hadamard(x)
    for batch, head, row in ((0, 0, 0), (1, 2, 32), (1, 0, 7)):
        assert_same_bits(whole[batch, head, row], ops.hadamard(x[batch, head, row]))
        assert_same_bits(whole[batch, head, row], ops.hadamard(x[batch : batch + 1, head, row : row + 2])[0, 0])
    assert_same_bits(ops.hadamard(x.transpose(1, 2)).transpose(1, 2), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_bits
def test_rotated_rows_are_within_the_bound_of_the_rotated_ones(bits, dtype):
    """The rotation keeps lengths, so the error of a row is at most half a step times the root of the width."""
    x = example(64, dtype, rows=33)
    rows = AffineRows.of(x, bits, 32, rotated=True)
    error = (rows.unpack().double() - x.double()).norm(dim=-1)
    steps = half_steps(rows.scale, 32, 64).norm(dim=-1)
    assert (error <= steps + 2 * torch.finfo(dtype).eps * x.double().norm(dim=-1)).all()
