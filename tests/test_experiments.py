"""The experiments measure what they say; run at toy sizes."""

from types import SimpleNamespace

import cache_bytes
import decode_speed
import packed_speed
import perplexity
import pytest
import quantization
import torch
import typer
from machine import provenance

from kvcomp import KV, Observed
from kvcomp.evict import VaSE
from kvcomp.quant import MixedPrecision


def test_the_speed_benchmark_times_every_variant_and_its_compressions():
    turns = []
    rows = decode_speed.measure(256, torch.float32, [160], ["vase-attnv", "random"], 80, turns.append)
    full, kept, *methods = rows
    assert [row["variant"] for row in rows] == [decode_speed.FULL, decode_speed.KEPT, "vase-attnv", "random"]
    assert sum(turns) == 4 * 80
    assert all(row["budget"] is None or row["ms_compression"] > 0 for row in rows)
    token = 2 * decode_speed.LAYERS * decode_speed.KV_HEADS * decode_speed.HEAD_DIM * 4
    assert full["kv_bytes"] == (256 + 82) * token
    for row in methods:
        assert 224 * token < row["kv_bytes"] < 1.5 * 224 * token
        assert row["ms_compression"] > 0 and row["tokens_per_second"] < 1e3 / row["ms_step"]
    assert full["ms_compression"] == kept["ms_compression"] == 0
    assert full["times_full"] == pytest.approx(1.0) and kept["times_kept"] == pytest.approx(1.0)


def test_every_figure_carries_where_it_comes_from():
    assert {"command", "commit", "torch", "transformers", "processor", "threads", "date"} <= provenance().keys()


def test_the_packed_benchmark_compares_every_step_to_dense_rows_and_times_the_compressions(monkeypatch):
    names = ["K8/V4", "K2/V2"]
    monkeypatch.setattr(packed_speed, "QUANTIZERS", {name: packed_speed.QUANTIZERS[name] for name in names})
    monkeypatch.setattr(packed_speed, "BUDGET", 160)
    monkeypatch.setattr(packed_speed, "INTERVAL", 16)
    turns = []
    rows = {row["variant"]: row for row in packed_speed.measure(192, torch.float32, 32, turns.append)}
    evicted = [packed_speed.EVICTED, *(f"{packed_speed.EVICTED} | {name}" for name in names)]
    assert list(rows)[3:] == names + evicted and sum(turns) == 32 * len(rows)
    assert rows[decode_speed.KEPT]["step_over_dense"] == rows[packed_speed.EVICTED]["step_over_dense"] == 1
    assert all(rows[name]["ms_compression"] > 0 for name in names + evicted)
    assert rows["K2/V2"]["kv_bytes"] < rows["K8/V4"]["kv_bytes"] < rows[decode_speed.KEPT]["kv_bytes"]
    assert 0 < rows["QuantizedCache, quanto 4 bit"]["kv_bytes"] < rows[decode_speed.FULL]["kv_bytes"]


def test_the_bytes_are_those_of_a_real_cache():
    row = cache_bytes.measure(VaSE(160) | MixedPrecision.k8v4(), 16, 160, 400)
    assert row["rows"] == 161 and row["total"] == sum(row["parts"].values())
    assert row["full"] == 400 * 2 * decode_speed.LAYERS * decode_speed.KV_HEADS * decode_speed.HEAD_DIM * 2
    packed = 160 - 64 - 4
    assert row["parts"]["codes"] == packed * decode_speed.LAYERS * decode_speed.KV_HEADS * (128 + 64)


def test_the_limits_on_perplexity_are_checked_against_their_own_base():
    found = {quantization.FULL: 4.0, "K8/V4": 4.01, "K4/V4 rotated": 4.2, quantization.EVICTED: 5.0}
    found |= {f"{quantization.EVICTED} | K8/V4": 5.04, f"{quantization.EVICTED} | K4/V4 rotated": 5.2}
    limits = quantization.check([{"setting": name, "perplexity": value} for name, value in found.items()])
    assert [limit["holds"] for limit in limits] == [True, False, True, False]
    assert limits[0]["rise"] == pytest.approx(0.0025) and limits[3]["rise"] == pytest.approx(0.04)


def test_a_side_that_is_not_packed_stays_as_it_is():
    kv = KV.of(torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16))
    packed = quantization.OneSide(4, exact=0.0, sinks=0, recent=0).compress(kv, Observed())
    assert torch.equal(packed.values, kv.values) and not torch.equal(packed.keys, kv.keys)
    packed = quantization.OneSide(4, keys=False, exact=0.0, sinks=0, recent=0).compress(kv, Observed())
    assert torch.equal(packed.keys, kv.keys) and not torch.equal(packed.values, kv.values)


def test_perplexity_of_chosen_methods_on_later_stretches():
    assert [method.name for method in perplexity.chosen(["Replay"])] == [perplexity.FULL, "Replay"]
    with pytest.raises(typer.BadParameter, match="no method .'Nothing'"):
        perplexity.chosen(["Replay", "Nothing"])
    tokenizer = lambda text, add_special_tokens: SimpleNamespace(input_ids=[int(word) for word in text.split()])  # noqa: E731
    text = " ".join(map(str, range(4 * perplexity.LENGTH + 5)))
    assert perplexity.cut(text, tokenizer, 2, skip=1)[:, 0].tolist() == [perplexity.LENGTH, 2 * perplexity.LENGTH]
    with pytest.raises(typer.BadParameter, match="5 stretches need 10240"):
        perplexity.cut(text, tokenizer, 2, skip=3)
    assert perplexity.check_orders([{"method": "Replay"}]) == []
