"""Attention of the newest queries over packed, exact and recent rows on a GPU.

Name, arguments and result are those of `kvcomp.ops.decode.packed_decode`. The rows of a KV head are shared by several
programs, each of which goes through its share of the packed tiles, then of the exact and of the recent ones; a second
launch joins what they found by log-sum-exp. Codes are turned into numbers in registers: a code less the middle one, a
small integer, times the scale of its group over the largest scale of the tile, both in float16 for models of 16 bit;
what was left out, the middle and the zero point, is one float32 number for each row and group.
"""

# A kernel has no types until Triton compiles it for those of its arguments.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcomp_kernels.launch import FLOATS, MOST_GROUPS, WIDEST, launch, offset, spaced
from kvcomp_kernels.score import LOG2_E, log_sum_of

MOST_QUERIES = 128
"""Queries of a KV head, new ones times group, beyond which decoding is left to the definition."""


@triton.jit
def channels(width: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, fields: tl.constexpr):
    """The channel that each column of a tile of `fields * padded` stands for, and whether there is one: the order in
    which a byte of codes is taken apart."""
    column = tl.arange(0, fields * padded)
    if size == padded:
        return column, column < width
    byte = column % padded
    channel = column // padded * size + byte
    return channel, (byte < size) & (channel < width)


@triton.jit
def centred(
    codes, scale, zero_point, head, row, real, slots, columns, bits: tl.constexpr, group_size: tl.constexpr,
    groups: tl.constexpr, padded_groups: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, dtype: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """What rows are made of: `unit * steps + rest`, with `steps` `[block, columns]` in `dtype` and `rest` `[block,
    groups]`, the same for all channels of a group."""
    fields: tl.constexpr = 8 // bits
    middle: tl.constexpr = 1 << (bits - 1)
    byte, field, group = tl.arange(0, padded), tl.arange(0, fields), tl.arange(0, padded_groups)
    source = codes + offset(head, slots) * size + offset(row, size)[:, None] + byte[None, :]
    packed = tl.load(source, mask=real[:, None] & (byte < size)[None, :], other=0).to(tl.int16)
    code = (packed[:, None, :] >> (field * bits)[None, :, None].to(tl.int16)) & ((1 << bits) - 1)
    steps = (code | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + middle)  # 1024 + code, without a conversion
    steps = tl.reshape(steps, [block, fields * padded]).to(dtype)
    side = offset(head, slots) * groups + offset(row, groups)
    mask = real[:, None] & (group < groups)[None, :]
    scales = tl.load(scale + side[:, None] + group[None, :], mask=mask, other=0).to(tl.float32)
    zeros = tl.load(zero_point + side[:, None] + group[None, :], mask=mask, other=0).to(tl.float32)
    unit = tl.max(tl.max(scales, 1), 0)
    share = scales / tl.where(unit > 0, unit, 1.0)
    factor = tl.zeros([block, fields * padded], dtype)
    for one in tl.static_range(groups):
        own = tl.sum(tl.where((group == one)[None, :], share, 0.0), 1).to(dtype)
        factor = tl.where((columns // group_size == one)[None, :], own[:, None], factor)
    return unit, steps * factor, zeros + middle * scales


@triton.jit
def by_group(x, columns, inside, group_size: tl.constexpr, padded_groups: tl.constexpr):
    """Sums of the columns of `x` `[tile, columns]` by group: `[tile, groups]`."""
    own = (columns // group_size)[:, None] == tl.arange(0, padded_groups)[None, :]
    return tl.sum(tl.where((inside[:, None] & own)[None, :, :], x[:, :, None], 0.0), 1)


@triton.jit
def absorb(logits, highest, total):
    """Takes more logits into a running softmax: their weights, and what earlier weights must be multiplied by."""
    higher = tl.maximum(highest, tl.max(logits, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights, kept = tl.exp2(logits - shift[:, None]), tl.exp2(highest - shift)
    return weights, kept, higher, total * kept + tl.sum(weights, 1)


@triton.jit
def dense_part(
    query, keys, values, positions, head, slots, rows, key_channels, key_inside, value_channels, value_inside, split,
    splits, highest, total, output, scaling, width: tl.constexpr, value_width: tl.constexpr, new: tl.constexpr,
    causal: tl.constexpr, precision: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Takes the share of a program in the exact or the recent rows into a running softmax."""
    for start in range(split * block, rows, splits * block):
        row = start + tl.arange(0, block)
        real = tl.load(positions + offset(head, slots) + row, mask=row < rows, other=-1) >= 0
        place = offset(head, slots) * width + offset(row, width)[:, None] + key_channels[None, :]
        key = tl.load(keys + place, mask=real[:, None] & key_inside[None, :], other=0)
        visible = real[None, :]
        if causal:
            visible = visible & (row[None, :] <= rows - new + (tl.arange(0, tile) % new)[:, None])
        logits = tl.dot(query, tl.trans(key), input_precision=precision) * scaling
        logits = tl.where(visible, logits, float("-inf"))
        weights, kept, highest, total = absorb(logits, highest, total)
        place = offset(head, slots) * value_width + offset(row, value_width)[:, None] + value_channels[None, :]
        value = tl.load(values + place, mask=real[:, None] & value_inside[None, :], other=0)
        output = tl.dot(weights.to(value.dtype), value, output * kept[:, None], input_precision=precision)
    return highest, total, output


@triton.jit
def _shares(
    query, rotated, key_codes, key_scale, key_zero, value_codes, value_scale, value_zero, packed_positions, exact_keys,
    exact_values, exact_positions, recent_keys, recent_values, recent_positions, outputs, log_sums, packed_rows,
    exact_rows, recent_rows, recent_slots, scaling, splits, count: tl.constexpr, new: tl.constexpr,
    width: tl.constexpr, key_size: tl.constexpr, key_padded: tl.constexpr, key_bits: tl.constexpr,
    key_group: tl.constexpr, key_groups: tl.constexpr, key_padded_groups: tl.constexpr, value_width: tl.constexpr,
    value_size: tl.constexpr, value_padded: tl.constexpr, value_bits: tl.constexpr, value_group: tl.constexpr,
    value_groups: tl.constexpr, value_padded_groups: tl.constexpr, dtype: tl.constexpr, precision: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    split, head, asked = tl.program_id(0), tl.program_id(1), tl.arange(0, tile)
    key_channels, key_inside = channels(width, key_size, key_padded, 8 // key_bits)
    value_channels, value_inside = channels(value_width, value_size, value_padded, 8 // value_bits)
    place = offset(head, count * width) + (asked * width)[:, None] + key_channels[None, :]
    mask = (asked < count)[:, None] & key_inside[None, :]
    turned = tl.load(rotated + place, mask=mask, other=0).to(tl.float32)
    sums = by_group(turned, key_channels, key_inside, key_group, key_padded_groups)
    largest = tl.max(tl.abs(turned), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    turned = (turned / largest[:, None]).to(dtype)
    highest, total = tl.full([tile], float("-inf"), tl.float32), tl.zeros([tile], tl.float32)
    output = tl.zeros([tile, value_padded * (8 // value_bits)], tl.float32)
    shifts = tl.zeros([tile, value_padded_groups], tl.float32)
    for start in range(split * block, packed_rows, splits * block):
        row = start + tl.arange(0, block)
        real = row < packed_rows
        visible = tl.load(packed_positions + offset(head, packed_rows) + row, mask=real, other=-1) >= 0
        unit, steps, rest = centred(
            key_codes, key_scale, key_zero, head, row, real, packed_rows, key_channels, key_bits, key_group, key_groups,
            key_padded_groups, key_size, key_padded, dtype, block,
        )  # fmt: skip
        logits = tl.dot(turned, tl.trans(steps), input_precision=precision) * (largest * unit)[:, None]
        logits = (logits + tl.sum(sums[:, None, :] * rest[None, :, :], 2)) * scaling
        logits = tl.where(visible[None, :], logits, float("-inf"))
        weights, kept, highest, total = absorb(logits, highest, total)
        unit, steps, rest = centred(
            value_codes, value_scale, value_zero, head, row, real, packed_rows, value_channels, value_bits, value_group,
            value_groups, value_padded_groups, value_size, value_padded, dtype, block,
        )  # fmt: skip
        output = output * kept[:, None] + tl.dot(weights.to(dtype), steps, input_precision=precision) * unit
        shifts = shifts * kept[:, None] + tl.sum(weights[:, :, None] * rest[None, :, :], 1)
    group = tl.arange(0, value_padded_groups)[None, :]
    for one in tl.static_range(value_groups):
        shift = tl.sum(tl.where(group == one, shifts, 0.0), 1)
        output += tl.where((value_channels // value_group == one)[None, :], shift[:, None], 0.0)
    plain = tl.load(query + place, mask=mask, other=0)
    highest, total, output = dense_part(
        plain, exact_keys, exact_values, exact_positions, head, exact_rows, exact_rows, key_channels, key_inside,
        value_channels, value_inside, split, splits, highest, total, output, scaling, width, value_width, new, False,
        precision, tile, block,
    )  # fmt: skip
    highest, total, output = dense_part(
        plain, recent_keys, recent_values, recent_positions, head, recent_slots, recent_rows, key_channels, key_inside,
        value_channels, value_inside, split, splits, highest, total, output, scaling, width, value_width, new, new > 1,
        precision, tile, block,
    )  # fmt: skip
    output = output / tl.where(total == 0, 1.0, total)[:, None]
    place = offset(head * splits + split, count) + asked
    tl.store(log_sums + place, log_sum_of(highest, total), mask=asked < count)
    place = offset(place, value_width)[:, None] + value_channels[None, :]
    tl.store(outputs + place, output, mask=(asked < count)[:, None] & value_inside[None, :])


@triton.jit
def _join(
    outputs, log_sums, out, splits, heads, count: tl.constexpr, new: tl.constexpr, width: tl.constexpr,
    padded_width: tl.constexpr, padded_splits: tl.constexpr,
):  # fmt: skip
    asked, head = tl.program_id(0), tl.program_id(1)
    split, channel = tl.arange(0, padded_splits), tl.arange(0, padded_width)
    place, real = offset(head * splits + split, count) + asked, split < splits
    log_sum = tl.load(log_sums + place, mask=real, other=float("-inf"))
    highest = tl.max(log_sum, 0)
    weights = tl.exp2(log_sum - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    mask = real[:, None] & (channel < width)[None, :]
    shares = tl.load(outputs + offset(place, width)[:, None] + channel[None, :], mask=mask, other=0)
    output = tl.sum(weights[:, None] * shares, 0) / tl.where(total == 0, 1.0, total)
    batch, group, step = head // heads, asked // new, asked % new
    line = (batch * new + step) * heads * (count // new) + head % heads * (count // new) + group
    tl.store(out + offset(line, width) + channel, output.to(out.dtype.element_ty), mask=channel < width)


def packed_decode(
    query: Tensor, rotated: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], dense: Sequence[Tensor],
    positions: Sequence[Tensor], bits: Sequence[int], group_sizes: Sequence[int], scaling: float,
) -> Tensor:  # fmt: skip
    """Attention of the `new` newest queries over packed, exact and recent rows."""
    (batch, query_heads, new, width), heads, value_width = query.shape, positions[0].shape[1], dense[1].shape[3]
    count, groups = query_heads // heads * new, (keys[1].shape[3], values[1].shape[3])
    if max(width, value_width) > WIDEST or max(groups) > MOST_GROUPS or count > MOST_QUERIES:
        return NotImplemented
    if query.dtype not in FLOATS or any(part.dtype != query.dtype for part in dense):
        return NotImplemented
    query, rotated = query.contiguous(), rotated.contiguous()
    older = [part.contiguous() for part in (*keys, *values, positions[0], *dense[:2], positions[1])]
    recent, recent_slots = _one_buffer([*dense[2:], positions[2]])
    rows = [part.shape[2] for part in positions]
    sizes = [triton.next_power_of_2(part[0].shape[3]) for part in (keys, values)]
    setup, widest = launch("decode", query), max(size * 8 // bit for size, bit in zip(sizes, bits, strict=True))
    block = setup.rows(widest, query.element_size())
    splits = setup.splits(batch * heads, triton.cdiv(max(rows), block))
    outputs = torch.empty((batch, heads, splits, count, value_width), device=query.device)
    log_sums = torch.empty((batch, heads, splits, count), device=query.device)
    _shares[splits, batch * heads](
        query, rotated, *older, *recent, outputs, log_sums, *rows, recent_slots, scaling * LOG2_E, splits,
        count, new,
        width, keys[0].shape[3], sizes[0], bits[0], group_sizes[0], groups[0], triton.next_power_of_2(groups[0]),
        value_width, values[0].shape[3], sizes[1], bits[1], group_sizes[1], groups[1],
        triton.next_power_of_2(groups[1]),
        tl.float32 if query.dtype == torch.float32 else tl.float16, "ieee" if query.dtype == torch.float32 else "tf32",
        max(16, triton.next_power_of_2(count)), block,
        num_warps=setup.warps, num_stages=setup.stages,
    )  # fmt: skip
    out = torch.empty((batch, new, query_heads, value_width), dtype=query.dtype, device=query.device)
    _join[count, batch * heads](
        outputs, log_sums, out, splits, heads, count, new, value_width, triton.next_power_of_2(value_width),
        triton.next_power_of_2(splits), num_warps=setup.warps,
    )  # fmt: skip
    return out


def _one_buffer(parts: list[Tensor]) -> tuple[list[Tensor], int]:
    """Keys, values and positions whose heads are the same number of rows apart, and that number: views of a buffer of
    rows as they are, others as copies."""
    slots = set()
    for part in parts:
        same, head_stride, row_stride = spaced(part)
        width = math.prod(part.shape[3:])
        slots.add(head_stride // width if same is part and row_stride == width and head_stride % width == 0 else -1)
    if len(slots) == 1 and -1 not in slots:
        return parts, slots.pop()
    return [part.contiguous() for part in parts], parts[0].shape[2]
