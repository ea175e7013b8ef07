"""BitsAndBytes: stored bytes are decoded here from the published formulas, and `unpack` must give the same."""

import importlib.util
import itertools
import statistics
import sys

import pytest
import torch
from support import run_python
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcomp.core import EMPTY, KV, Observed
from kvcomp.evict import KeyNorm, SnapKV, VaSE
from kvcomp.quant import BitsAndBytes, BlockRows, MixedKV

if importlib.util.find_spec("bitsandbytes") is None:
    pytest.skip("bitsandbytes is not installed", allow_module_level=True)

FORMATS = ("nf4", "fp4", "int8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (  # width, block size, and the formats that have it
    (32, 32, FORMATS), (64, 64, FORMATS), (64, 32, FORMATS), (80, 16, ("int8",)), (96, 32, FORMATS), (128, 64, FORMATS),
    (128, 128, FORMATS), (256, 64, FORMATS), (256, 256, FORMATS),
)  # fmt: skip
CASES = [(format, width, size) for width, size, formats in SHAPES for format in formats]
each_case = pytest.mark.parametrize("format, width, size", CASES)
each_format = pytest.mark.parametrize("format", FORMATS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def nf4_table():
    """QLoRA (arXiv 2305.14314), section 3 and appendix E: quantiles of N(0, 1), 8 above zero and 7 below, between 1/2
    and 0.9677083, over the largest."""
    quantile, top = statistics.NormalDist().inv_cdf, 0.9677083
    above = [quantile(top + (0.5 - top) * i / 8) for i in range(8)]
    below = [-quantile(top + (0.5 - top) * i / 7) for i in range(7)]
    return torch.tensor([*below, 0.0, *reversed(above)]) / max(above)


def fp4_table():
    """Sign, two bits of exponent e, one of mantissa m, over the largest. bitsandbytes orders the numbers by its own
    bits (`dDequantizeFP4Tree` in csrc/kernels.cu): 0, 1/16, 8, 12, 4, 6, 2, 3, over 12."""
    positive = torch.tensor([0, 1 / 16, 8, 12, 4, 6, 2, 3]) / 12
    return torch.cat([positive, -positive])


def dynamic_table():
    """Signed dynamic code (arXiv 1511.04561): 10**(i - 6) times the middles of 2**i parts of [0.1, 1], with both
    signs, for i from 0 to 6; and 0 and 1."""
    numbers = [0.0, 1.0]
    for i in range(7):
        step = 0.9 / 2**i
        middles = [10 ** (i - 6) * (0.1 + (j + 0.5) * step) for j in range(2**i)]
        numbers += middles + [-middle for middle in middles]
    return torch.tensor(sorted(numbers))


TABLES = {"nf4": nf4_table(), "fp4": fp4_table(), "int8": dynamic_table()}


def decoded(rows):
    """`absmax * table[code]` in float32, worked out from the stored bytes and nothing else."""
    codes = rows.codes.long()
    if rows.format != "int8":
        codes = torch.stack([codes // 16, codes % 16], dim=-1).flatten(-2)
    return TABLES[rows.format][codes] * rows.absmax.repeat_interleave(rows.block_size, dim=-1)


def normal(*shape, dtype=torch.float32, seed=0):
    """Gaussian rows of very different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10.0 ** torch.randint(-3, 3, (*shape[:-1], 1), generator=generator)
    return (torch.randn(*shape, generator=generator) * magnitude).to(dtype)


def assert_same(one, other):
    assert one.settings == other.settings
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, other.tensors[name], rtol=0, atol=0)


@each_dtype
@each_case
def test_rows_decode_to_the_nearest_numbers_of_the_published_table(format, width, size, dtype):
    table = TABLES[format]
    for count, heads, batch in [(1, 1, 1), (63, 3, 2), (64, 8, 1), (129, 1, 3), (129, 3, 1)]:
        x = normal(batch, heads, count, width, dtype=dtype, seed=count)
        rows = BlockRows.of(x, format, size)
        assert rows.codes.shape == (batch, heads, count, width if format == "int8" else width // 2)
        assert (rows.codes.dtype, rows.absmax.dtype) == (torch.uint8, torch.float32)
        blocks = x.float().unflatten(-1, (-1, size))
        assert torch.equal(rows.absmax, blocks.abs().amax(-1))
        truth, unpacked = decoded(rows), rows.unpack()
        assert unpacked.dtype == dtype and unpacked.shape == x.shape and rows.rows == count
        kind = torch.finfo(dtype)
        rounding = max(kind.eps, 2e-6)  # of `dtype`; of the tables, which are worked out in another order
        torch.testing.assert_close(unpacked, truth.to(dtype), rtol=rounding, atol=kind.smallest_normal * kind.eps)
        scaled = (x.float() / rows.absmax.repeat_interleave(size, dim=-1)).flatten()
        ascending = table.unique()
        after = torch.searchsorted(ascending, scaled).clamp(1, len(ascending) - 1)
        nearest = torch.minimum((scaled - ascending[after - 1]).abs(), (scaled - ascending[after]).abs())
        chosen = (scaled - (truth / rows.absmax.repeat_interleave(size, dim=-1)).flatten()).abs()
        # The library compares with rounded middles (fp4: three digits), so a near tie may go the other way.
        assert bool((chosen <= nearest + 2e-3).all()) and float((chosen > nearest + 1e-5).float().mean()) < 5e-3


@each_dtype
@each_case
def test_a_row_is_packed_and_unpacked_independently_of_others(format, width, size, dtype):
    x = normal(2, 3, 65, width, dtype=dtype)
    rows = BlockRows.of(x, format, size)
    unpacked = rows.unpack()
    for batch, head, row in [(0, 0, 0), (0, 2, 64), (1, 1, 33)]:
        part = (slice(batch, batch + 1), slice(head, head + 1), slice(row, row + 1))
        alone = BlockRows.of(x[part], format, size)
        assert_same(alone, rows[part])
        assert torch.equal(alone.unpack(), unpacked[part])
    shuffled = torch.randperm(65, generator=torch.Generator().manual_seed(0))
    assert_same(BlockRows.of(x[:, :, shuffled], format, size), rows[:, :, shuffled])


@each_dtype
@each_case
def test_views_with_strides_are_read_as_what_they_show(format, width, size, dtype):
    x = normal(1, 1, 40, width, dtype=dtype)
    whole = BlockRows.of(x, format, size)
    # `[batch, rows, heads, width]` is how a projection lays rows out; keys of a fused projection have gaps.
    laid_out = torch.cat([x, x], dim=-1).transpose(1, 2)[..., :width].transpose(1, 2)
    assert_same(BlockRows.of(laid_out, format, size), whole)
    for view in (
        lambda t: t[:, :, ::2],
        lambda t: t[:, :, 5:17],
        lambda t: t.expand(3, 2, -1, -1),
        lambda t: t[:, :, :0],
    ):
        strided = whole.map(view)
        assert torch.equal(strided.unpack(), view(whole.unpack()))
        assert_same(BlockRows.of(view(x), format, size), strided)


@each_dtype
@each_format
def test_no_rows(format, dtype):
    rows = BlockRows.of(torch.empty(2, 3, 0, 64, dtype=dtype), format, 32)
    assert rows.rows == 0 and rows.codes.shape[:3] == (2, 3, 0) and rows.absmax.shape == (2, 3, 0, 2)
    assert rows.unpack().shape == (2, 3, 0, 64) and rows.unpack().dtype == dtype
    assert rows.dot(torch.ones(2, 3, 4, 64)).shape == (2, 3, 4, 0)
    assert torch.equal(rows.weighted_sum(torch.ones(2, 3, 4, 0)), torch.zeros(2, 3, 4, 64))
    one = BlockRows.of(torch.ones(2, 3, 1, 64, dtype=dtype), format, 32)
    assert_same(rows.join(one), one)


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_constants_and_the_largest_numbers(format, dtype):
    largest = torch.finfo(dtype).max
    for number in (0.0, 1.0, 1e-3, largest, torch.finfo(dtype).tiny):
        x = torch.full((1, 2, 3, 64), number, dtype=dtype)
        back = BlockRows.of(x, format, 64).unpack()
        torch.testing.assert_close(back, x, rtol=torch.finfo(dtype).eps, atol=0)  # 1 is in every table
    mixed = (torch.linspace(-1, 1, 64) * largest).to(dtype).expand(1, 1, 3, 64)
    back = BlockRows.of(mixed, format, 64).unpack().float()
    assert (
        float((back / largest - mixed.float() / largest).abs().max())
        < {"nf4": 0.16, "fp4": 0.17, "int8": 0.008}[format]
    )
    tiny = torch.full((1, 1, 2, 64), 1e-40)  # below the smallest normal number nothing but the magnitude is promised
    assert bool((BlockRows.of(tiny, format, 64).unpack().abs() <= 1e-40).all())


def test_errors_of_the_formats_stand_to_each_other_as_the_docstring_says():
    x = torch.randn(1, 4, 500, 128, generator=torch.Generator().manual_seed(0))
    relative = lambda decoded: float((decoded - x).norm() / x.norm())  # noqa: E731
    error = {format: relative(BlockRows.of(x, format, 64).unpack()) for format in FORMATS}
    low, high = (edge.repeat_interleave(64, dim=-1) for edge in x.unflatten(-1, (2, 64)).aminmax(dim=-1))
    steps = {bits: (high - low) / (2**bits - 1) for bits in (4, 8)}  # min-max codes, as those of MixedPrecision
    plain = {bits: relative(low + ((x - low) / step).round() * step) for bits, step in steps.items()}
    assert plain[4] < error["nf4"] < 1.05 * plain[4] < error["fp4"]
    assert 1.5 * plain[8] < error["int8"]
    assert error["nf4"] == pytest.approx(0.092, rel=0.03) and error["int8"] == pytest.approx(0.0095, rel=0.03)


@each_case
def test_storage_takes_the_promised_bits(format, width, size):
    kv = KV.of(normal(2, 3, 77, width), normal(2, 3, 77, width, seed=1))
    packed = BitsAndBytes(format, block_size=size, sinks=0, recent=0).compress(kv, Observed()).packed
    bits = (8 if format == "int8" else 4) + 32 / size
    for rows in (packed.keys, packed.values):
        assert 8 * sum(tensor.nbytes for tensor in rows.tensors.values()) == bits * 2 * 3 * 77 * width
        assert all(tensor.is_contiguous() for tensor in rows.tensors.values())


@each_dtype
@each_format
def test_dot_and_weighted_sum_are_those_of_the_decoded_rows(format, dtype):
    rows = BlockRows.of(normal(2, 3, 600, 96, dtype=dtype), format, 32)
    generator = torch.Generator().manual_seed(1)
    query, weights = (torch.randn(2, 3, 4, size, generator=generator) for size in (96, 600))
    truth, x = decoded(rows).to(dtype).double(), rows.unpack().double()
    for product, exact, reference in (
        (rows.dot(query), query.double() @ x.mT, query.double() @ truth.mT),
        (rows.weighted_sum(weights), weights.double() @ x, weights.double() @ truth),
    ):
        assert product.dtype == torch.float32
        assert float((product - exact).norm() / exact.norm()) < 1e-5
        assert float((product - reference).norm() / reference.norm()) < 1e-3


@pytest.mark.parametrize(
    "format, width, size",
    [("nf4", 64, 64), ("nf4", 96, 32), ("nf4", 128, 64), ("fp4", 256, 64), ("int8", 80, 16), ("int8", 64, 64),
     ("int8", 128, 64), ("int8", 16, 16), ("fp4", 32, 32)],
)  # fmt: skip
def test_the_default_block_is_the_largest_that_fits_up_to_64(format, width, size):
    x = normal(1, 2, 5, width)
    keys, values = BitsAndBytes(format).pack(x, x)
    assert keys.block_size == values.block_size == size and keys.format == format and keys.width == width


def test_values_may_have_another_width_than_keys():
    keys, values = BitsAndBytes().pack(normal(1, 2, 5, 192), normal(1, 2, 5, 96))
    assert (keys.width, keys.block_size, values.width, values.block_size) == (192, 64, 96, 32)
    with pytest.raises(ValueError, match="block_size=64 does not divide head_dim=96"):
        BitsAndBytes(block_size=64).pack(normal(1, 2, 5, 192), normal(1, 2, 5, 96))


def by_row(part):
    """By batch row, head and position: all that is stored of the key and the value."""
    tensors = []
    for rows in (part.keys, part.values):
        tensors += [rows] if isinstance(rows, torch.Tensor) else rows.tensors.values()
    slots = itertools.product(*map(range, part.positions.shape))
    used = [slot for slot in slots if part.positions[slot] != EMPTY]
    return {(*slot[:2], int(part.positions[slot])): [tensor[slot] for tensor in tensors] for slot in used}


@pytest.mark.parametrize(
    "evictor", [VaSE(40, recent=8, window=8), SnapKV(40, recent=8, window=8), KeyNorm(40, recent=8)], ids=repr
)
@pytest.mark.parametrize("exact", [0.0, 0.2])
@each_format
def test_eviction_moves_the_bytes_of_a_row_and_never_packs_it_again(format, exact, evictor):
    pipeline = evictor | BitsAndBytes(format, sinks=2, recent=8, exact=exact)
    kv = KV.of(normal(2, 3, 80, 64), normal(2, 3, 80, 64, seed=1))
    given, before, moved = by_row(kv), {}, 0
    for round in range(4):
        kv = pipeline.compress(kv, Observed(normal(2, 6, 8, 64, seed=10 + round), round=round))
        assert isinstance(kv, MixedKV) and kv.rows == 40
        now = by_row(kv.packed)
        for key, stored in now.items():
            if key in before:
                moved += 1
                expected = before[key]
            else:  # packed in this round, from the row as it was given
                alone = [BlockRows.of(row[None, None, None], format, 64) for row in given[key]]
                expected = [tensor.flatten() for rows in alone for tensor in rows.tensors.values()]
            assert all(torch.equal(*pair) for pair in zip(stored, expected, strict=True))
        positions = torch.arange(80 + 20 * round, 100 + 20 * round, dtype=torch.int32).expand(2, 3, 20)
        new = KV(normal(2, 3, 20, 64, seed=20 + round), normal(2, 3, 20, 64, seed=30 + round), positions)
        before, given = now, given | by_row(new)
        kv = MixedKV(kv.packed, kv.exact, kv.recent.join(new), kv.rows + 20)
    assert moved > 100


def test_rows_of_another_block_size_are_not_joined():
    x = normal(1, 1, 3, 128)
    for other in (BlockRows.of(x, "nf4", 128), BlockRows.of(x, "fp4", 64), BlockRows.of(x.half(), "nf4", 64)):
        with pytest.raises(ValueError, match="cannot be joined"):
            BlockRows.of(x, "nf4", 64).join(other)


@pytest.mark.parametrize(
    "settings, head_dim, message",
    [
        ({"block_size": 64}, 96, "block_size=64 does not divide head_dim=96; block sizes that do: 32$"),
        ({"block_size": 256}, 128, "block_size=256 does not divide head_dim=128; block sizes that do: 32, 64, 128$"),
        ({}, 80, "head_dim=80 is no multiple of 32, the smallest block of nf4; use MixedPrecision, or format='int8'$"),
        ({"block_size": 32}, 80, "head_dim=80 is no multiple of 32"),
        ({"format": "fp4"}, 24, "head_dim=24 is no multiple of 32, the smallest block of fp4; use MixedPrecision$"),
        ({"format": "int8"}, 24, "head_dim=24 is no multiple of 16, the smallest block of int8; use MixedPrecision$"),
        ({"format": "int8", "block_size": 64}, 80, "block_size=64 does not divide head_dim=80; .* that do: 16$"),
    ],
)
def test_a_head_dim_that_blocks_do_not_fill_is_refused(settings, head_dim, message):
    quantizer = BitsAndBytes(**settings)
    with pytest.raises(ValueError, match=message):
        quantizer.check_head_dim(head_dim)
    with pytest.raises(ValueError, match=message):
        quantizer.compress(KV.of(*[normal(1, 1, 100, head_dim)] * 2), Observed())


def test_small_8_bit_blocks_are_refused_on_cuda():
    with FakeTensorMode(), pytest.raises(ValueError, match="at least 64 channels, got 32 for rows of 96 and 96"):
        BitsAndBytes("int8").pack(*[torch.empty(1, 1, 2, 96, device="cuda")] * 2)


def test_wrong_settings_name_value_and_remedy_and_the_library_waits_for_rows_and_keeps_quiet():
    run_python(
        """
import logging, sys
import pytest, torch
from kvcomp import KV, Observed
from kvcomp.quant import BitsAndBytes
for settings, message in [
    ({"format": "int4"}, "format must be one of nf4, fp4, int8, got 'int4'"),
    ({"format": None}, "format must be one of nf4, fp4, int8, got None"),
    ({"format": ["nf4"]}, "format must be one of nf4, fp4, int8, got \\\\['nf4'\\\\]"),
    ({"block_size": 16}, "block_size must be at least 32, got 16"),
    ({"block_size": 0}, "block_size must be at least 32, got 0"),
    ({"block_size": 48}, "block_size for nf4 must be one of 32, 64, 128, 256, 512, 1024, 2048, 4096, got 48"),
    ({"format": "int8", "block_size": 8192}, "block_size for int8 must be one of 16, 32, .*, 4096, got 8192"),
    ({"block_size": 64.0}, "block_size must be an int, got 64.0"),
    ({"block_size": True}, "block_size must be an int, got True"),
    ({"block_size": "64"}, "block_size must be an int, got '64'"),
    ({"recent": -1}, "recent must be at least 0, got -1"),
    ({"exact": 2.0}, "exact is a share"),
]:
    with pytest.raises(ValueError, match="BitsAndBytes: " + message):
        BitsAndBytes(**settings)

heard = []
class Ear(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())
logging.getLogger().addHandler(Ear())
quantizer = BitsAndBytes(recent=2)
quantizer.check_head_dim(64)
assert "bitsandbytes" not in sys.modules
kv = quantizer.compress(KV.of(torch.randn(1, 1, 9, 64), torch.randn(1, 1, 9, 64)), Observed())
assert "bitsandbytes" in sys.modules and kv.packed.rows == 3
assert not any("kernels" in message for message in heard), heard
assert logging.getLogger("bitsandbytes.backends.cpu.ops").level == logging.NOTSET
"""
    )


def test_without_the_library_construction_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError) as error:
        BitsAndBytes()
    assert str(error.value) == "bitsandbytes is not installed: pip install 'kvcomp[bnb]'"
