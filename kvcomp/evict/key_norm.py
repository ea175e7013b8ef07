"""KeyNorm: short keys."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class KeyNorm(ScoreEvictor):
    """`s_i = -|k_i|_2`.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430); kvpress
    `knorm_press.py` at 8bb29b9. Deviation: sinks and recent rows are kept, in every layer.
    """

    def score(self, kv: KV, seen: Observed) -> Score:
        """Minus the norm of the key."""
        return -kv.keys.float().norm(dim=-1)
