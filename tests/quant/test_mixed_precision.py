"""Quantizers as compressors on plain tensors: which rows are packed, that they stay as they are, and what they take."""

import inspect
import math
from dataclasses import FrozenInstanceError, fields, replace

import numpy
import pytest
import torch
from support import run_python

from kvcomp import noise, quant
from kvcomp.core import EMPTY, KV, PAD, Compressor, Observed
from kvcomp.evict import H2O, METHODS, KeyNorm, Random, StreamingLLM
from kvcomp.pipeline import Pipeline
from kvcomp.quant import MixedKV, MixedPrecision, Quantizer
from kvcomp.rotary import Rotary
from kvcomp.storage import RowStorage

DIM, ROWS, RECENT, SINKS, EXACT = 32, 60, 6, 2, 0.25
VARIANTS = {  # every way to pack that the contract is held to
    "MixedPrecision": {
        "int8": lambda **more: MixedPrecision(8, **more),
        "int4": lambda **more: MixedPrecision(4, **more),
        "int2": lambda **more: MixedPrecision(2, group_size=12, **more),
        "k8v4": MixedPrecision.k8v4,
        "k4v4_rotated": MixedPrecision.k4v4_rotated,
    },
    "BitsAndBytes": {
        "nf4": lambda **more: quant.BitsAndBytes("nf4", **more),
        "fp4": lambda **more: quant.BitsAndBytes("fp4", **more),
        "bnb_int8": lambda **more: quant.BitsAndBytes("int8", **more),
    },
}
BUILD = {name: build for variants in VARIANTS.values() for name, build in variants.items()}
each_quantizer = pytest.mark.parametrize("name", BUILD)
each_mixed = pytest.mark.parametrize("name", VARIANTS["MixedPrecision"])


def small(name="int4", **settings):
    """The quantizer with 2 sinks, 6 recent rows and a quarter of the others exact."""
    if name in VARIANTS["BitsAndBytes"]:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes (extra bnb) is not installed")
    return BUILD[name](**{"sinks": SINKS, "recent": RECENT, "exact": EXACT} | settings)


def rows(batch=2, heads=2, count=ROWS, start=0, pads=(), dtype=torch.bfloat16, seed=0, dim=DIM):
    """Rows of very different range; `pads[b]` of them padding at the start of batch row `b`."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(batch, heads, count, dim, generator=generator)
        * 10.0 ** torch.randn(batch, heads, count, 1, generator=generator)
        for _ in range(2)
    )
    pads = torch.tensor([*pads, *[0] * (batch - len(pads))])
    positions = (torch.arange(start, start + count) - pads[:, None]).clamp_min(PAD).to(torch.int32)
    return KV(keys.to(dtype), values.to(dtype), positions[:, None].repeat(1, heads, 1))


def seen_at(count, batch=2, heads=4, round=0, seed=7):
    """What a layer knows when `count` tokens have been seen."""
    generator = torch.Generator().manual_seed(round)
    return Observed(
        torch.randn(batch, heads, 6, DIM, generator=generator).bfloat16(),
        torch.arange(count - 6, count).expand(batch, 6),
        layer=3, round=round, seed=seed, prompt_end=torch.full((batch,), ROWS),
        rotary=Rotary(100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))),
    )  # fmt: skip


def tensors_of(kv):
    if not isinstance(kv, MixedKV):
        return kv.tensors
    packed = [kv.packed.keys, kv.packed.values]
    own = [tensor for part in packed for tensor in part.tensors.values()] + [kv.packed.positions]
    own += [] if kv.packed.mass is None else [kv.packed.mass]
    return own + kv.exact.tensors + kv.recent.tensors


def positions_of(part):
    """By batch row and head, the positions of tokens in a part."""
    return [[[p for p in head if p >= 0] for head in row] for row in part.positions.tolist()]


def packed_bytes(kv):
    """All that is stored of each packed row, by (batch row, head, position)."""
    parts = [*kv.packed.keys.tensors.values(), *kv.packed.values.tensors.values()]
    parts = [part.contiguous().view(torch.uint8).tolist() for part in parts]
    return {
        (b, h, position): tuple(tuple(part[b][h][slot]) for part in parts)
        for b, row in enumerate(kv.packed.positions.tolist())
        for h, head in enumerate(row)
        for slot, position in enumerate(head)
        if position >= 0
    }


def by_position(kv, tensor):
    return {
        (b, h, position): tensor[b, h, slot]
        for b, row in enumerate(kv.positions.tolist())
        for h, head in enumerate(row)
        for slot, position in enumerate(head)
        if position >= 0
    }


def assert_equal_rows(one, other):
    assert one.dtype == other.dtype and torch.equal(one, other)


# Contract ------------------------------------------------------------------------------------------------------------


def test_the_contract_walks_every_quantizer():
    exported = {name: getattr(quant, name) for name in quant.__all__}
    kinds = {
        name
        for name, kind in exported.items()
        if isinstance(kind, type) and issubclass(kind, Quantizer) and not inspect.isabstract(kind)
    }
    assert kinds <= VARIANTS.keys() and "MixedPrecision" in kinds


@each_quantizer
def test_a_quantizer_is_a_frozen_compressor_that_compares_by_its_settings(name):
    one, other = small(name), small(name)
    assert isinstance(one, Compressor) and one == other and hash(one) == hash(other)
    assert one != small(name, recent=7) and one.budget is None and one.unpacked == RECENT
    assert repr(one).startswith(type(one).__name__) and f"recent={RECENT}" in repr(one)
    with pytest.raises(FrozenInstanceError):
        one.recent = 7


@each_quantizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_all_rows_stay_in_time_order(name, dtype, heads):
    kv = rows(heads=heads, dtype=dtype)
    kv = replace(kv, mass=torch.rand(kv.positions.shape))
    result = small(name).compress(kv, Observed())
    assert isinstance(result, MixedKV) and result.rows == ROWS and result.head_dim == DIM
    assert_equal_rows(result.positions, kv.positions)
    assert_equal_rows(result.mass, kv.mass)
    for decoded, given in ((result.keys, kv.keys), (result.values, kv.values)):
        assert decoded.shape == given.shape and decoded.dtype == dtype and decoded.isfinite().all()
        assert not torch.equal(decoded, given)


@each_quantizer
def test_newest_rows_and_sinks_are_bit_exact_and_the_others_packed(name):  # case 43
    kv = rows()
    for exact in (0.0, EXACT):
        result = small(name, exact=exact).compress(kv, Observed())
        same = ((result.keys == kv.keys) & (result.values == kv.values)).all(-1)
        assert same[:, :, :SINKS].all() and same[:, :, -RECENT:].all()
        assert (same.sum(-1) == RECENT + small(exact=exact).exact_rows(ROWS - RECENT)).all()  # else no packing


@each_quantizer
@pytest.mark.parametrize("count", [1, RECENT - 1, RECENT])
def test_no_more_rows_than_recent_ones_stay_as_they_are(name, count):
    kv = rows(count=count)
    result = small(name).compress(kv, Observed())
    assert_equal_rows(result.keys, kv.keys)
    assert_equal_rows(result.values, kv.values)


@each_quantizer
@pytest.mark.parametrize("count", [RECENT + 1, 63, 64, 129])
def test_any_number_of_rows(name, count):
    result = small(name).compress(rows(count=count), Observed())
    exact = small(name).exact_rows(count - RECENT)
    assert [part.rows for part in result.parts] == [count - RECENT - exact, exact, RECENT]


@each_quantizer
def test_every_row_may_be_packed_or_exact(name):
    kv = rows()
    bare = small(name, recent=0, sinks=0, exact=0.0).compress(kv, Observed())
    assert [part.rows for part in bare.parts] == [ROWS, 0, 0]
    full = small(name, recent=0, sinks=0, exact=1.0).compress(kv, Observed())
    assert [part.rows for part in full.parts] == [0, ROWS, 0]
    assert_equal_rows(full.keys, kv.keys)
    assert_equal_rows(full.values, kv.values)


@each_quantizer
def test_inputs_stay_unchanged_and_results_are_new_tensors(name):
    kv = rows()
    before = [tensor.clone() for tensor in kv.tensors]
    first = small(name).compress(kv, Observed())
    inner = [tensor.clone() for tensor in tensors_of(first)]
    again = small(name).compress(appended(first, rows(count=9, start=ROWS)), Observed())
    for tensor in tensors_of(again):
        tensor.zero_()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors_of(first), inner, strict=True))
    for tensor in tensors_of(first):
        tensor.zero_()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(kv.tensors, before, strict=True))


@each_quantizer
def test_rows_may_be_a_view_of_larger_storage(name):
    kv = rows()
    view = kv.map(lambda tensor: torch.cat([tensor, tensor.flip(2)], dim=2)[:, :, :ROWS])
    transposed = kv.map(lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2))
    results = [small(name).compress(each, Observed()) for each in (kv, view, transposed)]
    for other in results[1:]:
        for one, same in zip(tensors_of(results[0]), tensors_of(other), strict=True):
            assert_equal_rows(one, same)


@each_quantizer
def test_a_row_does_not_depend_on_its_batch(name):  # cases 11, 53
    kv = rows(batch=3)
    whole, loud = small(name).compress(kv, seen_at(ROWS, 3)), kv.map(torch.clone)
    loud.keys[[0, 2]] *= 1000
    loud.values[[0, 2]] *= 1000
    alone = kv.map(lambda tensor: tensor[1:2])
    for result, index in ((small(name).compress(loud, seen_at(ROWS, 3)), 1),
                          (small(name).compress(alone, seen_at(ROWS, 1)), 0)):  # fmt: skip
        for one, other in zip(tensors_of(whole), tensors_of(result), strict=True):
            assert_equal_rows(one[1], other[index])


@each_quantizer
def test_global_generators_stay_untouched(name):
    torch_state, numpy_state = torch.get_rng_state(), numpy.random.get_state()
    small(name, exact_by="random").compress(rows(), Observed())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(numpy.array_equal(new, old) for new, old in zip(numpy.random.get_state(), numpy_state, strict=True))


# Exact rows ----------------------------------------------------------------------------------------------------------


def largest(ranges, count):
    """Positions of the `count` largest of `{position: range}`, newest first among equals."""
    return sorted(sorted(ranges, key=lambda position: (ranges[position], position), reverse=True)[:count])


@each_quantizer
@pytest.mark.parametrize("exact_by", ["value_range", "key_range"])
@pytest.mark.parametrize("exact", [0.0, 0.05, 0.25, 1.0])
def test_exact_rows_are_the_sinks_and_those_of_the_largest_range(name, exact_by, exact):
    kv = rows()
    result = small(name, exact=exact, exact_by=exact_by).compress(kv, Observed())
    tensor = kv.values if exact_by == "value_range" else kv.keys
    for b, row in enumerate(tensor.tolist()):
        for h, head in enumerate(row):
            candidates = range(SINKS, ROWS - RECENT)
            chosen = largest({p: max(head[p]) - min(head[p]) for p in candidates}, round(exact * len(candidates)))
            assert sorted(positions_of(result.exact)[b][h]) == [*range(SINKS), *chosen]


def test_equal_ranges_go_to_the_newer_row():
    kv = rows()
    kv = replace(kv, values=torch.ones_like(kv.values))
    kv.values[..., 0] = -1
    exact = small(exact=0.1).compress(kv, Observed()).exact
    assert positions_of(exact)[0][0] == [0, 1, 49, 50, 51, 52, 53]


def test_no_row_but_the_sinks_is_exact_by_none():
    result = small(exact=1.0, exact_by="none").compress(rows(), Observed())
    assert result.exact.positions.tolist() == [[[0, 1]] * 2] * 2
    assert small(exact=1.0, exact_by="none").exact_rows(ROWS) == SINKS


@each_quantizer
def test_random_rows_are_fixed_by_seed_layer_head_and_position_alone(name):
    quantizer, kv, seen = small(name, exact_by="random"), rows(batch=3), seen_at(ROWS, 3)
    chosen = positions_of(quantizer.compress(kv, seen).exact)
    assert all(len(head) == quantizer.exact_rows(ROWS - RECENT) for row in chosen for head in row)
    assert chosen[0] == chosen[1] == chosen[2] and chosen[0][0] != chosen[0][1]
    same = [replace(seen, round=9, phase="prefill"), replace(seen, queries=None, query_positions=None)]
    for other in same:
        assert positions_of(quantizer.compress(rows(batch=3, seed=1), other).exact) == chosen
    for other in (replace(seen, seed=8), replace(seen, layer=4)):
        assert positions_of(quantizer.compress(kv, other).exact) != chosen


def test_random_rows_are_those_of_the_largest_numbers():
    seen = seen_at(ROWS)
    result = small(exact_by="random").compress(rows(), seen)
    uniform = noise.uniform(torch.arange(ROWS).expand(2, 2, ROWS), 7, 3, 0, torch.arange(2)[:, None]).tolist()
    for head in range(2):
        candidates = {p: uniform[0][head][p] for p in range(SINKS, ROWS - RECENT)}
        expected = [*range(SINKS), *largest(candidates, round(EXACT * len(candidates)))]
        assert positions_of(result.exact)[1][head] == expected


def test_number_of_exact_rows():
    for exact, sinks, older, expected in (
        (0.05, 4, 1004, 54), (0.05, 4, 4, 4), (0.05, 4, 3, 3), (0.5, 0, 7, 4), (1.0, 4, 9, 9), (0.0, 4, 9, 4)
    ):  # fmt: skip
        assert MixedPrecision(exact=exact, sinks=sinks).exact_rows(older) == expected


# Padding -------------------------------------------------------------------------------------------------------------


@each_quantizer
@pytest.mark.parametrize("exact_by", ["value_range", "key_range", "random", "none"])
def test_what_padding_holds_does_not_matter(name, exact_by):
    clean = rows(pads=(9, 0))
    results = []
    for filling in (0.0, torch.nan, torch.inf, 1e30):
        kv = clean.map(torch.clone)
        hidden = (kv.positions == PAD)[..., None]
        kv = replace(kv, keys=kv.keys.masked_fill(hidden, filling), values=kv.values.masked_fill(hidden, filling))
        results.append(small(name, exact_by=exact_by).compress(kv, seen_at(ROWS)))
    for other in results[1:]:
        assert packed_bytes(other) == packed_bytes(results[0])
        assert positions_of(other.exact) == positions_of(results[0].exact)
        assert_equal_rows(other.positions, clean.positions)


@each_quantizer
def test_sinks_are_the_first_tokens_not_the_padding(name):
    for pads in (1, 9, ROWS - RECENT, ROWS - RECENT - 1, ROWS - 2, ROWS):
        kv = rows(pads=(pads, 0))
        result = small(name, exact=0.0).compress(kv, Observed())
        tokens = ROWS - pads
        assert [sorted(head) for head in positions_of(result.exact)[0]] == [
            list(range(min(SINKS, max(tokens - RECENT, 0))))
        ] * 2
        assert positions_of(result.exact)[1] == [[0, 1]] * 2
        assert_equal_rows(result.positions, kv.positions)


@each_quantizer
@pytest.mark.parametrize("exact_by", ["value_range", "random"])
def test_a_padded_text_is_packed_as_it_is_alone(name, exact_by):  # case 11, O3
    pads = 14
    padded = rows(pads=(pads, 0))
    alone = KV(*(tensor[:1, :, pads:].clone() for tensor in padded.tensors))
    quantizer = small(name, exact_by=exact_by)
    one, other = quantizer.compress(padded, seen_at(ROWS)), quantizer.compress(alone, seen_at(ROWS - pads, 1))
    both = {key: value for key, value in packed_bytes(one).items() if key[0] == 0}
    common = both.keys() & packed_bytes(other).keys()
    assert common and all(both[key] == packed_bytes(other)[key] for key in common)
    assert positions_of(one.exact)[0] == positions_of(other.exact)[0]


# Numbers that are huge or none at all --------------------------------------------------------------------------------


@each_quantizer
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_row_to_be_packed_that_is_not_finite_raises(name, side):
    for bad in (torch.nan, torch.inf, -torch.inf):
        kv = rows()
        getattr(kv, side)[1, 1, 20, 5] = bad
        with pytest.raises(ValueError, match=rf"\b1 {side} of layer 3\b.*NaN or infinite"):
            small(name, exact=0.0).compress(kv, seen_at(ROWS))
        getattr(kv, side)[0, :, 30] = bad
        with pytest.raises(ValueError, match=rf"\b3 {side} of layer 3\b"):
            small(name, exact=0.0).compress(kv, seen_at(ROWS))


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("exact_by", ["value_range", "key_range", "random"])
def test_a_row_that_is_not_finite_raises_or_is_exact_beside_the_sinks(side, exact_by):
    for bad in (torch.nan, torch.inf):
        kv = rows()
        getattr(kv, side)[1, 1, 20, 5] = bad
        try:
            result = small(exact_by=exact_by).compress(kv, seen_at(ROWS))
        except ValueError as error:
            assert f"1 {side} of layer 3" in str(error)
        else:
            assert {0, 1, 20} <= set(positions_of(result.exact)[1][1])


@each_quantizer
@pytest.mark.parametrize("side", ["keys", "values"])
def test_huge_rows_harm_no_other(name, side):
    huge, pairs = (20, 21, 22), ((3e38, -3e38), (3e38, 3e38), (-3e38, 0.0))
    kv, spoilt = rows(), rows()
    for row, pair in zip(huge, pairs, strict=True):
        getattr(spoilt, side)[:, 0, row, :2] = torch.tensor(pair, dtype=torch.bfloat16)
    for exact_by in ("value_range", "key_range", "none"):
        quantizer = small(name, exact=0.0, exact_by=exact_by)
        usual, result = quantizer.compress(kv, Observed()), quantizer.compress(spoilt, Observed())
        assert positions_of(result.exact) == positions_of(usual.exact)  # the sinks
        before, after = packed_bytes(usual), packed_bytes(result)
        assert after.keys() == before.keys()
        assert all(after[key] == before[key] for key in before if key[1] == 1 or key[2] not in huge)
        assert result.keys.isfinite().all() and result.values.isfinite().all()


def test_a_huge_range_is_larger_than_any_other():
    kv = rows()
    kv.values[:, :, 20, :2] = torch.tensor([3e38, -3e38], dtype=torch.bfloat16)  # beyond float32
    for row in positions_of(small().compress(kv, Observed()).exact):
        assert all({0, 1, 20} <= set(head) for head in row)


@each_quantizer
def test_rows_that_are_huge_in_every_channel_stay_finite(name):
    kv = rows()
    for fill in (3e38, -3e38):
        kv.keys[:, :, 20], kv.values[:, :, 21] = fill, fill
        if "rotated" in name:  # a rotation adds channels up, which float32 cannot hold
            with pytest.raises(ValueError, match="keys up to 3.0e.38 overflow when they are rotated"):
                small(name, exact=0.0).compress(kv, Observed())
            continue
        result = small(name, exact=0.0).compress(kv, Observed())
        assert result.keys.isfinite().all() and result.values.isfinite().all()
        for packed in (result.packed.keys, result.packed.values):
            assert all(tensor.isfinite().all() for tensor in packed.tensors.values())
        assert packed.dot(torch.full((2, 2, 1, DIM), 1e-3)).isfinite().all()


@each_quantizer
def test_subnormal_and_constant_rows_are_packed(name):  # case 47
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kv = rows(dtype=dtype)
        step = torch.finfo(dtype).smallest_normal
        kv.keys[:, :, 20], kv.values[:, :, 21], kv.keys[:, :, 22] = 0.0, 2.0, step / 4
        kv.values[:, :, 23] = torch.linspace(-step, step, DIM).to(dtype)
        result = small(name, exact=0.0).compress(kv, Observed())
        assert result.keys.isfinite().all() and result.values.isfinite().all()
        assert (result.keys[:, :, 20] == 0).all()
        assert (result.values[:, :, 21] == 2).all()
        assert (result.values[:, :, 23] - kv.values[:, :, 23]).abs().max() <= step


# Rounds with eviction ------------------------------------------------------------------------------------------------


def appended(kv, fresh):
    """What a layer holds when `fresh` rows came after `kv`."""
    if not isinstance(kv, MixedKV):
        return kv.join(fresh)
    return MixedKV(kv.packed, kv.exact, kv.recent.join(fresh), kv.rows + fresh.rows)


def evictor(name, recent, budget=24):
    """A method with that budget and recent rows, no sinks, and a window of at most 6."""
    method = METHODS[name](1000)
    given = {"budget": budget, "sinks": 0, "recent": recent, "window": 6, "protected": 4, "rank": 4, "future": 16}
    settable = {field.name for field in fields(method) if field.init}
    return replace(method, **{key: value for key, value in given.items() if key in settable})


def plain(kv):
    return KV(kv.keys, kv.values, kv.positions, kv.mass)


class Rounds:
    """Runs `stages` over rounds of fresh rows, as a layer does, and holds every row to what it was."""

    def __init__(self, stages, with_mass, interval=8):
        self.stages, self.interval = stages, interval
        self.storage = RowStorage(stages.unpacked, interval, with_mass)
        self.codes, self.dense, self.mass, self.packed_once, self.seen = {}, {}, {}, set(), 0

    def feed(self, count):
        fresh = rows(start=self.seen, count=count, seed=self.seen)
        self.storage.append(fresh.keys, fresh.values, fresh.positions[:, 0])
        self.seen += count
        self.dense |= {key: (row, None) for key, row in by_position(fresh, fresh.keys).items()}
        for key, row in by_position(fresh, fresh.values).items():
            self.dense[key] = (self.dense[key][0], row)
        if self.storage.with_mass:
            kv = self.storage.kv
            added = torch.rand(2, 2, kv.rows, generator=torch.Generator().manual_seed(self.seen))
            for key, mass in by_position(kv, added).items():
                self.mass[key] = self.mass.get(key, 0.0) + mass
            self.storage.add_mass(added)

    def compress(self, round, checked_each=5):
        kv, seen = self.storage.kv, seen_at(self.seen, round=round)
        result = self.stages.compress(kv, seen)
        if round % checked_each == 0:
            self.check(result)
            assert torch.equal(result.positions, self.expected(kv, seen))
        self.storage.replace(result)
        assert self.storage.rows == result.rows
        return result

    def expected(self, kv, seen):
        """What the evictors alone keep of decoded rows, with the noise of their place in the pipeline."""
        stages, dense = self.stages.stages, plain(kv)
        for index, stage in enumerate(stages):
            if stage.unpacked is None:
                dense = Pipeline((Random(10**6),) * index + (stage,)).compress(dense, seen)
            else:  # the next stage sees what packing has made of the rows
                dense = plain(Pipeline(stages[: index + 1]).compress(kv, seen))
        return dense.positions

    def check(self, kv):
        codes = packed_bytes(kv)
        assert all(self.codes.get(key, row) == row for key, row in codes.items())
        self.codes |= codes
        loose = {(b, h, p) for part in (kv.exact, kv.recent) for b, row in enumerate(positions_of(part))
                 for h, head in enumerate(row) for p in head}  # fmt: skip
        assert not loose & self.packed_once
        self.packed_once |= codes.keys()
        assert len(loose) + len(codes) == kv.rows * 4
        for part in (kv.exact, kv.recent):
            keys, values = by_position(part, part.keys), by_position(part, part.values)
            assert all(torch.equal(keys[key], self.dense[key][0]) for key in keys)
            assert all(torch.equal(values[key], self.dense[key][1]) for key in values)
        if self.storage.with_mass:
            assert all(
                abs(mass - self.mass[key]) < 1e-4 * self.mass[key] for key, mass in by_position(kv, kv.mass).items()
            )
        assert (kv.positions.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("recent", [2, RECENT, 12])
@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_packed_once_in_a_hundred_rounds_of_any_evictor(name, recent):
    method = evictor(name, recent)
    rounds = Rounds(method | small(exact=0.2), method.accumulates)
    rounds.feed(40)
    for round in range(100 if recent == RECENT else 15):
        result = rounds.compress(round)
        assert result.rows == method.budget and result.recent.rows <= RECENT
        assert result.exact.rows <= small(exact=0.2).exact_rows(method.budget - RECENT)
        rounds.feed(8)
    assert len(rounds.packed_once) > 20


@pytest.mark.parametrize("name", ["vase-attnv", "h2o", "random", "streaming-llm", "rkv"])
def test_packing_before_evicting_holds_the_same(name):
    method = evictor(name, recent=4)
    rounds = Rounds(small(exact=0.2) | method, method.accumulates)
    rounds.feed(40)
    for round in range(30):
        assert rounds.compress(round).rows == method.budget
        rounds.feed(8)


@each_quantizer
def test_rows_of_every_format_move_with_the_evictor(name):
    rounds = Rounds(H2O(24, recent=4) | small(name, exact=0.2) | KeyNorm(20, sinks=0, recent=4), with_mass=True)
    rounds.feed(40)
    for round in range(15):
        assert rounds.compress(round).rows == 20
        rounds.feed(8)


@each_quantizer
def test_without_eviction_only_exact_rows_are_packed_later(name):
    quantizer = small(name)
    kv, known, exact_before = rows(count=20), {}, None
    for round in range(20):
        kv = quantizer.compress(kv, seen_at(kv.rows, round=round))
        codes, exact = packed_bytes(kv), positions_of(kv.exact)
        assert all(codes[key] == value for key, value in known.items())
        assert all(len(head) == quantizer.exact_rows(kv.rows - RECENT) for row in exact for head in row) or round
        known, exact_before = codes, exact
        kv = appended(kv, rows(count=8, start=kv.rows, seed=round + 1))
    assert exact_before[0][0][:SINKS] == [0, 1] and len(known) > 300


def test_exact_rows_compete_with_the_new_ones():
    """Over rounds without eviction the exact rows are the largest of those that were never packed."""
    quantizer = small(exact=0.1)
    kv = rows(count=40)
    first = quantizer.compress(kv, Observed())
    fresh = rows(count=20, start=40, seed=1)
    fresh = replace(fresh, values=fresh.values * 1000)
    second = quantizer.compress(appended(first, fresh), Observed())
    exact = set(positions_of(second.exact)[0][0])
    assert {0, 1} < exact and len(exact) == quantizer.exact_rows(54)
    left = {p: None for p in positions_of(first.exact)[0][0][SINKS:]} | {p: None for p in range(34, 54)}
    ranges = {}
    for position in left:
        source = fresh.values[0, 0, position - 40] if position >= 40 else kv.values[0, 0, position]
        ranges[position] = float(source.max() - source.min())
    assert exact == {0, 1, *largest(ranges, len(exact) - SINKS)}


@pytest.mark.parametrize("exact_by", ["none", "value_range"])
def test_no_other_row_becomes_exact_where_sinks_were_evicted(exact_by):
    """`exact` says how many rows besides the sinks are exact: none here."""
    quantizer = small(exact=0.0, exact_by=exact_by)
    kv = quantizer.compress(rows(count=40), Observed())
    kv = kv.take(torch.arange(10, 40).expand(2, 2, 30))  # both sinks are gone
    for start in range(40, 80, 8):
        kv = quantizer.compress(appended(kv, rows(count=8, start=start)), Observed())
        assert positions_of(kv.exact) == [[[], []]] * 2


def test_sinks_are_exact_as_long_as_they_are_kept():
    rounds = Rounds(StreamingLLM(20, sinks=SINKS, recent=4) | small(exact=0.0), with_mass=False)
    rounds.feed(40)
    for round in range(20):
        assert positions_of(rounds.compress(round).exact) == [[[0, 1]] * 2] * 2
        rounds.feed(8)


# take() --------------------------------------------------------------------------------------------------------------


def indexed(kv, kept):
    parts = [
        tensor.gather(2, kept.unsqueeze(-1).expand(*kept.shape, tensor.shape[-1])) for tensor in (kv.keys, kv.values)
    ]
    return [*parts, kv.positions.gather(2, kept)]


@each_quantizer
def test_taking_rows_equals_indexing_the_decoded_ones(name):
    generator = torch.Generator().manual_seed(0)
    kv = small(name).compress(rows(pads=(9, 0)), seen_at(ROWS))
    while kv.rows > 1:
        count = max(kv.rows * 3 // 4, 1)
        kept = torch.rand(2, 2, kv.rows, generator=generator).argsort(-1)[:, :, :count].sort(-1).values
        expected = indexed(kv, kept)
        kv = kv.take(kept)
        assert kv.rows == count
        for tensor, reference in zip((kv.keys, kv.values, kv.positions), expected, strict=True):
            assert_equal_rows(tensor, reference)


@each_mixed
def test_heads_may_take_all_of_one_part(name):
    kv = small(name).compress(rows(), Observed())
    packed, exact = sorted(positions_of(kv.packed)[0][0]), sorted(positions_of(kv.exact)[0][1])
    count = len(exact)
    newest = list(range(ROWS - count, ROWS))
    kept = torch.tensor([[packed[:count], exact], [newest, list(range(count))]])
    taken = kv.take(kept)
    for tensor, reference in zip((taken.keys, taken.values, taken.positions), indexed(kv, kept), strict=True):
        assert_equal_rows(tensor, reference)
    again = small(name).compress(appended(taken, rows(count=9, start=ROWS)), Observed())
    assert again.rows == count + 9
    assert torch.equal(again.positions[:, :, :count], taken.positions)
    slots = torch.cat([part.positions for part in again.parts], dim=2)
    assert ((slots != EMPTY).sum(-1) == again.rows).all()


# Bytes ---------------------------------------------------------------------------------------------------------------


def nbytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def bytes_of_a_row(bits, group_size, width):
    return math.ceil(width * bits / 8) + 2 * 2 * math.ceil(width / group_size)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("key_bits", "value_bits", "group"), [(4, 4, 64), (8, 4, 32), (2, 2, 16), (8, 8, 64)])
def test_storage_equals_the_bit_formula(dim, key_bits, value_bits, group):  # O6
    kv = rows(count=260, dim=dim, heads=3)
    quantizer = MixedPrecision(key_bits=key_bits, value_bits=value_bits, group_size=group, exact=0.1, recent=56)
    result = quantizer.compress(kv, Observed())
    exact = 4 + round(0.1 * 200)
    packed = 260 - 56 - exact
    each = bytes_of_a_row(key_bits, group, dim) + bytes_of_a_row(value_bits, group, dim) + 4
    assert [part.rows for part in result.parts] == [packed, exact, 56]
    stored = [tensor for tensor in tensors_of(result) if all(tensor is not own for own in result.recent.tensors)]
    assert nbytes(stored) == 2 * 3 * (packed * each + exact * (2 * 2 * dim + 4))


def test_int4_in_groups_of_64_with_5_percent_exact_takes_5_08_bits_an_element():
    kv = rows(batch=1, heads=8, count=4000, dim=128)
    result = MixedPrecision(4, group_size=64, exact=0.05, sinks=0, recent=0).compress(kv, Observed())
    sizes = [tensor for tensor in tensors_of(result) if tensor.dtype != torch.int32]
    assert nbytes(sizes) * 8 == 5.075 * 2 * 8 * 4000 * 128
    positions = [part.positions for part in result.parts]
    assert nbytes(positions) * 8 == 32 * 8 * 4000  # 0.125 bits an element more


@each_quantizer
def test_no_tensor_is_a_view_of_a_larger_one(name):  # a view keeps its whole storage alive
    quantizer = small(name)
    kv = rows()
    for round in range(3):
        kv = quantizer.compress(kv, Observed())
        for part in (kv, kv.take(torch.arange(4, kv.rows).expand(2, 2, kv.rows - 4))):
            tensors = tensors_of(part)
            assert nbytes(tensors) == sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        kv = appended(kv, rows(count=8, start=kv.rows, seed=round))


@each_mixed
def test_empty_slots_are_few(name):
    """Heads differ in how many rows of each part they hold; every part is as long as its longest head."""
    rounds = Rounds(Random(24, sinks=0, recent=4) | small(name, exact=0.2), with_mass=False)
    rounds.feed(40)
    for round in range(30):
        kv = rounds.compress(round)
        for part in kv.parts:
            used = (part.positions != EMPTY).sum(-1)
            assert used.max() == part.rows
        rounds.feed(8)


# Settings ------------------------------------------------------------------------------------------------------------


def test_a_pipeline_packs_once():
    for build in (
        lambda: MixedPrecision(4) | MixedPrecision(8),
        lambda: MixedPrecision(4) | Random(100) | MixedPrecision(4),
        lambda: (Random(100) | MixedPrecision(4)) | (MixedPrecision.k8v4() | Random(90)),
    ):
        with pytest.raises(ValueError, match="pack.*once.*2 stages"):
            build()


def test_a_pipeline_answers_for_its_quantizer():
    for stages in (Random(100) | MixedPrecision(recent=12), MixedPrecision(recent=12) | Random(100)):
        assert stages.budget == 100 and stages.unpacked == 12
    with pytest.raises(ValueError, match="group_size=64.*head_dim=32"):
        (Random(100) | MixedPrecision(group_size=64)).check_head_dim(32)


def test_rows_packed_in_another_way_are_refused():
    kv = MixedPrecision(4, recent=RECENT).compress(rows(), Observed())
    kv = appended(kv, rows(count=20, start=ROWS))
    for other in (MixedPrecision(8, recent=RECENT), MixedPrecision.k4v4_rotated(recent=RECENT),
                  MixedPrecision(4, group_size=16, recent=RECENT)):  # fmt: skip
        with pytest.raises(ValueError, match="packed.*one quantizer"):
            other.compress(kv, Observed())


def test_named_settings():
    one, other = MixedPrecision.k8v4(), MixedPrecision.k4v4_rotated(exact=0.1, recent=128)
    assert (one.key_bits, one.value_bits, one.rotate_keys, one.exact) == (8, 4, False, 0.0)
    assert (other.key_bits, other.value_bits, other.rotate_keys, other.exact, other.recent) == (4, 4, True, 0.1, 128)


def test_settings_that_read_alike_are_equal():
    for one, other in (
        (MixedPrecision(8), MixedPrecision(key_bits=8, value_bits=8)),
        (MixedPrecision(2, key_bits=8), MixedPrecision(key_bits=8, value_bits=2)),
        (MixedPrecision(4), MixedPrecision(key_bits=4, value_bits=4)),
    ):
        assert repr(one) == repr(other)
        assert one == other and hash(one) == hash(other)


def test_bits_may_be_replaced():
    changed = replace(MixedPrecision(4), key_bits=8)
    assert (changed.key_bits, changed.value_bits) == (8, 4)
    assert MixedPrecision(8) == MixedPrecision(key_bits=8, value_bits=8)
    with pytest.raises(ValueError, match="bits=8 has no effect beside key_bits=4 and value_bits=4"):
        replace(MixedPrecision(4), bits=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "bits must be 2, 4 or 8, got 3"), ({"bits": 0}, "got 0"), ({"bits": 16}, "got 16"),
        ({"key_bits": 5}, "key_bits must be 2, 4 or 8, got 5"), ({"value_bits": -4}, "value_bits.*got -4"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"), ({"group_size": -64}, "group_size.*-64"),
        ({"exact": 1.5}, "exact.*0 to 1, got 1.5"), ({"exact": -0.1}, "exact.*-0.1"),
        ({"exact": float("nan")}, "exact.*nan"), ({"recent": -1}, "recent must be at least 0, got -1"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        MixedPrecision(**settings)


def test_values_of_a_wrong_type():
    """In a process of its own, without the type checks of this suite, as users run it."""
    run_python("""
import re
import sys
from kvcomp.quant import MixedPrecision
heavy = {"triton", "bitsandbytes", "matplotlib", "numba", "kvcomp_kernels"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
for settings, message in (
    ({"bits": True}, "bits must be 2, 4 or 8, got True"),
    ({"bits": 4.0}, "bits must be 2, 4 or 8, got 4.0"),
    ({"bits": "4"}, "bits must be 2, 4 or 8, got '4'"),
    ({"key_bits": 8.0}, "key_bits must be 2, 4 or 8, got 8.0"),
    ({"value_bits": False}, "value_bits must be 2, 4 or 8, got False"),
    ({"group_size": 64.0}, "group_size must be an int, got 64.0"),
    ({"group_size": True}, "group_size must be an int, got True"),
    ({"exact": True}, "exact must be a float, got True"),
    ({"exact": "5%"}, "exact must be a float, got '5%'"),
    ({"exact": None}, "exact must be a float, got None"),
    ({"exact_by": "range"}, "exact_by must be one of value_range, key_range, random, none, got 'range'"),
    ({"exact_by": None}, "exact_by.*None"),
    ({"recent": 4.0}, "recent must be an int, got 4.0"),
    ({"recent": True}, "recent must be an int, got True"),
    ({"sinks": None}, "sinks must be an int, got None"),
    ({"rotate_keys": "no"}, "rotate_keys must be a bool, got 'no'"),
    ({"rotate_keys": 1}, "rotate_keys must be a bool, got 1"),
):
    try:
        MixedPrecision(**settings)
    except ValueError as error:
        assert re.search(message, str(error)), (settings, str(error))
    else:
        raise AssertionError(f"accepted {settings}")
""")


@pytest.mark.parametrize("dim", [7, 16, 40])
def test_a_group_wider_than_a_row_is_refused(dim):  # case 50
    kv = rows(dim=dim)
    for call in (
        lambda: MixedPrecision(group_size=dim + 1).check_head_dim(dim),
        lambda: MixedPrecision(group_size=dim + 1, recent=4).compress(kv, Observed()),
    ):
        with pytest.raises(ValueError, match=rf"group_size={dim + 1}\b.*head_dim={dim}\b"):
            call()
    MixedPrecision(group_size=dim, recent=4).compress(kv, Observed())


@pytest.mark.parametrize("dim", [7, 12, 100])
def test_a_width_that_cannot_be_rotated_is_refused(dim):  # case 49
    with pytest.raises(ValueError, match=rf"head_dim.*\b{dim}\b.*rotate_keys=False"):
        MixedPrecision.k4v4_rotated().check_head_dim(dim)


@pytest.mark.parametrize("dim", [1, 3, 7, 16, 33, 40, 80, 96, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_defaults_fit_any_width(bits, dim):  # cases 50, 51
    kv = rows(dim=dim)
    result = MixedPrecision(bits, recent=RECENT).compress(kv, Observed())
    assert result.keys.shape == kv.keys.shape
    ranges = (kv.keys.amax(-1) - kv.keys.amin(-1)).float()
    assert (
        (result.keys - kv.keys).abs().amax(-1) <= ranges / (2**bits - 1) * 0.51 + 2**-8 * kv.keys.abs().amax(-1)
    ).all()


def test_values_may_have_another_width_than_keys():
    kv = rows(dim=64)
    kv = replace(kv, values=kv.values[..., :40].contiguous())
    result = MixedPrecision(4, recent=RECENT, exact=0.0).compress(kv, Observed())
    assert result.values.shape == kv.values.shape and result.packed.values.width == 40
    assert ((result.values - kv.values).abs().amax(-1) <= kv.values.abs().amax(-1) * 0.1).all()
