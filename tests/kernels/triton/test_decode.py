"""Attention over packed, exact and recent rows, against float64 over decoded rows."""

from dataclasses import dataclass, replace

import pytest
import torch
from kvcomp_kernels.decode import packed_decode

from kvcomp import ops

from .helpers import LAYOUTS, assert_close, call, integers, laid, normal, on_device

HALF = torch.bfloat16
EMPTY, PAD = -2, -1


@dataclass(frozen=True)
class Case:
    """`packed`, `exact` and `recent` rows; of each pair of settings the first is that of keys."""

    packed: int = 100
    exact: int = 10
    recent: int = 20
    new: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    heads: int = 2
    group: int = 4
    batch: int = 1
    bits: tuple[int, int] = (4, 4)
    group_sizes: tuple[int, int] = (64, 64)
    rotate: bool = False
    dtype: torch.dtype = torch.float32
    scaling: float | None = None
    sharpness: float = 2.0

    def inputs(self):
        """The arguments up to `positions`."""
        value_dim = self.value_dim or self.head_dim
        numbers = lambda seed, rows, width: normal(self.batch, self.heads, rows, width, seed=seed)  # noqa: E731
        query = self.sharpness * normal(self.batch, self.heads * self.group, self.new, self.head_dim, seed=1)
        query = query.to(self.dtype)
        side = torch.float16 if self.dtype == torch.float16 else torch.bfloat16
        keys, values = (
            list(ops.pack(numbers(seed, self.packed, width).to(self.dtype), bits, size, side, rotate))
            for seed, width, bits, size, rotate in zip(
                (2, 3), (self.head_dim, value_dim), self.bits, self.group_sizes, (self.rotate, False), strict=True
            )
        )
        shapes = ((self.exact, self.head_dim), (self.exact, value_dim), (self.recent, self.head_dim))
        dense = [numbers(4 + i, *shape) for i, shape in enumerate([*shapes, (self.recent, value_dim)])]
        positions, start = [], 0
        for rows in (self.packed, self.exact, self.recent):
            part = torch.arange(start, start + rows, dtype=torch.int32)
            positions.append(part.repeat(self.batch, self.heads, 1))
            start += rows
        rotated = ops.hadamard(query) if self.rotate else query
        return [query, rotated, keys, values, [part.to(self.dtype) for part in dense], positions]

    @property
    def settings(self):
        scaling = self.head_dim**-0.5 if self.scaling is None else self.scaling
        return list(self.bits), list(self.group_sizes), scaling

    @property
    def tolerance(self):
        return 1e-6 if self.dtype == torch.float32 else 2e-3


def attention(query, rotated, keys, values, dense, positions, bits, group_sizes, scaling):
    """`softmax(scaling * q . k) v` in float64; only the bits of packed rows are turned into numbers by the package."""
    (query_heads, new, head_dim), heads = query.shape[1:], positions[0].shape[1]
    decoded = [
        ops.unpack(*parts, bit, size, width, torch.float32).double()
        for parts, bit, size, width in zip(
            (keys, values), bits, group_sizes, (head_dim, dense[1].shape[-1]), strict=True
        )
    ]
    asked, turned = (part.double().unflatten(1, (heads, query_heads // heads)) for part in (query, rotated))
    plain = torch.cat([dense[0], dense[2]], dim=2).double()
    logits = torch.cat(
        [torch.einsum("bhgnd,bhrd->bhgnr", *pair) for pair in ((turned, decoded[0]), (asked, plain))], dim=-1
    )
    hidden = (torch.cat([part.long() for part in positions], dim=2) < 0)[:, :, None, None]
    rows = logits.shape[-1]
    hidden = hidden | (torch.arange(rows) > rows - new + torch.arange(new)[:, None])
    weights = (scaling * logits).masked_fill(hidden, -torch.inf).softmax(-1)
    weights = weights.where(~hidden.all(-1, keepdim=True), 0.0)
    rows = torch.cat([decoded[1], dense[1].double(), dense[3].double()], dim=2)
    output = torch.einsum("bhgnr,bhrd->bnhgd", weights, rows)
    return output.flatten(2, 3)


def decoded(inputs, settings, layout="plain"):
    return call(packed_decode, *(on_device(part, layout) for part in inputs), *settings)


def assert_decodes(case, inputs, layout="plain"):
    got = decoded(inputs, case.settings, layout)
    assert got.dtype == case.dtype
    assert_close(got, attention(*inputs, *case.settings), case.tolerance)


CASES = {
    "one packed row": Case(packed=1, exact=0),
    "63 packed rows": Case(packed=63),
    "64 packed rows": Case(packed=64, exact=1),
    "129 packed rows": Case(packed=129, recent=129),
    "1000 packed rows": Case(packed=1000, heads=1),
    "1000 packed rows, bfloat16": Case(packed=1000, exact=50, recent=64, heads=1, dtype=HALF),
    "1000 exact and recent rows": Case(packed=20, exact=500, recent=500, heads=1),
    "float16": Case(dtype=torch.float16),
    "bfloat16": Case(dtype=HALF),
    "no packed rows": Case(packed=0),
    "no exact rows": Case(exact=0),
    "no recent rows": Case(recent=0),
    "packed rows alone": Case(exact=0, recent=0),
    "exact rows alone": Case(packed=0, recent=0),
    "recent rows alone": Case(packed=0, exact=0),
    "one recent row": Case(packed=0, exact=0, recent=1),
    "head_dim 80": Case(head_dim=80, group_sizes=(80, 16)),
    "head_dim 96": Case(head_dim=96, dtype=torch.float16),
    "head_dim 128": Case(head_dim=128, dtype=HALF),
    "head_dim 256": Case(head_dim=256, bits=(8, 4), heads=1),
    "head_dim 16": Case(head_dim=16, group_sizes=(16, 16)),
    "value_dim 128": Case(value_dim=128),
    "value_dim 80": Case(head_dim=96, value_dim=80, group_sizes=(32, 80), dtype=HALF),
    "value_dim 64": Case(head_dim=128, value_dim=64, bits=(8, 2)),
    "2 bits": Case(bits=(2, 2), group_sizes=(32, 32)),
    "8 bits": Case(bits=(8, 8)),
    "8 and 4 bits": Case(bits=(8, 4), dtype=HALF),
    "2 and 8 bits": Case(bits=(2, 8), group_sizes=(16, 64), dtype=torch.float16),
    "4 and 2 bits": Case(bits=(4, 2), head_dim=128, group_sizes=(128, 32)),
    "groups that do not divide": Case(head_dim=96, group_sizes=(64, 36)),
    "odd groups": Case(head_dim=80, group_sizes=(5, 7), bits=(8, 4)),
    "odd width": Case(head_dim=72, group_sizes=(72, 16)),
    "rotated, 64": Case(rotate=True),
    "rotated, 80": Case(rotate=True, head_dim=80, group_sizes=(16, 80), dtype=HALF),
    "rotated, 128": Case(rotate=True, head_dim=128, bits=(2, 4), dtype=torch.float16),
    "group 1": Case(group=1, heads=3),
    "group 3": Case(group=3, dtype=HALF),
    "group 8": Case(group=8),
    "2 queries": Case(new=2),
    "5 queries": Case(new=5, dtype=HALF),
    "5 queries, group 3": Case(new=5, group=3, recent=5),
    "5 queries, rotated": Case(new=5, rotate=True, head_dim=128, group=1),
    "batch": Case(batch=2, heads=3, group=2),
    "batch, 2 queries": Case(batch=2, new=2, dtype=HALF, group=2),
    "scaling 1": Case(scaling=1.0, sharpness=0.3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decoding(case):
    assert_decodes(case, case.inputs())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    case = Case(batch=2, packed=40, new=2, rotate=True, dtype=HALF)
    assert_decodes(case, case.inputs(), layout)


def test_what_a_model_gives():
    case = Case(batch=2, packed=40, new=2, dtype=HALF)
    query, rotated, keys, values, dense, positions = case.inputs()
    given = [laid(query, "heads_last"), laid(rotated, "heads_last"), on_device(keys), on_device(values)]
    dense_given = [*on_device(dense[:2]), *on_device(dense[2:], "rows")]
    shared = laid(positions[2][:, :1]).expand_as(positions[2])
    got = call(packed_decode, *given, dense_given, [*on_device(positions[:2]), shared], *case.settings)
    assert_close(got, attention(query, rotated, keys, values, dense, positions, *case.settings), case.tolerance)


def test_recent_rows_of_one_buffer():
    case = Case(batch=2, packed=40, recent=11)
    inputs = case.inputs()
    *given, dense, positions = (on_device(part) for part in inputs)
    dense[2:] = on_device(inputs[4][2:], "rows")
    positions[2] = laid(inputs[5][2], "rows")
    got = call(packed_decode, *given, dense, positions, *case.settings)
    assert_close(got, attention(*inputs, *case.settings), case.tolerance)


def test_positions_of_64_bit():
    case = Case(batch=2, packed=40)
    *inputs, positions = case.inputs()
    positions[0][1, 0, 5:9] = EMPTY
    assert_decodes(case, [*inputs, [part.long() for part in positions]])


def ragged(positions, seed=0):
    """Slots of packed and exact rows emptied, in other numbers for each head, and padding among the oldest rows."""
    for part in positions[:2]:
        batch, heads, slots = part.shape
        used = integers(slots // 4, slots + 1, (batch, heads, 1), seed)
        part[(torch.arange(slots) >= used).expand(part.shape)] = EMPTY
    positions[0][0, :, :7] = PAD


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=2), Case(batch=2, dtype=HALF, rotate=True, new=5), Case(batch=2, heads=3, group=1, exact=40),
        Case(packed=600, exact=100, heads=1, group=8, dtype=torch.float16), Case(packed=700, heads=1, group=1),
    ],
)  # fmt: skip
def test_empty_slots_are_not_seen(case):
    inputs = case.inputs()
    ragged(inputs[-1])
    assert_decodes(case, inputs)
    for part in inputs[-1][:2]:
        part[0, 0] = EMPTY  # a head that has recent rows only
    assert_decodes(case, inputs)


@pytest.mark.parametrize("scale", [1e6, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rows_that_are_not_seen_may_hold_anything(dtype, scale):
    case = Case(batch=2, heads=1, dtype=dtype)
    inputs = case.inputs()
    ragged(inputs[-1])
    inputs[-1][2][0, :, :4] = PAD
    want = attention(*inputs, *case.settings)
    for index, positions in ((0, inputs[-1][1]), (2, inputs[-1][2])):
        inputs[4][index][positions < 0] = torch.nan  # keys
        inputs[4][index + 1][positions < 0] = scale
    for side in (2, 3):
        inputs[side][0][inputs[-1][0] < 0] = 255
        inputs[side][1][inputs[-1][0] < 0] = scale
    assert_close(decoded(inputs, case.settings), want, case.tolerance)


def test_a_share_of_rows_that_nobody_sees():
    case = Case(packed=1000, heads=2, group=1)
    inputs = case.inputs()
    inputs[-1][0][0, 0, :900] = EMPTY
    inputs[-1][0][0, 1, 10:] = EMPTY
    assert_decodes(case, inputs)


@pytest.mark.parametrize("case", [Case(batch=2), Case(batch=2, dtype=HALF, new=2)])
def test_queries_that_see_nothing_get_0(case):
    inputs = case.inputs()
    for part in inputs[-1]:
        part[0] = PAD
    assert_decodes(case, inputs)
    got = decoded(inputs, case.settings)
    assert not got[0].any() and got[1].any()


def test_nothing_but_padding():
    case = Case(new=2, dtype=HALF)
    inputs = case.inputs()
    for part in inputs[-1]:
        part.fill_(PAD)
    assert not decoded(inputs, case.settings).any()


def test_the_first_of_several_queries_may_see_nothing():
    case = Case(new=5, recent=5, packed=20, exact=3)
    inputs = case.inputs()
    for part in inputs[-1][:2]:
        part.fill_(EMPTY)
    inputs[-1][2][..., :2] = PAD
    assert_decodes(case, inputs)
    got = decoded(inputs, case.settings)
    assert not got[:, :2].any() and got[:, 2:].any(-1).all()


@pytest.mark.parametrize("part, index", [(0, 0), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_nan_stays_visible(part, index):
    case = Case(packed=40)
    inputs = case.inputs()
    spoiled = inputs[part] if part == 0 else inputs[part][index]
    spoiled[0, 1, 0, 5] = torch.nan
    if part == 0:
        inputs[1] = inputs[0]
    want = attention(*inputs, *case.settings)
    assert want.isnan().any() and not want.isnan().all()
    assert_close(decoded(inputs, case.settings), want, case.tolerance)


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("side", [2, 3])
def test_nan_in_packed_rows_stays_visible(side, index):
    case = Case(packed=40)
    inputs = case.inputs()
    inputs[side][index][0, 1, 3, 0] = torch.nan
    want = attention(*inputs, *case.settings)
    assert want.isnan().any() and not want.isnan().all()
    assert_close(decoded(inputs, case.settings), want, case.tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_logits_that_overflow_without_their_maximum(dtype):
    case = Case(sharpness=60.0, dtype=dtype)
    inputs = case.inputs()
    at_most = 1e-4 if dtype == torch.float32 else 5e-2  # logits near 300 have an error near 3e-5, or codes of 16 bit
    assert_close(decoded(inputs, case.settings), attention(*inputs, *case.settings), at_most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
def test_groups_of_very_different_scale(dtype):
    """Channels and rows with outliers, as models have them."""
    case = Case(dtype=dtype, group_sizes=(16, 32), sharpness=1.0)
    inputs, side = case.inputs(), torch.float16 if dtype == torch.float16 else torch.bfloat16
    factors = torch.ones(64)
    factors[3], factors[40] = 30.0, 0.01
    by_row = 2.0 ** integers(-6, 4, (1, 2, 100, 1), dtype=torch.float32)
    keys = normal(1, 2, 100, 64, seed=8) * factors
    inputs[2] = list(ops.pack(keys.to(dtype), 4, 16, side))
    inputs[3] = list(ops.pack((normal(1, 2, 100, 64, seed=9) * by_row).to(dtype), 4, 32, side))
    assert_decodes(case, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
def test_a_row_that_is_larger_than_all_others(dtype):
    """It points away from the query, so that its weight is 0 and the others are what counts."""
    case = Case(dtype=dtype, group=1, heads=1, exact=0, recent=0)
    inputs, side = case.inputs(), torch.float16 if dtype == torch.float16 else torch.bfloat16
    keys, values = normal(1, 1, 100, 64, seed=8), normal(1, 1, 100, 64, seed=9)
    keys[:, :, 7], values[:, :, 7] = -400 * inputs[0][:, :, 0].float(), 1000 * values[:, :, 7]
    inputs[2:4] = (list(ops.pack(rows.to(dtype), 4, 64, side)) for rows in (keys, values))
    assert_decodes(case, inputs)


def test_constant_rows():
    case = Case(packed=40, exact=0, recent=0)
    inputs = case.inputs()
    for side in (2, 3):
        inputs[side] = list(ops.pack(torch.full((1, 2, 40, 64), 1.5), 4, 64, HALF))
    assert not inputs[2][1].any()
    assert_decodes(case, inputs)
    got = decoded(inputs, case.settings)
    torch.testing.assert_close(got, torch.full_like(got, 1.5))


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_rows_of_extreme_size(scale):
    case = Case(packed=40, exact=0, recent=0, dtype=torch.float32)
    inputs = case.inputs()
    inputs[3] = list(ops.pack(scale * normal(1, 2, 40, 64, seed=9), 4, 64, HALF))
    assert_decodes(case, inputs)
    inputs[2] = list(ops.pack(scale * normal(1, 2, 40, 64, seed=8), 4, 64, HALF))
    inputs[0] = inputs[1] = inputs[0] / scale
    assert_decodes(case, inputs)


def test_a_query_of_zeros_weighs_all_rows_alike():
    case = Case()
    inputs = case.inputs()
    inputs[0] = inputs[1] = torch.zeros_like(inputs[0])
    assert_decodes(case, inputs)


def test_a_result_does_not_depend_on_the_batch():
    case = Case(batch=2)
    inputs = case.inputs()
    ragged(inputs[-1])
    both = decoded(inputs, case.settings)
    one = [part[1:] if isinstance(part, torch.Tensor) else [tensor[1:] for tensor in part] for part in inputs]
    torch.testing.assert_close(decoded(one, replace(case, batch=1).settings), both[1:], rtol=1e-5, atol=1e-6)
