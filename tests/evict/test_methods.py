"""Every method against a slow loop over plain Python floats, written from its formula.

The loops see one batch row and KV head at a time, without its padding: the tests also say that padding changes nothing.
"""

import math
from dataclasses import dataclass, replace
from operator import mul

import pytest
import torch

from kvcomp import noise
from kvcomp.core import KV, PAD, Observed
from kvcomp.evict import (
    H2O,
    RKV,
    TOVA,
    VATP,
    CurDKV,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    Random,
    Replay,
    SnapKV,
    StreamingLLM,
    VaSE,
)
from kvcomp.evict.curdkv import gaussian_sketch
from kvcomp.rotary import Rotary

BATCH, HEADS, GROUP, ROWS, CHANNELS, QUERIES, REMEMBERED = 2, 2, 2, 40, 8, 12, 5
ROTARY = Rotary(100.0 ** -(torch.arange(CHANNELS // 2) / (CHANNELS // 2)), scaling=1.2)
LAYOUTS = ["whole", "evicted", "padded", "short"]


def example(layout):
    """40 rows, the last 12 queries and 5 older ones; the padding holds numbers that must not matter.

    whole: positions 0..39. evicted: each head holds other positions of 0..59. padded: 7 rows of padding before the
    first text. short: 30 of them, so that its oldest 2 queries are padding too.
    """
    generator = torch.Generator().manual_seed(LAYOUTS.index(layout))
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    pads = {"padded": 7, "short": 30}.get(layout, 0)
    positions = torch.arange(ROWS, dtype=torch.int32).expand(BATCH, HEADS, ROWS).clone()
    query_positions = torch.arange(ROWS - QUERIES, ROWS, dtype=torch.int32).expand(BATCH, QUERIES).clone()
    if layout == "evicted":
        newest, query_positions = torch.arange(54, 60), query_positions + 20
        for head in positions.view(-1, ROWS):
            older = torch.randperm(54, generator=generator)[: ROWS - 6].sort().values
            head.copy_(torch.cat([older, newest]))
    positions[0] = (positions[0] - pads).clamp_min(PAD)
    query_positions[0] = (query_positions[0] - pads).clamp_min(PAD)
    remembered_positions = torch.tensor([1, 3, 8, 9, 20], dtype=torch.int32).expand(BATCH, HEADS, REMEMBERED).clone()
    remembered_positions[0] = (remembered_positions[0] - pads).clamp_min(PAD)
    kv = KV(
        normal(BATCH, HEADS, ROWS, CHANNELS), normal(BATCH, HEADS, ROWS, CHANNELS), positions,
        torch.rand(BATCH, HEADS, ROWS, generator=generator).masked_fill(positions == PAD, 0.0),
    )  # fmt: skip
    seen = Observed(
        1.5 * normal(BATCH, HEADS * GROUP, QUERIES, CHANNELS), query_positions, 0.5 if layout == "evicted" else None,
        layer=3, round=5, seed=11, prompt_end=torch.tensor([9, 7]), padded=pads > 0, rotary=ROTARY,
        remembered=1.5 * normal(BATCH, HEADS, REMEMBERED, CHANNELS), remembered_positions=remembered_positions,
    )  # fmt: skip
    return kv, seen


@dataclass
class Head:
    """One batch row and KV head as lists, without padding; `queries[g][t]`: query `t` of head `g` of the group."""

    batch: int
    number: int
    stored: list  # index of each row among all stored rows
    keys: list
    values: list
    positions: list
    mass: list
    queries: list
    query_positions: list
    remembered: list
    scaling: float
    prompt_end: int


def one_head(kv, seen, batch, number, window):
    stored = [row for row, position in enumerate(kv.positions[batch, number].tolist()) if position != PAD]
    asked = list(range(QUERIES))[-window:] if window else []
    asked = [query for query in asked if seen.query_positions[batch, query] != PAD]
    known = [query for query in range(REMEMBERED) if seen.remembered_positions[batch, number, query] != PAD]
    queries = seen.queries[batch, number * GROUP : (number + 1) * GROUP].double().tolist()
    return Head(
        batch, number, stored,
        [kv.keys[batch, number, row].double().tolist() for row in stored],
        [kv.values[batch, number, row].double().tolist() for row in stored],
        [int(kv.positions[batch, number, row]) for row in stored],
        [float(kv.mass[batch, number, row]) for row in stored],
        [[head[query] for query in asked] for head in queries],
        [int(seen.query_positions[batch, query]) for query in asked],
        [seen.remembered[batch, number, query].double().tolist() for query in known],
        CHANNELS**-0.5 if seen.scaling is None else seen.scaling,
        int(seen.prompt_end[batch]),
    )  # fmt: skip


def heads(kv, seen, window):
    return [one_head(kv, seen, batch, number, window) for batch in range(BATCH) for number in range(HEADS)]


def dot(x, y):
    return sum(map(mul, x, y))


def norm(x):
    return math.sqrt(dot(x, x))


def mean(numbers):
    return sum(numbers) / len(numbers)


def matvec(matrix, x):
    return [dot(row, x) for row in matrix]


def softmax(logits):
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def mean_attention(head, rows, logit):
    """Mean over the queries of the softmax over those of the first `rows` rows that are not newer than the query."""
    total = [0.0] * rows
    for query, position in enumerate(head.query_positions):
        visible = [row for row in range(rows) if head.positions[row] <= position]
        for row, weight in zip(visible, softmax([logit(query, row) for row in visible]), strict=True):
            total[row] += weight
    return [weight / len(head.query_positions) for weight in total]


def attention_of_each_query_head(head, rows):
    return [
        mean_attention(head, rows, lambda query, row, mine=mine: head.scaling * dot(mine[query], head.keys[row]))
        for mine in head.queries
    ]


def neighbours(score, row, kernel):
    return score[max(row - kernel // 2, 0) : row + kernel // 2 + 1]


def average_pool(score, kernel):
    return [sum(neighbours(score, row, kernel)) / kernel for row in range(len(score))]


def max_pool(score, kernel):
    return [max(neighbours(score, row, kernel)) for row in range(len(score))]


def mean_over_group(scores):
    return [mean(column) for column in zip(*scores, strict=True)]


def draw(head, seen, row):
    return float(
        noise.uniform(
            torch.tensor(head.positions[row]), seen.seed, seen.layer, seen.round, torch.tensor(head.number)
        ).double()
    )


# A formula returns the scores of the rows without padding; rows that it does not score may be missing at the end.


def vase_attnv(method, head, seen, everything):
    rows = len(head.keys) - method.recent
    pooled = [average_pool(attention, method.pool) for attention in attention_of_each_query_head(head, rows)]
    score = mean_over_group(pooled)
    if not method.stochastic:
        return score
    return [math.log(s) / method.temperature - math.log(-math.log(draw(head, seen, i))) for i, s in enumerate(score)]


def leverage(method, head, kv, seen, resample):
    if method.rank is None:
        return [dot(key, key) for key in head.keys], [dot(value, value) for value in head.values]
    sketch = gaussian_sketch(kv, seen, method.rank, resample)[head.number].double().T.tolist()
    projected = [[matvec(sketch, row) for row in rows] for rows in (head.keys, head.values)]
    return [[dot(row, row) for row in rows] for rows in projected]


def vase_dkv(method, head, seen, everything):
    return list(map(mul, *leverage(method, head, everything, seen, resample=method.stochastic)))


def curdkv(method, head, seen, everything):
    factors = leverage(method, head, everything, seen, resample=False)
    if method.local_window is not None:
        starts = [row - row % method.local_window for row in range(len(head.keys))]
        factors = [
            [x / sum(factor[start : start + method.local_window]) for x, start in zip(factor, starts, strict=True)]
            for factor in factors
        ]
    return list(map(mul, *factors))


def snapkv(method, head, seen, everything):
    attention = attention_of_each_query_head(head, len(head.keys))
    rows = len(head.keys) - method.recent  # the window's columns are dropped after the softmax, before the pooling
    return mean_over_group([average_pool(row[:rows], method.pool) for row in attention])


def redundancy(method, head, rows):
    units = [[x / norm(key) for x in key] for key in head.keys[:rows]]
    similarity = [[0.0 if i == j else dot(units[i], units[j]) for j in range(rows)] for i in range(rows)]
    if method.threshold is not None:
        for row in similarity:
            similar = [j for j, cosine in enumerate(row) if cosine > method.threshold]
            if similar:
                row[similar[-1]] = 0.0
    return softmax([mean(column) for column in zip(*similarity, strict=True)])


def rkv(method, head, seen, everything):
    rows = len(head.keys) - method.recent
    if method.group == "max":
        largest = lambda query, row: max(head.scaling * dot(mine[query], head.keys[row]) for mine in head.queries)  # noqa: E731
        attention = [mean_attention(head, rows, largest)]
    else:
        attention = attention_of_each_query_head(head, rows)
    pool = max_pool if method.pooling == "max" else average_pool
    importance = mean_over_group([pool(row, method.pool) for row in attention])
    spared = redundancy(method, head, rows)
    return [method.weight * i - (1 - method.weight) * r for i, r in zip(importance, spared, strict=True)]


def h2o(method, head, seen, everything):
    return head.mass


def streaming_llm(method, head, seen, everything):
    return head.stored


def tova(method, head, seen, everything):
    attention = []
    for number in range(HEADS):
        other = one_head(everything, seen, head.batch, number, window=1)
        attention += attention_of_each_query_head(other, len(other.keys))
    return mean_over_group(attention)


def keydiff(method, head, seen, everything):
    units = [[x / norm(key) for x in key] for key in head.keys]
    direction = [mean(channel) for channel in zip(*units, strict=True)]
    return [-dot(key, direction) / norm(key) / norm(direction) for key in head.keys]


def key_norm(method, head, seen, everything):
    return [-norm(key) for key in head.keys]


def vatp(method, head, seen, everything):
    return [mass * sum(map(abs, value)) for mass, value in zip(head.mass, head.values, strict=True)]


def rotation(cosines, sines):
    """The matrix that turns channel `j` with channel `j + pairs`."""
    pairs, matrix = len(cosines), [[0.0] * CHANNELS for _ in range(CHANNELS)]
    for pair, (cosine, sine) in enumerate(zip(cosines, sines, strict=True)):
        matrix[pair][pair] = matrix[pair + pairs][pair + pairs] = cosine
        matrix[pair][pair + pairs], matrix[pair + pairs][pair] = -sine, sine
    return matrix


def expected_attention(method, head, seen, everything):
    frequencies, amplitude = ROTARY.frequencies.tolist(), ROTARY.scaling
    used = [query for query, position in enumerate(head.query_positions) if position >= method.skip]
    steps = range(head.query_positions[-1] + 1, head.query_positions[-1] + 1 + method.future)
    mean_rotation = rotation(
        [amplitude * mean([math.cos(step * frequency) for step in steps]) for frequency in frequencies],
        [amplitude * mean([math.sin(step * frequency) for step in steps]) for frequency in frequencies],
    )
    scores = []
    for mine in head.queries:
        before = []
        for query in used:
            angles = [-head.query_positions[query] * frequency for frequency in frequencies]
            back = rotation([math.cos(a) / amplitude for a in angles], [math.sin(a) / amplitude for a in angles])
            before.append(matvec(back, mine[query]))
        centre = [mean(channel) for channel in zip(*before, strict=True)]
        centred = [[x - m for x, m in zip(query, centre, strict=True)] for query in before]
        covariance = [[mean([q[i] * q[j] for q in centred]) for j in range(CHANNELS)] for i in range(CHANNELS)]
        centre = matvec(mean_rotation, centre)
        turned_back = list(zip(*mean_rotation, strict=True))  # k' R C R' k = (R'k)' C (R'k)
        logits = []
        for key in head.keys:
            turned = matvec(turned_back, key)
            spread = dot(turned, matvec(covariance, turned)) if method.covariance else 0.0
            logits.append(head.scaling * dot(centre, key) + head.scaling**2 * spread / 2)
        attention = [0.0] * method.sinks + softmax(logits[method.sinks :]) if len(logits) > method.sinks else logits
        scores.append([(a + method.epsilon) * norm(v) for a, v in zip(attention, head.values, strict=True)])
    return mean_over_group(scores)


def replayed(method, head):
    soon = max(head.positions) + method.ahead
    angles = [soon * frequency for frequency in ROTARY.frequencies.tolist()]
    turn = rotation(*([ROTARY.scaling * f(angle) for angle in angles] for f in (math.cos, math.sin)))
    asked = [[head.scaling * dot(matvec(turn, query), key) for key in head.keys] for query in head.remembered]
    return [max(column) for column in zip(*map(softmax, asked), strict=True)] or [0.0] * len(head.keys)


def random(method, head, seen, everything):
    return [draw(head, seen, row) for row in range(len(head.keys))]


FRAME = {"budget": 16, "sinks": 2, "recent": 4}
WIDE = {"budget": 16, "sinks": 1, "recent": 3, "window": 12}  # queries older than rows that are scored
METHODS = {
    "vase-attnv": (vase_attnv, VaSE(**FRAME, window=4, protected=6)),
    "vase-attnv-wide": (vase_attnv, VaSE(**WIDE, protected=6)),
    "vase-attnv-variance": (vase_attnv, VaSE(**FRAME, window=8, protected=5, magnitude="variance", temperature=2.0)),
    "vase-attnv-l2": (vase_attnv, VaSE(**FRAME, window=4, protected=5, magnitude="l2", pool=3, stochastic=False)),
    "vase-dkv": (vase_dkv, VaSE(**FRAME, scorer="dkv")),
    "vase-dkv-fixed": (vase_dkv, VaSE(**FRAME, scorer="dkv", rank=4, stochastic=False)),
    "snapkv": (snapkv, SnapKV(16, recent=8, window=8)),
    "snapkv-wide": (snapkv, SnapKV(**WIDE)),
    "rkv": (rkv, RKV(16)),
    "rkv-wide": (rkv, RKV(**WIDE, weight=0.6)),
    "rkv-simplified": (rkv, replace(RKV.simplified(100), budget=16, recent=8, window=8)),
    "rkv-simplified-wide": (rkv, replace(RKV.simplified(100), **WIDE)),
    "curdkv": (curdkv, CurDKV(**FRAME)),
    "curdkv-local": (curdkv, CurDKV(**FRAME, rank=None, local_window=16)),
    "h2o": (h2o, H2O(16)),
    "streaming-llm": (streaming_llm, StreamingLLM(**FRAME)),
    "tova": (tova, TOVA(16)),
    "keydiff": (keydiff, KeyDiff(**FRAME)),
    "key-norm": (key_norm, KeyNorm(**FRAME)),
    "vatp": (vatp, VATP(16, sinks=3)),
    "expected-attention": (expected_attention, ExpectedAttention(**FRAME, window=8, future=20)),
    "expected-attention-mean": (expected_attention, ExpectedAttention(**WIDE, future=7, epsilon=0.1, covariance=False)),
    "random": (random, Random(**FRAME)),
    "replay": (snapkv, Replay(**FRAME, window=4, ahead=7)),
    "replay-wide": (snapkv, Replay(**WIDE, share=0.25)),
}
each_method = pytest.mark.parametrize("name", METHODS)


def magnitude(method, value):
    if method.magnitude == "range":
        return max(value) - min(value)
    return mean([(x - mean(value)) ** 2 for x in value]) if method.magnitude == "variance" else norm(value)


def pinned_rows(method, head):
    count = len(head.keys)
    prompt = [row for row in range(count) if method.protect_prompt and head.positions[row] < head.prompt_end]
    return {*range(count)[: method.sinks], *range(count)[max(count - method.recent, 0) :], *prompt}


def reserved_rows(method, head):
    """Outside the pinned rows, best first: VaSE's of largest magnitude, Replay's that are read most."""
    free = [row for row in range(len(head.keys)) if row not in pinned_rows(method, head)]
    if isinstance(method, VaSE):
        free.sort(key=lambda row: magnitude(method, head.values[row]), reverse=True)
        return free[: max(method.protected - method.sinks, 0)]
    if isinstance(method, Replay):
        read = replayed(method, head)
        free.sort(key=lambda row: (read[row], row), reverse=True)
        return free[: round(method.share * (method.budget - method.sinks - method.recent))]
    return []


def chosen(method, head, score):
    """Indices among the stored rows: the pinned ones, the reserved ones, then the best; the newest of equal ones."""
    pinned, reserved = pinned_rows(method, head), reserved_rows(method, head)
    rest = [row for row in range(len(head.keys)) if row not in pinned.union(reserved)]
    rest.sort(key=lambda row: (score[row], row), reverse=True)
    order = [*pinned, *reserved, *rest]
    return {head.stored[row] for row in order[: method.budget]}


def assert_equal_scores(score, expected):
    score, expected = torch.as_tensor(score).double(), torch.as_tensor(expected).double()
    # A score is a difference of larger numbers in several methods, so what is near zero is compared with the largest.
    torch.testing.assert_close(score, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("layout", LAYOUTS)
@each_method
def test_score_equals_the_formula(name, layout):
    formula, method = METHODS[name]
    kv, seen = example(layout)
    score = method.score(kv, seen.last(method.window))
    for head in heads(kv, seen, method.window):
        expected = formula(method, head, seen, kv)
        skipped = pinned_rows(method, head).union(reserved_rows(method, head))
        rows = [row for row in range(len(head.keys)) if row not in skipped]
        got = score[head.batch, head.number, [head.stored[row] for row in rows]]
        if rows:
            assert_equal_scores(got, [expected[row] for row in rows])


@pytest.mark.parametrize("protect_prompt", [False, True], ids=["", "prompt"])
@pytest.mark.parametrize("layout", LAYOUTS)
@each_method
def test_kept_rows_equal_the_choice_of_the_formula(name, layout, protect_prompt):
    formula, method = METHODS[name]
    method = replace(method, protect_prompt=protect_prompt, budget=method.budget + 4 * protect_prompt)
    kv, seen = example(layout)
    kept = method.select(kv, seen)
    for head in heads(kv, seen, method.window):
        got = set(kept[head.batch, head.number].tolist())
        if len(head.keys) > method.budget:
            assert got == chosen(method, head, formula(method, head, seen, kv))
        else:
            assert got >= set(head.stored)


@pytest.mark.parametrize("layout", ["padded", "short"])
@each_method
def test_padded_row_scores_like_the_row_alone(name, layout):
    _, method = METHODS[name]
    kv, seen = example(layout)
    real, real_queries = kv.positions[0, 0] != PAD, seen.query_positions[0] != PAD
    alone = KV(kv.keys[:1, :, real], kv.values[:1, :, real], kv.positions[:1, :, real], kv.mass[:1, :, real])
    seen_alone = replace(
        seen, queries=seen.queries[:1, :, real_queries], query_positions=seen.query_positions[:1, real_queries],
        prompt_end=seen.prompt_end[:1], padded=False, remembered=seen.remembered[:1],
        remembered_positions=seen.remembered_positions[:1],
    )  # fmt: skip
    score = method.score(kv, seen.last(method.window))[:1, :, real]
    score_alone = method.score(alone, seen_alone.last(method.window))
    if name == "streaming-llm":  # its score is the number of the row among the stored ones
        score = score - (ROWS - real.sum())
    for number in range(HEADS):
        head = one_head(kv, seen, 0, number, method.window)
        skipped = pinned_rows(method, head).union(reserved_rows(method, head))
        rows = [row for row in range(len(head.keys)) if row not in skipped]
        if rows:
            assert_equal_scores(score[0, number, rows], score_alone[0, number, rows])


@each_method
def test_padded_row_keeps_the_tokens_that_it_keeps_alone(name):
    _, method = METHODS[name]
    kv, seen = example("padded")
    alone = KV(kv.keys[:1, :, 7:], kv.values[:1, :, 7:], kv.positions[:1, :, 7:], kv.mass[:1, :, 7:])
    seen_alone = replace(
        seen, queries=seen.queries[:1], query_positions=seen.query_positions[:1], prompt_end=seen.prompt_end[:1],
        padded=False, remembered=seen.remembered[:1], remembered_positions=seen.remembered_positions[:1],
    )  # fmt: skip
    assert torch.equal(method.compress(kv, seen).positions[:1], method.compress(alone, seen_alone).positions)


@pytest.mark.parametrize("name", [name for name, (_, method) in METHODS.items() if method.window])
def test_queries_without_positions_are_those_of_the_newest_rows(name):
    _, method = METHODS[name]
    kv, seen = example("whole")
    unknown = replace(seen, query_positions=None)
    if isinstance(method, ExpectedAttention):
        with pytest.raises(ValueError, match="query_positions"):
            method.select(kv, unknown)
    else:
        score, expected = (method.score(kv, known.last(method.window)) for known in (unknown, seen))
        assert_equal_scores(score, expected)


def test_replay_keeps_what_an_old_query_would_read_now():
    """Row 6 came after the query that asks for it, and its older copy, row 2, is of no more use."""
    still = Rotary(torch.zeros(CHANNELS // 2))
    keys = torch.randn(1, 1, 40, CHANNELS, generator=torch.Generator().manual_seed(0))
    asked = 10 * torch.nn.functional.one_hot(torch.tensor(0), CHANNELS).float()
    keys[..., 0] = -1.0
    keys[0, 0, 2, 0], keys[0, 0, 6, 0] = 4.0, 6.0
    kv, window = KV.of(keys, keys), torch.zeros(1, 1, 4, CHANNELS)
    seen = Observed(window, torch.arange(36, 40, dtype=torch.int32)[None], rotary=still)
    known = replace(
        seen, remembered=asked[None, None, None], remembered_positions=torch.full((1, 1, 1), 4, dtype=torch.int32)
    )
    method = Replay(12, sinks=0, recent=8, window=4)
    score = method.score(kv, known)[0, 0]
    assert score.argmax() == 6
    assert float(method.replayed(kv, known)[0, 0, 6]) > 0.99 and float(method.replayed(kv, known)[0, 0, 2]) < 0.01
    assert 6 in method.select(kv, known) and 6 not in method.select(kv, seen)


def test_tova_keeps_the_same_tokens_in_every_head():
    kept = TOVA(16).select(*example("whole"))
    assert torch.equal(kept[:, 0], kept[:, 1])
    assert not torch.equal(kept[0], kept[1])


def test_rkv_spares_the_newest_of_similar_keys():
    keys = torch.eye(CHANNELS)[[0, 1, 0, 2, 0, 3, 4]][None, None]  # rows 0, 2 and 4 are the same
    kv, seen = KV.of(keys, keys), Observed(torch.zeros(1, 1, 1, CHANNELS))
    score = RKV(3, window=1, recent=1, weight=0.0).score(kv, seen)[0, 0, :6]
    # Rows 0 and 2 spare row 4, row 4 spares row 2: row 0 counts twice, row 2 once, row 4 never.
    assert score[0] < score[2] < score[4]
    assert score[4] == score[1] == score[3] == score[5]


def test_vase_reserves_the_largest_ranges_that_fit_beside_a_protected_prompt():
    kv, seen = example("whole")
    method = VaSE(20, sinks=2, recent=4, window=4, protected=10, protect_prompt=True)
    seen = replace(seen, prompt_end=torch.tensor([13, 13]))  # 3 rows are left to choose, 8 would be reserved
    kept = method.select(kv, seen)
    for head in heads(kv, seen, method.window):
        free = sorted(range(13, 36), key=lambda row: magnitude(method, head.values[row]), reverse=True)
        assert set(kept[head.batch, head.number].tolist()) == {*range(13), *range(36, 40), *free[:3]}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (VaSE(4096), {"sinks": 4, "recent": 64, "window": 64, "protected": 1024, "pool": 5, "temperature": 1.0}),
        (VaSE(4096, scorer="dkv"), {"sinks": 4, "recent": 64, "protected": 0, "rank": 20, "window": 0}),
        (SnapKV(4096), {"sinks": 0, "recent": 64, "window": 64, "pool": 5}),
        (RKV(4096), {"sinks": 0, "recent": 8, "window": 8, "pool": 7, "pooling": "max", "group": "max", "weight": 0.1}),
        (RKV.simplified(4096), {"window": 64, "pool": 5, "pooling": "average", "group": "mean", "weight": 0.5}),
        (RKV.simplified(4096), {"sinks": 0, "recent": 64, "threshold": None}),
        (CurDKV(4096), {"sinks": 4, "recent": 64, "rank": 20, "local_window": None}),
        (H2O(4096), {"sinks": 0, "recent": 2048, "accumulates": True}),
        (VATP(4096), {"sinks": 20, "recent": 2048, "accumulates": True}),
        (StreamingLLM(4096), {"sinks": 4, "recent": 64}),
        (TOVA(4096), {"sinks": 0, "recent": 0, "window": 1}),
        (Replay(4096), {"window": 64, "pool": 5, "remembers": 128, "ahead": 16, "share": 0.6}),
        (ExpectedAttention(4096), {"sinks": 4, "future": 512, "skip": 4, "epsilon": 0.0, "covariance": True}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_defaults_follow_the_sources(method, settings):
    assert {name: getattr(method, name) for name in settings} == settings
