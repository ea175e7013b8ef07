"""The queries that a layer remembers: the most novel ones."""

import math

import pytest
import torch
from support import left_padded, tiny, tokens

from kvcomp import CompressedCache
from kvcomp.core import PAD
from kvcomp.evict import Replay
from kvcomp.remembered import AT_ONCE, RememberedQueries, novelty
from kvcomp.rotary import Rotary

CHANNELS = 8
ROTARY = Rotary(100.0 ** -(torch.arange(CHANNELS // 2) / (CHANNELS // 2)))
STILL = Rotary(torch.zeros(CHANNELS // 2))
METHOD = Replay(24, sinks=2, recent=4, window=4, remembers=20)


def queries(new, heads=4, batch=1, seed=0, pads=0):
    """Queries and their positions; the first batch row begins with `pads` queries of padding."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(new, dtype=torch.int32).expand(batch, new).clone()
    positions[0] = (positions[0] - pads).clamp_min(PAD)
    return torch.randn(batch, heads, new, CHANNELS, generator=generator), positions


def test_novelty_equals_the_formula():
    rows = torch.randn(2, 2, 9, CHANNELS, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(9, dtype=torch.int32).expand(2, 2, 9).clone()
    positions[1, :, :3] = PAD
    score = novelty(rows, positions)
    for batch, head in ((b, h) for b in range(2) for h in range(2)):
        real = [row for row in range(9) if positions[batch, head, row] != PAD]
        vectors = {row: rows[batch, head, row].double() for row in real}
        mean = sum(vectors.values()) / len(real)
        for row in range(9):
            if row not in real:
                assert score[batch, head, row] == -math.inf
                continue
            newer = [other for other in real if other > row]
            alike = [torch.cosine_similarity(vectors[row] - mean, vectors[other] - mean, dim=0) for other in newer]
            assert float(score[batch, head, row]) == pytest.approx(1 - float(max(alike, default=-1.0)), abs=1e-5)


def test_of_equal_queries_the_newest_stays():
    given, positions = queries(6, heads=1)
    given[:, :, 0] = given[:, :, 4]
    held = RememberedQueries(5, STILL)
    held.add(given, positions, kv_heads=1)
    assert held.positions.tolist() == [[[1, 2, 3, 4, 5]]]


def test_queries_are_held_before_rope_within_half_a_step_of_four_bits():
    given, positions = queries(10)
    held = RememberedQueries(100, ROTARY)
    held.add(given, positions, kv_heads=2)
    plain = ROTARY.unrotate(given, positions[:, None]).view(1, 2, 2, 10, CHANNELS)
    expected = torch.stack([plain[:, :, head] for head in range(2)], dim=3).flatten(2, 3)  # token by token
    assert held.positions[0, 0].tolist() == [position for position in range(10) for _ in range(2)]
    step = (expected.amax(-1) - expected.amin(-1)) / 15
    assert bool(((held.queries - expected).abs().amax(-1) <= 0.5 * step * 1.02 + 0.02).all())
    assert float((held.queries - expected).abs().max()) > 0


def test_no_more_than_size_are_held_and_they_are_the_most_novel():
    given, positions = queries(50, heads=2)
    held, everything = (RememberedQueries(size, ROTARY) for size in (16, 100))
    for each in (held, everything):
        each.add(given, positions, kv_heads=2)
    best = novelty(everything.queries, everything.positions).topk(16).indices.sort().values
    assert torch.equal(held.positions, everything.positions.gather(2, best))
    assert held.rows.rows == 16


def test_padding_changes_nothing_however_long():
    """Even where more queries are given than are judged at once."""
    given, positions = queries(AT_ONCE + 40, heads=1, batch=2, pads=60)
    held, alone = (RememberedQueries(30, ROTARY) for _ in range(2))
    held.add(given, positions, kv_heads=1)
    alone.add(given[:1, :, 60:], positions[:1, 60:], kv_heads=1)
    assert torch.equal(held.positions[:1], alone.positions)
    assert torch.equal(held.queries[:1], alone.queries)
    assert not torch.equal(held.positions[1], alone.positions[0])


def test_padding_leaves_first():
    held = RememberedQueries(12, ROTARY)
    held.add(*queries(10, heads=1, pads=7), kv_heads=1)
    assert held.positions.tolist() == [[[PAD] * 7 + [0, 1, 2]]]
    given, positions = queries(10, heads=1, seed=1)
    held.add(given, positions + 3, kv_heads=1)
    assert int(held.positions.min()) >= 0


def test_unknown_rotary_embedding_is_refused():
    with pytest.raises(NotImplementedError, match="rotary"):
        RememberedQueries(12, None).add(*queries(4), kv_heads=2)


def test_a_layer_hands_over_every_query_once_and_remembers_no_more_than_asked():
    model, ids = tiny(), tokens(2, 90)
    caches = [CompressedCache(model, METHOD, interval=8) for _ in range(2)]
    held = RememberedQueries(10_000, caches[0].compressed[1].rotary)
    caches[1].compressed[1].remembered = held
    for cache in caches:
        model(ids[:, :50], cache=cache)
        for token in range(50, 90):
            model(ids[:, token, None], cache=cache)
    layer = caches[0].compressed[1]
    heads, group = held.positions.shape[1], model.config.num_attention_heads // model.config.num_key_value_heads
    every = [position for position in range(90 - layer.count.uncounted) for _ in range(group)]
    assert layer.count.uncounted < 8 and held.positions.tolist() == [[every] * heads] * 2
    assert layer.remembered.rows.rows == METHOD.remembers


def test_remembered_queries_go_the_way_of_their_batch_row():
    model, (ids, mask) = tiny(), left_padded([40, 33])
    cache = CompressedCache(model, METHOD, interval=8)
    model(ids, attention_mask=mask, cache=cache)
    before = [layer.remembered.queries for layer in cache.compressed]
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer, held in zip(cache.compressed, before, strict=True):
        assert torch.equal(layer.remembered.queries, held.flip(0))


def test_without_remembered_queries_the_window_alone_is_replayed():
    model, ids = tiny(), tokens(1, 60)
    cache = CompressedCache(model, Replay(24, sinks=2, recent=4, window=4, remembers=0), interval=8)
    model(ids, cache=cache)
    assert all(layer.remembered.tensors == [] and layer.storage.rows == 24 for layer in cache.compressed)
