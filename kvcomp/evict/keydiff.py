"""KeyDiff: keys unlike the mean direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class KeyDiff(ScoreEvictor):
    """`s_i = -cos(k_i, m)`, `m = mean_i k_i / |k_i|`.

    Source: KeyDiff (arXiv 2504.15364); kvpress `keydiff_press.py` at 8bb29b9. Deviation: sinks and recent rows are
    kept.
    """

    def score(self, kv: KV, seen: Observed) -> Score:
        """Minus the cosine to the mean direction of the rows that are tokens."""
        direction = torch.nn.functional.normalize(kv.keys.float(), dim=-1)
        mean = direction.masked_fill(kv.pads[..., None], 0.0).sum(2, keepdim=True)  # only its direction matters
        return -torch.nn.functional.cosine_similarity(direction, mean, dim=-1)
