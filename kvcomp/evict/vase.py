"""VaSE: value-aware, stochastic eviction."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

from kvcomp import ops
from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor, ranked
from kvcomp.evict.curdkv import gaussian_sketch, key_value_leverage


@dataclass(frozen=True)
class VaSE(ScoreEvictor):
    """Reserve rows for the values of largest magnitude, then draw the rest at random in proportion to a score.

    `scorer="attnv"`: of the rows that are neither sinks nor recent, the `protected - sinks` with the largest
    `Range(v) = max(v) - min(v)` are reserved; the rest is drawn without replacement with probability proportional to
    `s ** (1 / temperature)`, `s_i = mean_group pool_5 mean_window softmax_i(scaling * q . k)` over all rows but the
    recent ones (Gumbel top-k on `log s / temperature`). `scorer="dkv"`: keep the largest `|k G|^2 |v G|^2` with
    a new `G ~ N(0, 1 / rank)` `[head_dim, rank]` at each round; `protected` defaults to 0, as it reserves none.

    `protected` counts the sinks (default `budget // 4` for attnv). `magnitude` replaces the range by the population
    variance or the L2 norm over channels. `stochastic=False` keeps the largest `s` (attnv) or one `G` for all rounds
    (dkv).

    Source: VaSE (arXiv 2606.03928); follows `eval/reasoning_tasks/modified/transformers/cache_utils.py` of
    github.com/terarachang/VaSE at bfa2692, modes `range_sink_sample_attn` and `cur_resample_gauss`. Deviations: rows
    are kept in time order, so pooling averages true neighbours; `budget` rows are kept whatever the length of the
    prompt; `G` differs by KV head, not by batch row, so that a row's result does not depend on its batch; `temperature`
    belongs to the draw (there it divides the logits; 1 in both).
    """

    _: KW_ONLY
    scorer: Literal["attnv", "dkv"] = "attnv"
    protected: int | None = None
    window: int = 64
    pool: int = 5
    temperature: float = 1.0
    rank: int = 20
    magnitude: ops.Magnitude = "range"
    stochastic: bool = True

    def __post_init__(self) -> None:
        if self.scorer not in ("attnv", "dkv"):
            raise ValueError(f"VaSE: scorer must be 'attnv' or 'dkv', got {self.scorer!r}")
        if self.magnitude not in ("range", "variance", "l2"):
            raise ValueError(f"VaSE: magnitude must be 'range', 'variance' or 'l2', got {self.magnitude!r}")
        self.require(budget=1)
        if self.protected is None:
            object.__setattr__(self, "protected", self.budget // 4 if self.scorer == "attnv" else 0)
        if self.scorer == "dkv":
            object.__setattr__(self, "window", 0)  # it looks at no query
        self.require(protected=0, window=0 if self.scorer == "dkv" else 1, pool=1, rank=1)
        if self.pool % 2 == 0:
            raise ValueError(f"VaSE: pool must be odd, got {self.pool}")
        if not self.temperature > 0:
            raise ValueError(
                f"VaSE: temperature must be above 0, got {self.temperature}; stochastic=False draws nothing"
            )
        super().__post_init__()

    @property
    def reserved(self) -> int:
        """Sinks, recent and protected rows; the sinks count twice, which leaves the draw a few rows more."""
        return super().reserved + (self.protected or 0)

    def score(self, kv: KV, seen: Observed) -> Score:
        """The log score with noise (attnv) or the sketched leverage (dkv); reserved rows above all others."""
        count = (self.protected or 0) - self.sinks
        score, magnitude = self._attnv(kv, seen) if self.scorer == "attnv" else (self._dkv(kv, seen), None)
        if count <= 0:
            return score
        if magnitude is None:
            magnitude = ops.value_magnitude(kv, self.magnitude)
        candidates = magnitude.masked_fill(self.pinned(kv, seen) | kv.pads, -torch.inf)
        largest = ranked(candidates, min(count, kv.rows))
        # Above every other score, yet ordered by magnitude in case a protected prompt leaves fewer rows than `count`.
        above = score.nan_to_num(0.0).amax(-1, keepdim=True).clamp_min(0.0) + 1.0
        return score.scatter(2, largest, above + candidates.gather(2, largest).clamp_min(0.0))

    def _attnv(self, kv: KV, seen: Observed) -> tuple[Score, Score | None]:
        """The score, and the range of the values if that is their magnitude: it comes in the same pass."""
        settings, magnitude = {"drop": self.recent, "recent": self.recent, "pool": self.pool}, None
        if self.magnitude == "range":
            attention, magnitude = ops.attention_and_range(kv, seen, **settings)
        else:
            attention = ops.pooled_attention(kv, seen, **settings)
        attention = torch.nn.functional.pad(attention, (0, self.recent))
        if not self.stochastic:
            return attention, magnitude
        logarithm = attention.clamp_min(torch.finfo(torch.float32).tiny).log()
        return logarithm / self.temperature + seen.gumbel(kv.positions), magnitude

    def _dkv(self, kv: KV, seen: Observed) -> Score:
        return key_value_leverage(kv, gaussian_sketch(kv, seen, self.rank, resample=self.stochastic))

    def _reserved_parts(self) -> str:
        return f"{super()._reserved_parts()} + protected={self.protected}"
