"""Reports on a model: what is captured, and what the caches predict."""

import math
from pydoc_data import topics
from statistics import fmean

import pytest
import torch
from support import tiny, tokens
from transformers import DynamicCache

from kvcomp import CompressedCache
from kvcomp.evict import SnapKV
from kvcomp.quant import MixedPrecision
from kvcomp.quant.spec import parse_compressor
from kvcomp.report import quantization_report, report_tensors
from kvcomp.report.measure import attend
from kvcomp.report.model import _layer, _Score, capture

LENGTH, CHUNK, INTERVAL = 150, 20, 16
SETTINGS = {"chunk": CHUNK, "interval": INTERVAL, "window": 12}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_captured_rows_and_queries_are_those_of_the_model(family):
    model, ids = tiny(family), tokens(2, 40)
    inputs = {}
    for index, layer in enumerate(model.get_decoder().layers):
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, index=index: inputs.__setitem__(index, args[0])
        )
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    outputs = dict(inputs)
    captured, left_out = capture(model, ids, 12, seed=0)
    assert len(captured) == (1 if family == "gemma3" else 2)
    told = "Layers 0, 2 are left out: they keep a sliding window or a state, which no compressor touches."
    assert left_out == ([told] if family == "gemma3" else [])
    for layer in captured:
        kv, seen = _layer(layer, 12)
        assert torch.equal(kv.keys, cache.layers[seen.layer].keys)
        assert torch.equal(kv.values, cache.layers[seen.layer].values)
        output = attend(kv, seen)[1].flatten(1, 2).transpose(1, 2).flatten(2)
        torch.testing.assert_close(output.float(), outputs[seen.layer][:, -12:], rtol=1e-4, atol=1e-5)


def loop_predictions(model, ids, compressor):
    """KL, agreement and perplexities from whole logits, token by token."""
    full = model(ids).logits.double().log_softmax(-1)
    cache = CompressedCache(model, compressor, INTERVAL)
    parts = [model(ids[:, start : start + CHUNK], cache=cache).logits for start in range(0, LENGTH, CHUNK)]
    own = torch.cat(parts, dim=1).double().log_softmax(-1)
    divergence, agreed, losses, full_losses = [], [], [], []
    for batch in range(len(ids)):
        for target in range(LENGTH // 2, LENGTH):
            p, q, token = full[batch, target - 1], own[batch, target - 1], ids[batch, target]
            divergence.append(math.fsum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))
            agreed.append(float(p.argmax() == q.argmax()))
            losses.append(-float(q[token]))
            full_losses.append(-float(p[token]))
    return fmean(divergence), fmean(agreed), math.exp(fmean(losses)), math.exp(fmean(full_losses)), len(losses)


@pytest.mark.parametrize("text", ["int2 recent=16", "snapkv budget=40 recent=16 window=8", "full"])
def test_predictions_are_those_of_the_loop(text):
    model, ids, compressor = tiny("qwen3"), tokens(2, LENGTH), parse_compressor(text)
    report = quantization_report(model, ids, [text], compare=False, **SETTINGS)
    found = report.of(text).model
    kl, top_1, perplexity, full_perplexity, count = loop_predictions(tiny("qwen3"), ids, compressor)
    assert found.tokens == count == 2 * (LENGTH - LENGTH // 2)
    assert found.kl == pytest.approx(kl, rel=1e-3, abs=1e-6) and found.top_1 == pytest.approx(top_1)
    assert found.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert found.full_perplexity == pytest.approx(full_perplexity, rel=1e-4)
    assert found.kl > 0.01 if text != "full" else found.kl < 1e-6


def test_predictions_that_are_no_numbers_are_refused():
    score = _Score(CompressedCache(tiny(), parse_compressor("full")), divergence=math.nan)
    with pytest.raises(ValueError, match="predictions through 'a' are not finite"):
        score.figures(1, 0.0, "a")


def test_errors_of_rows_are_those_of_the_tensors():
    model, ids = tiny("llama"), tokens(1, LENGTH)
    steps = []
    report = quantization_report(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        ["k8v4 recent=16", "int4 exact=0.1 recent=16"],
        progress=lambda *step: steps.append(step), settings={"text": "tokens"}, **SETTINGS,
    )  # fmt: skip
    captured, _ = capture(tiny("llama"), ids, 12, seed=0)
    layers = [_layer(layer, 12) for layer in captured]
    keys, values, queries = ([kv.keys for kv, _ in layers], [kv.values for kv, _ in layers],
                             [seen.queries for _, seen in layers])  # fmt: skip
    alone = report_tensors(keys, values, queries, ["k8v4 recent=16", "int4 exact=0.1 recent=16"])
    assert report.heads == alone.heads and report.break_even == alone.break_even and report.points == alone.points
    assert [each.compressor for each in report.figures] == [each.compressor for each in alone.figures]
    assert all(each.model is not None for each in report.figures)
    told = report.settings
    assert told["text"] == "tokens" and told["chunk"] == CHUNK and told["shape"] == [1, LENGTH] and told["window"] == 12
    assert [what for what, done, total in steps if done == total] == ["measuring", "reading"]


def test_figures_do_not_depend_on_the_windows_of_others():
    texts = ["snapkv budget=60 recent=16 window=8", "h2o budget=60"]
    settings = {"predict": False, "window": 12, "compare": False}
    alone = [quantization_report(tiny(), tokens(1, 100), [text], **settings).heads for text in texts]
    other = "tova budget=60", "snapkv budget=60 recent=16 window=30"
    report = quantization_report(tiny(), tokens(1, 100), [*texts, *other], **settings)
    assert report.settings["window"] == 12
    assert [head for head in report.heads if head.compressor in texts] == [head for heads in alone for head in heads]


def test_the_model_is_left_as_it_was():
    model, ids = tiny("qwen3"), tokens(1, 100)
    before = model(ids).logits
    quantization_report(model, ids, ["int4 recent=16"], predict=False, window=8)
    assert model.config._attn_implementation == "sdpa" and torch.equal(model(ids).logits, before)
    cache = CompressedCache(model, SnapKV(80))
    quantization_report(model, ids, ["int4 recent=16"], predict=False, window=8)
    assert model(ids, cache=cache).logits.shape[1] == 100  # a cache that was there before still works


def test_sliding_layers_learned_sinks_and_accumulated_attention_are_told():
    report = quantization_report(tiny("gemma3"), tokens(1, 100), ["int4 recent=16"], **SETTINGS)
    assert {head.layer for head in report.heads} == {1}
    assert report.notes[0].startswith("Layers 0, 2 are left out")
    report = quantization_report(tiny("gpt_oss"), tokens(1, 100), ["h2o budget=80"], predict=False, **SETTINGS)
    assert any("learned sinks" in note for note in report.notes)
    assert any("accumulate attention" in note for note in report.notes)


def test_a_method_that_remembers_queries_is_given_those_recorded():
    ids = tokens(1, 100)
    texts = [f"replay budget=60 sinks=2 recent=16 window=4 remembers={size}" for size in (0, 40)]
    report = quantization_report(tiny(), ids, texts, predict=False, window=30)
    assert any("remember queries" in note for note in report.notes)
    without, remembering = ([head.output_error for head in report.heads if head.compressor == text] for text in texts)
    assert without != remembering


def test_mistakes():
    model, ids = tiny("qwen3"), tokens(1, 100)
    with pytest.raises(ValueError, match="padded"):
        quantization_report(model, {"input_ids": ids, "attention_mask": torch.arange(100)[None] > 3})
    with pytest.raises(ValueError, match="at least 2 tokens, got \\[1, 1\\]"):
        quantization_report(model, ids[:, :1])
    with pytest.raises(ValueError, match="token ids"):
        quantization_report(model, ids.float())
    with pytest.raises(ValueError, match="window must be an int of at least 1, got 0"):
        quantization_report(model, ids, window=0)
    with pytest.raises(ValueError, match="all of them are recent"):
        quantization_report(model, ids, ["int4 recent=100"])
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        quantization_report(tiny("qwen3").train(), ids)
    broken = tiny("qwen3")
    broken.get_decoder().layers[1].self_attn.v_proj.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="values of layer 1 are NaN or infinite"):
        quantization_report(broken, ids, ["int4 recent=16"])


@pytest.mark.real_model
def test_the_break_even_of_a_real_model_foretells_its_predictions(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer(topics.topics["objects"], return_tensors="pt")["input_ids"][:, :200]
    exact = MixedPrecision(4, group_size=64, exact=0.05)
    report = quantization_report(model, ids, {"exact": exact}, window=16, chunk=100)
    (found,) = report.break_even
    assert not found.pays and 0.03 < found.carried < 0.3 < found.needed
    assert report.of("int4 g32").model.kl < report.of("exact").model.kl
    assert report.of("exact").errors["value_fit"] > 0.9 and report.of("exact").errors["value_error"] < 0.12
