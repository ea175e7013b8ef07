"""Expected Attention: attention that future queries are expected to give."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor
from kvcomp.rotary import turn


@dataclass(frozen=True)
class ExpectedAttention(ScoreEvictor):
    """`s_i = mean_group (softmax_i(c m.k_i + c^2 k_i' C k_i / 2) + epsilon) |v_i|_2`, `c` the scaling of the logits.

    The softmax leaves the sinks out. `m` and `C`: mean and covariance of the last `window` queries before RoPE (the
    first `skip` tokens of the text left out), turned by the mean rotation of the next `future` positions.
    `covariance=False` leaves the second term out.

    Source: Expected Attention (arXiv 2510.00636); kvpress `expected_attention_press.py` at 8bb29b9. Deviation:
    statistics of the last `window` queries (there of the whole prompt), so that they follow the chain of thought;
    recent rows are kept. Raises NotImplementedError where the rotary embedding of the model is not known.
    """

    _: KW_ONLY
    window: int = 128
    future: int = 512
    skip: int = 4
    epsilon: float = 0.0
    covariance: bool = True

    def __post_init__(self) -> None:
        self.require(window=1, future=1, skip=0)
        super().__post_init__()

    def score(self, kv: KV, seen: Observed) -> Score:
        """Expected attention times the norm of the value."""
        batch, heads, rows, head_dim = kv.keys.shape
        mean, covariance = self._future_queries(kv, seen)
        scaling = head_dim**-0.5 if seen.scaling is None else seen.scaling
        keys = kv.keys.float()[:, :, None]  # a group axis
        logits = scaling * torch.einsum("bhgd,bhgrd->bhgr", mean, keys.expand(-1, -1, mean.shape[2], -1, -1))
        if self.covariance:
            spread = (keys @ covariance * keys).sum(-1)
            logits = logits + 0.5 * scaling**2 * spread
        left_out = kv.pads | ((~kv.pads).cumsum(-1) <= self.sinks)
        attention = logits.masked_fill(left_out[:, :, None], torch.finfo(logits.dtype).min).softmax(-1)
        return ((attention + self.epsilon) * kv.values.float().norm(dim=-1)[:, :, None]).mean(2)

    def _future_queries(self, kv: KV, seen: Observed) -> tuple[Tensor, Tensor]:
        """Mean `[batch, kv_heads, group, head_dim]` and covariance `[..., head_dim, head_dim]` of future queries."""
        if seen.rotary is None:
            raise NotImplementedError(
                "ExpectedAttention undoes RoPE, but the rotary embedding of this model is not known"
            )
        if seen.queries is None or seen.query_positions is None:
            raise ValueError("ExpectedAttention needs Observed.queries and Observed.query_positions")
        positions = seen.query_positions[:, None]
        queries = seen.rotary.unrotate(seen.queries, positions).unflatten(1, (kv.keys.shape[1], -1))
        used = (seen.query_positions >= self.skip).float()[:, None, None, :, None]
        count = used.sum(3).clamp_min(1.0)
        mean = (queries * used).sum(3) / count
        centred = (queries - mean.unsqueeze(3)) * used
        covariance = centred.transpose(3, 4) @ centred / count[..., None]
        steps = torch.arange(1, self.future + 1, device=positions.device)
        cosine, sine = seen.rotary.mean_rotation(seen.query_positions[:, -1:] + steps)
        cosine, sine = cosine[:, None, None], sine[:, None, None]
        half = turn(covariance, cosine[..., None, :], sine[..., None, :])
        return turn(mean, cosine, sine), turn(half.transpose(3, 4), cosine[..., None, :], sine[..., None, :])
