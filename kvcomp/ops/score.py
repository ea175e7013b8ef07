"""Torch definitions of the operations that score rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvcomp.core import KV, Observed, Positions, Queries, Rows, Score, ValueRows
from kvcomp.dispatch import operation

Magnitude = Literal["range", "variance", "l2"]
HeadScore = Float[Tensor, "batch kv_heads group rows"]
Scored = Float[Tensor, "batch kv_heads scored"]
Logits = Float[Tensor, "batch kv_heads group window rows"]


def attention_logits(kv: KV, seen: Observed, drop: int = 0) -> Logits:
    """`scaling * q . k` over all rows but the `drop` newest, `-inf` where the query must not see the row.

    A query sees no padding and no row later than itself. The product is taken in the dtype of the keys, all else in
    float32. Learned attention sinks and logit caps are left out. Raises ValueError without queries.
    """
    queries = _queries(seen)
    older, window = kv.without_newest(drop), queries.shape[2]
    batch, heads, rows, head_dim = older.keys.shape
    scaling = head_dim**-0.5 if seen.scaling is None else seen.scaling
    folded = (queries * scaling).reshape(batch, heads, -1, head_dim)  # the query heads of a group become rows
    logits = (folded @ older.keys.transpose(2, 3)).float().view(batch, heads, -1, window, rows)
    causal = drop < window  # else every row that is left is older than every query
    if causal or seen.padded:
        visible = ~older.pads[:, :, None, :]
        if causal:
            visible = visible & (older.positions[:, :, None, :] <= _query_positions(kv, seen)[:, None, :, None])
        logits.masked_fill_(~visible[:, :, None], -torch.inf)
    return logits


def window_attention(logits: Logits, seen: Observed) -> HeadScore:
    """Softmax over the rows, mean over the queries that are tokens and see a row. NaN logits stay NaN."""
    weights, blind = _softmax(logits, seen.query_positions if seen.padded else None)
    return weights.sum(3) / (~blind).sum(3).clamp_min(1)


def _softmax(logits: Logits, query_positions: Tensor | None) -> tuple[Logits, Tensor]:
    """Softmax over the rows, and which queries are blind: they see no row, or are padding. Their weights are 0."""
    blind = logits.amax(-1, keepdim=True) == -torch.inf
    if query_positions is not None:
        blind = blind | (query_positions < 0)[:, None, None, :, None]
    return logits.softmax(-1).masked_fill_(blind, 0.0), blind


def attention_score(kv: KV, seen: Observed, drop: int = 0) -> HeadScore:
    """Mean over the window of `softmax_rows(scaling * q . k)`, per query head; the `drop` newest rows are left out."""
    return torch.cat([_attention_score(*heads, drop) for heads in _by_heads(kv, seen)], dim=1)


def _attention_score(kv: KV, seen: Observed, drop: int) -> HeadScore:
    logits = attention_logits(kv, seen, drop)
    every_query_sees_every_row = drop >= logits.shape[3] and not seen.padded
    return logits.softmax(-1).mean(3) if every_query_sees_every_row else window_attention(logits, seen)


def _by_heads(kv: KV, seen: Observed, at_once: int = 1 << 20) -> Iterator[tuple[KV, Observed]]:
    """On CPU as many KV heads at a time as make `at_once` logits, which then stay in its cache; elsewhere all."""
    heads = kv.keys.shape[1]
    if seen.queries is None or kv.keys.device.type != "cpu":
        yield kv, seen
        return
    grouped = seen.queries.unflatten(1, (heads, -1))
    step = max(1, at_once // (grouped[:, 0, :, :, 0].numel() * kv.rows))
    for start in range(0, heads, step):
        part = slice(start, start + step)
        rows = KV(kv.keys[:, part], kv.values[:, part], kv.positions[:, part])
        yield rows, replace(seen, queries=grouped[:, part].flatten(1, 2))


@operation(
    "score",
    "(Tensor queries, Tensor keys, Tensor? values, Tensor positions, Tensor query_positions, float scaling, int drop, "
    "int recent, int pool, bool padded) -> (Tensor, Tensor)",
)
def window_score(
    queries: Queries,
    keys: Rows,
    values: ValueRows | None,
    positions: Positions,
    query_positions: Int[Tensor, "batch window"],
    scaling: float,
    drop: int,
    recent: int,
    pool: int,
    padded: bool,
) -> tuple[Scored, Tensor]:
    """What `attention_and_range` returns, from plain tensors; without values the range has no elements."""
    kv = KV(keys, keys if values is None else values, positions)
    attention = attention_score(kv, Observed(queries, query_positions, scaling, padded=padded), drop)
    score = average_pool(attention[..., : kv.rows - recent], pool).mean(2)
    return score, keys.new_empty(0, dtype=torch.float32) if values is None else value_range(values)


def pooled_attention(kv: KV, seen: Observed, drop: int, recent: int, pool: int) -> Scored:
    """`mean_group pool(mean_window softmax_rows(scaling * q . k))` `[batch, kv_heads, rows - recent]`.

    The `drop` newest rows are left out of the softmax; the average over `pool` neighbours is taken over all rows but
    the `recent` newest. Raises ValueError without queries.
    """
    return window_score(*_scored(kv, seen, None), drop, recent, pool, seen.padded)[0]


def attention_and_range(kv: KV, seen: Observed, drop: int, recent: int, pool: int) -> tuple[Scored, Score]:
    """`pooled_attention`, and `value_range` of all rows, in one pass."""
    return window_score(*_scored(kv, seen, kv.values), drop, recent, pool, seen.padded)


def _scored(
    kv: KV, seen: Observed, values: ValueRows | None
) -> tuple[Queries, Rows, ValueRows | None, Positions, Tensor, float]:
    queries = _queries(seen)
    scaling = kv.head_dim**-0.5 if seen.scaling is None else seen.scaling
    return queries, kv.keys, values, kv.positions, _query_positions(kv, seen), scaling


def _queries(seen: Observed) -> Queries:
    if seen.queries is None:
        raise ValueError("this method scores with queries, but Observed.queries is None: pass the last queries")
    return seen.queries


def attention_mass(kv: KV, seen: Observed, block: int = 128) -> Score:
    """Attention received by each row, summed over all queries given, mean over the group. `block` queries at a time."""
    assert seen.queries is not None
    positions = _query_positions(kv, seen)
    mass = torch.zeros(kv.keys.shape[:3], dtype=torch.float32, device=kv.keys.device)
    for start in range(0, seen.queries.shape[2], block):
        part = slice(start, start + block)
        logits = attention_logits(kv, Observed(seen.queries[:, :, part], positions[:, part], seen.scaling))
        mass += _softmax(logits, positions[:, part])[0].sum(3).mean(2)
    return mass


def average_pool(score: Float[Tensor, "batch kv_heads *group rows"], kernel: int) -> Tensor:
    """Average over `kernel` neighbouring rows (odd), rows beyond the ends counted as zero."""
    flat = score.reshape(-1, 1, score.shape[-1])
    return torch.nn.functional.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2).view_as(score)


def max_pool(score: Float[Tensor, "batch kv_heads *group rows"], kernel: int) -> Tensor:
    """Maximum over `kernel` neighbouring rows (odd)."""
    flat = score.reshape(-1, 1, score.shape[-1])
    return torch.nn.functional.max_pool1d(flat, kernel, stride=1, padding=kernel // 2).view_as(score)


def value_magnitude(kv: KV, magnitude: Magnitude = "range") -> Score:
    """Per row over the channels of its value: `max - min` (range), population variance, or L2 norm; float32."""
    if magnitude == "range":
        return value_range(kv.values)
    values = kv.values.float()
    return values.var(-1, correction=0) if magnitude == "variance" else values.norm(dim=-1)


@operation("score", "(Tensor values) -> Tensor")
def value_range(values: Float[Tensor, "batch kv_heads rows width"]) -> Score:
    """`max - min` over the channels of each row; float32."""
    values = values.float()
    return values.amax(-1) - values.amin(-1)


@operation("score", "(Tensor keys, Tensor values, Tensor sketch) -> Tensor")
def sketched_leverage(keys: Rows, values: ValueRows, sketch: Float[Tensor, "kv_heads head_dim rank"]) -> Score:
    """`|k G|^2 |v G|^2` per row, with a sketch `G` for each KV head; float32."""
    return squared_norm(keys, sketch) * squared_norm(values, sketch)


def squared_norm(rows: Tensor, sketch: Tensor | None) -> Score:
    """`|x G|^2` per row, or `|x|^2` without a sketch `G`; float32."""
    projected = rows.float() if sketch is None else rows.float() @ sketch
    return projected.square().sum(-1)


def _query_positions(kv: KV, seen: Observed) -> Tensor:
    """Positions of the queries `[batch, window]`; unknown ones are taken to be the newest rows."""
    assert seen.queries is not None
    if seen.query_positions is not None:
        return seen.query_positions
    return kv.positions[:, 0, -seen.queries.shape[2] :]
