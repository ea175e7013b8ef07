"""The points of a study of `reasoning.py`: accuracy with its error, means, and paired differences."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, Literal, TypeAlias

import numpy as np
from machine import RESULTS

from kvcomp.eval.stats import Difference, difference

Row: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, float, str]
"""Name, fraction of the rows, quantizer."""
Figure: TypeAlias = Literal["right", "before"]

FULL: Key = ("full cache", 1.0, "")
RANDOM: Key = ("random + prompt", 0.25, "")


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


class Points:
    """Scores by problem over both families, all seeds averaged."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.rows: dict[Key, list[Row]] = defaultdict(list)
        for row in data["rows"]:
            self.rows[(row["name"], row["fraction"], row["quantizer"])].append(row)

    def scores(self, key: Key, family: str | None = None, figure: Figure = "right") -> dict[str, float]:
        """By problem, mean over the seeds: whether it is solved, or the share of its chain before the first error."""
        found: dict[str, list[float]] = defaultdict(list)
        for row in self.rows[key]:
            if family in (None, row["family"]):
                for number, value in enumerate(row[figure]):
                    found[f"{row['family']}-{number}"].append(float(value))
        return {problem: float(np.mean(values)) for problem, values in found.items()}

    def accuracy(self, key: Key, family: str | None = None, figure: Figure = "right") -> tuple[float, float]:
        """Mean and its standard error over problems."""
        values = np.array(list(self.scores(key, family, figure).values()))
        return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)

    def mean(self, key: Key, figure: str) -> float:
        """Of a figure of the rows."""
        return float(np.mean([row[figure] for row in self.rows[key]]))

    def minus(self, key: Key, other: Key, figure: Figure = "right") -> Difference:
        """The paired difference of two points over the problems of both families."""
        return difference(self.scores(key, figure=figure), self.scores(other, figure=figure))


def in_points(change: Difference) -> str:
    """A difference in points, with its 95 % interval."""
    return f"{100 * change.mean:+.1f} ({100 * change.low:+.1f} to {100 * change.high:+.1f})"
