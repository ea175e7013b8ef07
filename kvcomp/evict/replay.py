"""Replay: SnapKV, and what past queries would read if they were asked again now."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kvcomp import ops
from kvcomp.core import KV, Observed, Rows, Score
from kvcomp.evict.base import ScoreEvictor, ranked

AT_ONCE = 64
"""Queries of a KV head that are replayed together."""


@dataclass(frozen=True)
class Replay(ScoreEvictor):
    """`share` of the rows that are free to choose go to the largest `r_i`, the others to the largest `s_i`:

    `r_i = max over the remembered queries of softmax_i(scaling * R(q) . k)`,
    `s_i = mean_group pool(mean over the last `window` queries of softmax_i(scaling * q . k))`.

    The remembered queries are the `remembers` most novel ones per KV head of the whole text (`RememberedQueries`). `R`
    turns each to `ahead` positions after the newest token, as if it were asked soon: so it sees every row stored now,
    those written after it too, and of several rows that answer it only the one that the model prefers. The maximum
    keeps what any of them reads, however seldom. Free: the budget without sinks and recent rows.

    Source: this project; the study is in `experiments/README.md`. `s_i` is the score of SnapKV (arXiv 2404.14469).
    Related: Expected Attention (arXiv 2510.00636) asks with a normal distribution of recent queries. Raises
    NotImplementedError where the rotary embedding of the model is not known.
    """

    _: KW_ONLY
    window: int = 64
    pool: int = 5
    remembers: int = 128
    ahead: int = 16
    share: float = 0.6

    def __post_init__(self) -> None:
        self.require(window=1, pool=1, remembers=0, ahead=0)
        if self.pool % 2 == 0:
            raise ValueError(f"Replay: pool must be odd, got {self.pool}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"Replay: share is one of the free rows, 0 to 1, got {self.share}")
        super().__post_init__()

    def score(self, kv: KV, seen: Observed) -> Score:
        """`s_i`, which is at most 1, and `1 + r_i` for the rows with the largest `r_i`."""
        attention = ops.pooled_attention(kv, seen, drop=0, recent=self.recent, pool=self.pool)
        score = torch.nn.functional.pad(attention, (0, self.recent))
        if seen.remembered is None:
            return score
        candidates = self.replayed(kv, seen).masked_fill(self.pinned(kv, seen) | kv.pads, -1.0)
        largest = ranked(candidates, round(self.share * (self.budget - self.reserved)))
        return score.scatter(2, largest, 1.0 + candidates.gather(2, largest))

    def replayed(self, kv: KV, seen: Observed) -> Score:
        """`r_i` of each row; 0 for one that no remembered query reads."""
        if seen.rotary is None:
            raise NotImplementedError("Replay turns queries, but the rotary embedding of this model is not known")
        assert seen.remembered is not None and seen.remembered_positions is not None
        keys, pads = kv.keys, seen.remembered_positions < 0
        most, rows = keys.new_zeros(keys.shape[:3], dtype=torch.float32), KV(keys, keys, kv.positions)
        for queries, unknown in zip(seen.remembered.split(AT_ONCE, 2), pads.split(AT_ONCE, 2), strict=True):
            weights = self._ask(rows, seen, queries).softmax(-1).masked_fill_(unknown[..., None], 0.0)
            most = torch.maximum(most, weights.amax(2))
        return most

    def _ask(self, kv: KV, seen: Observed, queries: Rows) -> Tensor:
        """Logits `[batch, kv_heads, queries, rows]` of `queries` that are asked after the newest row."""
        assert seen.rotary is not None
        soon = (kv.positions[:, 0, -1:] + self.ahead).expand(-1, queries.shape[2])
        turned = seen.rotary.rotate(queries, soon[:, None]).to(kv.keys.dtype)
        return ops.attention_logits(kv, Observed(turned, soon, seen.scaling, padded=seen.padded))[:, :, 0]
