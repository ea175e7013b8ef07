"""Write experiments/README.md and its figures from the files in experiments/results.

Text that no figure can give stands in experiments/findings.md and is taken over.

    python experiments/readme.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from machine import RESULTS
from page import figures
from page.claims import CLAIMS, PILOT
from page.points import FULL, RANDOM, Figure, Key, Points, in_points, read
from reads_by_range import READ, in_largest_quarter

from kvcomp.eval.chains import FAMILIES
from kvcomp.memory import size

HERE = Path(__file__).parent
BOTH = (*FAMILIES, None)
ACCURACY = (*FAMILIES, "both", "before the first error")
FIGURES: dict[str, Figure] = {"chains right": "right", "before the first error": "before"}


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(data: dict[str, Any]) -> str:
    """What a reader needs to run it again."""
    of, settings = data["provenance"], data["settings"]
    how = "".join(f"{name} {value}; " for name, value in settings.items())
    return (
        f"`{of['command']}`; {how}commit {of['commit']}, {of['date']}, {of['processor']}, {of['threads']} thread, "
        f"torch {of['torch']}."
    )


def accuracy_cells(found: Points, key: Key) -> list[str]:
    """Of each family, then of both, then how far both come, in per cent with the standard error."""
    cells = [*(found.accuracy(key, family) for family in BOTH), found.accuracy(key, None, "before")]
    return [f"{100 * mean:.1f} ± {100 * error:.1f}" for mean, error in cells]


def main_table(found: Points) -> str:
    """Every method at a quarter of the rows, best first."""
    keys = sorted(found.rows, key=lambda key: [-found.accuracy(key, None, figure)[0] for figure in ("right", "before")])
    head = ["method", *ACCURACY, "minus full cache", "minus Random + prompt", "KV cache", "looped"]
    rows = [
        [
            key[0], *accuracy_cells(found, key), in_points(found.minus(key, FULL)), in_points(found.minus(key, RANDOM)),
            size(round(found.mean(key, "kv_bytes"))), f"{100 * found.mean(key, 'looped'):.0f}",
        ]
        for key in keys
    ]  # fmt: skip
    return table(head, rows)


def pilot_table(found: Points) -> str:
    """Beside what the paper's repository reports."""
    rows = [
        [key[0], *accuracy_cells(found, key), f"{PILOT[key[0]]:.1f}" if key[0] in PILOT else ""] for key in found.rows
    ]
    return table(["setting", *ACCURACY, "paper: Qwen3-4B, GSM8K"], rows)


def settings_table(found: Points) -> str:
    """One line a setting."""
    rows = [[key[0], *accuracy_cells(found, key), size(round(found.mean(key, "kv_bytes")))] for key in found.rows]
    return table(["setting", *ACCURACY, "KV cache"], rows)


def swept(found: Points) -> str:
    """The figure of the budget sweep, and a table of each figure of accuracy."""
    lines = figures.curves(found, lambda key: found.mean(key, "budget"), lambda key: key[0])
    figures.accuracy("sweep", lines, "rows kept per KV head, mean of both families")
    fractions = sorted({key[1] for key in found.rows}, reverse=True)
    names = dict.fromkeys(key[0] for key in found.rows)

    def cell(key: Key, figure: Figure) -> str:
        return " ± ".join(f"{100 * x:.1f}" for x in found.accuracy(key, None, figure)) if key in found.rows else ""

    tables = [
        table(
            [said, *(f"{part:.3g} of the rows" for part in fractions)],
            [[name, *(cell((name, part, ""), figure) for part in fractions)] for name in names],
        )
        for said, figure in FIGURES.items()
    ]
    return "\n\n".join(["![Accuracy against budget](figures/sweep.png)", *tables])


def fronted(found: Points) -> str:
    """The figure of accuracy against bytes and the table behind it, largest caches first."""
    lines = figures.curves(
        found, lambda key: found.mean(key, "kv_bytes") / 1024, lambda key: f"{key[0]} {key[2]}".strip()
    )
    figures.accuracy("front", lines, "KiB of KV cache for a text, mean of both families")
    full = found.mean(FULL, "kv_bytes")
    rows = [
        [
            key[0], f"{key[1]:.3g}", key[2] or "none", size(round(found.mean(key, "kv_bytes"))),
            f"{full / found.mean(key, 'kv_bytes'):.1f}", *accuracy_cells(found, key), in_points(found.minus(key, FULL)),
        ]
        for key in sorted(found.rows, key=lambda key: -found.mean(key, "kv_bytes"))
    ]  # fmt: skip
    head = ["method", "rows", "quantizer", "KV cache", "times smaller", *ACCURACY, "minus full cache"]
    return f"![Accuracy against bytes](figures/front.png)\n\n{table(head, rows)}"


def claims() -> str:
    """What was published beside what was measured here; nothing as long as a study is missing."""
    if not all((RESULTS / f"reasoning_{study}.json").exists() for study in ("pilot", "main")):
        return ""
    studies = {study: Points(read(f"reasoning_{study}")) for study in ("pilot", "main")}
    head = ["claim", "published, points", "where", "here, before the first error", "verdict"]
    lines = table(head, [claim.line(studies[claim.study]) for claim in CLAIMS])
    return f"## Published claims\n\n{(HERE / 'claims.md').read_text('utf-8')}\n{lines}\n"


def errors(data: dict[str, Any]) -> str:
    """The figure of quantization error against value range, and its correlation."""
    figures.error_by_range(data["rows"])
    groups = dict.fromkeys((row["model"], row["bits"], row["group_size"]) for row in data["rows"])
    rows = []
    for group in groups:
        these = [row for row in data["rows"] if (row["model"], row["bits"], row["group_size"]) == group]
        found = [row["correlation"] for row in these]
        largest = sum(row["share_by_tenth"][-1] for row in these) / len(these)
        spread = [f"{sum(found) / len(found):.2f}", f"{min(found):.2f} to {max(found):.2f}", f"{100 * largest:.0f}"]
        rows.append([group[0], str(group[1]), str(group[2]), *spread])
    head = ["model", "bits", "group", "correlation", "over layers", "largest tenth, % of the error"]
    return f"![Error against value range](figures/error_by_range.png)\n\n{table(head, rows)}"


def reads(data: dict[str, Any]) -> str:
    """Where the rows are that will be read; beside all layers the one that reads most rows."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in data["rows"]):
        these = [row for row in data["rows"] if row["model"] == name]
        most = max(these, key=lambda row: float(row["read"]))
        found = [
            sum(row["read"] for row in these) / len(these), in_largest_quarter(data["rows"], name),
            most["read"], most["read_in_largest_quarter"],
        ]  # fmt: skip
        lines.append([name, *(f"{100 * share:.1f}" for share in found), str(most["layer"])])
    inside = "in the largest quarter"
    head = ["model", "read, all layers", inside, "read, where most are", inside, "that layer"]
    told = (
        f"Three quarters into a text: rows that some later query reads with a weight of {READ} or more, and how many "
        "of these are in the quarter with the largest value ranges, per cent; 25 by chance."
    )
    return f"{told}\n\n{table(head, lines)}"


def speeds(data: dict[str, Any]) -> str:
    """The figure of speed and memory against length."""
    figures.speed([row for row in data["rows"] if row["dtype"] == "bfloat16"])
    return "![Speed and memory](figures/speed.png)\n\nThe table stands in the [README](../README.md#decoding-speed)."


SECTIONS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Every method at a quarter of the rows", "reasoning_main", lambda data: main_table(Points(data))),
    ("The pilot: from SnapKV to VaSE", "reasoning_pilot", lambda data: pilot_table(Points(data))),
    ("Settings of VaSE-AttnV", "reasoning_vase", lambda data: settings_table(Points(data))),
    ("Settings of Replay", "reasoning_replay", lambda data: settings_table(Points(data))),
    ("Fewer rows", "reasoning_sweep", lambda data: swept(Points(data))),
    ("Accuracy against bytes", "reasoning_front", lambda data: fronted(Points(data))),
    ("Quantization error of the values against their range", "error_by_range", errors),
    ("Value range and what is read", "reads_by_range", reads),
    ("Speed and memory against length", "decode_speed", speeds),
)


def section(title: str, name: str, make: Callable[[Any], str]) -> str:
    """A section of the page; without results it says so."""
    if not (RESULTS / f"{name}.json").exists():
        return f"## {title}\n\nNot measured: `results/{name}.json` is missing.\n"
    data = read(name)
    return f"## {title}\n\n{source(data)}\n\n{make(data)}\n"


def main() -> None:
    """Write the page."""
    parts = [
        "# Experiments\n\nWritten by `python experiments/readme.py` from `results/`, `findings.md` and `claims.md`.\n",
        (HERE / "findings.md").read_text("utf-8"),
        claims(),
        *(section(*one) for one in SECTIONS),
    ]
    (HERE / "README.md").write_text("\n".join(part for part in parts if part), "utf-8")
    print("wrote experiments/README.md")


if __name__ == "__main__":
    main()
