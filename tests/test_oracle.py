"""The masked oracle: every step of a compressed cache equals a full cache whose evicted rows are hidden."""

import pytest
import torch
from support import (
    FAMILIES,
    MaskedOracle,
    WitnessedCache,
    generate,
    kept_positions,
    left_padded,
    relative_error,
    tiny,
    tokens,
)

from kvcomp import CompressedCache
from kvcomp.evict import H2O, RKV, TOVA, KeyNorm, Random, VaSE

SMALL = {"budget": 24, "sinks": 2, "recent": 4}
ATTNV = VaSE(**SMALL, window=4, protected=6)
KINDS = [(family, attention) for family in ("llama", "qwen3", "gemma3") for attention in ("sdpa", "eager")]


def largest_error(model, reference, compressor, chunk, interval=8, prompt=40, rounds=5, seed=0):
    """Largest relative logit error over all steps through at least `rounds` compressions."""
    oracle, cache = MaskedOracle(reference), CompressedCache(model, compressor, interval=interval, seed=seed)
    length = prompt + chunk * -(-(interval * (rounds + 1)) // chunk)
    text, errors = tokens(2, length), []
    for part in text.split([prompt] + [chunk] * ((length - prompt) // chunk), dim=1):
        before = {index: kept for index, kept in kept_positions(cache).items() if kept.shape[2]}
        if not before:
            before = {index: torch.empty(2, 2, 0, dtype=torch.int32) for index in kept_positions(cache)}
        logits = model(part, cache=cache).logits
        errors.append(relative_error(logits, oracle.step(part, before)))
        assert cache.get_seq_length() == oracle.seen
    assert all(layer.count.round >= rounds for layer in cache.compressed)
    return max(errors)


@pytest.mark.parametrize("chunk", [1, 4, 12])
@pytest.mark.parametrize(("family", "attention"), KINDS)
def test_every_step_equals_the_full_cache_with_evicted_rows_hidden(family, attention, chunk):
    error = largest_error(tiny(family, attention), tiny(family, attention), ATTNV, chunk)
    assert error < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_the_oracle(family):
    assert largest_error(tiny(family), tiny(family), Random(**SMALL), chunk=1) < 1e-5


@pytest.mark.parametrize(
    "compressor",
    [H2O(24), RKV(24), TOVA(24), KeyNorm(**SMALL), VaSE(**SMALL, scorer="dkv"), ATTNV | Random(budget=16, recent=4)],
    ids=repr,
)
def test_every_kind_of_method_equals_the_oracle(compressor):
    assert largest_error(tiny(layers=3), tiny(layers=3), compressor, chunk=3) < 1e-5


def test_the_oracle_notices_a_wrong_kept_set():
    model, oracle = tiny(), MaskedOracle(tiny())
    cache = CompressedCache(model, ATTNV, interval=8)
    text = tokens(2, 41)
    model(text[:, :40], cache=cache)
    oracle.step(text[:, :40], {0: torch.empty(2, 2, 0), 1: torch.empty(2, 2, 0)})
    wrong = kept_positions(cache)
    wrong[0] = wrong[0].where(wrong[0] != wrong[0][0, 0, 10], 39)  # one row of one layer goes missing
    logits = model(text[:, 40:], cache=cache).logits
    assert relative_error(logits, oracle.step(text[:, 40:], wrong)) > 1e-3


GENERATIONS = {
    "greedy": {},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "chunked prefill": {"prefill_chunk_size": 7},
    "drafting": {"prompt_lookup_num_tokens": 4},
    "assistant": {"assistant_model": True},
}


@pytest.mark.parametrize("mode", GENERATIONS)
@pytest.mark.parametrize("lengths", [[40], [40, 23]], ids=["one text", "padded batch"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_every_forward_of_generate_equals_the_oracle(family, lengths, mode):
    if mode in ("drafting", "assistant") and len(lengths) > 1:
        lengths = [40]  # transformers drafts for one text only: once more, with the prompt repeating itself
    settings = dict(GENERATIONS[mode])
    if "assistant_model" in settings:
        settings["assistant_model"] = tiny(family)
    torch.manual_seed(0)
    ids, mask = left_padded(lengths)
    ids = ids if mode != "drafting" else ids[:, :10].repeat(1, 4)
    model = tiny(family)
    cache = WitnessedCache(model, tiny(family), ATTNV, interval=8)
    generate(model, ids, mask, new=60, cache=cache, **settings)
    assert max(cache.errors) < 1e-5
    assert cache.compressed[0].count.round >= (3 if mode == "assistant" else 5)  # all its drafts are accepted
