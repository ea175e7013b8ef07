"""Eviction by value range alone, to see how much the rows matter that VaSE reserves."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from kvcomp import ops
from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class ValueRange(ScoreEvictor):
    """`s_i = +-Range(v_i)`, `Range(v) = max(v) - min(v)` over channels: keeps the largest or the smallest ranges.

    Alone it is no method that anyone proposes; it shows how much the rows matter that VaSE reserves.
    """

    _: KW_ONLY
    keep: Literal["largest", "smallest"] = "largest"

    def score(self, kv: KV, seen: Observed) -> Score:
        """The range, with the sign of `keep`."""
        size = ops.value_magnitude(kv, "range")
        return size if self.keep == "largest" else -size
