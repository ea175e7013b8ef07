"""The break-even: it pays where the error sits in few rows of large range, and not on Gaussian rows."""

from dataclasses import replace

import pytest
import torch

from kvcomp.core import KV, Observed
from kvcomp.evict import SnapKV
from kvcomp.quant import MixedPrecision
from kvcomp.quant.spec import describe, parse_compressor
from kvcomp.report import report_tensors
from kvcomp.report.break_even import comparison, trial, uniform
from kvcomp.report.measure import Pair, contributions

HEAVY = "int4 g64 exact=0.05"


def gaussian(seed=0, tokens=500):
    generator = torch.Generator().manual_seed(seed)
    keys, values, queries = (torch.randn(1, heads, tokens, 64, generator=generator) for heads in (2, 2, 4))
    return 0.3 * keys, values, queries[:, :, -32:]


def heavy_tailed():
    keys, values, queries = gaussian()
    outliers = torch.zeros(500, 1)
    outliers[7::25] = 1  # 4 % of the rows
    return keys, values * (1 + 30 * outliers), queries


def test_it_pays_where_few_rows_carry_the_error():
    report = report_tensors(*heavy_tailed(), [HEAVY])
    (found,) = report.break_even
    assert found.pays and found.weighted and not found.assumed
    assert found.carried > 0.9 and 0.2 < found.needed < 0.35
    assert report.of(HEAVY).errors["output_error"] < 0.5 * report.of("int4 g32").errors["output_error"]


def test_it_does_not_pay_on_gaussian_rows():
    report = report_tensors(*gaussian(), [HEAVY])
    (found,) = report.break_even
    assert not found.pays
    assert 0.03 < found.carried < 0.15 and 0.2 < found.needed < 0.35
    assert report.of(HEAVY).errors["output_error"] > report.of("int4 g32").errors["output_error"]


def test_random_rows_carry_their_share():
    report = report_tensors(*gaussian(tokens=2000), ["int4 g64 exact=0.2 exact_by=random"])
    assert report.break_even[0].base == "int4 g64"
    assert report.break_even[0].carried == pytest.approx(0.2, abs=0.04)


def test_what_is_carried_is_the_error_in_the_exact_rows():
    keys, values, queries = gaussian(3)
    (found,) = report_tensors(keys, values, queries, [HEAVY]).break_even
    mixed = parse_compressor(HEAVY)
    kv, seen = KV.of(keys, values), Observed(queries)
    chosen = mixed.compress(kv, seen).exact.positions
    base = Pair.of(kv, seen, replace(mixed, exact=0.0))
    inside = whole = 0.0
    for h, part in enumerate(base.heads()):
        errors = sum(contributions(part))[0, 0]
        inside, whole = inside + float(errors[chosen[0, h].long()].sum()), whole + float(errors.sum())
    assert found.carried == pytest.approx(inside / whole, rel=1e-5)


def test_bits_and_cost_follow_the_formula():
    keys, values, queries = gaussian()
    (found,) = report_tensors(keys, values, queries, [HEAVY]).break_even
    older = 500 - 64 - 4  # recent rows and sinks are the same with and without exact rows
    share = round(0.05 * older) / older
    assert found.share == pytest.approx(share)
    assert found.base_bits == 4 + 32 / 64
    assert found.cost == pytest.approx((16 - 4.5) * share)
    assert found.lower[:2] == ("int4 g32", 5.0) and found.upper[:2] == ("int4 g16", 6.0)
    part = (4.5 + found.cost - 5) / (6 - 5)
    assert found.needed == pytest.approx((1 - part) * found.lower[2] + part * found.upper[2])


def test_the_uniform_setting_of_equal_bits_is_added():
    report = report_tensors(*gaussian(), ["k8v4", HEAVY, "int4 exact=0.1"])
    assert [each.compressor for each in report.figures] == ["k8v4", HEAVY, "int4 exact=0.1", "int4 g32", "int4 g16"]
    assert [each.equal_bits_of for each in report.figures] == [None, None, None, HEAVY, "int4 exact=0.1"]
    bits = {each.compressor: each.bits_at_16 for each in report.figures}
    assert abs(bits["int4 g32"] - bits[HEAVY]) < 0.5
    alone = report_tensors(*gaussian(), ["k8v4", HEAVY], compare=False)
    assert len(alone.figures) == 2 and not alone.break_even


def test_an_added_setting_replaces_no_name_of_the_user():
    report = report_tensors(*gaussian(), {"int4 g32": "int8", "mixed": HEAVY})
    found = {each.compressor: each.equal_bits_of for each in report.figures}
    assert found == {"int4 g32": None, "mixed": None, "int4 g32 (uniform)": "mixed"}
    assert report.settings["compressors"]["int4 g32"].count("_bits=8") == 2


def test_a_quantizer_without_exact_rows_is_asked_what_some_would_do():
    (found,) = report_tensors(*gaussian(), ["k8v4"]).break_even
    assert found.assumed and found.exact_by == "value_range" and found.share == pytest.approx(0.05, abs=0.002)
    assert found.base == "k8v4" and found.lower == ("k8v4", 6.5, 0.0) and found.upper[:2] == ("k8v4 g32", 7.0)
    both = report_tensors(*gaussian(), ["int4 g64", HEAVY]).break_even
    assert [each.compressor for each in both] == [HEAVY]  # once for the same base


def test_every_step_of_uniform_settings_costs_more_and_errs_less():
    like = KV.of(torch.randn(1, 1, 9, 128), torch.randn(1, 1, 9, 128))
    base = MixedPrecision(2, exact=0.0, group_size=128)
    steps = uniform(base, like)
    measured = [trial(quantizer, like) for _, quantizer in steps]
    assert steps[0] == (2.25, base) and len(steps) > 6
    assert [bits for bits, _ in steps] == [bits for bits, _ in measured] == sorted({bits for bits, _ in steps})
    assert [error for _, error in measured] == sorted((error for _, error in measured), reverse=True)
    for _, quantizer in steps:
        assert quantizer.key_bits + 32 / (quantizer.group_size or 64) >= 2.25


def test_beyond_the_last_uniform_setting_its_step_is_repeated():
    pytest.importorskip("bitsandbytes")
    (found,) = report_tensors(*gaussian(), ["nf4 g64 exact=0.1"]).break_even
    assert found.lower[0] == "nf4 g32" and found.upper is None
    steps = found.cost / (found.lower[1] - found.base_bits)
    assert steps > 2 and found.needed == pytest.approx(1 - (1 - found.lower[2]) ** steps)


def test_in_a_pipeline_only_the_quantizer_changes():
    evictor = SnapKV(200, recent=64, window=32)
    mixed = evictor | MixedPrecision(4, exact=0.1)
    like = KV.of(*gaussian()[:2])
    found = comparison("both", mixed, like)
    assert found.base == evictor | MixedPrecision(4, exact=0.0)
    assert all(each.stages[0] == evictor for each in found.compressors)
    assert found.share == pytest.approx(round(0.1 * 132) / 132)  # of the rows left, without recent and sinks
    report = report_tensors(*gaussian(), {"both": mixed})
    assert report.break_even[0].base == describe(found.base) and not report.break_even[0].pays


def test_what_does_not_quantize_has_no_break_even():
    report = report_tensors(*gaussian(), ["full", "snapkv budget=200"])
    assert not report.break_even
    constant = torch.ones(1, 1, 100, 64)
    report = report_tensors(constant, constant, constant, ["int4 exact=0.1"])
    assert not report.break_even and any("without any error" in note for note in report.notes)


def test_a_break_even_that_is_missing_is_told():
    few = report_tensors(*gaussian(tokens=90), ["int4 exact=0.01"])
    dear = report_tensors(*gaussian(), ["int8 g2", "full"])
    for report, name in ((few, "int4 exact=0.01"), (dear, "int8 g2")):
        assert not report.break_even and any(f"No break-even for {name}:" in note for note in report.notes)
    assert not any("No break-even" in note for note in report_tensors(*gaussian(), ["int4"], compare=False).notes)


def test_without_queries_keys_and_values_count_alike():
    keys, values, _ = gaussian()
    (found,) = report_tensors(keys, 100 * values, None, ["int4 exact=0.1"]).break_even
    assert found.carried == pytest.approx((found.carried_keys + found.carried_values) / 2, abs=0.005)
