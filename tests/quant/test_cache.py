"""A cache with packed rows: logits are those of the same rows decoded, and every operation moves codes as they are."""

import copy
import json
import pickle

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import FAMILIES, SHAPE, generate, left_padded, relative_error, tiny, tokens
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig

from kvcomp import CompressedCache
from kvcomp.core import EMPTY
from kvcomp.evict import H2O, KeyNorm, Random, SnapKV, VaSE
from kvcomp.layer import CompressedLayer
from kvcomp.ops import packed_decode
from kvcomp.quant import MixedKV, MixedPrecision

SMALL = {"sinks": 2, "recent": 4}
INT4 = MixedPrecision(4, exact=0.1, **SMALL)
INT8 = MixedPrecision(8, exact=0.1, **SMALL)
ROTATED = MixedPrecision.k4v4_rotated(group_size=8, **SMALL)
VASE = VaSE(24, sinks=2, recent=4, window=4, protected=6)
KINDS = {
    "int4": INT4,
    "rotated": ROTATED,
    "vase | int4": VASE | INT4,
    "h2o | k8v4": H2O(24, recent=4) | MixedPrecision.k8v4(**SMALL),
    "int4 | key-norm": INT4 | KeyNorm(24, sinks=0, recent=2),
}
each_kind = pytest.mark.parametrize("compressor", KINDS.values(), ids=KINDS)


class Witness(CompressedCache):
    """A cache beside which, at every forward, an untouched model runs on a DynamicCache that holds the decoded rows.

    `errors` has the largest relative error of each forward."""

    def __init__(self, model, reference, compressor, interval=8, **more):
        super().__init__(model, compressor, interval=interval, **more)
        self.reference, self.errors, self.packed, self.masks = reference, [], 0, {}
        for index, layer in enumerate(reference.get_decoder().layers):
            layer.self_attn.register_forward_pre_hook(
                lambda *call, index=index: self._swap(index, *call), with_kwargs=True
            )
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _swap(self, index, module, args, kwargs):
        if index in self.masks:
            kwargs["attention_mask"] = self.masks[index]
        return args, kwargs

    def _before(self, module, args, inputs):
        self.start, self.before, self.hidden = self.get_seq_length(), DynamicCache(config=module.config), {}
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, CompressedLayer):
                self.before.layers[index] = copy.deepcopy(layer)
            elif layer.is_initialized:
                self.packed += isinstance(layer.storage.kv, MixedKV)
                self.before.layers[index].update(layer.keys.clone(), layer.values.clone())
                self.hidden[index] = layer.positions == -1
            else:
                self.hidden[index] = torch.zeros(1, 2, 0, dtype=torch.bool)

    def _after(self, module, args, inputs, output):
        ids, mask = inputs["input_ids"] if "input_ids" in inputs else args[0], inputs.get("attention_mask")
        (batch, new), positions = ids.shape, inputs.get("position_ids")
        positions = torch.arange(self.start, self.start + new).expand(batch, new) if positions is None else positions
        real = torch.ones(batch, new, dtype=torch.bool)
        if mask is not None and mask.ndim == 2:
            real = mask[:, -new:] == 1
        self._make_masks(mask, real, new)
        passed = {"attention_mask": mask} if mask is not None and mask.ndim == 2 else {}
        reference = self.reference(ids, cache=self.before, position_ids=positions, **passed).logits
        logits = output.logits
        reference, real = reference[:, -logits.shape[1] :], real[:, -logits.shape[1] :]
        error = (logits - reference).abs().amax(-1)[real].max() / reference.abs()[real].max() if real.any() else 0.0
        self.errors.append(float(torch.as_tensor(error).nan_to_num(torch.inf)))

    def _make_masks(self, mask, real, new):
        """Additive masks: older rows but padding, then the new tokens up to the query itself."""
        config, lowest = self.reference.config, torch.finfo(self.reference.dtype).min
        group = config.num_attention_heads // config.num_key_value_heads
        causal = torch.ones(new, new, dtype=torch.bool).tril()
        for index, hidden in self.hidden.items():
            if mask is not None and mask.ndim == 4:
                self.masks[index] = mask
                continue
            older = ~hidden.expand(len(real), -1, -1)[:, :, None].expand(-1, -1, new, -1)
            fresh = (causal & real[:, None, None]).expand(-1, older.shape[1], -1, -1)
            shown = torch.cat([older, fresh], dim=-1).repeat_interleave(group, dim=1)
            self.masks[index] = torch.zeros(shown.shape, dtype=self.reference.dtype).masked_fill(~shown, lowest)


def witness(compressor, family="qwen3", attention=None, **more):
    model = tiny(family, attention)
    return model, Witness(model, tiny(family, attention), compressor, **more)


def filled(model, compressor, prompt=40, steps=11, batch=2, interval=8, seed=5):
    cache = CompressedCache(model, compressor, interval=interval, seed=seed)
    model(tokens(batch, prompt), cache=cache)
    for step in range(steps):
        model(tokens(batch, 1, seed=step), cache=cache)
    return cache


def decode(model, cache, steps, batch=2, seed=100):
    return [model(tokens(batch, 1, seed=seed + step), cache=cache).logits for step in range(steps)]


def rows_of(cache):
    """Decoded keys, values and positions of every layer."""
    return [
        tensor.clone()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values, *([layer.positions] if hasattr(layer, "positions") else []))
    ]


def packed_bytes(cache):
    """All that is stored of each packed row, by (layer, batch row, head, position)."""
    found = {}
    for layer in cache.compressed:
        packed = layer.storage.packed
        if packed is None:
            continue
        parts = [*packed.keys.tensors.values(), *packed.values.tensors.values()]
        parts = [part.contiguous().view(torch.uint8).tolist() for part in parts]
        for b, row in enumerate(packed.positions.tolist()):
            for h, head in enumerate(row):
                for slot, position in enumerate(head):
                    if position >= 0:
                        found[layer.layer_idx, b, h, position] = [part[b][h][slot] for part in parts]
    return found


def assert_same(one, other):
    for first, second in zip(one, other, strict=True):
        assert first.dtype == second.dtype and torch.equal(first, second)


# Logits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"), [*((family, "vase | int4") for family in FAMILIES), *(("qwen3", name) for name in KINDS)]
)
def test_every_step_equals_the_model_on_decoded_rows(family, name):
    model, cache = witness(KINDS[name], family)
    generate(model, tokens(2, 40), new=24, cache=cache)
    assert len(cache.errors) == 24 and max(cache.errors) < 1e-5
    assert cache.packed >= 20 and all(layer.count.round >= 3 for layer in cache.compressed)


def test_the_witness_notices_scales_of_one_head_that_are_a_tenth_too_large():
    model, cache = witness(VASE | INT4)
    generate(model, tokens(2, 40), new=4, cache=cache)

    def spoil(*_):
        cache.compressed[0].storage.packed.values.scale[0, 0] *= 1.1

    model.register_forward_pre_hook(spoil)
    model(tokens(2, 1), cache=cache)
    assert max(cache.errors[:-1]) < 1e-5 < 1e-4 < cache.errors[-1]


MODES = {
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},  # case 16
    "chunked prefill": {"prefill_chunk_size": 7},
    "drafting": {"prompt_lookup_num_tokens": 4},
    "assistant": {},
}


@pytest.mark.parametrize(
    ("family", "attention", "mode"),
    [
        *(("qwen3", "sdpa", mode) for mode in MODES),
        *(("qwen3", "eager", mode) for mode in ("beams", "drafting")),
        *(("gemma3", "sdpa", mode) for mode in ("beams", "chunked prefill", "assistant")),
        *(("gpt_oss", "eager", mode) for mode in ("beams", "chunked prefill", "drafting")),
    ],
)
def test_every_forward_of_generate_equals_the_model_on_decoded_rows(family, attention, mode):
    torch.manual_seed(0)
    settings, ids = MODES[mode], tokens(1, 10).repeat(1, 4)
    if mode == "assistant":
        settings = {"assistant_model": tiny(family)}
    model, cache = witness(VASE | INT4, family, attention, interval=4 if mode in ("drafting", "assistant") else 8)
    generate(model, ids, new=20, cache=cache, **settings)
    assert max(cache.errors) < 1e-5
    assert cache.packed > (0 if mode == "assistant" else 5)  # all drafts of an equal assistant are accepted


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"prefill_chunk_size": 7}], ids=repr)
@pytest.mark.parametrize(
    ("family", "attention"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("gemma3", "sdpa"), ("gpt_oss", None)]
)
def test_left_padded_batches(family, attention, settings):
    model, cache = witness(VASE | INT4, family, attention)
    ids, mask = left_padded([40, 9, 23])
    generate(model, ids, mask, new=18, cache=cache, **settings)
    assert max(cache.errors) < 1e-5 and cache.packed > 5


@each_kind
def test_left_padded_batches_with_every_kind(compressor):
    model, cache = witness(compressor)
    ids, mask = left_padded([40, 9, 23])
    generate(model, ids, mask, new=18, cache=cache, prefill_chunk_size=7)
    assert max(cache.errors) < 1e-5 and cache.packed > 5


@pytest.mark.parametrize("name", ["int4", "vase | int4"])
@pytest.mark.parametrize("filler", [0, 1, 30])
def test_a_padded_batch_fed_in_chunks_with_any_position_for_padding(name, filler):
    """What `position_ids` say of padding does not matter: 0 and 1 are both in use."""
    ids, mask = left_padded([40, 9, 23])
    model, cache = witness(KINDS[name])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, filler)
    for start in range(0, 40, 8):
        part = slice(start, start + 8)
        model(ids[:, part], attention_mask=mask[:, : start + 8], position_ids=positions[:, part], cache=cache)
    assert max(cache.errors) < 1e-5


@pytest.mark.parametrize("chunk", [3, 20])
@each_kind
def test_many_tokens_at_once_see_the_decoded_rows(compressor, chunk):
    model, cache = witness(compressor)
    text = tokens(3, 40 + 5 * chunk)
    for part in text.split([40] + [chunk] * 5, dim=1):
        model(part, cache=cache)
    assert max(cache.errors) < 1e-5


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in KINDS), ("vase | int4", "eager")])
def test_a_second_question(name, attention):
    model, cache = witness(KINDS[name], attention=attention)
    text = generate(model, tokens(1, 30), new=8, cache=cache)
    text = generate(model, torch.cat([text, tokens(1, 5, seed=2)], dim=1), new=12, cache=cache)
    assert max(cache.errors) < 1e-5 and cache.get_seq_length() == text.shape[1] - 1


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    "compressor",
    [
        MixedPrecision(8, exact=0.0, sinks=0, recent=0),
        Random(12, sinks=0, recent=1) | MixedPrecision(2, sinks=0, recent=0),
    ],
    ids=["alone", "evicted"],
)
def test_no_row_may_be_recent(compressor, interval):
    model, cache = witness(compressor, interval=interval)
    generate(model, tokens(2, 20), new=16, cache=cache)
    assert max(cache.errors) < 1e-5 and cache.compressed[0].storage.buffered < interval


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_ones_own(attention):
    model, cache = witness(VASE | INT4, attention=attention)
    model(tokens(2, 40), cache=cache)
    for step in range(20):
        stored = cache.compressed[0].storage.rows
        mask = torch.zeros(2, 1, 1, stored + 1)
        mask[0, ..., step % stored], mask[1, ..., 3:9] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
        model(tokens(2, 1, seed=step), attention_mask=mask, cache=cache)
    assert max(cache.errors) < 1e-5 and cache.packed >= 40


def test_learned_sinks_take_their_share():  # case 39
    model, reference = tiny("gpt_oss"), tiny("gpt_oss")
    for each in (model, reference):
        for name, parameter in each.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(6.0)
    cache = Witness(model, reference, VASE | INT8)
    generate(model, tokens(2, 40), new=20, cache=cache)
    assert max(cache.errors) < 1e-5 and cache.packed >= 10


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in KINDS), ("vase | int4", torch.float16)], ids=str
)
def test_half_precision_follows_the_model_on_decoded_rows(name, dtype):
    model, reference = tiny(dtype=dtype), tiny(dtype=dtype)
    cache = Witness(model, reference, KINDS[name])
    generate(model, tokens(2, 40), new=16, cache=cache)
    assert max(cache.errors) < 40 * torch.finfo(dtype).eps
    for layer in cache.compressed:
        assert layer.keys.dtype == layer.values.dtype == dtype


@pytest.mark.parametrize("head_dim", [7, 24, 80])
def test_other_head_dims(head_dim):  # cases 50, 51
    if head_dim == 7:
        config = GPT2Config(vocab_size=97, n_embd=21, n_head=3, n_layer=2, initializer_range=0.2, n_positions=256,
                            eos_token_id=None, bos_token_id=None)  # fmt: skip
    else:
        config = LlamaConfig(**SHAPE | {"head_dim": head_dim, "num_key_value_heads": 1})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, plain = tokens(2, 40), None
    for bits, bound in ((2, 2.0), (4, 0.5), (8, 0.05)):
        cache = CompressedCache(model, MixedPrecision(bits, **SMALL), interval=8)
        logits = [model(ids, cache=cache).logits, *decode(model, cache, 12)][-1]
        if plain is None:
            full = DynamicCache(config=model.config)
            plain = [model(ids, cache=full).logits, *decode(model, full, 12)][-1]
        assert relative_error(logits, plain) < bound
        assert cache.compressed[0].keys.shape[-1] == head_dim


@pytest.mark.parametrize("settings", [{"prompt_lookup_num_tokens": 3}, {"assistant": True}], ids=repr)
@pytest.mark.parametrize("compressor", [INT8, INT4], ids=["int8", "int4"])
def test_drafting_gives_the_tokens_of_greedy_decoding(compressor, settings):  # case 18
    model, ids = tiny(), tokens(1, 5).repeat(1, 6)
    settings = {"assistant_model": tiny()} if "assistant" in settings else settings
    drafted = CompressedCache(model, compressor, interval=4)
    out = generate(model, ids, new=40, cache=drafted, **settings)
    assert torch.equal(out, generate(model, ids, new=40, cache=CompressedCache(model, compressor, interval=4)))
    assert drafted.compressed[0].count.round >= 5 and drafted.compressed[0].storage.buffered < 4 + 4 + 5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_packed_yet_is_bit_identical_to_no_quantization(attention):  # O1
    model, ids = tiny(attention=attention), tokens(2, 40)
    quantized, plain = (
        CompressedCache(model, compressor, interval=8)
        for compressor in (Random(200) | MixedPrecision(4, recent=100), Random(200))
    )
    assert_same(
        [model(ids, cache=quantized).logits, *decode(model, quantized, 20)],
        [model(ids, cache=plain).logits, *decode(model, plain, 20)],
    )


def test_all_rows_exact_follows_the_plain_model():
    model, ids = tiny(), tokens(2, 40)
    cache, plain = (
        CompressedCache(model, MixedPrecision(4, exact=1.0, **SMALL), interval=8),
        DynamicCache(config=model.config),
    )
    model(ids, cache=cache), model(ids, cache=plain)
    for one, other in zip(decode(model, cache, 30), decode(model, plain, 30), strict=True):
        assert relative_error(one, other) < 1e-5


# What stays as it is -------------------------------------------------------------------------------------------------


class Recorded:
    """All rows that a model has written: by layer, keys and values of every token, oldest first."""

    def __init__(self, monkeypatch):
        self.rows, update = {}, CompressedLayer.update

        def recording(layer, keys, values, *args, **kwargs):
            older = self.rows.get(layer.layer_idx, (keys[:, :, :0], values[:, :, :0]))
            new = zip(older, (keys, values), strict=True)
            self.rows[layer.layer_idx] = [torch.cat([old, fresh], dim=2) for old, fresh in new]
            return update(layer, keys, values, *args, **kwargs)

        monkeypatch.setattr(CompressedLayer, "update", recording)

    def exact(self, layer):
        """By batch row and head, the positions of rows that are stored as they were written."""
        index = layer.positions.long()[..., None]
        keys, values = (tensor.gather(2, index.expand(*index.shape[:3], 16)) for tensor in self.rows[layer.layer_idx])
        same = ((keys == layer.keys) & (values == layer.values)).all(-1)
        return [layer.positions[b, h][same[b, h]].tolist() for b in range(len(same)) for h in range(2)]


@pytest.mark.parametrize("prompt", [3, 8, 9, 40])
@pytest.mark.parametrize("evictor", [None, VaSE(24, sinks=2, recent=8, window=4, protected=12)], ids=["alone", "vase"])
def test_newest_rows_and_sinks_are_exact_after_every_step(monkeypatch, prompt, evictor):  # case 43
    recorded, quantizer = Recorded(monkeypatch), MixedPrecision(4, exact=0.0, sinks=2, recent=8)
    model = tiny()
    cache = CompressedCache(model, quantizer if evictor is None else evictor | quantizer, interval=4)
    for step in range(31):
        model(tokens(1, prompt if step == 0 else 1, seed=step), cache=cache)
        seen = prompt + step
        for layer in cache.compressed:
            for exact in recorded.exact(layer):
                assert set(exact) >= {0, 1} | set(range(max(seen - 8, 0), seen))
                assert len(exact) < 8 + 4 + 2  # all else is packed: never more rows than an interval wait
    assert cache.compressed[0].count.round >= 5


@pytest.mark.parametrize("name", ["vase | int4", "int4 | key-norm", "int4"])
def test_codes_of_a_row_never_change(name):
    model, (ids, mask), known, states = tiny(), left_padded([40, 17]), {}, []
    cache = CompressedCache(model, KINDS[name], interval=8)
    model.register_forward_hook(
        lambda *_: states.append(packed_bytes(cache) if cache.compressed[0].count.fresh < 2 else {})
    )
    generate(model, ids, mask, new=50, cache=cache)
    for state in states:
        assert all(known.get(key, row) == row for key, row in state.items())
        known |= state
    assert len(known) > 100 and cache.compressed[0].count.round >= 6


@each_kind
def test_a_packed_row_never_becomes_exact(compressor):
    model, cache, packed = tiny(), None, set()
    cache = CompressedCache(model, compressor, interval=8)
    for step in range(40):
        model(tokens(1, 40 if step == 0 else 1, seed=step), cache=cache)
        for layer in cache.compressed:
            for h in range(2):
                name = (layer.layer_idx, h)
                packed |= {
                    (*name, position) for position in layer.storage.packed.positions[0, h].tolist() if position >= 0
                }
                loose = torch.cat([layer.storage.exact.positions[0, h], layer.storage.recent.positions[0, h]])
                assert not {(*name, position) for position in loose.tolist()} & packed


@each_kind
def test_replacing_one_text_leaves_the_others_bit_identical(compressor):  # cases 11, 53
    model, text = tiny(), tokens(3, 64)
    other = text.clone()
    other[1] = (text[1] * 7 + 3) % 97
    results = []
    for ids in (text, other):
        cache = CompressedCache(model, compressor, interval=8, seed=3)
        logits = [model(part, cache=cache).logits[[0, 2]] for part in ids.split([40] + [1] * 24, dim=1)]
        codes = {key: row for key, row in packed_bytes(cache).items() if key[1] != 1}
        results.append(([*logits, *(tensor[[0, 2]] for tensor in rows_of(cache))], codes))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("compressor", [MixedPrecision(8, **SMALL), MixedPrecision(4, exact=0.0, **SMALL)], ids=repr)
def test_padding_does_not_change_what_a_text_makes(compressor):  # case 11
    """The embedding of the padding is huge, and its rows must not count for anything."""
    model, (ids, mask) = tiny(), left_padded([36, 13])
    model.get_input_embeddings().weight[0] *= 50
    batch = generate(model, ids, mask, new=12, cache=CompressedCache(model, compressor, interval=8))
    alone = generate(model, ids[1:, 23:], new=12, cache=CompressedCache(model, compressor, interval=8))
    assert torch.equal(batch[1, 23:], alone[0])


def test_the_same_schedule_packs_the_same_rows_in_any_order_of_feeding():  # O8, case 41
    """After the first 12 tokens, and then every 8, 8 more rows are packed, whether fed at once or one by one."""
    model, text = tiny(), tokens(2, 68)
    quantizer, caches = MixedPrecision(4, exact=0.0, sinks=0, recent=4), []
    for sizes in ([12] + [8] * 7, [1] * 68, [12] + [4] * 14, [12] + [2] * 28):
        caches.append(CompressedCache(model, quantizer, interval=8))
        for part in text.split(sizes, dim=1):
            model(part, cache=caches[-1])
    first = packed_bytes(caches[0])
    assert len(first) == 2 * 2 * 2 * 64
    for other in caches[1:]:
        codes = packed_bytes(other)
        assert codes.keys() == first.keys()
        assert sum(codes[key] != row for key, row in first.items()) <= 0.02 * len(first)  # products round differently
        for one, same in zip(caches[0].compressed, other.compressed, strict=True):
            assert relative_error(same.keys, one.keys) < 0.02


def test_a_prompt_at_once_packs_the_rows_of_the_first_layer_alike():
    """Another schedule lets later layers see other rows packed; what the first one writes depends on the text alone."""
    model, text = tiny(), tokens(1, 68)
    quantizer, states = MixedPrecision(4, exact=0.0, sinks=0, recent=4), []
    for sizes in ([68], [20, 20, 28], [7] * 9 + [5]):
        cache = CompressedCache(model, quantizer, interval=8)
        for part in text.split(sizes, dim=1):
            model(part, cache=cache)
        states.append({key: row for key, row in packed_bytes(cache).items() if key[0] == 0})
    for other in states[1:]:
        common = other.keys() & states[0].keys()
        assert len(common) >= 2 * 50
        assert sum(other[key] != states[0][key] for key in common) <= 0.02 * len(common)


def test_global_generators_stay_untouched():  # O7
    model, ids = tiny(), tokens(2, 40)
    torch_state, numpy_state = torch.get_rng_state(), numpy.random.get_state()
    quantizer = MixedPrecision(4, exact=0.2, exact_by="random", **SMALL)
    generate(model, ids, new=20, cache=CompressedCache(model, VASE | quantizer, interval=8))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(numpy.array_equal(new, old) for new, old in zip(numpy.random.get_state(), numpy_state, strict=True))


# Operations ----------------------------------------------------------------------------------------------------------

OPERATIONS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "reorder twice": (lambda cache: [cache.reorder_cache(torch.tensor([2, 0, 1])) for _ in range(2)], [1, 2, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "select by mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
}


@each_kind
def test_batch_operations_equal_indexing_the_decoded_rows(compressor):  # case 16
    model = tiny()
    filled_once = filled(model, compressor, batch=3)
    for call, rows in OPERATIONS.values():
        changed, plain = copy.deepcopy(filled_once), copy.deepcopy(filled_once)
        before = [tensor[rows] for tensor in rows_of(plain)]
        call(changed)
        assert_same(rows_of(changed), before)
        for step in range(12 if len(rows) == 3 else 4):  # then a product of another size may turn a code
            token = tokens(3, 1, seed=step)
            one, other = model(token[rows], cache=changed).logits, model(token, cache=plain).logits[rows]
            assert relative_error(one, other) < 1e-5
        for one, other in zip(changed.compressed, plain.compressed, strict=True):
            assert torch.equal(one.positions, other.positions[rows])


def by_value(cache):
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_value], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["int4", "vase | int4", "h2o | k8v4"])
def test_a_copy_goes_on_alone(name, copied):
    compressor = KINDS[name]
    model = tiny("gemma3")
    cache = filled(model, compressor)
    other = copied(cache)
    assert_same(rows_of(other), rows_of(cache))
    expected = decode(model, cache, 12)
    assert other.get_seq_length() == 51
    assert_same(decode(model, other, 12), expected)


@pytest.mark.parametrize(
    ("name", "family", "dtype"),
    [*((name, "qwen3", torch.bfloat16) for name in KINDS), ("vase | int4", "gemma3", torch.float32)], ids=str,
)  # fmt: skip
def test_a_loaded_cache_goes_on_bit_for_bit(tmp_path, name, family, dtype):
    model, path, compressor = tiny(family, dtype=dtype), tmp_path / "cache.safetensors", KINDS[name]
    for steps in (0, 11):
        cache = filled(model, compressor, steps=steps)
        cache.save(path)
        other = CompressedCache.load(path, tiny(family, dtype=dtype))
        assert other.compressor == compressor
        assert_same(rows_of(other), rows_of(cache))
        assert packed_bytes(other) == packed_bytes(cache)
        assert_same(decode(model, other, 12), decode(model, cache, 12))
        assert other.memory() == cache.memory()
        for one, loaded in zip(cache.compressed, other.compressed, strict=True):
            assert torch.equal(one.positions, loaded.positions) and one.count == loaded.count


def test_an_unknown_format_of_a_file_is_refused(tmp_path):
    model, path = tiny(), tmp_path / "cache.safetensors"
    filled(model, INT4).save(path)
    save_file(load_file(path), path, metadata={"kvcomp": json.dumps({"format": 99})})
    with pytest.raises(ValueError, match="format 99"):
        CompressedCache.load(path, model)


def test_a_cache_may_be_saved_while_drafts_can_be_rolled_back(tmp_path):
    model, path = tiny(), tmp_path / "cache.safetensors"
    cache = filled(model, VASE | INT4)
    cache.activate_past_recording()
    model(tokens(2, 15), cache=cache)
    cache.save(path)
    loaded = CompressedCache.load(path, model)
    for each in (cache, loaded):
        each.crop(-9)
    assert_same(rows_of(loaded), rows_of(cache))
    assert_same(decode(model, loaded, 12), decode(model, cache, 12))


@each_kind
def test_dropped_drafts_leave_no_trace(compressor):
    model, ids = tiny(), tokens(2, 120)
    plain, drafted = (filled(model, compressor, steps=0) for _ in range(2))
    drafted.activate_past_recording()
    for start in range(40, 90, 5):
        expected = model(ids[:, start : start + 5], cache=plain).logits
        model(torch.cat([ids[:, start : start + 5], tokens(2, 3, seed=start)], dim=1), cache=drafted)
        drafted.crop(-3)
        assert relative_error(drafted.compressed[1].keys, plain.compressed[1].keys) < 0.05
    for one, other in zip(drafted.compressed, plain.compressed, strict=True):
        assert torch.equal(one.positions, other.positions) and one.count.round == other.count.round
    assert expected.isfinite().all()


def test_cropping_packed_rows_is_refused_and_changes_nothing():
    model = tiny()
    cache = filled(model, INT4, steps=3)
    before = rows_of(cache)
    with pytest.raises(ValueError, match="cannot crop 4 tokens: only the 3 newest"):
        cache.crop(-4)
    assert_same(rows_of(cache), before)
    cache.crop(-3)
    assert cache.get_seq_length() == 40


@each_kind
def test_reset_equals_a_fresh_cache(compressor):
    model, ids = tiny(), tokens(2, 40)
    cache = filled(model, compressor)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory().total == 0
    fresh = CompressedCache(model, compressor, interval=8, seed=5)
    assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=fresh).logits)
    assert_same(decode(model, cache, 20), decode(model, fresh, 20))
    assert cache.memory() == fresh.memory()


@each_kind
@pytest.mark.parametrize("gradients", [False, True], ids=["frozen", "with gradients"])
def test_inference_mode_may_come_and_go(compressor, gradients):
    model, ids = tiny().requires_grad_(gradients), tokens(2, 56)
    mixed, plain = (CompressedCache(model, compressor, interval=8) for _ in range(2))
    modes = [torch.inference_mode, torch.enable_grad, torch.no_grad]
    for index, part in enumerate(ids.split([40] + [1] * 16, dim=1)):
        with modes[(index + 3) // 4 % 3]():  # as a prompt and some tokens, then others
            one = model(part, cache=mixed).logits
        other = model(part, cache=plain).logits
        # With a gradient the definitions run in place of the kernels, which sum in another order.
        assert (one - other).abs().max() <= (5e-5 if gradients else 0) * other.abs().max()


@pytest.mark.parametrize("compressor", [VASE, VASE | INT4], ids=["evicted", "packed"])
def test_a_cache_reordered_under_inference_mode_goes_on_without_it(compressor):
    model = tiny()
    cache = filled(model, compressor)
    with torch.inference_mode():
        cache.reorder_cache(torch.tensor([1, 0]))
    decode(model, cache, 10)


# Memory --------------------------------------------------------------------------------------------------------------


def reachable(value, found, seen):
    """All tensors with a batch axis and more, held by `value`."""
    if id(value) in seen or isinstance(value, torch.nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.ndim > 1:
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, dict):
        for part in value.values():
            reachable(part, found, seen)
    elif isinstance(value, list | tuple):
        for part in value:
            reachable(part, found, seen)
    elif hasattr(value, "__dict__"):
        reachable(vars(value), found, seen)


def held(cache):
    found = {}
    reachable(cache.layers, found, set())
    return sum(size for address, size in found.items() if address)


@pytest.mark.parametrize(("family", "name"), [*(("qwen3", name) for name in KINDS), ("gemma3", "vase | int4")])
def test_memory_counts_the_bytes_behind_every_tensor(family, name):  # O6
    model = tiny(family)
    for steps in (0, 13):
        cache = filled(model, KINDS[name], steps=steps)
        memory = cache.memory()
        assert memory.total == sum(memory.parts.values()) == held(cache)
        assert memory.full == 2 * (40 + steps) * 2 * 2 * 16 * 4 * len(cache.compressed) + memory.other_layers
        assert memory.codes > 0 and memory.seen == 40 + steps


@pytest.mark.parametrize(
    "compressor",
    [MixedPrecision(4, recent=0, sinks=0), Random(24, sinks=0, recent=2) | MixedPrecision(4, recent=0)],
    ids=repr,
)
def test_memory_without_recent_rows(compressor):
    model = tiny()
    cache = filled(model, compressor, steps=0)
    memory = cache.memory()
    assert memory.full == 2 * 2 * 40 * 2 * 2 * 16 * 4
    assert memory.bits_per_element > 4 and memory.compression > 0.5


def test_memory_does_not_grow_over_500_steps():
    model, totals, parts, interval = tiny(layers=1), [], set(), 8
    cache = CompressedCache(model, VASE | INT4, interval=interval)
    model(tokens(1, 60), cache=cache)
    for step in range(500):
        model(tokens(1, 1, seed=step), cache=cache)
        memory = cache.memory()
        totals.append(memory.total)
        parts.add(tuple((name, size) for name, size in memory.parts.items() if name in ("keys", "values", "queries")))
    assert len(parts) == 1  # the buffers never change
    assert set(totals[2 * interval :]) == {totals[-1]}


def test_stored_rows_take_the_bytes_of_the_formula():
    """2 KV heads of 16 channels in 3 texts, int4 in groups of 8."""
    model = tiny(layers=1, dtype=torch.bfloat16)
    cache = CompressedCache(model, MixedPrecision(4, group_size=8, exact=0.1, sinks=4, recent=16), interval=8)
    model(tokens(3, 220), cache=cache)
    exact = 4 + 20
    rows, memory = 220 - 16 - exact, cache.memory()
    heads = 3 * 2
    assert memory.codes == heads * rows * 2 * 8  # 16 channels
    assert memory.scales == heads * rows * 2 * 2 * (2 + 2)
    assert memory.exact == heads * exact * 2 * 16 * 2
    assert memory.keys == memory.values == heads * (16 + 8) * 16 * 2
    assert memory.positions == heads * (rows + exact + 16 + 8) * 4


@each_kind
def test_no_tensor_of_the_length_of_the_prompt_survives(compressor):
    model = tiny(layers=1)
    cache = CompressedCache(model, compressor, interval=8)
    model(tokens(1, 1000), cache=cache)
    buffer = cache.compressed[0].storage.buffer
    assert buffer.keys.untyped_storage().nbytes() <= 2 * 32 * 16 * 4
    stored = cache.compressed[0].storage
    older = [*stored.packed.keys.tensors.values(), *stored.packed.values.tensors.values(), stored.packed.positions]
    older += stored.exact.tensors + ([] if stored.packed.mass is None else [stored.packed.mass])
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in older}
    assert sum(storages.values()) == sum(tensor.numel() * tensor.itemsize for tensor in older)


# Faults --------------------------------------------------------------------------------------------------------------


def interrupt(*_, **__):
    raise KeyboardInterrupt


def stops_at_call(number):
    """A decoding that works `number` times and is then interrupted."""
    calls = []

    def decoding(*arguments):
        calls.append(arguments)
        return packed_decode(*arguments) if len(calls) <= number else interrupt()

    return decoding


@pytest.mark.parametrize("name", ["int4", "vase | int4", "h2o | k8v4"])
@pytest.mark.parametrize("place", ["mlp", "attention"])
def test_any_step_may_be_interrupted_in_any_layer(monkeypatch, name, place):
    compressor = KINDS[name]
    model, ids = tiny(layers=3), tokens(1, 60)
    whole, broken = (CompressedCache(model, compressor, interval=8) for _ in range(2))
    for cache in (whole, broken):
        model(ids[:, :40], cache=cache)
    for step in range(40, 60):
        token, layer = ids[:, step, None], step % 3
        with monkeypatch.context() as patch:
            if place == "mlp":
                handle = model.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
            else:
                patch.setattr("kvcomp.ops.packed_decode", stops_at_call(layer))
            with pytest.raises(KeyboardInterrupt):
                model(token, cache=broken)
            if place == "mlp":
                handle.remove()
        assert broken.get_seq_length() == step
        assert torch.equal(model(token, cache=broken).logits, model(token, cache=whole).logits)
    assert_same(rows_of(broken), rows_of(whole))
    assert packed_bytes(broken) == packed_bytes(whole)


def test_an_interrupted_prompt_leaves_an_empty_cache():
    model, ids = tiny(layers=3), tokens(2, 40)
    cache, fresh = (CompressedCache(model, VASE | INT4, interval=8) for _ in range(2))
    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids, cache=cache)
    handle.remove()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=fresh).logits)
    assert_same(decode(model, cache, 12), decode(model, fresh, 12))


@pytest.mark.parametrize("name", ["int4", "rotated", "vase | int4"])
def test_a_compression_that_stops_before_it_writes_leaves_the_step_undone(monkeypatch, name):
    model, ids, compressor = tiny(layers=3), tokens(1, 60), KINDS[name]
    whole, broken = (CompressedCache(model, compressor, interval=8) for _ in range(2))
    for cache in (whole, broken):
        model(ids[:, :40], cache=cache)
        for step in range(40, 47):
            model(ids[:, step, None], cache=cache)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MixedPrecision, "pack", interrupt)
        model(ids[:, 47:48], cache=broken)
    for step in range(47, 60):
        token = ids[:, step, None]
        assert torch.equal(model(token, cache=broken).logits, model(token, cache=whole).logits)


def test_a_compression_that_stops_after_mass_was_added_is_refused(monkeypatch):
    model = tiny()
    cache = filled(model, KINDS["h2o | k8v4"], steps=7)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MixedPrecision, "pack", interrupt)
        model(tokens(2, 1), cache=cache)
    with pytest.raises(ValueError, match="half-way.*reset"):
        model(tokens(2, 1), cache=cache)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_refused_before_any_layer_changes(bad):
    model, text = tiny(layers=3), tokens(1, 48)
    cache, fresh = (filled(model, VASE | INT4, batch=1, steps=7) for _ in range(2))
    before = rows_of(cache)
    projection = model.model.layers[1].self_attn.v_proj
    handle = projection.register_forward_hook(
        lambda module, args, output: output.index_fill(-1, torch.tensor([3]), bad)
    )
    with pytest.raises(ValueError, match="new values of layer 1 are NaN or infinite"):
        model(text[:, :1], cache=cache)
    handle.remove()
    token = tokens(1, 1, seed=9)
    assert torch.equal(model(token, cache=cache).logits, model(token, cache=fresh).logits)
    assert len(before) == len(rows_of(cache))


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_setting_that_does_not_fit_the_model_is_refused_at_construction():  # cases 49, 50
    model = tiny()
    for compressor, message in (
        (MixedPrecision(4, group_size=17), "group_size=17.*head_dim=16"),
        (VASE | MixedPrecision(4, group_size=64), "group_size=64.*head_dim=16"),
    ):
        with pytest.raises(ValueError, match=message):
            CompressedCache(model, compressor)
    assert model.config._attn_implementation == "sdpa"  # nothing was installed
    odd = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | {"head_dim": 12})).eval()
    with pytest.raises(ValueError, match=r"head_dim.*12\b.*rotate_keys=False"):
        CompressedCache(odd, MixedPrecision.k4v4_rotated())


def test_a_forward_in_another_batch_size_is_refused():
    model = tiny()
    cache = filled(model, INT4)
    before = rows_of(cache)
    with pytest.raises(ValueError, match="batch of 2, got 3"):
        model(tokens(3, 1), cache=cache)
    assert_same(rows_of(cache), before)


def test_three_questions_in_half_precision():  # case 22
    for dtype in (torch.bfloat16, torch.float16):
        model, context = tiny(dtype=dtype), tokens(1, 30)
        cache = CompressedCache(model, MixedPrecision(4, **SMALL), interval=8)
        model(context, cache=cache)
        answers = []
        for length in (3, 7, 3):
            own = copy.deepcopy(cache)
            question = torch.cat([context, tokens(1, length, seed=length)], dim=1)
            answers.append(generate(model, question, new=10, cache=own))
            assert own.get_seq_length() == 30 + length + 9
            for layer in own.compressed:
                assert layer.keys.dtype == layer.values.dtype == dtype
        assert torch.equal(answers[0], answers[2])


def test_positions_hold_no_empty_slot():
    """Heads differ in how many rows of each part they hold; who reads the cache sees none of that."""
    model = tiny()
    quantizer = MixedPrecision(4, exact=0.3, sinks=0, recent=4)
    cache = CompressedCache(model, quantizer | Random(24, sinks=0, recent=2), interval=8)
    empty = 0
    for step in range(60):
        model(tokens(2, 40 if step == 0 else 1, seed=step), cache=cache)
        for layer in cache.compressed:
            assert (layer.positions >= 0).all() and (layer.positions.diff(dim=-1) > 0).all()
            assert layer.keys.shape[2] == layer.positions.shape[2] == layer.storage.rows
            empty += int((layer.storage.kv.slot_positions == EMPTY).sum())
    assert empty > 0


def test_a_window_of_queries_and_a_quantizer_larger_than_the_evictor():
    model, cache = witness(SnapKV(20, recent=2, window=12) | MixedPrecision(4, exact=0.2, sinks=0, recent=10))
    generate(model, tokens(2, 40), new=60, cache=cache)
    assert max(cache.errors) < 1e-5 and all(layer.storage.rows <= 28 for layer in cache.compressed)
