"""Scores of rows on a GPU: window attention, range of the values, sketched leverage.

Names, arguments and results are those of the definitions in `kvcomp.ops.score`. The attention of a window takes two
launches, and no `[window, rows]` matrix is stored: the first gives the log-sum-exp of each query over a share of the
rows, the second joins the shares, reads the keys again and sums the weights of all queries for each row, with the range
of its value. An exact softmax needs its sum before its terms, so keys are read twice, values once.
"""

# A kernel has no types until Triton compiles it for those of its arguments.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcomp.ops.score import average_pool
from kvcomp_kernels.launch import FLOATS, WIDEST, launch, offset, on_nvidia, spaced

LOG2_E = 1.4426950408889634
QUERIES = 64
"""Queries of a tile."""


@triton.jit
def value_spread(values, inside):
    """`max - min` over the channels `inside` of each row; NaN if one of them is."""
    high = tl.max(tl.where(inside, values, float("-inf")), 1)
    low = tl.min(tl.where(inside, values, float("inf")), 1)
    bad = tl.max((inside & (values != values)).to(tl.int32), 1)
    return tl.where(bad > 0, float("nan"), high - low)


@triton.jit
def window_logits(
    queries, query_positions, keys, row_position, row_real, first, count, head, batch, scaling,
    window: tl.constexpr, width: tl.constexpr, padded_width: tl.constexpr, causal: tl.constexpr, pads: tl.constexpr,
    precision: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """`scaling * q . k` `[tile, rows]` of the queries from `first` on of a KV head, `-inf` where one must not see."""
    query, channel = first + tl.arange(0, tile), tl.arange(0, padded_width)
    real = query < count
    source = queries + offset(head, count * width) + offset(query, width)[:, None] + channel[None, :]
    tiles = tl.load(source, mask=real[:, None] & (channel < width)[None, :], other=0)
    logits = tl.dot(tiles, tl.trans(keys), input_precision=precision) * scaling
    visible = real[:, None] & row_real[None, :]
    if causal or pads:
        visible = visible & (row_position >= 0)[None, :]
        asked = tl.load(query_positions + offset(batch, window) + query % window, mask=real, other=-1)
        if causal:
            visible = visible & (row_position[None, :] <= asked[:, None])
        if pads:
            visible = visible & (asked >= 0)[:, None]
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def load_rows(x, head, row, real, head_stride, row_stride, channel, width: tl.constexpr):
    """The channels `channel` of the rows `row` of a KV head, zeros where they are not `real` and beyond `width`."""
    source = x + offset(head, head_stride) + offset(row, row_stride)[:, None] + channel[None, :]
    return tl.load(source, mask=real[:, None] & (channel < width)[None, :], other=0)


@triton.jit
def log_sum_of(highest, total):
    """`log2` of a sum that was divided by `2 ** highest`; `-inf` if it has no terms."""
    return tl.where(total == 0, float("-inf"), highest + tl.log2(tl.where(total == 0, 1.0, total)))


@triton.jit
def absorb(logits, highest, total):
    """Takes more logits into a running softmax: their weights, and what earlier weights must be multiplied by."""
    higher = tl.maximum(highest, tl.max(logits, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights, kept = tl.exp2(logits - shift[:, None]), tl.exp2(highest - shift)
    return weights, kept, higher, total * kept + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["rows", "splits"])
def _log_sums(
    queries, keys, positions, query_positions, log_sums, rows, count, heads, key_head, key_row, position_head,
    position_row, scaling, splits, window: tl.constexpr, width: tl.constexpr, padded_width: tl.constexpr,
    causal: tl.constexpr, pads: tl.constexpr, precision: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    split, first, head = tl.program_id(0), tl.program_id(1) * tile, tl.program_id(2)
    highest = tl.full([tile], float("-inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    for start in range(split * block, rows, splits * block):
        row = start + tl.arange(0, block)
        real = row < rows
        position = tl.load(positions + offset(head, position_head) + offset(row, position_row), mask=real, other=-1)
        key = load_rows(keys, head, row, real, key_head, key_row, tl.arange(0, padded_width), width)
        logits = window_logits(
            queries, query_positions, key, position, real, first, count, head, head // heads, scaling,
            window, width, padded_width, causal, pads, precision, tile,
        )  # fmt: skip
        _, _, highest, total = absorb(logits, highest, total)
    query = first + tl.arange(0, tile)
    target = log_sums + offset(head * splits + split, count) + query
    tl.store(target, log_sum_of(highest, total), mask=query < count)


@triton.jit
def joined(log_sums, head, query, count, splits, padded_splits: tl.constexpr):
    """The log-sum-exp of each query over all shares of the rows; `-inf` for one that sees no row."""
    split = tl.arange(0, padded_splits)
    source = log_sums + offset(head * splits + split, count)[:, None] + query[None, :]
    shares = tl.load(source, mask=(split < splits)[:, None] & (query < count)[None, :], other=float("-inf"))
    highest = tl.max(shares, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    return log_sum_of(highest, tl.sum(tl.exp2(shares - shift[None, :]), 0))


@triton.jit(do_not_specialize=["rows", "seen_rows", "scored_rows", "splits"])
def _row_scores(
    queries, keys, values, positions, query_positions, log_sums, scores, spread, rows, seen_rows, scored_rows, count,
    heads, key_head, key_row, value_head, value_row, position_head, position_row, scaling, splits,
    padded_splits: tl.constexpr, window: tl.constexpr, width: tl.constexpr, padded_width: tl.constexpr,
    value_width: tl.constexpr, padded_value_width: tl.constexpr, causal: tl.constexpr, pads: tl.constexpr,
    precision: tl.constexpr, has_values: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(0) * block + tl.arange(0, block)
    if has_values:
        real = row < rows
        channel = tl.arange(0, padded_value_width)
        value = load_rows(values, head, row, real, value_head, value_row, channel, value_width)
        inside = (channel < value_width)[None, :]
        tl.store(spread + offset(head, rows) + row, value_spread(value.to(tl.float32), inside), mask=real)
    real = row < seen_rows
    position = tl.load(positions + offset(head, position_head) + offset(row, position_row), mask=real, other=-1)
    key = load_rows(keys, head, row, real, key_head, key_row, tl.arange(0, padded_width), width)
    total, seeing = tl.zeros([block], tl.float32), 0
    for first in range(0, count, tile):
        query = first + tl.arange(0, tile)
        log_sum = joined(log_sums, head, query, count, splits, padded_splits)
        sees = (query < count) & (log_sum != float("-inf"))
        logits = window_logits(
            queries, query_positions, key, position, real, first, count, head, head // heads, scaling,
            window, width, padded_width, causal, pads, precision, tile,
        )  # fmt: skip
        weights = tl.exp2(logits - tl.where(sees, log_sum, 0.0)[:, None])
        total += tl.sum(tl.where(sees[:, None], weights, 0.0), 0)
        seeing += tl.sum(sees.to(tl.int32), 0)
    score = total / tl.maximum(seeing, 1).to(tl.float32)
    tl.store(scores + offset(head, scored_rows) + row, score, mask=row < scored_rows)


def window_score(
    queries: Tensor, keys: Tensor, values: Tensor | None, positions: Tensor, query_positions: Tensor, scaling: float,
    drop: int, recent: int, pool: int, padded: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Pooled attention of the window, mean over the group, and the range of each value."""
    (batch, heads, rows, width), window = keys.shape, queries.shape[2]
    value_width = width if values is None else values.shape[3]
    if max(width, value_width) > WIDEST or keys.dtype not in FLOATS or queries.dtype != keys.dtype:
        return NotImplemented
    if query_positions.shape != (batch, window):
        return NotImplemented
    setup, seen, scored = launch("score", keys), rows - drop, rows - max(drop, recent)
    (keys, *of_keys), (positions, *of_positions) = spaced(keys), spaced(positions)
    given, *of_values = spaced(keys if values is None else values)
    queries, query_positions = queries.contiguous(), query_positions.contiguous()
    count, padded_width = queries.shape[1] // heads * window, triton.next_power_of_2(width)
    block, tiles = setup.rows(padded_width, keys.element_size()), triton.cdiv(count, QUERIES)
    splits = setup.splits(batch * heads * tiles, triton.cdiv(seen, block))
    log_sums = torch.empty((batch, heads, splits, count), device=keys.device)
    scores = torch.empty((batch, heads, scored), device=keys.device)
    spread = torch.empty(0 if values is None else (batch, heads, rows), device=keys.device)
    constants = {
        "window": window, "width": width, "padded_width": padded_width, "causal": drop < window, "pads": padded,
        "precision": "ieee" if keys.dtype == torch.float32 else "tf32", "tile": QUERIES, "block": block,
        **setup.options(fused=True),
    }  # fmt: skip
    _log_sums[splits, tiles, batch * heads](
        queries, keys, positions, query_positions, log_sums, seen, count, heads, *of_keys, *of_positions,
        scaling * LOG2_E, splits, **constants,
    )  # fmt: skip
    _row_scores[triton.cdiv(scored if values is None else rows, block), batch * heads](
        queries, keys, given, positions, query_positions, log_sums, scores, spread, rows, seen, scored, count, heads,
        *of_keys, *of_values, *of_positions, scaling * LOG2_E, splits, triton.next_power_of_2(splits),
        value_width=value_width, padded_value_width=triton.next_power_of_2(value_width), has_values=values is not None,
        **constants,
    )  # fmt: skip
    return scores if pool == 1 else average_pool(scores, pool), spread


@triton.jit(do_not_specialize=["rows"])
def _value_range(
    values, spread, rows, head_stride, row_stride, width: tl.constexpr, padded_width: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(0) * block + tl.arange(0, block)
    channel = tl.arange(0, padded_width)
    value = load_rows(values, head, row, row < rows, head_stride, row_stride, channel, width).to(tl.float32)
    inside = (channel < width)[None, :]
    tl.store(spread + offset(head, rows) + row, value_spread(value, inside), mask=row < rows)


def value_range(values: Tensor) -> Tensor:
    """`max - min` over the channels of each row."""
    if values.shape[3] > WIDEST or values.dtype not in FLOATS:
        return NotImplemented
    values, head_stride, row_stride = spaced(values)
    (batch, heads, rows, width), setup = values.shape, launch("value_range", values)
    spread, padded_width = torch.empty((batch, heads, rows), device=values.device), triton.next_power_of_2(width)
    block = setup.rows(padded_width, 4)
    _value_range[triton.cdiv(rows, block), batch * heads](
        values,
        spread,
        rows,
        head_stride,
        row_stride,
        width,
        padded_width,
        block,
        **setup.options(fused=True),
    )
    return spread


@triton.jit(do_not_specialize=["rows"])
def _sketched_leverage(
    keys, values, sketch, leverage, rows, heads, key_head, key_row, value_head, value_row, rank: tl.constexpr,
    padded_rank: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr, precision: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(0) * block + tl.arange(0, block)
    column = tl.arange(0, padded_rank)
    of_key = tl.zeros([block, padded_rank], tl.float32)
    of_value = tl.zeros([block, padded_rank], tl.float32)
    for first in range(0, width, chunk):  # the whole sketch would not fit into registers
        channel = first + tl.arange(0, chunk)
        source = sketch + offset(head % heads, width * rank) + offset(channel, rank)[:, None] + column[None, :]
        projection = tl.load(source, mask=(channel < width)[:, None] & (column < rank)[None, :], other=0)
        key = load_rows(keys, head, row, row < rows, key_head, key_row, channel, width).to(tl.float32)
        value = load_rows(values, head, row, row < rows, value_head, value_row, channel, width).to(tl.float32)
        of_key = tl.dot(key, projection, of_key, input_precision=precision)
        of_value = tl.dot(value, projection, of_value, input_precision=precision)
    product = tl.sum(of_key * of_key, 1) * tl.sum(of_value * of_value, 1)
    tl.store(leverage + offset(head, rows) + row, product, mask=row < rows)


def sketched_leverage(keys: Tensor, values: Tensor, sketch: Tensor) -> Tensor:
    """`|k G|^2 |v G|^2` per row, keys and values in one pass."""
    (batch, heads, rows, width), rank = keys.shape, sketch.shape[2]
    if width > WIDEST or rank > WIDEST or keys.dtype not in FLOATS or values.dtype != keys.dtype:
        return NotImplemented
    (keys, *of_keys), (values, *of_values), setup = spaced(keys), spaced(values), launch("leverage", keys)
    leverage, padded_rank = torch.empty((batch, heads, rows), device=keys.device), max(16, triton.next_power_of_2(rank))
    chunk = max(16, min(32, triton.next_power_of_2(width)))
    block = setup.rows(max(chunk, padded_rank), 4)
    # Keys of 16 bit are exact in tf32, and three products of tf32 give the sketch 22 bits.
    precision = "tf32x3" if keys.dtype != torch.float32 and on_nvidia(keys) else "ieee"
    _sketched_leverage[triton.cdiv(rows, block), batch * heads](
        keys, values, sketch.float().contiguous(), leverage, rows, heads, *of_keys, *of_values, rank, padded_rank,
        width, chunk, precision, block, **setup.options(fused=True),
    )  # fmt: skip
    return leverage
