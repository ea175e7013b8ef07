"""Random: the baseline that every method must beat."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class Random(ScoreEvictor):
    """Uniform among the rows that are not pinned, drawn anew for each KV head and round.

    With `protect_prompt=True` it is the policy of "Random Attention" (arXiv 2609.03430), which matched or beat scored
    methods.
    """

    def score(self, kv: KV, seen: Observed) -> Score:
        """A uniform number per row."""
        return seen.uniform(kv.positions)
