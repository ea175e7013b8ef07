"""SnapKV: attention of the last queries, pooled over neighbours."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from kvcomp import ops
from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class SnapKV(ScoreEvictor):
    """`s_i = mean_group pool(mean over the last `window` queries of softmax_i(scaling * q . k))`.

    The softmax runs over every row, causal inside the window; the window's own rows are `recent` and always kept.
    Average pooling over `pool` rows. No sinks, as in the source.

    Source: SnapKV (arXiv 2404.14469); `snapkv_utils.py` of github.com/FasterDecoding/SnapKV at e216ddc. Deviations:
    used at every compression, not only after the prompt; mean over the query heads of a group, as in kvpress.
    """

    _: KW_ONLY
    sinks: int = 0
    window: int = 64
    pool: int = 5

    def __post_init__(self) -> None:
        self.require(window=1, pool=1)
        if self.pool % 2 == 0:
            raise ValueError(f"SnapKV: pool must be odd, got {self.pool}")
        super().__post_init__()

    def score(self, kv: KV, seen: Observed) -> Score:
        """Pooled attention, mean over the group; 0 for the recent rows."""
        attention = ops.pooled_attention(kv, seen, drop=0, recent=self.recent, pool=self.pool)
        return torch.nn.functional.pad(attention, (0, self.recent))
