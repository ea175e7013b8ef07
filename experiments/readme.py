"""Write experiments/README.md and its figures from the files in experiments/results.

Text that no figure can give stands in experiments/findings.md and is taken over.

    python experiments/readme.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from machine import RESULTS

from kvcomp.eval.chains import FAMILIES
from kvcomp.eval.stats import difference
from kvcomp.memory import size

HERE = Path(__file__).parent
FIGURES = HERE / "figures"
PAPER = {
    "Random": 53.2,
    "largest value ranges evicted": 14.3,
    "SnapKV": 64.3,
    "SnapKV + sampling": 70.9,
    "SnapKV + budget/4 V slots": 80.5,
    "VaSE attnv (sampling + budget/4 V slots)": 85.2,
    "CurDKV (fixed G)": 78.6,
    "VaSE dkv (G resampled)": 87.6,
    "full cache": 88.0,
}
"""Per cent right on GSM8K, Qwen3-4B, 512 rows, about a quarter: plots/plot_pilot.py and tables/ablation.json of
github.com/terarachang/VaSE at bfa2692."""

Row: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, float, str]


def read(study: str) -> dict[str, Any]:
    """The file of a study of reasoning.py."""
    found: dict[str, Any] = json.loads((RESULTS / f"reasoning_{study}.json").read_text("utf-8"))
    return found


class Points:
    """The points of a study: scores by problem over both families, all seeds averaged."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.rows: dict[Key, list[Row]] = defaultdict(list)
        for row in data["rows"]:
            self.rows[(row["name"], row["fraction"], row["quantizer"])].append(row)

    def scores(self, key: Key, family: str | None = None) -> dict[str, float]:
        """The share of seeds that solve each problem."""
        right: dict[str, list[int]] = defaultdict(list)
        for row in self.rows[key]:
            if family in (None, row["family"]):
                for number, bit in enumerate(row["right"]):
                    right[f"{row['family']}-{number}"].append(int(bit))
        return {problem: float(np.mean(bits)) for problem, bits in right.items()}

    def accuracy(self, key: Key, family: str | None = None) -> tuple[float, float]:
        """Mean and its standard error over problems."""
        values = np.array(list(self.scores(key, family).values()))
        return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)

    def mean(self, key: Key, figure: str) -> float:
        """Of a figure of the rows."""
        return float(np.mean([row[figure] for row in self.rows[key]]))

    def against(self, key: Key, other: Key) -> str:
        """The paired difference of two points over the problems of both families, in points, with its interval."""
        change = difference(self.scores(key), self.scores(other))
        return f"{100 * change.mean:+.1f} ({100 * change.low:+.1f} to {100 * change.high:+.1f})"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(data: dict[str, Any]) -> str:
    """What a reader needs to run it again."""
    of, settings = data["provenance"], data["settings"]
    return (
        f"`{of['command']}`; {settings['problems']} problems of each family, seeds {settings['first']} and up, "
        f"{settings['seeds']} seed(s) of the noise, {settings['dtype']}; interval {settings['interval']}, recent rows "
        f"and window {settings['recent']}; commit {of['commit']}, {of['date']}, {of['processor']}, {of['threads']} "
        f"thread, torch {of['torch']}."
    )


def accuracy_cells(points: Points, key: Key) -> list[str]:
    """Of each family, then of both, in per cent with the standard error."""
    cells = [points.accuracy(key, family) for family in (*FAMILIES, None)]
    return [f"{100 * mean:.1f} ± {100 * error:.1f}" for mean, error in cells]


def main_table(points: Points) -> str:
    """Every method at a quarter of the rows, best first."""
    full, random = ("full cache", 1.0, ""), ("random + prompt", 0.25, "")
    keys = sorted(points.rows, key=lambda key: -points.accuracy(key)[0])
    head = ["method", *FAMILIES, "both", "minus full cache", "minus Random + prompt", "KV cache", "cut off", "looped"]
    rows = [
        [
            key[0], *accuracy_cells(points, key), points.against(key, full), points.against(key, random),
            size(round(points.mean(key, "kv_bytes"))), f"{100 * points.mean(key, 'cut'):.0f}",
            f"{100 * points.mean(key, 'looped'):.0f}",
        ]
        for key in keys
    ]  # fmt: skip
    return table(head, rows)


def pilot_table(points: Points) -> str:
    """Beside what the paper's repository reports."""
    rows = [
        [name, *accuracy_cells(points, key), f"{PAPER[name]:.1f}" if name in PAPER else ""]
        for key in points.rows
        for name in [key[0]]
    ]
    return table(["setting", *FAMILIES, "both", "paper: Qwen3-4B, GSM8K"], rows)


def curves(points: Points, across: Callable[[Key], float], name: Callable[[Key], str]) -> dict[str, list[list[float]]]:
    """By line of a plot its points: abscissa, accuracy and error in per cent, in order."""
    lines: dict[str, list[list[float]]] = defaultdict(list)
    for key in points.rows:
        mean, error = points.accuracy(key)
        lines[name(key)].append([across(key), 100 * mean, 100 * error])
    return {label: sorted(line) for label, line in lines.items()}


def plot(lines: dict[str, list[list[float]]], label: str, path: Path, full: float | None = None) -> None:
    """Accuracy over bytes or rows, logarithmic, with error bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, line), marker in zip(sorted(lines.items()), "osD^v<>pPX*hs" * 3, strict=False):
        across, accuracy, error = zip(*line, strict=True)
        axes.errorbar(across, accuracy, error, label=name, marker=marker, markersize=4, linewidth=1, capsize=2)
    if full is not None:
        axes.axhline(full, color="black", linewidth=0.8, linestyle=":", label="full cache")
    axes.set_xscale("log", base=2)
    axes.set(xlabel=label, ylabel="chains right, %", ylim=(-2, 102))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def section(title: str, study: str, make: Callable[[Points], str], missing: list[str]) -> str:
    """A section of the page, if its results are there."""
    if not (RESULTS / f"reasoning_{study}.json").exists():
        missing.append(study)
        return ""
    points = Points(read(study))
    return f"## {title}\n\n{source(points.data)}\n\n{make(points)}\n"


def swept(points: Points) -> str:
    """The figure of the budget sweep and its table."""
    plot(
        curves(points, lambda key: points.mean(key, "budget"), lambda key: key[0]),
        "rows kept per KV head, mean of both families",
        FIGURES / "sweep.png",
    )
    fractions = sorted({key[1] for key in points.rows}, reverse=True)
    names = list(dict.fromkeys(key[0] for key in points.rows))
    rows = [
        [name, *(" ± ".join(f"{100 * x:.1f}" for x in points.accuracy((name, part, ""))) for part in fractions)]
        for name in names
    ]
    head = ["method", *(f"1/{1 / part:.0f} of the rows" for part in fractions)]
    return f"![Accuracy against budget](figures/sweep.png)\n\n{table(head, rows)}"


def fronted(points: Points) -> str:
    """The figure of accuracy against bytes and the points that no other beats in both."""
    lines = curves(points, lambda key: points.mean(key, "kv_bytes") / 1024, lambda key: f"{key[0]} {key[2]}".strip())
    plot(lines, "KiB of KV cache for a text, mean of both families", FIGURES / "front.png")
    full = points.mean(("full cache", 1.0, ""), "kv_bytes")
    keys = sorted(points.rows, key=lambda key: -points.mean(key, "kv_bytes"))
    rows = [
        [
            key[0], f"{key[1]:.3g}", key[2] or "none", size(round(points.mean(key, "kv_bytes"))),
            f"{full / points.mean(key, 'kv_bytes'):.1f}", *accuracy_cells(points, key),
            points.against(key, ("full cache", 1.0, "")),
        ]
        for key in keys
    ]  # fmt: skip
    head = ["method", "rows", "quantizer", "KV cache", "times smaller", *FAMILIES, "both", "minus full cache"]
    return f"![Accuracy against bytes](figures/front.png)\n\n{table(head, rows)}"


def main() -> None:
    """Write the page; say which studies have no results yet."""
    missing: list[str] = []
    parts = [
        "# Experiments\n\nWritten by `python experiments/readme.py` from `results/*.json` and `findings.md`.\n",
        (HERE / "findings.md").read_text("utf-8"),
        section("Every method at a quarter of the rows", "main", main_table, missing),
        section("The pilot: from SnapKV to VaSE", "pilot", pilot_table, missing),
        section("Fewer rows", "sweep", swept, missing),
        section("Accuracy against bytes", "front", fronted, missing),
    ]
    (HERE / "README.md").write_text("\n".join(part for part in parts if part), "utf-8")
    print("wrote experiments/README.md" + (f"; no results of {', '.join(missing)}" if missing else ""))


if __name__ == "__main__":
    main()
