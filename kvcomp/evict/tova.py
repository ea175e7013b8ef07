"""TOVA: attention of the newest query, one kept set for all heads."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from kvcomp import ops
from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class TOVA(ScoreEvictor):
    """`s_i = mean over all query heads of softmax_i(scaling * q_last . k)`; nothing is pinned.

    Source: TOVA (arXiv 2401.06104); github.com/schwartz-lab-NLP/TOVA at 9c7d09b. Deviation: evicts every `interval`
    tokens.
    """

    _: KW_ONLY
    sinks: int = 0
    recent: int = 0
    window: int = 1

    def __post_init__(self) -> None:
        self.require(window=1)
        super().__post_init__()

    def score(self, kv: KV, seen: Observed) -> Score:
        """The same score for every KV head."""
        attention = ops.pooled_attention(kv, seen, drop=0, recent=0, pool=1)
        return attention.mean(1, keepdim=True).expand_as(attention)
