"""Attention of the newest queries over packed, exact and recent rows on a GPU.

Name, arguments and result are those of `kvcomp.ops.decode.packed_decode`. The rows of a KV head are shared by several
programs, each of which goes through its share of the packed tiles, then of the exact and of the recent ones; a second
launch joins what they found by log-sum-exp.

Codes become numbers in registers only. Four bytes are read as one word, and a field of them, the channels in the same
bits of every byte, is turned into float16 two at a time: put into the mantissa of 1024, a code is 1024 + code. Less the
middle code it is a small integer, exact in 16 bit, so that scale and zero point can be left to logits and weights.
"""

# A kernel has no types until Triton compiles it for those of its arguments.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,misc"
# ruff: noqa: RUF005 (Triton joins tuples, it does not unpack them)

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcomp_kernels.launch import FLOATS, MOST_GROUPS, WIDEST, launch, offset, spaced
from kvcomp_kernels.score import LOG2_E, absorb, log_sum_of

MOST_BYTES = 16384
"""Bytes of the queries of a KV head, padded to a tile, beyond which decoding is left to the definition: a tile of keys
beside them would not fit into the shared memory of every device."""


@triton.jit
def pair(words, shift: tl.constexpr, bits: tl.constexpr):
    """Codes less the middle one, in float16, of the bytes at `shift` and two bytes later: `[..., 2]`."""
    middle: tl.constexpr = 1 << (bits - 1)
    both = ((words >> shift) & (((1 << bits) - 1) * 0x00010001)) | 0x64006400
    low = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low - (1024.0 + middle), high - (1024.0 + middle))


@triton.jit
def field_steps(words, field: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, padded: tl.constexpr):
    """Codes less the middle one of a field, `[block, padded]`, in float16."""
    steps = tl.join(pair(words, field * bits, bits), pair(words, field * bits + 8, bits))
    return tl.reshape(steps, [block, padded])


@triton.jit
def load_words(codes, head, row, real, slots, size: tl.constexpr, padded: tl.constexpr):
    """The codes of rows, four bytes a word."""
    word = tl.arange(0, padded // 4)
    source = codes + offset(head, slots) * (size // 4) + offset(row, size // 4)[:, None] + word[None, :]
    return tl.load(source, mask=real[:, None] & (word < size // 4)[None, :], other=0)


@triton.jit
def load_group(scale, zero_point, head, row, real, slots, group, groups: tl.constexpr, bits: tl.constexpr):
    """The scale of a group of each row, and what the middle code stands for."""
    place = offset(head, slots) * groups + offset(row, groups) + group
    scales = tl.load(scale + place, mask=real, other=0).to(tl.float32)
    zeros = tl.load(zero_point + place, mask=real, other=0).to(tl.float32)
    return scales, zeros + (1 << (bits - 1)) * scales


@triton.jit
def key_field(
    logits, words, query, scale, zero_point, head, row, real, slots, field: tl.constexpr,
    size: tl.constexpr, padded: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr, groups: tl.constexpr,
    precision: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Adds the products of queries with a field of the keys."""
    first: tl.constexpr = field * size // group_size
    end: tl.constexpr = (field * size + size - 1) // group_size + 1
    stop: tl.constexpr = end if end < groups else groups
    steps = tl.trans(field_steps(words, field, bits, block, padded)).to(query.dtype)
    for group in tl.static_range(first, stop):
        own = query
        if stop - first > 1:
            own = tl.where(((field * size + tl.arange(0, padded)) // group_size == group)[None, :], query, 0)
        scales, middles = load_group(scale, zero_point, head, row, real, slots, group, groups, bits)
        logits += tl.dot(own, steps, input_precision=precision) * scales[None, :]
        logits += tl.sum(own.to(tl.float32), 1)[:, None] * middles[None, :]
    return logits


@triton.jit
def value_field(
    output, words, weights, scale, zero_point, head, row, real, slots, field: tl.constexpr,
    size: tl.constexpr, padded: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr, groups: tl.constexpr,
    dtype: tl.constexpr, precision: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Adds a field of the values, times the weights of their rows."""
    first: tl.constexpr = field * size // group_size
    end: tl.constexpr = (field * size + size - 1) // group_size + 1
    stop: tl.constexpr = end if end < groups else groups
    steps = field_steps(words, field, bits, block, padded).to(dtype)
    for group in tl.static_range(first, stop):
        scales, middles = load_group(scale, zero_point, head, row, real, slots, group, groups, bits)
        unit = tl.max(scales, 0)  # so that scaled weights stay within 16 bit
        shares = (weights * (scales / tl.where(unit > 0, unit, 1.0))[None, :]).to(dtype)
        part = tl.dot(shares, steps, input_precision=precision) * unit
        part += tl.sum(weights * middles[None, :], 1)[:, None]
        if stop - first > 1:
            part = tl.where(((field * size + tl.arange(0, padded)) // group_size == group)[None, :], part, 0)
        output += part
    return output


@triton.jit
def load_field(
    x, base, row, real, field: tl.constexpr, width: tl.constexpr, size: tl.constexpr, padded: tl.constexpr
):  # fmt: skip
    """The channels of a field of dense rows, zeros where they are not `real` and where there is no channel."""
    within = tl.arange(0, padded)
    channel = field * size + within
    mask = real[:, None] & ((within < size) & (channel < width))[None, :]
    return tl.load(x + base + offset(row, width)[:, None] + channel[None, :], mask=mask, other=0)


@triton.jit
def dense_part(
    query, keys, values, positions, head, slots, rows, split, splits, highest, total, outputs, scaling, count, new,
    causal: tl.constexpr, width: tl.constexpr, key_size: tl.constexpr, key_padded: tl.constexpr,
    key_fields: tl.constexpr, value_width: tl.constexpr, value_size: tl.constexpr, value_padded: tl.constexpr,
    value_fields: tl.constexpr, precision: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Takes the share of a program in the exact or the recent rows into a running softmax."""
    asked = tl.arange(0, tile)
    for start in range(split * block, rows, splits * block):
        row = start + tl.arange(0, block)
        real = tl.load(positions + offset(head, slots) + row, mask=row < rows, other=-1) >= 0
        visible = real[None, :]
        if causal:
            visible = visible & (row[None, :] <= rows - new + (asked % new)[:, None])
        logits = tl.zeros([tile, block], tl.float32)
        for field in tl.static_range(key_fields):
            key = load_field(keys, offset(head, slots) * width, row, real, field, width, key_size, key_padded)
            own = load_field(
                query, offset(head, count) * width, asked, asked < count, field, width, key_size, key_padded
            )
            logits = tl.dot(own, tl.trans(key), logits, input_precision=precision)
        logits = tl.where(visible, logits * scaling, float("-inf"))
        weights, kept, highest, total = absorb(logits, highest, total)
        grown = ()
        for field in tl.static_range(value_fields):
            base = offset(head, slots) * value_width
            value = load_field(values, base, row, real, field, value_width, value_size, value_padded)
            output = outputs[field] * kept[:, None]
            grown = grown + (tl.dot(weights.to(value.dtype), value, output, input_precision=precision),)
        outputs = grown
    return highest, total, outputs


STEPS = ["packed_rows", "exact_rows", "recent_rows", "recent_slots", "splits", "count", "new"]
"""Numbers that change while a text grows: a kernel must not be compiled anew for some of them."""


@triton.jit(do_not_specialize=STEPS)
def _shares(
    query, rotated, key_codes, key_scale, key_zero, value_codes, value_scale, value_zero, packed_positions, exact_keys,
    exact_values, exact_positions, recent_keys, recent_values, recent_positions, results, log_sums, packed_rows,
    exact_rows, recent_rows, recent_slots, scaling, splits, count, new, causal: tl.constexpr,
    width: tl.constexpr, key_size: tl.constexpr, key_padded: tl.constexpr, key_bits: tl.constexpr,
    key_group: tl.constexpr, key_groups: tl.constexpr, value_width: tl.constexpr, value_size: tl.constexpr,
    value_padded: tl.constexpr, value_bits: tl.constexpr, value_group: tl.constexpr, value_groups: tl.constexpr,
    dtype: tl.constexpr, precision: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    key_fields: tl.constexpr = 8 // key_bits
    value_fields: tl.constexpr = 8 // value_bits
    split, head, asked = tl.program_id(0), tl.program_id(1), tl.arange(0, tile)
    largest, turned, outputs = tl.zeros([tile], tl.float32), (), ()
    for field in tl.static_range(key_fields):
        base = offset(head, count) * width
        part = load_field(rotated, base, asked, asked < count, field, width, key_size, key_padded).to(tl.float32)
        largest, turned = tl.maximum(largest, tl.max(tl.abs(part), 1)), turned + (part,)
    largest = tl.where(largest > 0, largest, 1.0)
    queries = ()
    for field in tl.static_range(key_fields):  # within 16 bit, whatever the queries
        queries = queries + ((turned[field] / largest[:, None]).to(dtype),)
    for _ in tl.static_range(value_fields):
        outputs = outputs + (tl.zeros([tile, value_padded], tl.float32),)
    highest, total = tl.full([tile], float("-inf"), tl.float32), tl.zeros([tile], tl.float32)
    for start in range(split * block, packed_rows, splits * block):
        row = start + tl.arange(0, block)
        real = tl.load(packed_positions + offset(head, packed_rows) + row, mask=row < packed_rows, other=-1) >= 0
        words = load_words(key_codes, head, row, real, packed_rows, key_size, key_padded)
        logits = tl.zeros([tile, block], tl.float32)
        for field in tl.static_range(key_fields):
            logits = key_field(
                logits, words, queries[field], key_scale, key_zero, head, row, real, packed_rows, field,
                key_size, key_padded, key_bits, key_group, key_groups, precision, block,
            )  # fmt: skip
        logits = tl.where(real[None, :], logits * (largest * scaling)[:, None], float("-inf"))
        weights, kept, highest, total = absorb(logits, highest, total)
        words = load_words(value_codes, head, row, real, packed_rows, value_size, value_padded)
        grown = ()
        for field in tl.static_range(value_fields):
            output = value_field(
                outputs[field] * kept[:, None], words, weights, value_scale, value_zero, head, row, real, packed_rows,
                field, value_size, value_padded, value_bits, value_group, value_groups, dtype, precision,
                block,
            )  # fmt: skip
            grown = grown + (output,)
        outputs = grown
    highest, total, outputs = dense_part(
        query, exact_keys, exact_values, exact_positions, head, exact_rows, exact_rows, split, splits, highest, total,
        outputs, scaling, count, new, False, width, key_size, key_padded, key_fields, value_width, value_size,
        value_padded, value_fields, precision, tile, block,
    )  # fmt: skip
    highest, total, outputs = dense_part(
        query, recent_keys, recent_values, recent_positions, head, recent_slots, recent_rows, split, splits, highest,
        total, outputs, scaling, count, new, causal, width, key_size, key_padded, key_fields, value_width, value_size,
        value_padded, value_fields, precision, tile, block,
    )  # fmt: skip
    line = offset(head * splits + split, count) + asked
    tl.store(log_sums + line, log_sum_of(highest, total), mask=asked < count)
    for field in tl.static_range(value_fields):
        within = tl.arange(0, value_padded)
        channel = field * value_size + within
        mask = (asked < count)[:, None] & ((within < value_size) & (channel < value_width))[None, :]
        result = outputs[field] / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(results + offset(line, value_width)[:, None] + channel[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["splits", "count", "new", "heads"])
def _join(
    outputs, log_sums, out, splits, heads, count, new, width: tl.constexpr,
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
    sizes, tile = [codes.shape[3] for codes, *_ in (keys, values)], max(16, triton.next_power_of_2(count))
    padded = [4 * max(4, triton.next_power_of_2(size // 4)) for size in sizes]
    widest = max(size * 8 // bit for size, bit in zip(padded, bits, strict=True))
    if (
        max(width, value_width) > WIDEST
        or max(groups) > MOST_GROUPS
        or tile * widest * query.element_size() > MOST_BYTES
    ):
        return NotImplemented
    if query.dtype not in FLOATS or any(part.dtype != query.dtype for part in dense) or any(size % 4 for size in sizes):
        return NotImplemented
    query, rotated, rows = query.contiguous(), rotated.contiguous(), [part.shape[2] for part in positions]
    older = [part.contiguous() for part in (*keys, *values, positions[0], *dense[:2], positions[1])]
    older[0], older[3] = older[0].view(torch.int32), older[3].view(torch.int32)
    recent, recent_slots = _one_buffer([*dense[2:], positions[2]])
    setup = launch("decode", query)
    block = setup.rows(widest, query.element_size())
    splits = setup.splits(batch * heads, triton.cdiv(max(rows), block))
    results = torch.empty((batch, heads, splits, count, value_width), device=query.device)
    log_sums = torch.empty((batch, heads, splits, count), device=query.device)
    full = query.dtype == torch.float32
    _shares[splits, batch * heads](
        query, rotated, *older, *recent, results, log_sums, *rows, recent_slots, scaling * LOG2_E, splits, count, new,
        new > 1, width, sizes[0], padded[0], bits[0], group_sizes[0], groups[0],
        value_width, sizes[1], padded[1], bits[1], group_sizes[1], groups[1],
        tl.float32 if full else tl.float16, "ieee" if full else "tf32", tile, block,
        **setup.options(fused=True),
    )  # fmt: skip
    out = torch.empty((batch, new, query_heads, value_width), dtype=query.dtype, device=query.device)
    _join[count, batch * heads](
        results, log_sums, out, splits, heads, count, new, value_width, triton.next_power_of_2(value_width),
        triton.next_power_of_2(splits), **setup.options(fused=True),
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
