"""Left-padded batches: padding is never seen, and each row goes its own way."""

import copy

import pytest
import torch
from support import MaskedOracle, WitnessedCache, generate, left_padded, relative_error, tiny, tokens

from kvcomp import CompressedCache
from kvcomp.evict import H2O, TOVA, ExpectedAttention, Random, Replay, SnapKV, VaSE

LENGTHS = [40, 22, 31, 8]
METHODS = [
    VaSE(24, sinks=2, recent=4, window=4, protected=6),
    VaSE(24, sinks=2, recent=4, scorer="dkv"),
    SnapKV(24, recent=4, window=12),
    H2O(24),
    TOVA(24),
    ExpectedAttention(24, sinks=2, recent=4, window=12),
    Random(24, sinks=2, recent=4),
    Replay(24, sinks=2, recent=4, window=4, remembers=20),
]


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp_min(0)


def decode(model, cache, ids, mask, steps, chunk=1, explicit=True, watch=None):
    """Prefill and `steps` forwards of `chunk` tokens; logits of the newest token after each."""
    results, text = [], torch.cat([ids, tokens(len(ids), steps * chunk, seed=5)], dim=1)
    mask = torch.cat([mask, torch.ones(len(ids), steps * chunk, dtype=mask.dtype)], dim=1)
    start = 0
    for stop in range(ids.shape[1], text.shape[1] + 1, chunk):
        if watch is not None:
            watch(cache, text, start, stop)
        positions = {"position_ids": positions_of(mask)[:, start:stop]} if explicit else {}
        logits = model(text[:, start:stop], attention_mask=mask[:, :stop], cache=cache, **positions).logits
        results.append(logits[:, -1])
        start = stop
    return results


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_padding_is_kept_while_a_token_is_dropped(method):
    model, (ids, mask) = tiny(), left_padded(LENGTHS)
    cache = CompressedCache(model, method, interval=8)
    decode(model, cache, ids, mask, steps=1)
    for layer in cache.compressed:
        padding = (layer.positions == -1).sum(-1)
        expected = [max(0, layer.storage.rows - length - 1) for length in LENGTHS]
        assert padding.tolist() == [[count, count] for count in expected]
    decode_more = [tokens(4, 1, seed=step) for step in range(40)]
    for token in decode_more:
        model(token, cache=cache)
    assert not any((layer.positions == -1).any() for layer in cache.compressed)


@pytest.mark.parametrize("explicit", [True, False], ids=["position_ids", "default positions"])
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(
    ("family", "attention"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("gemma3", "sdpa"), ("gpt_oss", "eager")]
)
def test_each_row_equals_the_oracle_of_that_row_alone(family, attention, chunk, explicit):
    """The kept sets of the batch, shown to a full cache that holds one row without its padding."""
    model, (ids, mask) = tiny(family, attention), left_padded(LENGTHS)
    cache = CompressedCache(model, METHODS[0], interval=8)
    kept, parts = [], []

    def watch(cache, text, start, stop):
        kept.append({layer.layer_idx: layer.positions.clone() if start else None for layer in cache.compressed})
        parts.append((text[:, start:stop], start))

    results = decode(model, cache, ids, mask, steps=40 // chunk, chunk=chunk, explicit=explicit, watch=watch)
    assert cache.compressed[0].count.round >= 5
    for row, length in enumerate(LENGTHS):
        pads, oracle = max(LENGTHS) - length, MaskedOracle(tiny(family, attention))
        shift = 0 if explicit else pads  # default positions count the padding
        for logits, before, (part, start) in zip(results, kept, parts, strict=True):
            visible = {
                index: torch.empty(1, 2, 0, dtype=torch.int32) if rows is None else _without_padding(rows[row], shift)
                for index, rows in before.items()
            }
            alone = oracle.step(part[row : row + 1, 0 if start else pads :], visible)
            assert relative_error(logits[row], alone[0, -1]) < 1e-4


def _without_padding(positions, shift):
    return torch.where(positions == -1, -1, positions - shift)[None]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_padded_batch_equals_the_oracle_with_every_kind_of_method(method):
    model, (ids, mask) = tiny(), left_padded(LENGTHS)
    cache = WitnessedCache(model, tiny(), method, interval=8)
    generate(model, ids, mask, new=60, cache=cache)
    assert max(cache.errors) < 1e-5 and cache.compressed[0].count.round >= 7


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_replacing_one_row_leaves_the_others_bit_identical(method):
    model, (ids, mask) = tiny(), left_padded(LENGTHS)
    other = ids.clone()
    other[1] = torch.where(mask[1] == 1, (ids[1] * 7 + 3) % 97, 0)
    caches = [CompressedCache(model, method, interval=8) for _ in range(2)]
    results = [decode(model, cache, text, mask, steps=40) for cache, text in zip(caches, (ids, other), strict=True)]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first[[0, 2, 3]], second[[0, 2, 3]])
    assert not torch.equal(results[0][-1][1], results[1][-1][1])
    for first, second in zip(caches[0].compressed, caches[1].compressed, strict=True):
        assert torch.equal(first.positions[[0, 2, 3]], second.positions[[0, 2, 3]])


def test_the_same_text_keeps_the_same_rows_in_any_batch():
    model, ids = tiny(), tokens(3, 40)
    method = VaSE(24, sinks=2, recent=4, window=4)
    alone, batch = (CompressedCache(model, method, interval=8, seed=3) for _ in range(2))
    for step in range(40):
        part = ids if step == 0 else tokens(3, 1, seed=step)
        model(part[1:2], cache=alone)
        model(part, cache=batch)
    for one, many in zip(alone.compressed, batch.compressed, strict=True):
        assert torch.equal(one.positions[0], many.positions[1])


def test_a_batch_fed_token_by_token_marks_its_padding():
    model, (ids, mask) = tiny(), left_padded([12, 5])
    cache = CompressedCache(model, METHODS[0], interval=8)
    for stop in range(1, 13):
        positions = positions_of(mask)[:, stop - 1 : stop]
        logits = model(
            ids[:, stop - 1 : stop], attention_mask=mask[:, :stop], position_ids=positions, cache=cache
        ).logits
    assert (cache.compressed[0].positions == -1).sum(-1).tolist() == [[0, 0], [7, 7]]
    alone = model(ids[1:, 7:]).logits
    assert relative_error(logits[1], alone[0, -1:]) < 1e-5


def test_window_longer_than_the_text_reads_no_padding():
    """The queries of padding are garbage; make them huge and nothing may change."""
    ids, mask = left_padded([40, 10])
    kept = []
    for scale in (1.0, 50.0):
        model = copy.deepcopy(tiny())
        model.get_input_embeddings().weight[0] *= scale
        cache = CompressedCache(model, SnapKV(24, recent=4, window=30), interval=8)
        decode(model, cache, ids, mask, steps=30)
        kept.append([layer.positions.clone() for layer in cache.compressed])
    for first, second in zip(*kept, strict=True):
        assert torch.equal(first[1], second[1])


def test_generate_with_padding_equals_generate_alone_when_nothing_is_evicted():
    model, (ids, mask) = tiny(), left_padded([30, 12])
    batch = generate(model, ids, mask, cache=CompressedCache(model, VaSE(256)))
    alone = generate(model, ids[1:, 18:], cache=CompressedCache(model, VaSE(256)))
    assert torch.equal(batch[1, 18:], alone[0])
