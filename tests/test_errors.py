"""Bad input gets an error that names the number and the remedy, and the cache is as it was."""

import pytest
import torch
from support import SHAPE, generate, left_padded, run_python, tiny, tokens
from transformers import AutoModelForCausalLM, DeepseekV3Config, MistralConfig, T5Config, T5ForConditionalGeneration

from kvcomp import CompressedCache, Pipeline
from kvcomp.evict import METHODS, Random, ScoreEvictor, StreamingLLM, VaSE

SMALL = VaSE(24, sinks=2, recent=4, window=4, protected=6)


def state(cache):
    return [
        (
            vars(layer.count).copy(),
            [t.clone() for t in vars(layer.storage.kv).values() if t is not None] if layer.is_initialized else None,
        )
        for layer in cache.compressed
    ]


def assert_unchanged(before, cache):
    for (counts, tensors), (now, kept) in zip(before, state(cache), strict=True):
        assert counts == now
        assert (tensors is None) == (kept is None)
        assert tensors is None or all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


@pytest.fixture
def running():
    model = tiny()
    cache = CompressedCache(model, SMALL, interval=8)
    model(tokens(2, 43), cache=cache)
    return model, cache


CALLS = {
    "use_cache=False": (lambda m, c: m(tokens(2, 1), cache=c, use_cache=False), "use_cache=True"),
    "another batch": (lambda m, c: m(tokens(3, 1), cache=c), "batch of 2, got 3"),
    "the whole text again": (
        lambda m, c: m(tokens(2, 43), position_ids=torch.arange(43)[None], cache=c), "position 42.*position 42",
    ),
    "a mask of the new tokens only": (
        lambda m, c: m(tokens(2, 5), attention_mask=torch.ones(2, 5), cache=c),
        "covers 5 tokens.*seen 43 and 5 are new",
    ),
    "right padding": (
        lambda m, c: m(tokens(2, 5), attention_mask=(torch.arange(48) < 46).expand(2, 48), cache=c), "left",
    ),
    "a shorter prompt": (lambda m, c: generate(m, tokens(2, 20), cache=c), "seen 43 tokens.*reset"),
    "positive crop": (lambda m, c: c.crop(3), "negative number, got 3"),
    "crop beyond the fresh rows": (lambda m, c: c.crop(-1), "crop 1 tokens: only the 0 newest"),
    "no new tokens": (lambda m, c: m(tokens(2, 1)[:, :0], cache=c), "no new tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_and_changes_nothing(running, name):
    (model, cache), (call, message) = running, CALLS[name]
    before, computed = state(cache), []
    model.model.layers[0].register_forward_hook(lambda *_: computed.append(1))
    with pytest.raises(ValueError, match=message):
        call(model, cache)
    assert_unchanged(before, cache)
    assert not computed  # no layer has run


def test_the_decoder_called_with_positional_arguments_is_checked_too(running):
    model, cache = running
    before = state(cache)
    with pytest.raises(ValueError, match="left padding"):
        model.model(tokens(2, 5), (torch.arange(48) < 46).expand(2, 48), cache=cache)
    assert_unchanged(before, cache)


def test_training_through_the_cache_is_refused():
    model = tiny().train().requires_grad_(True)
    with torch.enable_grad(), pytest.raises(ValueError, match="without gradients.*model.eval"):
        model(tokens(1, 40), cache=CompressedCache(model, SMALL))


def test_use_cache_false_in_generate_is_refused_in_every_family():
    for family in ("qwen3", "gemma3", "gpt_oss"):
        model = tiny(family)
        with pytest.raises(ValueError, match="use_cache=True"):
            generate(model, tokens(1, 9), cache=CompressedCache(model, SMALL), use_cache=False)


def test_crop_without_recording_needs_the_queries_it_would_lose():
    model = tiny()
    cache = CompressedCache(model, VaSE(200), interval=8)
    model(tokens(1, 150), cache=cache)
    with pytest.raises(ValueError, match="crop 100 tokens.*activate_past_recording"):
        cache.crop(-100)
    cache.crop(-5)
    assert cache.get_seq_length() == 145


def test_crop_of_a_full_sliding_layer_is_refused_before_any_layer_changes():
    model = tiny("gemma3")
    cache = CompressedCache(model, VaSE(200), interval=8)
    model(tokens(1, 40), cache=cache)
    with pytest.raises(ValueError, match="sliding layer keeps only 8"):
        cache.crop(-2)
    assert {layer.get_seq_length() for layer in cache.layers} == {40}


def test_right_padded_prompts_are_refused():
    model, (ids, mask) = tiny(), left_padded([20, 10])
    with pytest.raises(ValueError, match="padding_side='left'"):
        model(ids.flip(1), attention_mask=mask.flip(1), cache=CompressedCache(model, SMALL))


def test_continuous_batching_is_refused():
    model = tiny()
    cache = CompressedCache(model, SMALL)
    for call in (
        lambda: generate(model, tokens(1, 9), cache=cache, cache_implementation="paged"),
        lambda: model.generate_batch([[1, 2, 3]]),
    ):
        with pytest.raises(ValueError, match="continuous batching"):
            call()


@pytest.mark.parametrize("broken", ["k_proj", "v_proj"])
def test_rows_that_are_not_finite_are_refused_and_nothing_is_lost(broken):
    model, text = tiny(layers=3), tokens(1, 60)
    cache, untouched = (CompressedCache(model, SMALL, interval=8) for _ in range(2))
    for start, stop in [(0, 40), *((step, step + 1) for step in range(40, 47))]:
        for each in (cache, untouched):
            model(text[:, start:stop], cache=each)
    projection = getattr(model.model.layers[1].self_attn, broken)
    handle = projection.register_forward_hook(lambda module, args, output: output * float("nan"))
    with pytest.raises(ValueError, match=r"\d+ new (keys|values) of layer 1 are NaN or infinite"):
        model(text[:, 47:48], cache=cache)
    handle.remove()
    for step in range(47, 60):
        token = text[:, step, None]
        assert torch.equal(model(token, cache=cache).logits, model(token, cache=untouched).logits)


def test_a_prompt_that_overflows_leaves_an_empty_cache():
    model, text = tiny(layers=3), tokens(1, 60)
    cache, fresh = (CompressedCache(model, SMALL, interval=8) for _ in range(2))
    handle = model.model.layers[1].self_attn.v_proj.register_forward_hook(
        lambda module, args, output: output * float("inf")
    )
    with pytest.raises(ValueError, match="new values of layer 1 are NaN or infinite.*bfloat16"):
        model(text, cache=cache)
    handle.remove()
    assert torch.equal(model(text, cache=cache).logits, model(text, cache=fresh).logits)
    assert cache.get_seq_length() == 60


def test_a_changed_attention_is_noticed(running):
    model, cache = running
    before = state(cache)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="now runs attention 'sdpa'"):
        model(tokens(2, 1), cache=cache)
    assert_unchanged(before, cache)


def test_a_prompt_that_cannot_be_protected_is_refused_before_any_forward():
    model = tiny()
    cache = CompressedCache(model, Random(24, sinks=2, recent=4, protect_prompt=True))
    with pytest.raises(ValueError, match="prompt of 21 tokens and recent=4.*budget=24.*at least 25"):
        model(tokens(1, 21), cache=cache)
    assert cache.get_seq_length() == 0
    model(tokens(1, 20), cache=cache)
    with pytest.raises(ValueError, match="prompt of 22 tokens"):
        model(tokens(1, 2), cache=cache)


@pytest.mark.parametrize("padded", [False, True])
def test_a_protected_prompt_is_kept_for_good(padded):
    model, (ids, mask) = tiny(), left_padded([20, 12 if padded else 20])
    cache = CompressedCache(model, Random(28, sinks=2, recent=4, protect_prompt=True), interval=8)
    generate(model, ids, mask, new=100, cache=cache)
    for row, length in enumerate(mask.sum(-1).tolist()):
        for layer in cache.compressed:
            assert (layer.positions[row, :, :length] == torch.arange(length)).all()
            assert layer.count.round > 8


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: VaSE(100, recent=64, protected=32),
            r"budget=100 leaves no row.*sinks=4 \+ recent=64 \+ protected=32; raise.*101",
        ),
        (lambda: StreamingLLM(68), "budget=68 leaves no row.*at least 69"),
        (lambda: VaSE(0), "budget must be at least 1, got 0"),
        (lambda: Random(-5), "budget must be at least 1, got -5"),
        (lambda: VaSE(512, window=0), "window must be at least 1, got 0"),
        (lambda: VaSE(512, sinks=-1), "sinks must be at least 0, got -1"),
        (lambda: VaSE(512, pool=4), "odd, got 4"),
        (lambda: VaSE(512, temperature=0.0), "above 0, got 0.0"),
        (lambda: METHODS["rkv"](512, weight=1.5), "between 0 and 1, got 1.5"),
        (lambda: CompressedCache(tiny(), VaSE(512), interval=0), "interval.*at least 1, got 0"),
        (lambda: Pipeline(()), "at least 1 stage"),
    ],
)
def test_settings_that_make_no_sense(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_values_of_a_wrong_type():
    """In a process of its own, without the type checks of this suite, as users run it."""
    run_python("""
import pytest
from support import tiny
from kvcomp import CompressedCache
from kvcomp.evict import VaSE
for build, error, message in (
    (lambda: VaSE(512, scorer="attention"), ValueError, "attnv.*dkv.*'attention'"),
    (lambda: VaSE(512, magnitude="l1"), ValueError, "'l1'"),
    (lambda: VaSE(512, stochastic="no"), ValueError, "stochastic must be a bool, got 'no'"),
    (lambda: VaSE(512, temperature="hot"), ValueError, "temperature must be a float, got 'hot'"),
    (lambda: CompressedCache(tiny(), VaSE(512), seed=None), ValueError, "seed must be an int, got None"),
    (lambda: VaSE(512.0), ValueError, "must be an int, got 512.0"),
    (lambda: CompressedCache(tiny(), 512), TypeError, "no Compressor"),
    (lambda: VaSE(512) | 3, TypeError, "no Compressor"),
):
    with pytest.raises(error, match=message):
        build()
""")


def test_a_method_that_breaks_its_promise_is_stopped():
    class Greedy(StreamingLLM):
        def compress(self, kv, seen):
            return kv

    model = tiny()
    with pytest.raises(ValueError, match="kept 40 rows, more than its budget of 24"):
        model(tokens(1, 40), cache=CompressedCache(model, Greedy(24, sinks=2, recent=4), interval=8))


def test_models_that_cannot_be_supported():
    latent = AutoModelForCausalLM.from_config(
        DeepseekV3Config(
            vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
            q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
            n_routed_experts=4, first_k_dense_replace=1,
        )
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="MLA, kv_lora_rank=16"):
        CompressedCache(latent, SMALL)
    both = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4))
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        CompressedCache(both, SMALL)
    sliding = AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=8))
    with pytest.raises(ValueError, match="no full-attention layer.*DynamicCache"):
        CompressedCache(sliding, SMALL)


def test_an_attention_that_is_not_supported():
    model = tiny()
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match="'flex_attention', kvcomp supports sdpa, eager, flash_attention_2"):
        CompressedCache(model, SMALL)


def test_a_model_whose_attention_cannot_be_set(monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match="AttentionInterface"):
        CompressedCache(model, SMALL)


def test_a_score_evictor_says_what_it_lacks():
    with pytest.raises(TypeError, match="abstract"):
        ScoreEvictor(512)
