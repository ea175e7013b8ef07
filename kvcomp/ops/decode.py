"""Attention of one query over rows of which most are packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvcomp.quant.mixed import MixedKV


def mixed_decode(query: Tensor, kv: MixedKV, scaling: float | None) -> Tensor:
    """`softmax(scaling * q . k) v` of one query `[batch, query_heads, 1, head_dim]` over all rows that are tokens.

    Returns `[batch, 1, query_heads, value_dim]` in the dtype of the query. Codes are read as they are: scale and zero
    point are applied to logits and probabilities, and only those are as long as the text. All in float32.
    """
    batch, query_heads, _, head_dim = query.shape
    folded = query.reshape(batch, kv.packed.positions.shape[1], -1, head_dim).float()
    folded = folded * (head_dim**-0.5 if scaling is None else scaling)
    dense = [part for part in (kv.exact, kv.recent) if part.rows]
    logits = [kv.packed.keys.dot(folded), *(folded @ part.keys.float().transpose(2, 3) for part in dense)]
    hidden = kv.slot_positions < 0
    weights = torch.cat(logits, dim=-1).masked_fill_(hidden[:, :, None], -torch.inf).softmax(-1)
    shares = weights.split([kv.packed.rows, *(part.rows for part in dense)], dim=-1)
    output = kv.packed.values.weighted_sum(shares[0].contiguous())
    for share, part in zip(shares[1:], dense, strict=True):
        output = output + share @ part.values.float()
    return output.reshape(batch, 1, query_heads, -1).to(query.dtype)
