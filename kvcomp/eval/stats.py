"""Figures of runs: pass@1 with its standard error, and paired differences between runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcomp.eval.records import Record

RESAMPLES = 10_000


@dataclass(frozen=True)
class Summary:
    """Figures of one run.

    `accuracy`: pass@1, the mean over problems of the share of right samples. `error`: its standard error over problems,
    `std(ddof=1) / sqrt(problems)`. `cut`: share of completions that ended at the length limit; `looped`: that ended in
    a repetition. `tokens`, `seconds`, `kv_bytes`: means over completions.
    """

    problems: int
    samples: int
    accuracy: float
    error: float
    cut: float
    looped: float
    tokens: float
    seconds: float
    kv_bytes: float

    @classmethod
    def of(cls, records: Sequence[Record]) -> Summary:
        """Raises ValueError without records."""
        if not records:
            raise ValueError("there is no completion to summarize")
        scores = np.array(list(by_problem(records).values()))
        means = {
            name: float(np.mean([getattr(record, name) for record in records]))
            for name in ("finished", "loops", "tokens", "seconds", "kv_bytes")
        }
        error = float(scores.std(ddof=1) / len(scores) ** 0.5) if len(scores) > 1 else float("nan")
        return cls(
            len(scores), len(records), float(scores.mean()), error,
            1.0 - means["finished"], means["loops"], means["tokens"], means["seconds"], means["kv_bytes"],
        )  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """`mean` of the accuracy of one run minus that of another over the same problems, with the 95 % interval of the
    paired bootstrap (`low` to `high`)."""

    mean: float
    low: float
    high: float


def by_problem(records: Sequence[Record]) -> dict[str, float]:
    """Share of right samples of each problem."""
    found: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        found[record.problem].append(record.correct)
    return {problem: sum(right) / len(right) for problem, right in found.items()}


def difference(first: Mapping[str, float], second: Mapping[str, float], seed: int = 0) -> Difference:
    """Accuracy of the first run minus that of the second, from `by_problem` of both.

    Problems are drawn with replacement, both runs judged on the same draw. Raises ValueError if they have different
    problems.
    """
    if first.keys() != second.keys():
        only = len(first.keys() ^ second.keys())
        raise ValueError(f"the runs cannot be paired: {only} problems are in one of them only")
    change = np.array([first[problem] - second[problem] for problem in first])
    draws = np.random.default_rng(seed).integers(0, len(change), (RESAMPLES, len(change)))
    low, high = np.percentile(change[draws].mean(1), [2.5, 97.5])
    return Difference(float(change.mean()), float(low), float(high))
