"""The operations that score rows, against loops over plain Python floats."""

import math
from dataclasses import replace
from operator import mul

import pytest
import torch

from kvcomp import ops
from kvcomp.core import KV, PAD, Observed

BATCH, HEADS, GROUP, ROWS, CHANNELS, WINDOW, PADS = 2, 2, 3, 20, 8, 6, 16


def example(padded=False, scaling=None, dtype=torch.float32):
    """Rows at positions 0, 2, 4, ..., queries at the newest 6 positions; the first text has 4 tokens if `padded`."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    positions = 2 * torch.arange(ROWS, dtype=torch.int32).expand(BATCH, HEADS, ROWS).clone()
    query_positions = torch.arange(2 * ROWS - WINDOW, 2 * ROWS, dtype=torch.int32).expand(BATCH, WINDOW).clone()
    if padded:
        positions[0] = torch.arange(ROWS).sub(PADS).clamp_min(PAD)
        query_positions[0] = torch.arange(ROWS - WINDOW, ROWS).sub(PADS).clamp_min(PAD)
    kv = KV(normal(BATCH, HEADS, ROWS, CHANNELS), normal(BATCH, HEADS, ROWS, CHANNELS), positions)
    queries = 2 * normal(BATCH, HEADS * GROUP, WINDOW, CHANNELS)
    return kv, Observed(queries, query_positions, scaling, padded=padded)


def logits_by_loop(kv, seen, drop=0):
    """Nested lists `[batch][head][group][query][row]`, float64."""
    scaling = CHANNELS**-0.5 if seen.scaling is None else seen.scaling
    keys, queries = kv.keys.double().tolist(), seen.queries.double().tolist()
    positions, query_positions = kv.positions.tolist(), seen.query_positions.tolist()

    def logit(batch, head, group, query, row):
        position = positions[batch][head][row]
        if position == PAD or position > query_positions[batch][query]:
            return -math.inf
        return scaling * sum(map(mul, queries[batch][head * GROUP + group][query], keys[batch][head][row]))

    return [
        [
            [
                [[logit(b, h, g, q, r) for r in range(ROWS - drop)] for q in range(seen.queries.shape[2])]
                for g in range(GROUP)
            ]
            for h in range(HEADS)
        ]
        for b in range(BATCH)
    ]


def softmax(logits):
    weights = [math.exp(x) for x in logits]  # `exp(-inf)` is 0
    return [weight / sum(weights) if sum(weights) else 0.0 for weight in weights]


def as_tensor(nested):
    return torch.tensor(nested, dtype=torch.float64)


def assert_close(got, expected, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(got.double(), as_tensor(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("drop", [0, 2, 10])
@pytest.mark.parametrize("padded", [True, False])
def test_logits_equal_a_loop(padded, drop, scaling):
    kv, seen = example(padded, scaling)
    if padded and drop > WINDOW:  # queries that are padding see what they like: the mean leaves them out
        seen = replace(seen, queries=seen.queries[:, :, -4:], query_positions=seen.query_positions[:, -4:])
    assert_close(ops.attention_logits(kv, seen, drop), logits_by_loop(kv, seen, drop))


def test_logits_of_unknown_query_positions_are_those_of_the_newest_rows():
    kv, seen = example()
    known = replace(seen, query_positions=kv.positions[:, 0, -WINDOW:])
    assert torch.equal(ops.attention_logits(kv, replace(seen, query_positions=None)), ops.attention_logits(kv, known))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_float32(dtype):
    kv, seen = example(dtype=dtype)
    logits = ops.attention_logits(kv, seen)
    assert logits.dtype == torch.float32
    # Scaled queries and their products are each rounded to the dtype of the keys.
    assert_close(logits, logits_by_loop(kv, seen), rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_logits_without_queries_raise():
    kv, _ = example()
    with pytest.raises(ValueError, match=r"Observed\.queries is None"):
        ops.attention_logits(kv, Observed())


@pytest.mark.parametrize("padded", [True, False])
def test_attention_score_equals_a_loop(padded):
    kv, seen = example(padded)
    expected = torch.zeros(BATCH, HEADS, GROUP, ROWS, dtype=torch.float64)
    for batch, rows_of_batch in enumerate(logits_by_loop(kv, seen)):
        real = [query for query in range(WINDOW) if seen.query_positions[batch, query] != PAD]
        for head in range(HEADS):
            for group in range(GROUP):
                for query in real:
                    weights = softmax(rows_of_batch[head][group][query])
                    expected[batch, head, group] += as_tensor(weights) / len(real)
    assert_close(ops.attention_score(kv, seen), expected.tolist())


def test_attention_score_of_each_head_sums_to_one():
    kv, seen = example(padded=True)
    assert_close(ops.attention_score(kv, seen).sum(-1), torch.ones(BATCH, HEADS, GROUP).tolist())


@pytest.mark.parametrize("padded", [True, False])
def test_query_that_sees_no_row_counts_as_padding(padded):
    """The mean is over the queries that see something."""
    kv, seen = example(padded)
    blind = replace(kv, positions=torch.where(kv.positions < 2 * ROWS - 4, 2 * ROWS - 4, kv.positions))
    score = ops.attention_score(blind, seen)[1]  # the oldest 2 of 6 queries are older than every row
    assert_close(score.sum(-1), torch.ones(HEADS, GROUP).tolist())


@pytest.mark.parametrize("tensor", ["keys", "queries"])
@pytest.mark.parametrize("padded", [True, False])
def test_nan_stays_visible_in_score_and_mass(padded, tensor):
    kv, seen = example(padded)
    {"keys": kv.keys, "queries": seen.queries}[tensor][1, 1, 3, 4] = torch.nan
    assert ops.attention_score(kv, seen)[1].isnan().any()
    assert ops.attention_mass(kv, seen)[1].isnan().any()


def mass_by_loop(kv, seen):
    mass = torch.zeros(BATCH, HEADS, ROWS, dtype=torch.float64)
    for batch, rows_of_batch in enumerate(logits_by_loop(kv, seen)):
        for head in range(HEADS):
            for group in range(GROUP):
                for query, logits in enumerate(rows_of_batch[head][group]):
                    if seen.query_positions[batch, query] != PAD:
                        mass[batch, head] += as_tensor(softmax(logits)) / GROUP
    return mass.tolist()


@pytest.mark.parametrize("block", [1, 4, 6, 128])
@pytest.mark.parametrize(("padded", "scaling"), [(False, None), (True, 0.7)])
def test_attention_mass_equals_a_loop(padded, scaling, block):
    kv, seen = example(padded, scaling)
    assert_close(ops.attention_mass(kv, seen, block), mass_by_loop(kv, seen))


def test_attention_mass_is_one_per_query_that_is_a_token():
    kv, seen = example(padded=True)
    mass = ops.attention_mass(kv, seen)
    assert_close(mass.sum(-1), [[4.0] * HEADS, [6.0] * HEADS])
    assert not mass[kv.pads].any()


def test_attention_mass_of_unknown_query_positions_is_that_of_the_newest_rows():
    kv, seen = example()
    known = replace(seen, query_positions=kv.positions[:, 0, -WINDOW:])
    mass = ops.attention_mass(kv, replace(seen, query_positions=None), block=4)
    assert torch.equal(mass, ops.attention_mass(kv, known, block=4))


@pytest.mark.parametrize("shape", [(2, 3, 11), (2, 3, 4, 11), (1, 1, 2)])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_pools_equal_loops(kernel, shape):
    score = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    average, largest = torch.empty(shape), torch.empty(shape)
    for line, into, into_largest in zip(
        score.view(-1, shape[-1]), average.view(-1, shape[-1]), largest.view(-1, shape[-1]), strict=True
    ):
        for row in range(shape[-1]):
            near = line[max(row - kernel // 2, 0) : row + kernel // 2 + 1].tolist()
            into[row], into_largest[row] = sum(near) / kernel, max(near)
    torch.testing.assert_close(ops.average_pool(score, kernel), average, rtol=1e-5, atol=1e-6)
    assert torch.equal(ops.max_pool(score, kernel), largest)


def test_pools_of_a_view_equal_those_of_its_copy():
    score = torch.randn(2, 3, 11, 4, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    for pool in (ops.average_pool, ops.max_pool):
        assert torch.equal(pool(score, 3), pool(score.contiguous(), 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_magnitudes_equal_loops(dtype):
    kv, _ = example(dtype=dtype)
    for name, of in {
        "range": lambda value: max(value) - min(value),
        "variance": lambda value: sum((x - sum(value) / len(value)) ** 2 for x in value) / len(value),
        "l2": lambda value: math.sqrt(sum(x * x for x in value)),
    }.items():
        got = ops.value_magnitude(kv, name)
        assert got.dtype == torch.float32
        assert_close(got, [[[of(value) for value in head] for head in row] for row in kv.values.double().tolist()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_norms_equal_loops(dtype):
    kv, _ = example(dtype=dtype)
    sketch = torch.randn(HEADS, CHANNELS, 5, generator=torch.Generator().manual_seed(1))
    plain, sketched = ops.squared_norm(kv.keys, None), ops.squared_norm(kv.keys, sketch)
    assert plain.dtype == sketched.dtype == torch.float32
    for batch, row in enumerate(kv.keys.double().tolist()):
        for head, keys in enumerate(row):
            columns = sketch[head].double().T.tolist()
            assert_close(plain[batch, head], [sum(map(mul, key, key)) for key in keys])
            projected = [[sum(map(mul, key, column)) for column in columns] for key in keys]
            assert_close(sketched[batch, head], [sum(x * x for x in key) for key in projected])
