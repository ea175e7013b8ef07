"""Everything that needs an NVIDIA GPU, in at most 8 minutes: tests of the compiled kernels, their speed, decoding.

Geometry of Qwen3-4B (32 query heads) and Qwen3-14B (40), 8 KV heads, head_dim 128, bfloat16. First the kernel tests; a
failure is the first line of the table and gives exit status 1, as does a kernel that raises or is wrong. Then, of each
kernel, the time, the share of the bandwidth of a large copy that its least bytes reach, and how many times faster it is
than its torch definition and than attention over the rows in bfloat16 (the best of torch's sdpa, and of flash-attn if
that is installed); `gpu/clock.py` says how that is timed. `differs` is the largest difference between kernel and
definition, as a share of the largest result, for any number of rows. Then one compression beside one decode step, and
decoding of a model of Qwen3-4B's size with random weights, which needs transformers: its caches are filled with random
rows and measured one after the other, as two full ones may not fit. What does not fit into memory or time has a line
that says so.

    PYTHONPATH=.:kernels:experiments:tests python3 experiments/gpu_check.py [--out FILE] [--seconds 480] [--toy]
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from gpu.cases import QWEN3, TOY, Sizes, flash_attn
from gpu.clock import Clock, Deadline, Row, copy_bandwidth, described
from gpu.decoding import decoding_rows
from gpu.table import failed, show, targets
from gpu.timing import compression_rows, kernel_rows
from machine import RESULTS, write_results

ROOT = Path(__file__).parents[1]
TESTS = "tests/kernels/triton"
FOR_TIMING, FOR_DECODING = 0.6, 0.3
"""Shares of the time that tests leave for all else, and kernels for what follows them."""


def run_tests(folder: str, limit: float, interpret: bool, jobs: int = 1) -> Row:
    """The kernel tests in a process of their own: compiled, or with `interpret` by Triton's interpreter."""
    paths = [str(ROOT / name) for name in (".", "kernels", "experiments", "tests")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"PYTHONUNBUFFERED": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", folder]
    command += [f"-n{jobs}"] if jobs > 1 else []
    start, late = time.monotonic(), False
    with tempfile.TemporaryFile("w+") as output:  # a file, so that a test that hangs keeps what it has printed
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code, late = None, True
        output.seek(0)
        lines = output.read().splitlines()
    counts = _counts(lines)
    return {
        "part": "tests", "case": folder, "passed": counts["passed"], "skipped_tests": counts["skipped"],
        "failed": counts["failed"] + counts["error"], "exit": code, "late": late,
        "seconds": time.monotonic() - start, "tail": lines[-25:],
    }  # fmt: skip


def _counts(lines: list[str]) -> Counter[str]:
    """From pytest's last line, or from its dots if it was stopped before that."""
    names = {".": "passed", "s": "skipped", "F": "failed", "E": "error"}
    for line in reversed(lines):
        found = re.findall(r"(\d+) (passed|failed|error|skipped)", line)
        if found and re.search(r" in [\d.]+s", line):
            return Counter({name: int(number) for number, name in found})
    progress = [re.match(r"[.sFExX]+(?=\s*(\[ *\d+%\])?$)", line) for line in lines]
    dots = "".join(match[0] for match in progress if match)
    return Counter(names[letter] for letter in dots if letter in names)


def measure(sizes: Sizes, device: torch.device, deadline: Deadline, reserve: float) -> Iterator[Row]:
    """Every row of the parts that follow the tests; an error in one part does not stop the next.

    `reserve`: seconds that the kernels leave for what follows them.
    """
    clock = Clock(device, sizes.repeats)
    copied = None
    try:
        copied = copy_bandwidth(clock, sizes.copied)
        about: Row = {"part": "bandwidth", "case": "copy", "bytes": 2 * sizes.copied, "flush_ms": clock.flush_ms}
        yield about | {"bytes_per_second": copied, "flash_attn": "installed" if flash_attn() else "not installed"}
    except Exception as error:
        yield broken("bandwidth", sizes, error)
    parts = {
        "kernels": kernel_rows(sizes, clock, Deadline(deadline.left(reserve)), copied),
        "compression": compression_rows(sizes, clock),
        "decoding": decoding_rows(sizes, clock, deadline),
    }
    for part, rows in parts.items():
        try:
            yield from rows
        except Exception as error:
            yield broken(part, sizes, error)


def broken(part: str, sizes: Sizes, error: Exception) -> Row:
    """The row of a part that could not go on."""
    return {"part": part, "case": "all", "error": described(error), "batch": None, "rows": sizes.rows[0]}


def main(
    out: Annotated[
        Path | None, typer.Option(help="where to write; experiments/results/gpu_check.json if left out")
    ] = None,
    seconds: Annotated[float, typer.Option(help="time for all parts")] = 480,
    tests: Annotated[str, typer.Option(help="folder of the kernel tests")] = TESTS,
    jobs: Annotated[int | None, typer.Option(help="processes for the kernel tests; 8 if pytest-xdist is there")] = None,
    toy: Annotated[bool, typer.Option(help="every part on CPU at toy sizes; written to the temporary folder")] = False,
) -> None:
    """Test and time the kernels on this machine's GPU."""
    if not toy and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here: run it on a machine with one, or with --toy on CPU")
    sizes, device = (TOY, torch.device("cpu")) if toy else (QWEN3, torch.device("cuda"))
    if not toy:
        os.environ.pop("TRITON_INTERPRET", None)  # no kernel has been imported yet
    path = out or (Path(tempfile.gettempdir()) if toy else RESULTS) / "gpu_check.json"
    deadline, rows = Deadline(seconds), list[Row]()

    def note(row: Row) -> None:
        rows.append(row)
        write_results("gpu_check", rows, out=path, seconds=seconds, toy=toy)  # at once: the next kernel may hang

    limit = max(deadline.left(FOR_TIMING * seconds), 1.0)
    several = 8 if importlib.util.find_spec("xdist") and not toy else 1
    note(run_tests(tests, limit, toy, jobs or several))
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            for row in measure(sizes, device, deadline, FOR_DECODING * seconds):
                note(row)
    except Exception as error:
        note(broken("kernels", sizes, error))
    for row in targets(rows, sizes):
        note(row)
    show(rows, sizes)
    print("written to", path)
    if failed(rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
