"""Every figure against a slow plain loop in float64, written from the definitions."""

import math
import warnings
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from support import run_python

from kvcomp.core import KV, Observed
from kvcomp.evict import SnapKV
from kvcomp.quant import MixedPrecision
from kvcomp.quant.spec import Full
from kvcomp.report import Report, report_tensors
from kvcomp.report.measure import Pair, attend, contributions, correlation, output_error

BATCH, HEADS, GROUP, TOKENS, WINDOW, DIM = 2, 2, 2, 40, 5, 8
SINKS, RECENT = 2, 6
QUANTIZER = MixedPrecision(4, group_size=4, exact=0.1, sinks=1, recent=RECENT)


def rows(seed=0, tokens=TOKENS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    keys, values = make(BATCH, HEADS, tokens, DIM), make(BATCH, HEADS, tokens, DIM)
    return keys, values * (1 + make(BATCH, HEADS, tokens, 1).abs()), make(BATCH, HEADS * GROUP, WINDOW, DIM)


def decoded(keys, values, quantizer=QUANTIZER):
    result = quantizer.compress(KV.of(keys, values), Observed())
    packed = {(b, h, p) for b in range(BATCH) for h in range(HEADS) for p in result.packed.positions[b, h].tolist()}
    return result.keys.double().numpy(), result.values.double().numpy(), packed


def attention(query, keys, position):
    """Weights of one query over the rows up to its position."""
    logits = [
        math.fsum(q * k for q, k in zip(query, row, strict=True)) / math.sqrt(DIM) for row in keys[: position + 1]
    ]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def outputs(queries, keys, values, b, h):
    """Output and weights of the queries of the group of head `h`, one after the other."""
    found = []
    for index in range(GROUP):
        for w in range(WINDOW):
            weights = attention(queries[b, h * GROUP + index, w], keys[b, h], TOKENS - WINDOW + w)
            found.append((np.array(weights) @ values[b, h, : len(weights)], weights))
    return found


def loop_figures(keys, values, queries, h):
    """What `HeadFigures` of head `h` should be."""
    new_keys, new_values, packed = decoded(keys, values)
    k, v, q = (tensor.double().numpy() for tensor in (keys, values, queries))
    older = range(TOKENS - RECENT)
    error = {"key": {}, "value": {}}
    spread = {"key": {}, "value": {}}
    norm = {"key": 0.0, "value": 0.0}
    off = total = 0.0
    for b in range(BATCH):
        for side, old, new in (("key", k, new_keys), ("value", v, new_values)):
            for i in range(TOKENS):
                spread[side][b, i] = max(old[b, h, i]) - min(old[b, h, i])
            for i in older:
                error[side][b, i] = sum((x - y) ** 2 for x, y in zip(old[b, h, i], new[b, h, i], strict=True))
                norm[side] += sum(x * x for x in old[b, h, i])
        for (one, _), (other, _) in zip(outputs(q, k, v, b, h), outputs(q, new_keys, new_values, b, h), strict=True):
            off += ((one - other) ** 2).sum()
            total += (one**2).sum()
    expected = {"output_error": math.sqrt(off / total)}
    for side in ("key", "value"):
        whole = sum(error[side].values())
        expected[f"{side}_error"] = math.sqrt(whole / norm[side])
        expected[f"{side}_snr"] = 10 * math.log10(norm[side] / whole)
        ranges = sorted(spread[side].values())
        expected[f"{side}_spread"] = ranges[-1] / ((ranges[len(ranges) // 2 - 1] + ranges[len(ranges) // 2]) / 2)
        expected[f"{side}_sinks"] = sum(e for (_, i), e in error[side].items() if i < SINKS) / whole
        for share in (2, 5, 10):
            top = set()
            for b in range(BATCH):
                ordered = sorted(older, key=lambda i: -spread["value"][b, i])
                top |= {(b, i) for i in ordered[: max(1, round(share / 100 * len(older)))]}
            expected[f"{side}_top_{share}"] = sum(error[side][place] for place in top) / whole
        points = [
            (spread[side][b, i], error[side][b, i] / DIM)
            for b in range(BATCH) for i in older if i >= SINKS and (b, h, i) in packed
        ]  # fmt: skip
        expected[f"{side}_fit"] = float(np.corrcoef(np.array(points).T)[0, 1])
    return expected


def test_every_figure_is_that_of_the_loop():
    keys, values, queries = rows()
    report = report_tensors(keys, values, queries, {"tested": QUANTIZER}, sinks=SINKS, compare=False)
    assert len(report.heads) == HEADS
    for head in report.heads:
        expected = loop_figures(keys, values, queries, head.head)
        for name, value in expected.items():
            assert getattr(head, name) == pytest.approx(value, rel=1e-4, abs=1e-9), (head.head, name)
    means = report.of("tested").errors
    for name, value in means.items():
        assert value == pytest.approx(fmean(getattr(head, name) for head in report.heads))
    assert report.by_layer("tested", "key_error") == [(0, pytest.approx(means["key_error"]))]


def test_contributions_are_those_of_the_loop():
    keys, values, queries = rows(1)
    new_keys, new_values, _ = decoded(keys, values)
    k, v, q = (tensor.double().numpy() for tensor in (keys, values, queries))
    pair = Pair.of(KV.of(keys, values), Observed(queries), QUANTIZER)
    for h, part in enumerate(pair.heads()):
        from_keys, from_values, total = np.zeros((BATCH, TOKENS)), np.zeros((BATCH, TOKENS)), 0.0
        for b in range(BATCH):
            for index, (output, weights) in enumerate(outputs(q, k, v, b, h)):
                query = q[b, h * GROUP + index // WINDOW, index % WINDOW]
                total += (output**2).sum()
                for i, weight in enumerate(weights):
                    shift = query @ (k[b, h, i] - new_keys[b, h, i]) / math.sqrt(DIM)
                    from_keys[b, i] += (weight * shift) ** 2 * ((v[b, h, i] - output) ** 2).sum()
                    from_values[b, i] += weight**2 * ((v[b, h, i] - new_values[b, h, i]) ** 2).sum()
        own_keys, own_values = contributions(part)
        np.testing.assert_allclose(own_keys[:, 0].numpy(), from_keys / total, rtol=2e-4, atol=1e-9)
        np.testing.assert_allclose(own_values[:, 0].numpy(), from_values / total, rtol=2e-4, atol=1e-9)


def test_contributions_add_up_to_the_error_of_the_output():
    torch.manual_seed(0)
    keys, values, queries = torch.randn(1, 2, 600, 64), torch.randn(1, 2, 600, 64), torch.randn(1, 4, 64, 64)
    pair = Pair.of(KV.of(keys, values), Observed(queries), MixedPrecision(8, exact=0.0, recent=0))
    for part in pair.heads():
        predicted = math.sqrt(sum(float(side.sum()) for side in contributions(part)))
        assert predicted == pytest.approx(output_error(part), rel=0.05)


def test_points_are_packed_rows_behind_the_sinks():
    keys, values, queries = rows()
    report = report_tensors(keys, values, queries, {"tested": QUANTIZER}, sinks=SINKS, compare=False)
    new_keys, new_values, packed = decoded(keys, values)
    expected = {}
    for b, h, i in packed:
        if i >= SINKS:
            k, v = keys[b, h, i].double(), values[b, h, i].double()
            errors = [(x - torch.from_numpy(y[b, h, i])).square().mean() for x, y in ((v, new_values), (k, new_keys))]
            point = float(v.max() - v.min()), float(errors[0]), float(k.max() - k.min()), float(errors[1])
            expected[tuple(f"{number:.6g}" for number in point)] = h
    points = report.points["tested"]
    assert len(points) == len(expected)
    for layer, head, *numbers in points:
        assert layer == 0 and expected[tuple(f"{number:.6g}" for number in numbers)] == head


def test_an_evictor_is_judged_by_the_rows_it_keeps():
    keys, values, queries = rows()
    evictor = SnapKV(20, recent=5, window=WINDOW)
    report = report_tensors(keys, values, queries, {"evicted": evictor}, compare=False)
    figures = report.of("evicted")
    assert figures.errors["key_error"] == figures.errors["value_error"] == 0.0
    assert figures.errors["key_snr"] is None and figures.errors["value_fit"] is None
    kv, seen = KV.of(keys, values), Observed(queries, KV.of(keys, values).positions[:, 0, -WINDOW:])
    kept = evictor.compress(kv, seen)
    for h in range(HEADS):
        part, heads = slice(h, h + 1), slice(h * GROUP, (h + 1) * GROUP)
        own = Observed(queries[:, heads], seen.query_positions)
        whole = attend(KV(keys[:, part], values[:, part], kv.positions[:, part]), own)[1]
        less = attend(KV(kept.keys[:, part], kept.values[:, part], kept.positions[:, part]), own)[1]
        assert report.heads[h].output_error == pytest.approx(float((whole - less).norm() / whole.norm()), rel=1e-5)


def test_a_pipeline_has_the_errors_of_the_kept_rows():
    keys, values, queries = rows()
    compressors = {"both": SnapKV(20, recent=6, window=WINDOW) | MixedPrecision(4, exact=0.0, sinks=0, recent=6)}
    report = report_tensors(keys, values, queries, compressors, compare=False)
    kept = compressors["both"].stages[0].compress(KV.of(keys, values), Observed(queries))
    alone = report_tensors(
        kept.keys, kept.values, None, [MixedPrecision(4, exact=0.0, sinks=0, recent=6)], compare=False
    )
    for one, other in zip(report.heads, alone.heads, strict=True):
        assert one.key_error == pytest.approx(other.key_error) and one.value_error == pytest.approx(other.value_error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numpy_lists_and_dtypes(dtype):
    keys, values, queries = rows(dtype=dtype)
    settings = {"compressors": ["int4 recent=6", "int8 recent=6"], "compare": False}
    one = report_tensors(keys, values, queries, **settings)
    assert one.settings["dtype"] == str(dtype).removeprefix("torch.")
    listed = report_tensors([keys, keys], [values, values], [queries, queries], **settings)
    assert [head.layer for head in listed.heads] == [0, 0, 1, 1] * 2
    assert [head.key_error for head in listed.heads if head.layer == 1] == [head.key_error for head in one.heads]
    if dtype != torch.bfloat16:
        arrays = report_tensors(keys.numpy(), values.numpy(), queries.numpy(), **settings)
        assert arrays.heads == one.heads
    if dtype == torch.float32:
        wide = report_tensors(keys.numpy().astype(np.float64), values.numpy().astype(np.float64), **settings)
        assert [head.key_error for head in wide.heads] == [head.key_error for head in one.heads]


def test_arrays_of_every_kind():
    keys, values, queries = (each.numpy() for each in rows())
    settings = {"compressors": ["int4 recent=6"], "compare": False}
    expected = report_tensors(keys, values, queries, **settings).heads
    swapped = [each.astype(each.dtype.newbyteorder(">")) for each in (keys, values, queries)]
    assert report_tensors(*swapped, **settings).heads == expected
    keys.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report_tensors(keys, values, queries, **settings).heads == expected
    code = "from kvcomp.report import report_tensors\ntry: report_tensors([[[[1.0]]]], [[[[1.0]]]])\n"
    assert run_python(code + "except TypeError as error: print(error)").strip() == (
        "layer 0: keys must be a tensor or an array, got list"
    )
    with pytest.raises(ValueError, match="sinks must be an int of at least 0, got -1"):
        report_tensors(keys, values, sinks=-1, **settings)


def test_without_queries_there_is_no_attention():
    keys, values, _ = rows()
    report = report_tensors(keys, values, compressors=["int4 recent=6 exact=0.1"])
    assert report.of("int4 recent=6 exact=0.1").errors["output_error"] is None
    assert [each.weighted for each in report.break_even] == [False]
    assert any("No queries" in note for note in report.notes)


class Overflowing(Full):
    def compress(self, kv, seen):
        return replace(kv, keys=kv.keys * math.inf)


def test_huge_numbers_have_errors_or_are_refused():
    keys, values, queries = (1e20 * each for each in rows(dtype=torch.bfloat16))
    report = report_tensors(keys, values, queries, ["int4 recent=6 exact=0.1"])
    assert report.break_even and 0 < report.of("int4 recent=6 exact=0.1").errors["value_error"] < 0.3
    assert Report.from_json(report.to_json()) == report
    with pytest.raises(ValueError, match="queries are NaN or infinite in float16"):
        report_tensors(keys.mul(1e-20).half(), values.mul(1e-20).half(), queries, ["int4 recent=6"])
    with pytest.raises(ValueError, match="rows of layer 0 overflow when Overflowing"):
        report_tensors(keys, values, queries, [Overflowing()])


def test_a_query_that_sees_no_row_has_no_output():
    kv = KV.of(torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8))
    weights, output = attend(kv, Observed(torch.randn(1, 1, 2, 8), torch.tensor([[-1, 2]])))
    assert not output[0, 0, 0, 0].any() and float(weights[0, 0, 0, 1].sum()) == pytest.approx(1)
    assert weights[0, 0, 0, 1, 3] == 0


def test_figures_that_do_not_exist():
    constant = torch.full((100,), 0.1, dtype=torch.float64)
    assert correlation(constant, torch.arange(100.0).double()) is None
    spiked = torch.zeros(1, 1, 40, 8)
    spiked[0, 0, 3, 2] = 1
    errors = report_tensors(spiked, spiked, compressors=["int4 recent=6"]).of("int4 recent=6").errors
    assert errors["value_spread"] is None and errors["key_spread"] is None


def test_attention_that_is_accumulated_needs_queries():
    keys, values, _ = rows()
    with pytest.raises(ValueError, match="needs attention: pass queries"):
        report_tensors(keys, values, None, ["h2o budget=30"])


def test_odd_widths_and_values_of_another_width():
    keys, values = torch.randn(1, 3, 50, 20), torch.randn(1, 3, 50, 12)
    report = report_tensors(keys, values, torch.randn(1, 3, 4, 20), ["int4 g8 recent=10 exact=0.2"])
    assert len(report.heads) == 3 * 2 and report.break_even


def test_rows_that_cannot_be_reported_on():
    keys, values, queries = rows()
    wrong = keys.clone()
    wrong[0, 1, 3, 2], wrong[1, 0, 4] = torch.nan, torch.inf
    options = {"compressors": ["int4 recent=6"]}
    with pytest.raises(ValueError, match=r"layer 0: 2 keys are NaN or infinite"):
        report_tensors(wrong, values, **options)
    with pytest.raises(ValueError, match=r"layer 1: 2 values are NaN"):
        report_tensors([keys, keys], [values, wrong], **options)
    with pytest.raises(ValueError, match=r"\[batch, heads, tokens, head_dim\]"):
        report_tensors(keys[0], values[0], **options)
    with pytest.raises(ValueError, match="differ in batch, heads or tokens"):
        report_tensors(keys, values[:, :, 1:], **options)
    with pytest.raises(ValueError, match="do not fit keys"):
        report_tensors(keys, values, queries[:, :3], **options)
    with pytest.raises(ValueError, match="same number of layers, at least 1, got 2, 1, 2"):
        report_tensors([keys, keys], [values], **options)
    with pytest.raises(ValueError, match="must be float16, bfloat16 or float32, got torch.int64"):
        report_tensors(keys.long(), values, **options)
    with pytest.raises(ValueError, match="all of them are recent"):
        report_tensors(keys, values, compressors=["int4"])
    with pytest.raises(ValueError, match="given twice"):
        report_tensors(keys, values, compressors=["int4 recent=6", "int4  recent=6"])
    with pytest.raises(ValueError, match="'int4 g8 recent=6' is given twice, also as 'g8 int4 recent=6'"):
        report_tensors(keys, values, compressors=["int4 g8 recent=6", "g8 int4 recent=6"])
    for other in (keys[:, :1], keys[..., :4], keys.half()):
        with pytest.raises(ValueError, match="layer 1 has other heads, widths or another dtype"):
            report_tensors([keys, other], [values, other], **options)
    with pytest.raises(ValueError, match="at least 1"):
        report_tensors(keys, values, compressors=[])
    with pytest.raises(TypeError, match="write \\['k8v4'\\]"):
        report_tensors(keys, values, compressors="k8v4")
