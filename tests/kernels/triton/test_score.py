"""Scores of rows, against float64."""

from dataclasses import dataclass

import pytest
import torch
from kvcomp_kernels import score as kernels

from .helpers import FLOATS, LAYOUTS, assert_close, assert_same_bits, call, laid, normal

HALF = torch.bfloat16


def tolerance(dtype):
    return 1e-6 if dtype == torch.float32 else 1e-5


@dataclass(frozen=True)
class Case:
    """Rows of which the first text has `pads` of padding, with `blind` queries of padding."""

    rows: int = 64
    window: int = 20
    drop: int = 20
    recent: int = 20
    pool: int = 5
    head_dim: int = 64
    value_dim: int | None = None
    heads: int = 2
    group: int = 4
    batch: int = 1
    pads: int = 0
    blind: int = 0
    dtype: torch.dtype = torch.float32
    scaling: float | None = None
    sharpness: float = 2.0

    def tensors(self):
        """Queries, keys, values, positions and query positions."""
        shape = self.batch, self.heads, self.rows
        queries = self.sharpness * normal(self.batch, self.heads * self.group, self.window, self.head_dim, seed=1)
        keys, values = normal(*shape, self.head_dim, seed=2), normal(*shape, self.value_dim or self.head_dim, seed=3)
        age = torch.arange(self.rows).flip(0)  # every second row is gone, other ones for each head, but the newest 12
        newest = 3 * self.rows + 2 * self.window
        positions = newest - age - (age - 12).clamp_min(0) - torch.arange(self.heads)[:, None] * (age > 12)
        positions = positions.to(torch.int32).repeat(self.batch, 1, 1)
        positions[0, :, : self.pads] = -1
        query_positions = torch.arange(newest + 1 - self.window, newest + 1, dtype=torch.int32).repeat(self.batch, 1)
        query_positions[0, : self.blind] = -1
        return *(part.to(self.dtype) for part in (queries, keys, values)), positions, query_positions

    @property
    def settings(self):
        scaling = self.head_dim**-0.5 if self.scaling is None else self.scaling
        return scaling, self.drop, self.recent, self.pool, self.pads + self.blind > 0


def pooled(scores, width):
    """The average over `width` neighbours, of zeros beyond the ends."""
    padded = torch.nn.functional.pad(scores, (width // 2, width // 2))
    return padded.unfold(-1, width, 1).sum(-1) / width


def attention(queries, keys, positions, query_positions, scaling, drop, recent, pool, padded):
    """`mean_group pool(mean_window softmax(scaling * q . k))` in float64."""
    heads, rows, older = keys.shape[1], keys.shape[2], keys.shape[2] - drop
    grouped = queries.double().unflatten(1, (heads, -1))
    logits = scaling * torch.einsum("bhgwd,bhrd->bhgwr", grouped, keys[:, :, :older].double())
    row = positions[:, :, None, None, :older]
    asked = query_positions[:, None, None, :, None]
    seen = torch.ones_like(row, dtype=torch.bool) & torch.ones_like(asked, dtype=torch.bool)
    if padded:
        seen = seen & (row != -1)
    if drop < queries.shape[2]:
        seen = seen & (row != -1) & (row <= asked)
    blind = ~seen.any(-1, keepdim=True)
    if padded:
        blind = blind | (asked < 0)
    weights = logits.where(seen, -torch.inf).softmax(-1).where(~blind, 0.0)
    mean = weights.sum(3) / (~blind).sum(3).clamp_min(1)
    return pooled(mean[..., : rows - recent], pool).mean(2)


def value_range(values):
    """Its one subtraction in float32, as there is one right answer."""
    return values.float().max(-1).values - values.float().min(-1).values


def scored(tensors, settings, layout="plain"):
    """What the kernel returns; the values may be None."""
    *rows, query_positions = tensors
    given = [None if part is None else laid(part, layout) for part in rows]
    return call(kernels.window_score, *given, laid(query_positions), *settings)


def assert_scores(tensors, settings, at_most, layout="plain"):
    queries, keys, values, positions, query_positions = tensors
    score, spread = scored(tensors, settings, layout)
    assert score.dtype == spread.dtype == torch.float32
    assert_close(score, attention(queries, keys, positions, query_positions, *settings), at_most)
    assert_same_bits(spread, value_range(values))


CASES = {
    "one row": Case(rows=1, drop=0, recent=0, pool=1, window=1),
    "one row, many queries": Case(rows=1, drop=0, recent=0, window=20),
    "63 rows": Case(rows=63),
    "64 rows": Case(rows=64, head_dim=128),
    "129 rows": Case(rows=129, window=64, drop=64, recent=64),
    "1000 rows": Case(rows=1000, window=64, drop=64, recent=64, heads=1),
    "1000 rows, causal": Case(rows=1000, window=64, drop=0, recent=64, heads=1, dtype=HALF),
    "one scored row": Case(rows=21),
    "fewer scored rows than the pool": Case(rows=66, window=64, drop=0, recent=64, pool=7),
    "one query": Case(window=1, drop=0, recent=0, pool=1, rows=65),
    "one query, recent": Case(window=1, drop=3, recent=3),
    "the window itself": Case(rows=65, window=64, drop=0, recent=64),
    "all rows": Case(window=20, drop=0, recent=0, pool=1),
    "window larger than drop": Case(window=20, drop=6, recent=6),
    "window larger than recent": Case(window=20, drop=0, recent=6, pool=3),
    "drop below recent": Case(window=20, drop=5, recent=11),
    "drop larger than window": Case(window=20, drop=30, recent=30),
    "head_dim 80": Case(head_dim=80),
    "head_dim 96": Case(head_dim=96, dtype=torch.float16),
    "head_dim 256": Case(head_dim=256, dtype=HALF),
    "head_dim 16": Case(head_dim=16),
    "value_dim 128": Case(head_dim=64, value_dim=128),
    "value_dim 80": Case(head_dim=96, value_dim=80, dtype=HALF),
    "value_dim 1": Case(value_dim=1),
    "group 1": Case(group=1, heads=3),
    "group 3": Case(group=3, dtype=torch.float16),
    "group 8": Case(group=8, window=64, drop=0, recent=64, rows=129, dtype=HALF),
    "group 1, one query": Case(group=1, window=1, drop=0, recent=0, pool=1),
    "float16": Case(dtype=torch.float16, rows=129),
    "bfloat16": Case(dtype=HALF, rows=129),
    "scaling 1": Case(scaling=1.0, sharpness=0.3),
    "batch": Case(batch=2, rows=63),
    "batch, causal": Case(batch=2, rows=63, drop=0, window=64, recent=30),
    "padding": Case(batch=2, pads=17),
    "padding, causal": Case(batch=2, pads=17, drop=0),
    "padding, bfloat16": Case(batch=2, pads=40, dtype=HALF, rows=129),
    "padded queries": Case(batch=2, pads=50, blind=6, drop=0, recent=6),
    "padded queries beyond the dropped rows": Case(batch=2, pads=50, blind=6),
    "padded queries, dropped rows": Case(batch=2, pads=10, blind=19, drop=20),
    "a text of padding": Case(batch=2, pads=64, blind=20, drop=0, recent=6),
    "a text without visible rows": Case(batch=2, pads=44, drop=20),
    "one text of padding": Case(pads=64, blind=20),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scores_and_ranges(case):
    assert_scores(case.tensors(), case.settings, tolerance(case.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [Case(rows=33, batch=2, pads=5), Case(rows=33, drop=0, dtype=HALF, group=3)])
def test_every_layout(case, layout):
    assert_scores(case.tensors(), case.settings, tolerance(case.dtype), layout)


def test_queries_and_rows_as_a_model_has_them():
    case = Case(rows=33, batch=2, dtype=HALF)
    tensors = case.tensors()
    queries, keys, values, positions, query_positions = tensors
    given = laid(queries, "heads_last"), laid(keys, "rows"), laid(values, "rows")
    shared = laid(positions[:, :1]).expand_as(positions)
    score, spread = call(kernels.window_score, *given, shared, laid(query_positions), *case.settings)
    want = attention(queries, keys, positions[:, :1].expand_as(positions), query_positions, *case.settings)
    assert_close(score, want, 1e-5)
    assert_same_bits(spread, value_range(values))


def test_query_positions_may_be_a_view():
    case = Case(rows=33, batch=2, drop=0)
    *rows, query_positions = case.tensors()
    wide = torch.full((2, 50), 99, dtype=torch.int32)
    wide[:, 30:] = query_positions
    got = call(kernels.window_score, *map(laid, rows), laid(wide)[:, 30:], *case.settings)
    assert_close(got[0], attention(rows[0], rows[1], rows[3], query_positions, *case.settings), 1e-6)
    one = query_positions[:1].expand(2, -1)
    got = call(kernels.window_score, *map(laid, rows), laid(query_positions)[:1].expand(2, -1), *case.settings)
    assert_close(got[0], attention(rows[0], rows[1], rows[3], one, *case.settings), 1e-6)


def test_fewer_positions_than_queries_are_left_to_the_definition():
    queries, keys = laid(normal(2, 2, 9, 64)), laid(normal(2, 2, 5, 64))
    positions = torch.arange(5, dtype=torch.int32, device=keys.device).repeat(2, 2, 1)
    for known in (positions[:, 0], torch.arange(9, device=keys.device)[None]):
        assert kernels.window_score(queries, keys, None, positions, known, 0.125, 0, 0, 1, False) is NotImplemented


def test_positions_of_64_bit():
    case = Case(rows=33, batch=2, pads=4, drop=0)
    *rows, positions, query_positions = case.tensors()
    assert_scores((*rows, positions.long(), query_positions.long()), case.settings, 1e-6)
    assert_scores((*rows, positions.long(), query_positions), case.settings, 1e-6)


@pytest.mark.parametrize("case", [Case(), Case(drop=0, dtype=HALF), Case(batch=2, pads=9)])
def test_without_values_the_range_is_empty(case):
    queries, keys, values, *positions = case.tensors()
    score, spread = scored((queries, keys, None, *positions), case.settings)
    assert_close(score, attention(queries, keys, *positions, *case.settings), tolerance(case.dtype))
    assert spread.shape == (0,) and spread.dtype == torch.float32


def test_what_is_padding_may_hold_nan():
    case = Case(batch=2, pads=17, blind=5, drop=0, recent=6)
    tensors = case.tensors()
    clean = attention(tensors[0], tensors[1], *tensors[3:], *case.settings)
    tensors[0][0, :, :5] = torch.nan
    tensors[1][0, :, :17] = torch.nan
    assert_close(scored(tensors, case.settings)[0], clean, 1e-6)


def test_rows_that_are_dropped_or_come_later_may_hold_nan():
    case = Case(drop=6, recent=6)
    queries, keys, values, positions, query_positions = case.tensors()
    want = attention(queries, keys, positions, query_positions, *case.settings)
    keys[:, :, -6:] = torch.nan
    assert_close(scored((queries, keys, values, positions, query_positions), case.settings)[0], want, 1e-6)
    positions[:, :, 7] = 10**6
    want = attention(queries, keys.nan_to_num(), positions, query_positions, *case.settings)
    keys[:, :, 7] = torch.nan
    assert_close(scored((queries, keys, values, positions, query_positions), case.settings)[0], want, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("drop", [0, 20])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_a_key_stays_visible(bad, drop, dtype):
    case = Case(batch=2, drop=drop, dtype=dtype)
    tensors = case.tensors()
    tensors[1][1, 0, 3, 5] = bad
    want = attention(tensors[0], tensors[1], *tensors[3:], *case.settings)
    assert want[1, 0].isnan().all() and want.isnan().sum() == want[1, 0].numel()
    assert_close(scored(tensors, case.settings)[0], want, tolerance(dtype))


@pytest.mark.parametrize("drop", [0, 20])
def test_nan_in_a_query_stays_visible(drop):
    case = Case(batch=2, drop=drop)
    tensors = case.tensors()
    tensors[0][0, 5, 7, 11] = torch.nan
    want = attention(tensors[0], tensors[1], *tensors[3:], *case.settings)
    assert want[0, 1].isnan().all() and want.isnan().sum() == want[0, 1].numel()
    assert_close(scored(tensors, case.settings)[0], want, 1e-6)


def test_nan_in_a_value_spoils_its_range_alone():
    case = Case(batch=2)
    tensors = case.tensors()
    tensors[2][0, 1, 7, 3] = torch.nan
    score, spread = scored(tensors, case.settings)
    assert spread.isnan().nonzero().tolist() == [[0, 1, 7]] and not score.isnan().any()
    assert kernels.value_range(laid(tensors[2])).isnan().nonzero().tolist() == [[0, 1, 7]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_logits_that_overflow_without_their_maximum(dtype):
    case = Case(dtype=dtype, sharpness=60.0, drop=0, recent=20)
    assert_scores(case.tensors(), case.settings, 1e-4)  # logits near 300 have an error near 3e-5


def test_equal_keys_share_the_attention():
    case = Case(rows=50, drop=20, recent=20, pool=1)
    queries, keys, *rest = case.tensors()
    score, _ = scored((queries, keys[:, :, :1].expand_as(keys), *rest), case.settings)
    torch.testing.assert_close(score, torch.full_like(score, 1 / 30))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "rows, width", [(1, 64), (63, 80), (129, 96), (64, 128), (20, 256), (5, 1), (1000, 64), (0, 64)]
)
def test_ranges_of_values(rows, width, dtype):
    values = normal(2 if rows < 500 else 1, 2, rows, width, seed=width, dtype=dtype)
    assert_same_bits(call(kernels.value_range, laid(values)), value_range(values))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranges_of_values_in_every_layout(layout):
    values = normal(2, 3, 21, 80, dtype=HALF)
    assert_same_bits(call(kernels.value_range, laid(values, layout)), value_range(values))


@pytest.mark.parametrize("dtype", FLOATS)
def test_ranges_of_extreme_values(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([[1.0, 1.0], [-largest, largest], [-0.0, 0.0], [-torch.inf, 0.0], [-3.0, -7.0], [6e-8, 1e-7]])
    values = values.repeat(1, 40)[None, None].to(dtype)
    assert_same_bits(call(kernels.value_range, laid(values)), value_range(values))


def leverage(keys, values, sketch):
    of_keys, of_values = (part.double() @ sketch.double() for part in (keys, values))
    return of_keys.square().sum(-1) * of_values.square().sum(-1)


@pytest.mark.parametrize(
    "shape, rank, dtype",
    [
        ((1, 2, 64, 64), 20, torch.float32), ((1, 2, 64, 64), 20, HALF), ((1, 2, 64, 64), 20, torch.float16),
        ((2, 3, 63, 80), 20, torch.float32), ((1, 2, 129, 128), 20, torch.float32), ((1, 1, 1000, 64), 20, HALF),
        ((1, 2, 1, 64), 20, torch.float32), ((1, 2, 33, 96), 8, torch.float32), ((1, 2, 33, 256), 20, HALF),
        ((1, 2, 33, 64), 1, torch.float32), ((1, 2, 33, 64), 33, torch.float32), ((2, 2, 33, 64), 64, HALF),
        ((1, 4, 16, 16), 20, torch.float32), ((1, 2, 0, 64), 20, HALF),
    ],
)  # fmt: skip
def test_leverage(shape, rank, dtype):
    keys, values = normal(*shape, seed=1, dtype=dtype), normal(*shape, seed=2, dtype=dtype)
    sketch = normal(shape[1], shape[3], rank, seed=3) * rank**-0.5
    got = call(kernels.sketched_leverage, laid(keys), laid(values), laid(sketch))
    assert got.dtype == torch.float32
    assert_close(got, leverage(keys, values, sketch), tolerance(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leverage_in_every_layout(layout):
    keys, values, sketch = normal(2, 3, 21, 64, seed=1), normal(2, 3, 21, 64, seed=2), normal(3, 64, 20, seed=3)
    got = call(kernels.sketched_leverage, laid(keys, layout), laid(values, layout), laid(sketch, layout))
    assert_close(got, leverage(keys, values, sketch), 1e-6)


def test_leverage_keeps_nan():
    keys, values, sketch = normal(2, 3, 21, 64, seed=1), normal(2, 3, 21, 64, seed=2), normal(3, 64, 20, seed=3)
    keys[0, 1, 7, 3] = values[1, 2, 20, 0] = torch.nan
    assert_close(
        call(kernels.sketched_leverage, *map(laid, (keys, values, sketch))), leverage(keys, values, sketch), 1e-6
    )
