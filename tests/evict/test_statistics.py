"""The laws that stochastic methods draw from, over thousands of draws."""

from dataclasses import replace

import pytest
import torch

from kvcomp.core import KV, Observed
from kvcomp.evict import CurDKV, Random, VaSE
from kvcomp.evict.curdkv import gaussian_sketch

CHANNELS, DRAWS = 8, 3000
WEIGHTS = torch.tensor([0.3, 1, 2, 2, 0.1, 5, 3, 9, 0.5, 1, 4, 2, 0.2, 16, 1, 6])
FREE = len(WEIGHTS)


def heads_that_attend_by(weights, heads):
    """Rows that each of `heads` equal heads attends to in proportion to `weights`, then 2 recent rows."""
    keys = torch.zeros(1, heads, len(weights) + 2, CHANNELS)
    keys[..., :-2, 0] = weights.log()
    values = torch.linspace(-1.0, 1.0, CHANNELS).expand_as(keys)
    queries = torch.zeros(1, heads, 1, CHANNELS).index_fill_(3, torch.tensor(0), 1.0)
    return KV.of(keys, values), Observed(queries, scaling=1.0)


def inclusion(method, kv, seen, rounds):
    """How often each row is kept, `[rows]`, over all heads and rounds."""
    kept = torch.cat([method.select(kv, replace(seen, round=round)) for round in range(rounds)], dim=1)
    return torch.bincount(kept.flatten(), minlength=kv.rows) / kept.shape[1]


def multinomial_inclusion(weights, count, draws=200_000):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(weights.expand(draws, -1), count, replacement=False, generator=generator)
    return torch.bincount(drawn.flatten(), minlength=len(weights)) / draws


def assert_same_frequency(got, expected, draws):
    """Within 4.5 standard errors; 1e-3 for the error of `expected`, which is measured too."""
    error = (expected * (1 - expected) / draws).sqrt()
    assert bool(((got - expected).abs() < 4.5 * error + 1e-3).all()), (got, expected)


def attnv(count, **settings):
    """Draws `count` rows beside the 2 recent ones and those that `settings` reserve."""
    settings = {"sinks": 0, "recent": 2, "window": 1, "pool": 1, "protected": 0} | settings
    return VaSE(settings["recent"] + settings["protected"] + count, **settings)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_attnv_draws_like_multinomial_without_replacement(count, temperature):
    kv, seen = heads_that_attend_by(WEIGHTS, heads=DRAWS // 10)
    got = inclusion(attnv(count, temperature=temperature), kv, seen, rounds=10)
    assert bool((got[-2:] == 1).all())
    assert_same_frequency(got[:-2], multinomial_inclusion(WEIGHTS ** (1 / temperature), count), DRAWS)


def test_attnv_draws_the_same_way_over_the_rounds_of_one_head():
    kv, seen = heads_that_attend_by(WEIGHTS, heads=1)
    assert_same_frequency(inclusion(attnv(5), kv, seen, DRAWS)[:-2], multinomial_inclusion(WEIGHTS, 5), DRAWS)


def test_the_measure_tells_proportional_draws_from_others():
    kv, seen = heads_that_attend_by(WEIGHTS, heads=DRAWS // 10)
    got = inclusion(attnv(5), kv, seen, rounds=10)[:-2]
    for wrong in (WEIGHTS**1.2, WEIGHTS + 0.5):
        with pytest.raises(AssertionError):
            assert_same_frequency(got, multinomial_inclusion(wrong, 5), DRAWS)


def test_attnv_always_keeps_reserved_rows_and_draws_the_rest():
    kv, seen = heads_that_attend_by(WEIGHTS, heads=DRAWS // 10)
    large = torch.tensor([4, 0, 12])  # the rows of least attention have the largest value range
    factor = torch.ones(kv.rows).index_put_((large,), torch.tensor([2.0, 3.0, 4.0]))
    got = inclusion(attnv(4, protected=3), replace(kv, values=kv.values * factor[:, None]), seen, rounds=10)
    assert bool((got[large] == 1).all())
    others = torch.tensor([row for row in range(FREE) if row not in large.tolist()])
    assert_same_frequency(got[others], multinomial_inclusion(WEIGHTS[others], 4), DRAWS)


def test_attnv_at_a_low_temperature_keeps_the_largest():
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    kv = KV.of(normal(8, 4, 40, CHANNELS), normal(8, 4, 40, CHANNELS))
    seen = Observed(normal(8, 8, 4, CHANNELS))
    settings = {"budget": 16, "sinks": 2, "recent": 4, "window": 4, "protected": 6}
    top = VaSE(**settings, stochastic=False).select(kv, seen)
    assert torch.equal(VaSE(**settings, temperature=1e-6).select(kv, seen), top)
    assert not torch.equal(VaSE(**settings).select(kv, seen), top)


def test_random_keeps_every_free_row_equally_often():
    kv, seen = heads_that_attend_by(WEIGHTS, heads=DRAWS // 10)
    got = inclusion(Random(7, sinks=0, recent=2), kv, seen, rounds=10)
    assert_same_frequency(got[:-2], torch.full((FREE,), 5 / FREE), DRAWS)


def test_kept_sets_of_different_rounds_are_independent():
    kv, seen = heads_that_attend_by(torch.ones(FREE), heads=DRAWS)
    method, kept = Random(10, sinks=0, recent=2), torch.zeros(2, DRAWS, FREE + 2)
    for round in (0, 1):
        kept[round].scatter_(1, method.select(kv, replace(seen, round=round))[0], 1.0)
    both = (kept[0] * kept[1])[:, :-2].mean(0)  # each keeps 8 of 16
    assert_same_frequency(both, torch.full((FREE,), 0.25), DRAWS)


def norms_far_apart(heads=2):
    """Rows whose `|k|^2 |v|^2` differ by more than 20 % from each other, in random order."""
    generator = torch.Generator().manual_seed(0)
    size = 1.1 ** torch.stack([torch.randperm(40, generator=generator) for _ in range(heads)])
    direction = torch.nn.functional.normalize(torch.randn(2, 1, heads, 40, CHANNELS, generator=generator), dim=-1)
    return KV.of(direction[0] * size[None, :, :, None] ** 0.5, direction[1] * size[None, :, :, None] ** 0.5), size


def test_dkv_of_large_rank_tends_to_the_product_of_squared_norms():
    kv, size = norms_far_apart()
    method = VaSE(16, sinks=0, recent=1, scorer="dkv", rank=1 << 16)
    score = method.score(kv, Observed())[0]
    # |x G|^2 / |x|^2 has standard deviation (2 / rank) ** 0.5, the product at most twice that: 0.011; 5 of them.
    assert bool(((score / size**2 - 1).abs() < 0.055).all())
    exact = CurDKV(16, sinks=0, recent=1, rank=None)
    assert torch.equal(method.select(kv, Observed()), exact.select(kv, Observed()))


def test_dkv_is_noisier_at_a_smaller_rank():
    kv, _ = norms_far_apart(heads=200)
    exact = CurDKV(16, sinks=0, recent=1, rank=None).select(kv, Observed())
    overlap = []
    for rank in (1, 4, 20, 500):
        kept = VaSE(16, sinks=0, recent=1, scorer="dkv", rank=rank).select(kv, Observed())
        overlap.append(float((kept[..., :, None] == exact[..., None, :]).any(-1).float().mean()))
    assert overlap == sorted(overlap)
    assert overlap[0] < 0.75 and overlap[-1] > 0.95


def sketches(rank, heads=50, rounds=40):
    rows = torch.zeros(1, heads, 1, CHANNELS)
    kv = KV.of(rows, rows)
    return torch.stack([gaussian_sketch(kv, Observed(round=round), rank, resample=True) for round in range(rounds)])


@pytest.mark.parametrize("rank", [1, 20])
def test_sketch_entries_are_normal_with_variance_one_over_rank(rank):
    entries = sketches(rank).flatten() * rank**0.5
    count = len(entries)
    assert abs(float(entries.mean())) < 4.5 * count**-0.5
    assert abs(float(entries.var()) - 1) < 4.5 * (2 / count) ** 0.5
    assert abs(float((entries**4).mean()) - 3) < 4.5 * (96 / count) ** 0.5
    assert abs(float((entries.abs() < 0.6744898).float().mean()) - 0.5) < 4.5 * 0.5 * count**-0.5  # its quartiles


def test_sketch_entries_are_uncorrelated():
    entries = sketches(rank=4).reshape(-1, CHANNELS * 4) * 2  # one sketch per head and round
    covariance = entries.T @ entries / len(entries)
    error = 4.5 * len(entries) ** -0.5
    assert bool(((covariance - torch.eye(CHANNELS * 4)).abs() < error * (1 + 0.5 * torch.eye(CHANNELS * 4))).all())


def test_sketch_differs_by_head_seed_layer_and_round_only():
    rows = torch.randn(3, 4, 5, CHANNELS, generator=torch.Generator().manual_seed(0))
    make = lambda rows=rows, resample=True, **seen: gaussian_sketch(  # noqa: E731
        KV.of(rows, rows), Observed(**seen), 6, resample
    )
    first = make()
    assert first.shape == (4, CHANNELS, 6)
    assert torch.equal(first, make(rows[:1, :, :2]))
    assert all(not torch.isclose(first[0], first[head]).any() for head in (1, 2, 3))
    assert all(not torch.isclose(first, make(**change)).any() for change in ({"seed": 1}, {"layer": 1}, {"round": 1}))
    assert torch.equal(make(resample=False), make(resample=False, round=9))
