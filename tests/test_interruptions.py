"""A forward that stops half-way, wherever it stops, leaves no trace, or is refused."""

import pytest
import torch
from support import generate, relative_error, tiny, tokens
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from kvcomp import CompressedCache
from kvcomp.attention import folded_decode
from kvcomp.evict import H2O, Random, Replay, SnapKV, VaSE
from kvcomp.storage import RowStorage

SMALL = VaSE(24, sinks=2, recent=4, window=4, protected=6)
METHODS = [SMALL, SnapKV(24, recent=4, window=6), H2O(24), Replay(24, sinks=2, recent=4, window=4, remembers=20)]


def interrupt(*_, **__):
    raise KeyboardInterrupt


def interrupted(model, layer, call):
    handle = model.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call()
    handle.remove()


def stops_at_call(number):
    """An attention that works `number` times and is then interrupted."""
    calls = []

    def attention(*arguments):
        calls.append(arguments)
        return folded_decode(*arguments) if len(calls) <= number else interrupt()

    return attention


def assert_equal_state(one, other):
    for first, second in zip(one.compressed, other.compressed, strict=True):
        assert torch.equal(first.positions, second.positions)
        assert first.count == second.count
        if first.recent_queries.count:
            assert torch.equal(first.recent_queries.queries, second.recent_queries.queries)
        if first.compressor.remembers:
            assert torch.equal(first.remembered.queries, second.remembered.queries)


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("place", ["mlp", "attention"])
def test_any_step_may_be_interrupted_in_any_layer(monkeypatch, method, place):
    model, ids = tiny(layers=3), tokens(1, 90)
    whole, broken = (CompressedCache(model, method, interval=8) for _ in range(2))
    for cache in (whole, broken):
        model(ids[:, :40], cache=cache)
    for step in range(40, 90):
        token, layer = ids[:, step, None], step % 3
        if place == "mlp":
            interrupted(model, layer, lambda token=token: model(token, cache=broken))
        else:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("kvcomp.attention.folded_decode", stops_at_call(layer))
                model(token, cache=broken)
        assert torch.equal(model(token, cache=broken).logits, model(token, cache=whole).logits)
    assert_equal_state(broken, whole)


def test_generate_goes_on_after_an_interrupted_prompt_and_step():
    model, ids = tiny(layers=3), tokens(1, 60)
    expected = generate(model, ids, new=20, cache=CompressedCache(model, SMALL, interval=8))
    cache = CompressedCache(model, SMALL, interval=8)
    interrupted(model, 1, lambda: generate(model, ids[:, :40], cache=cache))
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, ids, new=20, cache=cache), expected)
    short, same = (CompressedCache(model, VaSE(200), interval=8) for _ in range(2))
    for each in (short, same):
        model(ids[:, :40], cache=each)
    interrupted(model, 2, lambda: model(ids[:, 40:41], cache=short))
    assert short.get_seq_length() == 40
    assert torch.equal(generate(model, ids, new=9, cache=short), generate(model, ids, new=9, cache=same))
    assert short.get_seq_length() == 68


def test_saving_and_batch_operations_after_an_interruption(tmp_path):
    model, ids = tiny(layers=3), tokens(2, 60)
    whole, broken = (CompressedCache(model, SMALL, interval=8) for _ in range(2))
    for cache in (whole, broken):
        model(ids[:, :40], cache=cache)
    interrupted(model, 1, lambda: model(ids[:, 40:41], cache=broken))
    broken.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model)
    interrupted(model, 1, lambda: model(ids[:, 40:41], cache=broken))
    broken.reorder_cache(torch.tensor([1, 0]))
    for step in range(40, 60):
        token = ids[:, step, None]
        reference = model(token, cache=whole).logits
        assert torch.equal(model(token, cache=loaded).logits, reference)
        assert torch.equal(model(token.flip(0), cache=broken).logits, reference.flip(0))


def test_a_compression_that_was_interrupted_while_writing_is_refused(monkeypatch):
    model, ids = tiny(), tokens(1, 60)
    cache = CompressedCache(model, SMALL, interval=8)
    model(ids[:, :40], cache=cache)
    for step in range(40, 47):
        model(ids[:, step, None], cache=cache)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RowStorage, "_write", interrupt)
        patch.setattr(RowStorage, "append", lambda self, *args: setattr(self, "buffered", self.buffered + 1))
        model(ids[:, 47:48], cache=cache)
    for call in (lambda: model(ids[:, 48:49], cache=cache), lambda: generate(model, ids, cache=cache)):
        with pytest.raises(ValueError, match="interrupted.*reset"):
            call()
    cache.reset()
    fresh = CompressedCache(model, SMALL, interval=8)
    assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=fresh).logits)


def test_state_that_cannot_go_back_is_refused():
    config = Qwen3NextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, initializer_range=0.2, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    cache, ids = CompressedCache(model, Random(24, sinks=2, recent=4), interval=8), tokens(1, 60)
    model(ids[:, :40], cache=cache)
    assert cache.memory().other_layers > 0
    interrupted(model, 2, lambda: model(ids[:, 40:41], cache=cache))
    with pytest.raises(ValueError, match="half-way.*no earlier state.*reset"):
        model(ids[:, 40:41], cache=cache)
    cache.reset()
    first = [
        model(ids[:, :40], cache=cache).logits,
        *(model(ids[:, i, None], cache=cache).logits for i in range(40, 60)),
    ]
    fresh = CompressedCache(model, Random(24, sinks=2, recent=4), interval=8)
    again = [
        model(ids[:, :40], cache=fresh).logits,
        *(model(ids[:, i, None], cache=fresh).logits for i in range(40, 60)),
    ]
    assert all(relative_error(one, other) < 1e-6 for one, other in zip(first, again, strict=True))
