"""Stored bytes against the formulas, counted from real tensors."""

import pytest
import torch
from support import tiny, tokens

from kvcomp import CompressedCache
from kvcomp.quant import MixedPrecision
from kvcomp.report import report_tensors

BATCH, HEADS, ROWS = 2, 3, 400


def figures(compressor, width=128, dtype=torch.bfloat16, layers=1):
    rows = [torch.randn(BATCH, HEADS, ROWS, width).to(dtype) for _ in range(layers)]
    return report_tensors(rows, rows, compressors={"tested": compressor}, compare=False).of("tested")


def test_four_bits_with_five_percent_exact_take_5_08_bits():
    found = figures(MixedPrecision(4, group_size=64, exact=0.05, sinks=0, recent=0))
    share = round(0.05 * ROWS) / ROWS
    assert found.bits_at_16 == pytest.approx((1 - share) * 4.5 + 16 * share) == pytest.approx(5.075)
    assert found.bits == found.older_bits == pytest.approx(5.075 + 32 / 256)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)])
@pytest.mark.parametrize(("key_bits", "value_bits", "group"), [(4, 4, 64), (8, 4, 32), (2, 8, 128), (4, 4, None)])
def test_bytes_by_part(dtype, size, key_bits, value_bits, group):
    quantizer = MixedPrecision(
        key_bits=key_bits, value_bits=value_bits, group_size=group, exact=0.1, sinks=4, recent=30
    )
    found = figures(quantizer, dtype=dtype, layers=2)
    heads, older = 2 * BATCH * HEADS, ROWS - 30
    exact = 4 + round(0.1 * (older - 4))
    packed = heads * (older - exact)
    assert found.bytes == {
        "codes": packed * 128 * (key_bits + value_bits) // 8,
        "scales": packed * 2 * (128 // (group or 64)) * 2 * 2,
        "exact": heads * exact * 2 * 128 * size,
        "recent": heads * 30 * 2 * 128 * size,
        "positions": heads * ROWS * 4,
    }
    elements = heads * ROWS * 256
    assert found.full == elements * size and found.stored == sum(found.bytes.values())
    assert found.bits == pytest.approx(8 * found.stored / elements)
    without = found.stored - found.bytes["recent"] - heads * 30 * 4
    assert found.older_bits == pytest.approx(8 * without / (heads * older * 256))
    base = (key_bits + value_bits) / 2 + 32 / (group or 64)
    share = exact / older
    assert found.bits_at_16 == pytest.approx((1 - share) * base + 16 * share)
    assert found.layer_bytes == BATCH * HEADS * ROWS * 256 * size
    assert found.decode_bytes == 0  # without queries their heads are not known


def test_an_evictor_and_the_full_cache_hold_rows_only():
    rows = torch.randn(1, 2, 300, 64)
    report = report_tensors(rows, rows, torch.randn(1, 4, 8, 64), ["full", "streaming-llm budget=100"])
    full, evicted = report.figures
    assert full.bytes == dict.fromkeys(("codes", "scales", "recent"), 0) | {
        "exact": 2 * rows.nbytes, "positions": 2 * 300 * 4,
    }  # fmt: skip
    assert evicted.bytes["exact"] == full.bytes["exact"] / 3 and evicted.full == full.full
    assert full.bits == 32 + 32 / 128 and full.bits_at_16 == 16 and full.layer_bytes == 0
    assert full.decode_bytes == 0 and full.errors["key_error"] == 0


def test_a_cache_holds_the_same_bytes():
    model, quantizer = tiny(), MixedPrecision(4, exact=0.1, recent=16)
    cache = CompressedCache(model, quantizer)
    model(tokens(1, 100), cache=cache)
    rows = [(layer.keys, layer.values) for layer in cache.compressed]
    found = report_tensors(*map(list, zip(*rows, strict=True)), compressors={"tested": quantizer}, compare=False)
    held = cache.memory()
    for part in ("codes", "scales", "exact"):
        assert getattr(held, part) == found.of("tested").bytes[part]
