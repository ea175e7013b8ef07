"""A budget that is never reached: every mode of generate() gives what DynamicCache gives."""

import copy
import io
import pickle
from contextlib import redirect_stdout

import pytest
import torch
from support import FAMILIES, generate, left_padded, tiny, tokens
from transformers import DynamicCache, TextStreamer

from kvcomp import CompressedCache
from kvcomp.evict import H2O, Random, VaSE

ROOMY = VaSE(budget=256)
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 7},
    "repetition penalty": {"repetition_penalty": 1.3},
}


def outputs(model, ids, mask, cache, **settings):
    torch.manual_seed(7)
    settings = {"return_dict_in_generate": True, "output_logits": True} | settings
    return generate(model, ids, mask, cache=cache, **settings)


def assert_same(model, ids, mask=None, **settings):
    plain = outputs(model, ids, mask, None, **settings)
    ours = outputs(model, ids, mask, CompressedCache(model, ROOMY), **settings)
    assert torch.equal(ours.sequences, plain.sequences)
    for step, reference in zip(ours.logits, plain.logits, strict=True):
        assert (step - reference).abs().max() <= 1e-5 * reference.abs().max()
    return ours


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_modes(family, mode):
    assert_same(tiny(family), tokens(2, 30), **MODES[mode])


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    assert_same(tiny(family), tokens(2, 30))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "chunked prefill"])
def test_left_padded_batches(attention, mode):
    ids, mask = left_padded([30, 11, 23])
    assert_same(tiny("qwen3", attention), ids, mask, **MODES[mode])


def test_eager_is_bit_identical():
    model, ids = tiny("qwen3", "eager"), tokens(2, 30)
    plain, ours = (outputs(model, ids, None, cache) for cache in (None, CompressedCache(model, ROOMY)))
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, plain.logits, strict=True))


def test_prefill_is_bit_identical_even_when_it_is_compressed():
    model, ids = tiny(), tokens(2, 60)
    small = CompressedCache(model, VaSE(16, sinks=2, recent=4, window=4), interval=8)
    assert torch.equal(model(ids, cache=small).logits, model(ids, cache=DynamicCache(config=model.config)).logits)
    assert small.compressed[0].storage.rows == 16


def test_inputs_embeds():
    model, ids = tiny(), tokens(2, 20)
    embeds = model.get_input_embeddings()(ids)
    settings = {
        "inputs_embeds": embeds,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
    }
    assert torch.equal(model.generate(**settings, cache=CompressedCache(model, ROOMY)), model.generate(**settings))


def test_half_precision():
    model, ids = tiny(dtype=torch.bfloat16), tokens(2, 30)
    cache = CompressedCache(model, ROOMY)
    assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)
    assert cache.compressed[0].keys.dtype == torch.bfloat16


@pytest.mark.parametrize("length", [None, 16])
def test_chat_continuation_feeds_only_the_new_tokens(length):
    model, ids = tiny(), tokens(1, 20)
    compressor = ROOMY if length is None else VaSE(length, sinks=2, recent=4, window=4)
    cache, fed = CompressedCache(model, compressor, interval=8), []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: fed.append(args[0].shape[1]))
    first = generate(model, ids, new=10, cache=cache)
    fed.clear()
    question = torch.cat([first, tokens(1, 5, seed=2)], dim=1)
    second = generate(model, question, new=6, cache=cache)
    assert fed[0] == 6  # the last generated token was never fed, and five are new
    if length is None:
        assert torch.equal(second, generate(model, question, new=6))


@pytest.mark.parametrize("settings", [{"prompt_lookup_num_tokens": 4}, {"assistant": True}])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_drafting_equals_greedy(family, settings):
    model, ids = tiny(family), tokens(1, 6).repeat(1, 6)
    settings = {"assistant_model": tiny(family)} if "assistant" in settings else settings
    drafted = generate(model, ids, new=40, cache=CompressedCache(model, ROOMY), **settings)
    assert torch.equal(drafted, generate(model, ids, new=40))


@pytest.mark.parametrize("method", [VaSE(24, sinks=2, recent=4, window=4), H2O(24)], ids=["vase", "h2o"])
def test_drafting_compresses_and_stays_bounded(method):
    model, ids = tiny(), tokens(1, 6).repeat(1, 8)
    cache = CompressedCache(model, method, interval=8)
    out = generate(model, ids, new=100, cache=cache, prompt_lookup_num_tokens=4)
    layer = cache.compressed[0]
    assert out.shape[1] == 148 and layer.count.round >= 10
    assert cache.get_seq_length() == 147 and layer.storage.rows < 24 + 8
    assert layer.storage.capacity <= 24 + 8 + 5


def test_memory_is_bounded_again_after_drafting_and_after_a_reset():
    model, ids = tiny("gemma3"), tokens(1, 6).repeat(1, 8)
    cache = CompressedCache(model, VaSE(24, sinks=2, recent=4, window=4), interval=8)
    text = generate(model, ids, new=40, cache=cache, prompt_lookup_num_tokens=4)
    generate(model, text, new=100, cache=cache)
    assert cache.compressed[0].storage.capacity == 32
    assert all(layer.keys.shape[2] <= 8 for layer in cache.layers if layer.is_sliding)
    cache.activate_past_recording()
    cache.reset()
    model(tokens(1, 400), cache=cache)
    assert cache.compressed[0].storage.capacity == 32


@pytest.mark.parametrize("settings", [{"prompt_lookup_num_tokens": 4}, {}])
def test_drafts_do_not_count_as_prompt(settings):
    model, ids = tiny(), tokens(1, 6).repeat(1, 4)
    cache = CompressedCache(model, Random(34, sinks=2, recent=4, protect_prompt=True), interval=8)
    generate(model, ids, new=60, cache=cache, **settings)
    assert (cache.compressed[0].positions[:, :, :24] == torch.arange(24)).all()


def test_recording_ends_when_nobody_crops():
    model, ids = tiny(), tokens(1, 40)
    cache = CompressedCache(model, VaSE(24, sinks=2, recent=4, window=4), interval=8)
    cache.activate_past_recording()
    generate(model, ids, new=300, cache=cache)
    assert cache.compressed[0].storage.rows < 24 + 8


def test_streaming():
    class Numbers:
        def decode(self, ids, **settings):
            return " ".join(map(str, ids)) + " "

    model, ids, printed = tiny(), tokens(1, 10), io.StringIO()
    with redirect_stdout(printed):
        out = generate(model, ids, new=8, cache=CompressedCache(model, ROOMY), streamer=TextStreamer(Numbers()))
    assert [int(word) for word in printed.getvalue().split()] == out[0].tolist()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_copy_goes_on_alone(family, copied):
    model, ids = tiny(family), tokens(1, 40)
    cache = CompressedCache(model, VaSE(24, sinks=2, recent=4, window=4), interval=8)
    model(ids, cache=cache)
    other, nxt = copied(cache), tokens(1, 30, seed=3)
    expected = [model(nxt[:, i : i + 1], cache=cache).logits for i in range(30)]
    assert other.get_seq_length() == 40
    assert all(torch.equal(model(nxt[:, i : i + 1], cache=other).logits, expected[i]) for i in range(30))


def test_beams_and_sequences_with_eviction_run_and_stay_bounded():
    model, (ids, mask) = tiny(), left_padded([40, 25])
    for settings in (MODES["beams"], MODES["several sequences"]):
        cache = CompressedCache(model, VaSE(24, sinks=2, recent=4, window=4), interval=8)
        out = generate(model, ids, mask, new=60, cache=cache, **settings)
        assert out.shape[1] == 100 and cache.compressed[0].storage.capacity == 32


def test_beams_with_eviction_equal_a_cache_reordered_by_hand():
    model, cache = tiny(), None
    order = torch.tensor([2, 2, 0])
    text = tokens(3, 41)
    caches = [CompressedCache(model, VaSE(24, sinks=2, recent=4, window=4), interval=8) for _ in range(2)]
    cache, reordered = caches
    model(text[:, :40], cache=cache)
    cache.reorder_cache(order)
    model(text[order, :40], cache=reordered)
    for step in range(20):
        token = text[order, 40:] + step
        assert torch.equal(model(token % 97, cache=cache).logits, model(token % 97, cache=reordered).logits)


def test_flash_attention_runs_through_the_same_path():
    pytest.importorskip("flash_attn", reason="flash-attn needs CUDA and is not installed here")
    model = tiny(dtype=torch.bfloat16).cuda()
    model.set_attn_implementation("flash_attention_2")
    ids = tokens(1, 40).cuda()
    cache = CompressedCache(model, VaSE(24, sinks=2, recent=4, window=4), interval=8)
    assert generate(model, ids, cache=cache).shape[1] == 64 and cache.compressed[0].count.round > 1


def emulated_flash(query, key, value, mask, *, query_length, is_causal, softmax_scale, attn_implementation, **_):
    """What the kernel computes: `[batch, tokens, heads, head_dim]`, causal from the lower right, a 2-D padding mask."""
    assert is_causal and attn_implementation == "flash_attention_2" and query_length == query.shape[1]
    rows = key.shape[1]
    visible = torch.arange(rows) <= torch.arange(rows - query_length, rows)[:, None]
    visible = visible if mask is None else visible & mask[:, None, None].bool()
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    logits = (query @ key.transpose(2, 3) * softmax_scale).masked_fill(~visible, torch.finfo(query.dtype).min)
    return (logits.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", [[40, 40], [40, 13]])
def test_what_flash_attention_is_given_is_right(monkeypatch, lengths):
    """The kernel needs a GPU; here its arithmetic is emulated, to test shapes, masks and observed queries."""
    monkeypatch.setattr("kvcomp.attention._flash_attention_forward", emulated_flash)
    flash, sdpa, (ids, mask) = tiny(), tiny(), left_padded(lengths)
    flash.config._attn_implementation_internal = "flash_attention_2"
    method = VaSE(24, sinks=2, recent=4, window=4)
    caches = [CompressedCache(model, method, interval=8) for model in (flash, sdpa)]
    assert flash.config._attn_implementation == "kvcomp_fa2"
    text = torch.cat([ids, tokens(2, 60, seed=4)], dim=1)
    shown = torch.nn.functional.pad(mask, (0, 60), value=1)
    start = 0
    for stop in [40, *range(44, 60, 4), *range(60, 100)]:
        positions = (shown.cumsum(-1) - 1).clamp_min(0)[:, start:stop]
        one, other = (
            model(text[:, start:stop], attention_mask=shown[:, :stop], position_ids=positions, cache=cache).logits[
                :, -1
            ]
            for model, cache in zip((flash, sdpa), caches, strict=True)
        )
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
        start = stop
    assert caches[0].compressed[0].count.round > 5
    assert torch.equal(caches[0].compressed[1].positions, caches[1].compressed[1].positions)
