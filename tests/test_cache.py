"""What a cache promises beside right logits: nothing else is touched, memory is bounded, randomness is repeatable."""

import pytest
import torch
from support import MaskedOracle, generate, kept_positions, left_padded, relative_error, run_python, tiny, tokens
from transformers import DynamicCache

from kvcomp import CompressedCache, attention
from kvcomp.evict import H2O, KeyNorm, Random, Replay, SnapKV, StreamingLLM, VaSE

SMALL = VaSE(24, sinks=2, recent=4, window=4, protected=6)


def decode(model, cache, ids, steps=40, prompt=40):
    model(ids[:, :prompt], cache=cache)
    return [model(ids[:, prompt + step : prompt + step + 1], cache=cache).logits for step in range(steps)]


# Isolation


def test_a_plain_cache_on_the_same_model_is_bit_identical_to_an_untouched_model():
    model, ids = tiny(), tokens(2, 80)
    untouched = tiny()
    CompressedCache(model, SMALL)
    for padded in (None, left_padded([40, 20])[1]):
        theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
        for part in ids[:, :47].split([40, 1, 5, 1], dim=1) if padded is None else [ids[:, :40]]:
            settings = {} if padded is None else {"attention_mask": padded}
            assert torch.equal(
                model(part, cache=ours, **settings).logits, untouched(part, cache=theirs, **settings).logits
            )
    assert torch.equal(generate(model, ids), generate(untouched, ids))


def test_two_caches_and_a_plain_one_interleaved_do_not_touch_each_other():
    model, texts = tiny(), [tokens(1, 80, seed=seed) for seed in (1, 2)]
    expected = [decode(model, CompressedCache(model, SMALL, interval=8, seed=seed), texts[seed]) for seed in (0, 1)]
    caches, plain = (
        [CompressedCache(model, SMALL, interval=8, seed=seed) for seed in (0, 1)],
        DynamicCache(config=model.config),
    )
    for cache, text in zip(caches, texts, strict=True):
        model(text[:, :40], cache=cache)
    for step in range(40):
        part = slice(40 + step, 41 + step)
        model(texts[0][:, part], cache=plain)
        for index in (1, 0):
            assert torch.equal(model(texts[index][:, part], cache=caches[index]).logits, expected[index][step])
    assert plain.get_seq_length() == 40


def test_import_changes_nothing_in_transformers_and_loads_nothing_heavy():
    code = """
import sys, transformers
from transformers import AttentionInterface, AttentionMaskInterface
before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
import transformers.modeling_flash_attention_utils, transformers.modeling_utils  # they load Triton where there is one
loaded = set(sys.modules)
import kvcomp.evict, kvcomp.quant
from kvcomp import CompressedCache
assert before == (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
assert not {"triton", "bitsandbytes", "matplotlib", "flash_attn", "numba"} & (sys.modules.keys() - loaded)
"""
    run_python(code)


def test_uninstall_gives_the_model_its_attention_back():
    for own in ("sdpa", "eager"):
        model = tiny(attention=own)
        CompressedCache(model, SMALL)
        attention.uninstall(model)
        assert model.config._attn_implementation == own


# Memory


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_storage_is_exactly_budget_plus_interval_rows_for_2000_steps(family):
    model, prompt = tiny(family), tokens(1, 60)
    cache, interval = CompressedCache(model, SMALL, interval=8), 8
    model(prompt, cache=cache)
    addresses, sizes = set(), set()
    for step in range(2000):
        model(prompt[:, step % 60, None], cache=cache)
        for layer in cache.compressed:
            buffer = layer.storage.buffer
            addresses.add(buffer.keys.untyped_storage().data_ptr())
            sizes.add(sum(tensor.untyped_storage().nbytes() for tensor in (buffer.keys, buffer.values)))
    rows = SMALL.budget + interval
    assert sizes == {2 * rows * 2 * 16 * 4}  # keys and values, 2 KV heads, head_dim 16, 4 bytes
    assert len(addresses) == len(cache.compressed)  # allocated once
    assert cache.get_seq_length() == 2060
    memory = cache.memory()
    assert memory.keys + memory.values == len(cache.compressed) * 2 * rows * 2 * 16 * 4
    assert memory.full > 40 * (memory.keys + memory.values) - memory.other_layers


def test_no_tensor_of_the_length_of_the_prompt_survives_the_first_compression():
    model = tiny(layers=3)
    for method in (SMALL, H2O(24), StreamingLLM(24, sinks=2, recent=4)):
        cache = CompressedCache(model, method, interval=8)
        model(tokens(1, 1000), cache=cache)
        for layer in cache.compressed:
            tensors = [value for part in (layer.storage.buffer, layer.recent_queries) for value in vars(part).values()]
            tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
            # nor is it held through a view: the bytes behind every tensor are those of at most 32 rows or queries
            assert all(tensor.untyped_storage().nbytes() <= 32 * 4 * 16 * 4 for tensor in tensors)


def test_a_long_prompt_is_compressed_layer_by_layer():
    """When a layer attends to the prompt, every layer before it has let go of its rows."""
    model, rows = tiny(layers=3), []
    cache = CompressedCache(model, SMALL, interval=8)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda *_: rows.append([kept.storage.rows for kept in cache.compressed]), with_kwargs=False
        )
    model(tokens(1, 200), cache=cache)
    assert rows == [[0, 0, 0], [24, 0, 0], [24, 24, 0]]


@pytest.mark.parametrize("method", [H2O(24), Replay(24, sinks=2, recent=4, window=4, remembers=20)], ids=repr)
def test_the_memory_report_counts_the_bytes_behind_every_tensor(method):
    model = tiny("gemma3")
    cache = CompressedCache(model, method, interval=8)
    model(tokens(2, 60), cache=cache)
    reachable = {}
    for layer in cache.layers:
        parts = [layer.storage.buffer, layer.recent_queries] if layer in cache.compressed else [layer]
        remembered = layer.remembered.tensors if layer in cache.compressed else []
        for value in [value for part in parts for value in vars(part).values()] + remembered:
            if isinstance(value, torch.Tensor) and value.ndim > 1:
                reachable[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    memory = cache.memory()
    assert memory.total == sum(reachable.values())
    assert memory.rows == 24 and memory.seen == 60
    assert memory.full == 2 * 60 * 2 * 2 * 16 * 4 + memory.other_layers
    assert "24 of 60 tokens" in str(memory)


# Positions and randomness


def test_positions_are_true_and_unique_and_sinks_and_recent_rows_stay():
    model, cache = tiny(), None
    cache = CompressedCache(model, SMALL, interval=8)
    for step in range(100):
        model(tokens(2, 40 if step == 0 else 1, seed=step), cache=cache)
        for layer in cache.compressed:
            positions = layer.positions
            assert (positions.diff(dim=-1) > 0).all()
            assert (positions[..., :2] == torch.arange(2)).all()
            newest = torch.arange(36 + step, 40 + step)
            assert (positions[..., -4:] == newest).all()
    assert not torch.equal(cache.compressed[0].positions[:, 0], cache.compressed[0].positions[:, 1])


@pytest.mark.parametrize(
    "method", [SMALL, VaSE(24, sinks=2, recent=4, scorer="dkv"), Random(24, sinks=2, recent=4)], ids=repr
)
def test_the_seed_decides(method):
    model, ids = tiny(), tokens(1, 80)
    kept = []
    for seed in (0, 0, 1):
        cache = CompressedCache(model, method, interval=8, seed=seed)
        decode(model, cache, ids)
        kept.append([layer.positions for layer in cache.compressed])
    assert all(torch.equal(a, b) for a, b in zip(kept[0], kept[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(kept[0], kept[2], strict=True))


def test_global_generators_are_untouched():
    """In a process of its own: the type checks of this suite draw from Python's generator."""
    code = """
import random, numpy, torch
from support import tiny, tokens
from kvcomp import CompressedCache
from kvcomp.evict import METHODS
model, ids = tiny(), tokens(1, 300)
before = torch.get_rng_state(), numpy.random.get_state()[1].copy(), random.getstate()
for name in METHODS:
    cache = CompressedCache(model, METHODS[name](budget=160), interval=8)
    model(ids[:, :200], cache=cache), model(ids[:, 200:], cache=cache)
    assert cache.compressed[0].count.round == 2
assert torch.equal(before[0], torch.get_rng_state())
assert (before[1] == numpy.random.get_state()[1]).all() and before[2] == random.getstate()
"""
    run_python(code)


# Going back


def test_crop_then_go_on_equals_never_drafted():
    model, ids = tiny(), tokens(1, 100)
    never, drafted = (CompressedCache(model, SMALL, interval=8) for _ in range(2))
    for cache in (never, drafted):
        model(ids[:, :40], cache=cache)
    drafted.activate_past_recording()
    for start in range(40, 90, 5):
        drafts = torch.cat([ids[:, start : start + 5], tokens(1, 3, seed=start)], dim=1)
        logits = model(drafts, cache=drafted).logits[:, :5]
        drafted.crop(-3)
        reference = model(ids[:, start : start + 5], cache=never).logits
        assert relative_error(logits, reference) < 1e-5
        for one, other in zip(never.compressed, drafted.compressed, strict=True):
            assert torch.equal(one.positions, other.positions)
            assert one.count.seen == other.count.seen == start + 5
            queries = [layer.recent_queries.queries[:, :, -4:] for layer in (one, other)]
            torch.testing.assert_close(*queries, rtol=1e-4, atol=1e-4)  # 5 or 8 tokens at once round differently


def test_crop_of_an_empty_cache_does_nothing():
    cache = CompressedCache(tiny("gemma3"), SMALL)
    cache.crop(0)
    assert cache.get_seq_length() == 0


def test_a_cache_filled_under_inference_mode_goes_on_without_it():
    model, ids = tiny(), tokens(1, 80)
    cache, other = (CompressedCache(model, SMALL, interval=8) for _ in range(2))
    with torch.inference_mode():
        model(ids[:, :43], cache=cache)
    model(ids[:, :43], cache=other)
    with torch.enable_grad():
        for step in range(43, 80):
            token = ids[:, step, None]
            assert torch.equal(model(token, cache=cache).logits, model(token, cache=other).logits)


def test_a_model_loaded_with_the_name_of_our_attention_works_in_a_new_process(tmp_path):
    model = tiny()
    CompressedCache(model, SMALL)
    torch.save(model, tmp_path / "model.pt")
    run_python(f"""
import torch
from support import tokens
from kvcomp import CompressedCache
from kvcomp.evict import VaSE
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
model(tokens(1, 40), cache=CompressedCache(model, VaSE(128)))
""")


def test_reset_equals_a_fresh_cache():
    model, ids = tiny("gemma3"), tokens(1, 80)
    cache = CompressedCache(model, SMALL, interval=8)
    first = decode(model, cache, ids)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory().keys == 0
    assert all(torch.equal(a, b) for a, b in zip(first, decode(model, cache, ids), strict=True))


def test_batch_operations_move_every_tensor():
    model, ids = tiny(), tokens(3, 80)
    for operation, rows in (
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ):
        changed, direct = (
            CompressedCache(model, H2O(24) | KeyNorm(20, sinks=2, recent=4), interval=8) for _ in range(2)
        )
        model(ids[:, :40], cache=changed)
        operation(changed)
        decode(model, direct, ids[rows], steps=0)
        for step in range(40, 80):
            token = ids[rows, step, None]
            assert relative_error(model(token, cache=changed).logits, model(token, cache=direct).logits) < 1e-5
        for one, other in zip(changed.compressed, direct.compressed, strict=True):
            assert torch.equal(one.positions, other.positions)


def test_an_interrupted_forward_is_rolled_back():
    model, ids = tiny(layers=3), tokens(1, 80)
    whole, broken = (CompressedCache(model, SMALL, interval=8) for _ in range(2))
    for cache in (whole, broken):
        model(ids[:, :40], cache=cache)
    for step in range(40, 47):
        handle = model.model.layers[step % 3].mlp.register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, step, None], cache=broken)
        handle.remove()
        assert torch.equal(
            model(ids[:, step, None], cache=broken).logits, model(ids[:, step, None], cache=whole).logits
        )


def test_an_interrupted_prompt_leaves_an_empty_cache():
    model, ids = tiny(layers=3), tokens(1, 80)
    broken, whole = (CompressedCache(model, SMALL, interval=8) for _ in range(2))
    handle = model.model.layers[1].mlp.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids, cache=broken)
    handle.remove()
    for one, other in zip(decode(model, broken, ids), decode(model, whole, ids), strict=True):
        assert torch.equal(one, other)


def test_a_long_forward_that_was_interrupted_after_a_compression_is_refused():
    model, ids = tiny(layers=3), tokens(1, 80)
    cache = CompressedCache(model, SMALL, interval=8)
    model(ids[:, :10], cache=cache)
    handle = model.model.layers[1].mlp.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 10:], cache=cache)
    handle.remove()
    with pytest.raises(ValueError, match="half-way"):
        model(ids[:, :1], cache=cache)
    cache.reset()
    model(ids, cache=cache)


def _interrupt(*_):
    raise KeyboardInterrupt


# A pipeline and a method of one's own


def test_a_window_longer_than_the_interval_and_a_budget_per_stage():
    model, oracle = tiny(), MaskedOracle(tiny())
    cache = CompressedCache(model, SnapKV(30, recent=4, window=20) | KeyNorm(24, sinks=2, recent=4), interval=4)
    ids, errors = tokens(1, 80), []
    for start, stop in [(0, 40), *((step, step + 1) for step in range(40, 80))]:
        before = kept_positions(cache) if start else {0: torch.empty(1, 2, 0), 1: torch.empty(1, 2, 0)}
        before = {index: positions.int() for index, positions in before.items()}
        errors.append(
            relative_error(model(ids[:, start:stop], cache=cache).logits, oracle.step(ids[:, start:stop], before))
        )
    assert max(errors) < 1e-5 and cache.compressed[0].storage.capacity == 28
