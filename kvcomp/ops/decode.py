"""Attention of the newest queries over rows of which most are packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcomp.dispatch import operation
from kvcomp.ops.packed import packed_dot, packed_weighted_sum


def attend(
    query: Tensor,
    dot: Callable[[Tensor], Tensor],
    weighted_sum: Callable[[Tensor], Tensor],
    dense: Sequence[Tensor],
    positions: Sequence[Tensor],
    scaling: float,
) -> Tensor:
    """Attention over three parts of rows: packed ones, known by `dot` and `weighted_sum` only, exact and recent ones.

    Arguments and result as those of `packed_decode`, which see; all in float32.
    """
    batch, _, new, head_dim = query.shape
    folded = query.reshape(batch, positions[0].shape[1], -1, head_dim).float() * scaling  # a group's queries: rows
    logits = [dot(folded), *(folded @ keys.float().transpose(2, 3) for keys in dense[::2])]
    hidden = (torch.cat(list(positions), dim=2) < 0)[:, :, None, None, :]
    rows = hidden.shape[-1]
    if new > 1:
        own = torch.arange(rows - new, rows, device=query.device)
        hidden = hidden | (torch.arange(rows, device=query.device) > own[:, None])
    weights = torch.cat(logits, dim=-1).unflatten(2, (-1, new)).masked_fill_(hidden, -torch.inf).softmax(-1)
    shares = weights.flatten(2, 3).split([part.shape[2] for part in positions], dim=-1)
    output = weighted_sum(shares[0].contiguous())
    for share, values in zip(shares[1:], dense[1::2], strict=True):
        output = output + share @ values.float()
    output = output.unflatten(2, (-1, new)).masked_fill(hidden.all(-1, keepdim=True), 0)  # padding among padding
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype).contiguous()


@operation(
    "decode",
    "(Tensor query, Tensor rotated, Tensor[] keys, Tensor[] values, Tensor[] dense, Tensor[] positions, int[] bits, "
    "int[] group_sizes, float scaling) -> Tensor",
)
def packed_decode(
    query: Tensor,
    rotated: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    dense: Sequence[Tensor],
    positions: Sequence[Tensor],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    scaling: float,
) -> Tensor:
    """`softmax(scaling * q . k) v` over all rows that are tokens: `[batch, new, query_heads, value_dim]`.

    `query` `[batch, query_heads, new, head_dim]` are the queries of the `new` newest recent rows: each sees the rows up
    to its own. `rotated` is what packed keys are multiplied by: the query, or its rotation if they are rotated. `keys`
    and `values` are codes, scale and zero point; `bits` and `group_sizes` those of keys and of values; `dense` are
    exact keys, exact values, recent keys, recent values; `positions` those of the three parts, below 0 for what is no
    token. Codes are read as they are: scale and zero point are applied to logits and probabilities, so no decoded row
    is ever stored. A query that sees no row gets 0. The result has the dtype of the query.
    """
    folded = rotated.reshape(rotated.shape[0], positions[0].shape[1], -1, rotated.shape[-1]).float() * scaling
    key_parts, value_parts = (keys[0], keys[1], keys[2]), (values[0], values[1], values[2])
    return attend(
        query,
        lambda _: packed_dot(folded, *key_parts, bits[0], group_sizes[0]),
        lambda weights: packed_weighted_sum(weights, *value_parts, bits[1], group_sizes[1], dense[1].shape[-1]),
        dense,
        positions,
        scaling,
    )
