"""The check for a machine with a GPU, rehearsed on CPU at toy sizes."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu.cases
import gpu.decoding
import gpu.timing
import gpu_check
import pytest
import torch
from gpu.cases import DECODED, INT4, QWEN3, TOY, Case, Scene, packed_decode, rivals
from gpu.clock import Clock, Deadline
from gpu.decoding import TIMED, count_synchronisations, decoding_rows, layers_that_fit
from gpu.table import PACKING, SCORING, failed, show, targets
from gpu.timing import difference, kernel_rows
from typer.testing import CliRunner

from kvcomp import dispatch, ops

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
SMALL = replace(TOY, models={"4B": 4}, batches=(1,), rows=(128,), copied=2**16, repeats=1)


@pytest.fixture
def clock():
    return Clock(CPU, 1)


def kernels(clock, seconds=1e3):
    return list(kernel_rows(SMALL, clock, Deadline(seconds), 1e9))


def a_test(folder, body):
    (folder / "test_it.py").write_text(f"def test_first():\n    pass\n\ndef test_second():\n    {body}\n")
    return str(folder)


def test_every_part_runs_and_the_table_is_short(tmp_path):
    out = tmp_path / "folder" / "out.json"
    app = gpu_check.typer.Typer()
    app.command()(gpu_check.main)
    arguments = ["--toy", "--tests", a_test(tmp_path, "assert False"), "--out", str(out), "--seconds", "100"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("kernel tests FAILED: 1 passed, 1 failed") and "test_second" in lines[0]
    assert len(lines) < 40 and lines[-1] == f"written to {out}"
    rows = json.loads(out.read_text())["rows"]
    parts = {name: [row for row in rows if row["part"] == name] for name in dict.fromkeys(row["part"] for row in rows)}
    assert list(parts) == ["tests", "bandwidth", "kernels", "compression", "decoding", "targets"]
    assert not [row for row in rows if row.get("error") or row.get("skipped")]
    cases = 2 * (len(DECODED) + 1) + 7  # with the query heads of two models, and without
    assert len(parts["kernels"]) == 4 * cases and all(row["ms"] > 0 and row["share"] > 0 for row in parts["kernels"])
    decode = [row for row in parts["kernels"] if row["case"] == INT4]
    assert len(decode) == 8 and all(row["times_best"] == row["times_sdpa"] > 0 for row in decode)
    compressions = {row["case"]: row["compressions"] for row in parts["decoding"]}
    assert compressions.pop("DynamicCache") == 0
    assert compressions == dict.fromkeys(("VaSE(160)", "VaSE(160) | MixedPrecision(4)", "K4/V4 rotated"), TIMED)
    assert [row["told"].startswith("least") for row in parts["targets"]] == [True] * 5 + [False] * 2


def test_the_kernel_tests_run_compiled_and_keep_what_they_printed_until_it_was_late(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    body = "import os, time; time.sleep(0 if 'TRITON_INTERPRET' in os.environ else 60)"
    row = gpu_check.run_tests(a_test(tmp_path, body), 4, interpret=False)
    assert (row["passed"], row["failed"], row["exit"], row["late"]) == (1, 0, None, True), row["tail"]
    assert failed([row])


def test_the_counts_are_those_of_pytest():
    for line, counts in {
        "3 failed, 10 passed, 2 skipped, 1 error in 2.11s": (10, 3, 1),
        "12 passed in 61.00s (0:01:01)": (12, 0, 0),
        "..sF.                                                     [ 50%]": (3, 1, 0),
        "FAILED test_it.py::test_second - assert 2 passed": (0, 0, 0),
    }.items():
        found = gpu_check._counts(["", line])
        assert (found["passed"], found["failed"], found["error"]) == counts, line


def test_the_bytes_are_those_of_operands_and_results(clock):
    rows = {row["case"]: row for row in kernels(clock)}
    count, heads, width = 128, SMALL.kv_heads, SMALL.head_dim
    row, scored, query = 2 * heads * count * width, 4 * heads * count, 2 * 4 * width
    assert rows["value_range"]["bytes"] == row + scored
    assert rows["window_score"]["bytes"] == 2 * row + 64 * query + scored + 4 * heads * (count - 64)
    assert rows["sketched_leverage"]["bytes"] == 2 * row + scored + 4 * heads * width * 20
    packed = {bits: heads * count * (width * bits // 8 + 4) for bits in (2, 4, 8)}  # one group of 64 channels
    assert rows["pack 4 bit"]["bytes"] == rows["unpack 4 bit"]["bytes"] == row + packed[4]
    assert rows["pack 8 bit"]["bytes"] == row + packed[8]
    assert rows["take_rows"]["bytes"] == row + 8 * heads * count // 2
    exact, positions = round(0.05 * count), 4 * heads * count
    share = (count - exact - 64) / count
    dense = 2 * row * (1 - share) + positions + 2 * query
    assert rows["decode K8/V4"]["bytes"] == pytest.approx(share * (packed[8] + packed[4]) + dense)
    assert rows["decode K2/V2"]["bytes"] == pytest.approx(share * 2 * packed[2] + dense)
    assert rows["decode dense"]["bytes"] == 2 * row + positions + 2 * query
    for found in rows.values():
        assert found["share"] == pytest.approx(found["bytes"] / 1e9 / (found["ms"] / 1e3))


def test_flash_attention_is_a_rival_where_it_is_installed(clock, monkeypatch):
    def attention(query, keys, values, cache_seqlens=None):
        assert cache_seqlens is None or cache_seqlens.tolist() == [128, 128]
        swapped = (tensor.transpose(1, 2) for tensor in (query, keys, values))
        return torch.nn.functional.scaled_dot_product_attention(*swapped, enable_gqa=True)

    package = SimpleNamespace(flash_attn_func=attention, flash_attn_with_kvcache=attention)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    scene = Scene.of(SMALL, clock, batch=2, rows=128)
    folded, *others = [call() for call in rivals(scene.queries("4B", 1), scene.keys, scene.values).values()]
    assert len(others) == 3
    for result in others:
        torch.testing.assert_close(result.view_as(folded), folded)
    decode = next(row for row in kernels(clock) if row["case"] == INT4)
    assert len(decode["beside"]) == 4 and decode["times_best"] == min(decode["times_sdpa"], decode["times_flash"])


def test_a_kernel_that_raises_or_is_wrong_is_told_and_the_others_are_timed(clock, monkeypatch, capsys):
    class Kernels:
        value_range = staticmethod(lambda values: torch.full(values.shape[:3], math.nan))
        sketched_leverage = staticmethod(lambda keys, values, sketch: 1 / 0)
        window_score = staticmethod(lambda *_: NotImplemented)

    monkeypatch.setattr(dispatch, "_kernels", lambda device, module: Kernels if module == "score" else None)
    rows = {row["case"]: row for row in kernels(clock)}
    assert rows["value_range"]["wrong"] and math.isnan(rows["value_range"]["difference"])
    assert "ZeroDivisionError" in rows["sketched_leverage"]["error"]
    assert rows["sketched_leverage"]["ms"] is None and rows["sketched_leverage"]["definition_ms"] > 0
    assert not rows["window_score"]["kernel"] and not rows["take_rows"]["kernel"]
    assert rows["window_score"]["ms"] > 0 and rows["take_rows"]["ms"] > 0
    elsewhere = rows["value_range"] | {"rows": 64, "difference": 0.5}
    right = rows["value_range"] | {"wrong": False, "difference": 0.0}
    show([right, elsewhere], SMALL)
    shown = capsys.readouterr().out
    assert "WRONG" in shown and "5.0e-01" in shown
    passed = {"part": "tests", "exit": 0, "passed": 1}
    assert failed([]) and failed([passed | {"passed": 0}]) and not failed([passed, rows["window_score"]])
    assert failed([passed, rows["value_range"]]) and failed([passed, rows["sketched_leverage"]])


def test_the_difference_is_a_share_of_the_largest_result():
    expected = torch.tensor([[4.0, 1.0], [0.0, -8.0]])
    assert difference([expected + 1], [expected]) == pytest.approx(1 / 8)
    assert math.isnan(difference([expected * math.nan, expected], [expected, expected]))
    assert difference([torch.empty(2, 0)], [torch.empty(2, 0)]) == 0


def test_a_case_runs_kernel_and_definition_and_leaves_kernels_on(clock):
    scene = Scene.of(SMALL, clock, 1, 128)
    case = Case("broken", "score", "no_such_operation", (scene.keys,), 0)
    with pytest.raises(AttributeError):
        case.run(False)
    assert dispatch._enabled
    rotated = packed_decode(scene, INT4, scene.queries("4B", 1))
    query, _, *others = rotated.arguments
    assert torch.equal(rotated.run(True)[0], ops.packed_decode(query, ops.hadamard(query), *others))


def test_what_does_not_fit_says_so(clock, monkeypatch):
    late = kernels(clock, seconds=0.0)
    assert len(late) == 9 and all(row["skipped"] == "no time left" for row in late)
    monkeypatch.setattr(clock, "free", lambda: 2**20)
    (full,) = kernels(clock)
    assert full["case"] == "all" and "needs 0 GiB" in full["skipped"]
    assert layers_that_fit(QWEN3, 139 * 2**30, 100) == layers_that_fit(QWEN3, 79 * 2**30, 100) == 36
    assert layers_that_fit(QWEN3, 139 * 2**30, 50) == 8
    assert 0 < layers_that_fit(QWEN3, 40 * 2**30, 100) < 36 and not layers_that_fit(QWEN3, 0, 100)
    (row,) = decoding_rows(SMALL, clock, Deadline(0))
    assert "layers are left" in row["skipped"]


def test_an_error_in_one_part_does_not_stop_the_next(monkeypatch):
    def broken(*_):
        raise RuntimeError("no part")

    for owner, name in (
        (gpu_check, "copy_bandwidth"), (gpu.cases, "packed_rows"), (gpu.timing, "VaSE"), (gpu.decoding, "build"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, broken)
    rows = list(gpu_check.measure(SMALL, CPU, Deadline(100), 0.0))
    errors = {(row["part"], row["case"]) for row in rows if "no part" in (row.get("error") or "")}
    assert errors == {
        ("bandwidth", "all"), ("kernels", "packed_decode"), ("kernels", "unpack 4 bit"), ("compression", "VaSE(160)"),
        ("decoding", "all"),
    }  # fmt: skip
    assert all(row["share"] is None for row in rows if row["part"] == "kernels" and row.get("ms"))
    show([*rows, *targets(rows, SMALL)], SMALL)


def figures(share, times, compression):
    about = {"part": "kernels", "batch": 1, "rows": 128, "kernel": True, "model": None}
    rows = [about | {"case": name, "share": share} for name in (*SCORING, *PACKING)]
    rows.append(about | {"case": INT4, "share": 0.1, "times_best": times, "model": "4B"})
    rows.append({"part": "compression", "batch": 1, "over_attention": compression})
    return rows


def test_the_targets():
    assert [row["met"] for row in targets(figures(0.7, 2.5, 1.0), SMALL)] == [True] * 4
    assert [row["met"] for row in targets(figures(0.69, 2.4, 1.1), SMALL)] == [False] * 4
    assert [row["met"] for row in targets([], SMALL)] == [None] * 4
    rows = figures(0.8, 3.0, 30.0)
    whole = {"part": "decoding", "batch": 1, "case": "VaSE(160)", "ms_step": 20.0, "ms_compression": 10.0}
    assert [row["met"] for row in targets([*rows, whole], SMALL)] == [True] * 4
    rows[0]["kernel"] = False  # a definition must not meet a target
    assert [row["met"] for row in targets(rows[:-1], SMALL)] == [False, True, True, None]
    rows[0] |= {"kernel": True, "share": None}  # nor may a kernel that raised be passed over
    assert not targets(rows, SMALL)[0]["met"]


def test_synchronisations_are_counted_with_their_places(clock, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(clock, "cuda", True)
    found = count_synchronisations(waits, clock)
    assert found["count"] == 3 and modes == ["warn", "default"]
    ((place, times),) = found["places"].items()
    assert "tests/test_gpu_check.py:" in place and times == 3


INTERPRETED = """
import sys
sys.modules["transformers"] = None
import json, torch
from dataclasses import replace
from kvcomp import dispatch
dispatch.LIBRARIES["cpu"] = ("triton", "kvcomp_kernels")
import guard, gpu_check
from gpu.cases import TOY
from gpu.clock import Clock, Deadline
from gpu.timing import kernel_rows
guard.install()
sizes = replace(TOY, models={"4B": 4}, batches=(1,), rows=(80,), head_dim=32, repeats=1)
with torch.no_grad():
    clock = Clock(torch.device("cpu"), 1)
    print(json.dumps(list(kernel_rows(sizes, clock, Deadline(100), 1e9))))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_is_timed_without_transformers_and_agrees_with_its_definition():
    folders = (".", "kernels", "experiments", "tests", "tests/kernels/triton")
    paths = os.pathsep.join(str(ROOT / name) for name in folders)
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert not [row for row in rows if row.get("error")] and all(row["kernel"] and row["ms"] > 0 for row in rows)
    assert not [(row["case"], row["difference"]) for row in rows if row["wrong"]]
