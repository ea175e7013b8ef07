"""What is printed: the table, and whether the targets are met."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from gpu.cases import INT4, Sizes
from gpu.clock import Row
from gpu.decoding import FULL

SCORING = ("window_score", "sketched_leverage", "value_range")
PACKING = ("pack 4 bit", "pack 4 bit, rotated", "pack 8 bit")
WIDTH = 150


def targets(rows: list[Row], sizes: Sizes) -> list[Row]:
    """Whether each target is met; None if it was not measured."""
    kernels = [row for row in rows if row["part"] == "kernels" and row["rows"] == sizes.rows[0]]
    found = []
    for name, cases in (("scoring >= 70 % of copy", SCORING), ("packing >= 70 % of copy", PACKING)):
        for batch in sizes.batches:
            own = [row for row in kernels if row["case"] in cases and row["batch"] == batch]
            found.append(_target(name, batch, own, "share", 0.7, len(cases)))
    batch = max(sizes.batches)
    own = [row for row in kernels if row["case"] == INT4 and row["batch"] == batch]
    found.append(_target("int4 decode >= 2.5 x sdpa, flash-attn", batch, own, "times_best", 2.5, len(sizes.models)))
    return [*found, *(_compression_target(rows, sizes, batch) for batch in sizes.batches)]


def _target(name: str, batch: int, rows: list[Row], key: str, least: float, wanted: int) -> Row:
    measured = [row for row in rows if row.get(key) is not None]
    target: Row = {"part": "targets", "case": name, "batch": batch}
    if not measured:
        return target | {"met": None, "told": "no figure"}
    worst = min(measured, key=lambda row: row[key])
    enough = len(measured) >= max(wanted, len(rows)) and all(row["kernel"] for row in measured)
    told = f"least {worst[key]:.2f}: {worst['case']} {worst.get('model') or ''}".strip()
    told += "" if enough else "; kernels are missing"
    return target | {"met": enough and worst[key] >= least, "told": told}


def _compression_target(rows: list[Row], sizes: Sizes, batch: int) -> Row:
    """From the whole model if it ran, else from one layer, whose decode step is its attention alone."""
    own = [row for row in rows if row.get("batch") == batch]
    target: Row = {"part": "targets", "case": "one AttnV compression <= one decode step", "batch": batch}
    whole = [row for row in own if row["part"] == "decoding" and row["case"] == f"VaSE({sizes.budget})"]
    if whole and whole[0].get("ms_compression") is not None:
        compression, step = whole[0]["ms_compression"], whole[0]["ms_step"]
        return target | {"met": compression <= step, "told": f"{compression:.1f} ms, step {step:.1f} ms"}
    layer = [row["over_attention"] for row in own if row["part"] == "compression" and row.get("over_attention")]
    if not layer:
        return target | {"met": None, "told": "no figure"}
    return target | {"met": max(layer) <= 1, "told": f"{max(layer):.1f} x attention alone, no whole step measured"}


def failed(rows: list[Row]) -> bool:
    """Whether a test failed, none ran, or a kernel raised or was wrong."""
    tests = [row for row in rows if row["part"] == "tests"]
    parts = ("kernels", "compression")
    raised = any(row.get("error") or row.get("wrong") for row in rows if row["part"] in parts)
    return raised or not tests or tests[0]["exit"] != 0 or not tests[0]["passed"]


def show(rows: list[Row], sizes: Sizes) -> None:
    """Prints tests, kernels, compression, decoding and targets."""
    console = Console(width=WIDTH)

    def print_line(line: str) -> None:
        console.print(line[: WIDTH - 1], highlight=False, markup=False)

    for row in rows:
        if row["part"] == "tests":
            print_line(_tests(row))
        if row["part"] == "bandwidth":
            told = row.get("error") or f"{row['bytes_per_second'] / 1e9:.0f} GB/s; flash-attn {row['flash_attn']}"
            print_line(f"copy bandwidth {told}; at {sizes.rows[0]} rows:")
    console.print(_kernel_table(rows, sizes))
    lines = [*_compression_lines(rows), *_lines(rows, "decoding", "decoding ", _decoding)]
    for name in ("error", "skipped"):
        own = [row for row in rows if row.get(name)]
        lines += [f"{name}: {len(own)}; {_one_line(_about(row, name))}" for row in own[:1]]
    for line in [*lines, *_lines(rows, "targets", "", _met)]:
        print_line(line)


def _tests(row: Row) -> str:
    """How many passed, and the first that did not."""
    state = "passed" if row["exit"] == 0 and row["passed"] else "LATE" if row["late"] else "FAILED"
    counts = f"{row['passed']} passed, {row['failed']} failed, {row['skipped_tests']} skipped"
    broken = [line.split(" - ")[0].split("/")[-1] for line in row["tail"] if re.match("FAILED |ERROR ", line)]
    return f"kernel tests {state}: {counts} in {row['seconds']:.0f} s" + (f", first: {broken[0]}" if broken else "")


def _kernel_table(rows: list[Row], sizes: Sizes) -> Table:
    first, *others = sizes.models
    table = Table(box=None, pad_edge=False)
    columns = ("kernel", "batch", f"ms {first}", *(f"ms {name}" for name in others))
    for column in (*columns, "of copy", "x definition", "x sdpa", "x flash", "differs", ""):
        table.add_column(column, justify="left" if column in ("kernel", "") else "right", no_wrap=True)
    kernels = [row for row in rows if row["part"] == "kernels"]
    for row in kernels:
        if row["rows"] != sizes.rows[0] or row.get("model") not in (None, first):
            continue
        alike = [other for other in kernels if (other["case"], other["batch"]) == (row["case"], row["batch"])]
        ms = {other.get("model"): other.get("ms") for other in alike if other["rows"] == row["rows"]}
        numbers = [_number(row.get("ms")), *(_number(ms.get(name)) for name in others)]
        numbers.append(_number(row.get("share"), "{:.0%}"))
        numbers += [_number(row.get(f"times_{name}"), "{:.2f}") for name in ("definition", "sdpa", "flash")]
        numbers.append(_number(_worst_difference(alike), "{:.1e}"))
        table.add_row(row["case"], str(row["batch"]), *numbers, _note(row, alike))
    return table


def _worst_difference(rows: list[Row]) -> float | None:
    """NaN counts as the largest."""
    found = [row["difference"] for row in rows if row.get("difference") is not None]
    return max(found, key=lambda value: math.inf if math.isnan(value) else value, default=None)


def _note(row: Row, alike: list[Row]) -> str:
    """What is wrong with a kernel; `alike`: the lines of the same case for any number of rows and any model."""
    wrong = any(other.get("wrong") for other in alike)
    state = "WRONG" if wrong else "host-bound" if row.get("host_bound") else ""
    state = state if row.get("kernel") else "no kernel, definition"
    return _one_line(row.get("error") or row.get("skipped") or state)[:40].replace("[", "(")


def _compression_lines(rows: list[Row]) -> list[str]:
    own = [row for row in rows if row["part"] == "compression"]
    told = [
        f"{row.get('model', '')} batch {row.get('batch', '')} "
        + (row.get("error") or f"{_number(row.get('ms'))} ({_number(row.get('attention_ms'))})")[:40]
        for row in own
    ]
    return [f"{own[0]['case']} of one layer, ms (its attention of a step): " + ", ".join(told)] if own else []


def _lines(rows: list[Row], part: str, prefix: str, tell: Callable[[Row], str]) -> list[str]:
    """One line for each case of a part, its batch sizes side by side."""
    told: dict[str, list[str]] = {}
    for row in rows:
        if row["part"] == part:
            told.setdefault(row["case"], []).append(tell(row))
    return [f"{prefix}{case}: " + "; ".join(each) for case, each in told.items()]


def _decoding(row: Row) -> str:
    if row.get("error") or row.get("skipped"):
        return _one_line(row.get("error") or row["skipped"])[:100]
    waits = row["synchronisations"]["count"] if row["synchronisations"] else "-"
    full = "" if row["case"] == FULL else f", {_number(row['times_full'], '{:.2f}')} x full"
    return f"batch {row['batch']} {row['tokens_per_second']:.0f} tokens/s{full}, {waits} syncs"


def _met(row: Row) -> str:
    states = {None: "not measured", True: "met", False: "NOT MET"}
    return f"batch {row['batch']} {states[row['met']]} ({row['told']})"


def _about(row: Row, name: str) -> str:
    return f"{row['case']}, batch {row.get('batch')}, {row.get('rows')} rows: {row[name]}"


def _number(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
