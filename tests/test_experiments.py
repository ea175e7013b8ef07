"""The experiments measure what they say; run at toy sizes."""

import decode_speed
import pytest
import torch
from machine import provenance


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
