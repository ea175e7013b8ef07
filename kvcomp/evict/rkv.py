"""R-KV: importance against redundancy."""

from __future__ import annotations

import itertools
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcomp import ops
from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class RKV(ScoreEvictor):
    """`Z_i = weight * I_i - (1 - weight) * R_i` over the rows older than the last `window` (which are always kept).

    Importance `I`: logits of the last `window` queries, `group` = maximum or mean over the query heads of a group (the
    maximum is taken before the softmax, the mean after it), softmax over the older rows, mean over the window,
    `pooling` over `pool` rows. Redundancy `R`: cosine matrix `S` of the keys, zero diagonal; with `threshold`, each row
    spares the newest key more similar to it than that (its entry becomes 0); `R = softmax_j(mean_i S_ij)`.

    Source: R-KV (arXiv 2505.24133); the defaults follow `rkv/compression/r1_kv.py` of github.com/Zefan-Cai/R-KV at
    d15c976 with the README's weight 0.1 (its class says 0.07). `RKV.simplified(budget)` is the baseline of
    github.com/terarachang/VaSE at bfa2692. Deviations: any batch size; nothing is spared where no key is similar (the
    source then spares row 0).
    """

    _: KW_ONLY
    weight: float = 0.1
    window: int = 8
    pool: int = 7
    pooling: Literal["max", "average"] = "max"
    group: Literal["max", "mean"] = "max"
    threshold: float | None = 0.5
    sinks: int = 0
    recent: int = 8

    @classmethod
    def simplified(cls, budget: int, *, weight: float = 0.5, protect_prompt: bool = False) -> RKV:
        """The variant of the VaSE repository: 64 queries, mean over the group, average pooling 5, plain mean cosine."""
        variant = {"window": 64, "recent": 64, "pool": 5, "pooling": "average", "group": "mean", "threshold": None}
        return cls(budget, weight=weight, protect_prompt=protect_prompt, **variant)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        self.require(window=1, pool=1)
        if self.pool % 2 == 0:
            raise ValueError(f"RKV: pool must be odd, got {self.pool}")
        if not 0.0 <= self.weight <= 1.0:
            raise ValueError(f"RKV: weight must be between 0 and 1, got {self.weight}")
        if self.pooling not in ("max", "average") or self.group not in ("max", "mean"):
            raise ValueError(f"RKV: pooling must be 'max' or 'average' and group 'max' or 'mean', got {self!r}")
        super().__post_init__()

    def score(self, kv: KV, seen: Observed) -> Score:
        """`Z`, zero for the recent rows."""
        redundancy = self._redundancy(kv.without_newest(self.recent))
        score = self.weight * self._importance(kv, seen) - (1.0 - self.weight) * redundancy
        return torch.nn.functional.pad(score, (0, self.recent))

    def _importance(self, kv: KV, seen: Observed) -> Score:
        logits = ops.attention_logits(kv, seen, drop=self.recent)
        if self.group == "max":
            logits = logits.amax(2, keepdim=True)
        attention = ops.window_attention(logits, seen)
        pool = ops.max_pool if self.pooling == "max" else ops.average_pool
        return pool(attention, self.pool).mean(2)

    def _redundancy(self, older: KV) -> Score:
        keys = torch.nn.functional.normalize(older.keys.float(), dim=-1)
        redundancy, real = torch.empty(keys.shape[:3], device=keys.device), ~older.pads
        for batch, head in itertools.product(
            *map(range, keys.shape[:2])
        ):  # rows x rows floats, not kv_heads times that
            redundancy[batch, head] = self._mean_similarity(keys[batch, head], real[batch, head])
        return redundancy.softmax(-1)

    def _mean_similarity(self, keys: Tensor, real: Tensor, block: int = 1024) -> Tensor:
        """Mean over the rows `i` of `S_ij`, `[rows]`, `-inf` at padding; `block` rows of `S` at a time."""
        index = torch.arange(len(keys), device=keys.device)
        total = torch.zeros(len(keys), device=keys.device)
        for rows in index.split(block):
            similarity = (keys[rows] @ keys.T) * real[rows, None] * real
            local = rows - rows[0]
            similarity[local, rows] = 0.0
            if self.threshold is not None:
                newest = torch.where(similarity > self.threshold, index, -1).amax(-1)
                similarity[local[newest >= 0], newest[newest >= 0]] = 0.0
            total += similarity.sum(0)
        return (total / real.sum().clamp_min(1)).masked_fill(~real, -torch.inf)
