"""H2O: accumulated attention."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class H2O(ScoreEvictor):
    """`s_i = sum over every query since row i was stored of softmax_i(scaling * q . k)`, mean over the group.

    `recent` defaults to half of the budget; the other half are the heavy hitters.

    Source: H2O (arXiv 2306.14048); github.com/FMInference/H2O at ac75c2a. Deviation: evicts every `interval` tokens,
    not at each one.
    """

    _: KW_ONLY
    sinks: int = 0
    recent: int | None = None  # type: ignore[assignment]
    accumulates: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        self.require(budget=1)
        if self.recent is None:
            object.__setattr__(self, "recent", self.budget // 2)
        super().__post_init__()

    def score(self, kv: KV, seen: Observed) -> Score:
        """The accumulated attention."""
        return accumulated(kv, self)


def accumulated(kv: KV, method: ScoreEvictor) -> Score:
    """`kv.mass`, or a ValueError that says who needs it."""
    if kv.mass is None:
        raise ValueError(f"{type(method).__name__} scores with accumulated attention, but KV.mass is None: pass it")
    return kv.mass
