"""StreamingLLM: sinks and a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class StreamingLLM(ScoreEvictor):
    """The first `sinks` tokens and the newest ones: `s_i = i`.

    Source: StreamingLLM (arXiv 2309.17453); github.com/mit-han-lab/streaming-llm at 2e50426. Deviation: keys keep their
    true positions (there they are rotated by slot, so that a stream may be longer than the trained context).
    """

    def score(self, kv: KV, seen: Observed) -> Score:
        """The age rank of the row."""
        return torch.arange(kv.rows, device=kv.keys.device).float().expand(kv.keys.shape[:3])
