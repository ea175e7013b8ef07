"""VATP: accumulated attention times the size of the value."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from kvcomp.core import KV, Observed, Score
from kvcomp.evict.h2o import H2O, accumulated


@dataclass(frozen=True)
class VATP(H2O):
    """`s_i = S_i * |v_i|_1`, `S_i` the accumulated attention of H2O; the first `sinks` tokens are always kept.

    Source: VATP (arXiv 2406.12335); github.com/guozhiyu/vatp at 39ea686. Deviation: evicts every `interval` tokens.
    """

    _: KW_ONLY
    sinks: int = 20

    def score(self, kv: KV, seen: Observed) -> Score:
        """Accumulated attention times the L1 norm of the value."""
        return accumulated(kv, self) * kv.values.float().abs().sum(-1)
