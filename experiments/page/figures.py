"""The figures of the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from page.points import Key, Points, Row

matplotlib.use("Agg")
from matplotlib import pyplot

FIGURES = Path(__file__).parents[1] / "figures"
MARKERS = "osD^v<>pPX*hs" * 3

Line = list[tuple[float, float, float]]
"""Abscissa, ordinate and its error."""


@contextmanager
def drawn(name: str, panels: int = 1, width: float = 7.0) -> Iterator[Any]:
    """The axes of a figure with `panels` beside each other, saved as `figures/<name>.png`."""
    figure, axes = pyplot.subplots(1, panels, figsize=(width, 4.2), layout="constrained", squeeze=False)
    yield axes[0]
    for one in axes[0]:
        one.grid(alpha=0.3)
        one.legend(fontsize=7, ncols=1 if panels > 1 else 2)
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def curves(found: Points, across: Callable[[Key], float], name: Callable[[Key], str]) -> dict[str, Line]:
    """By line of a plot its points in order, in per cent."""
    lines: dict[str, Line] = defaultdict(list)
    for key in found.rows:
        mean, error = found.accuracy(key)
        lines[name(key)].append((across(key), 100 * mean, 100 * error))
    return {label: sorted(line) for label, line in lines.items()}


def accuracy(name: str, lines: dict[str, Line], label: str) -> None:
    """Accuracy over bytes or rows, with error bars."""
    with drawn(name) as (axes,):
        for (line, values), marker in zip(lines.items(), MARKERS, strict=False):
            x, y, error = zip(*values, strict=True)
            axes.errorbar(x, y, error, label=line, marker=marker, markersize=4, linewidth=1, capsize=2)
        axes.set(xlabel=label, ylabel="chains right, %", ylim=(-2, 102))


def error_by_range(rows: list[Row]) -> None:
    """Share of the squared error of the values in each tenth of the rows, mean over layers."""
    groups: dict[tuple[str, int, int], list[list[float]]] = defaultdict(list)
    for row in rows:
        groups[(row["model"], row["bits"], row["group_size"])].append(row["share_by_tenth"])
    with drawn("error_by_range") as (axes,):
        for ((model, bits, size), shares), marker in zip(groups.items(), MARKERS, strict=False):
            label = f"{model}, {bits} bits, groups of {size}"
            axes.plot(range(1, 11), 100 * np.mean(shares, 0), label=label, marker=marker, markersize=4, linewidth=1)
        axes.axhline(10, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="tenth of the rows, by value range", ylabel="share of the error, %", ylim=(0, None))


def speed(rows: list[Row]) -> None:
    """Tokens a second and KV bytes against length."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        budget = f", {row['budget']} rows" if row["budget"] else ""
        groups[f"{row['variant']}{budget}"].append(row)
    with drawn("speed", panels=2, width=10.0) as (left, right):
        for (label, line), marker in zip(groups.items(), MARKERS, strict=False):
            lengths = [row["length"] for row in line]
            style = {"label": label, "marker": marker, "markersize": 4, "linewidth": 1}
            left.plot(lengths, [row["tokens_per_second"] for row in line], **style)
            right.plot(lengths, [row["kv_bytes"] / 2**20 for row in line], **style)
        for axes, what in ((left, "tokens a second"), (right, "MiB of KV cache, spare room included")):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set(xlabel="tokens in the cache", ylabel=what)
