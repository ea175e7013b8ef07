"""Rows in 2, 4 or 8 bits on a GPU: packing, decoding, rotating and moving them.

Names, arguments and results, bit for bit, are those of the definitions in `kvcomp.ops.packed` and of
`kvcomp.core.take_rows`. A program works on a tile `[rows, fields, bytes]` of one KV head: the channels of a row in the
order of the format, so that the codes of a byte are summed over `fields`. Products are not fused with sums, as that
would change codes.
"""

# A kernel has no types until Triton compiles it for those of its arguments.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcomp.ops.packed import hadamard_block
from kvcomp_kernels.launch import FLOATS, MOST_GROUPS, WIDEST, launch, offset, spaced

HALF_WAY: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2**23: added and taken away again, it rounds a float32 below 2**22 to an integer, halves to even."""


@triton.jit
def round_up(x, dtype: tl.constexpr):
    """The least number of `dtype` that is not below `x >= 0`."""
    if dtype == tl.float32:
        return x
    else:  # what follows a return would be compiled, too
        rounded = x.to(dtype)
        bits = rounded.to(tl.int16, bitcast=True)
        return tl.where(rounded.to(tl.float32) < x, bits + 1, bits).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def round_down(x, dtype: tl.constexpr, largest: tl.constexpr):
    """The largest finite number of `dtype` that is not above `x`."""
    x = tl.minimum(tl.maximum(x, -largest), largest)
    if dtype == tl.float32:
        return x
    else:
        rounded = x.to(dtype)
        bits, again = rounded.to(tl.int16, bitcast=True), rounded.to(tl.float32)
        lower = tl.where(again > 0, bits - 1, bits + 1)  # towards zero, or away from it
        return tl.where(again > x, lower, bits).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def rotation_round(x, rows: tl.constexpr, width: tl.constexpr, half: tl.constexpr):
    """Sums and differences of the channels `half` apart."""
    pairs = tl.reshape(x, [rows, width // (2 * half), 2, half])
    first, second = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    pairs = tl.permute(tl.join(first + second, first - second), [0, 1, 3, 2])
    return tl.reshape(pairs, [rows, width])


@triton.jit
def rotated(x, rows: tl.constexpr, width: tl.constexpr, rounds: tl.constexpr, factor: tl.constexpr):
    """`x` `[rows, width]` times the orthonormal Walsh-Hadamard matrix, in the order of the definition."""
    x = x * factor
    for step in tl.static_range(rounds):
        x = rotation_round(x, rows, width, 1 << step)
    return x


@triton.jit(do_not_specialize=["slots"])
def _pack(
    x, index, codes, scale, zero_point, slots, head_stride, row_stride, largest: tl.constexpr, width: tl.constexpr,
    size: tl.constexpr, padded: tl.constexpr, bits: tl.constexpr, group_size: tl.constexpr, groups: tl.constexpr,
    rounds: tl.constexpr, factor: tl.constexpr, indexed: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    head, slot = tl.program_id(1), tl.program_id(0) * rows + tl.arange(0, rows)
    real = slot < slots
    levels: tl.constexpr = (1 << bits) - 1
    fields: tl.constexpr = 8 // bits
    row, used = slot, real
    if indexed:
        row = tl.load(index + offset(head, slots) + slot, mask=real, other=-1)
        used = row >= 0
    field, byte = tl.arange(0, fields)[None, :, None], tl.arange(0, padded)[None, None, :]
    channel = field * size + byte
    inside = (byte < size) & (channel < width)
    source = x + offset(head, head_stride) + offset(row, row_stride)[:, None, None] + channel
    values = tl.load(source, mask=used[:, None, None] & inside, other=0).to(tl.float32)
    if rounds > 0:
        turned = rotated(tl.reshape(values, [rows, width]), rows, width, rounds, factor)
        values = tl.reshape(turned, [rows, fields, padded])
    half_zero, half_scale = tl.zeros_like(values), tl.zeros_like(values)
    side = offset(head, slots) * groups + offset(slot, groups)
    for group in tl.static_range(groups):
        own = inside & (channel // group_size == group)
        low = tl.min(tl.min(tl.where(own, values, float("inf")), 2), 1)
        high = tl.max(tl.max(tl.where(own, values, float("-inf")), 2), 1)
        zero = round_down(low, zero_point.dtype.element_ty, largest)
        halved = 0.5 * zero.to(tl.float32)
        step = tl.div_rn(tl.maximum(0.5 * high - halved, 0.0), tl.full([rows], levels, tl.float32))
        step = round_up(2 * step, scale.dtype.element_ty)
        tl.store(zero_point + side + group, zero, mask=real)
        tl.store(scale + side + group, step, mask=real)
        half_zero = tl.where(own, halved[:, None, None], half_zero)
        half_scale = tl.where(own, (0.5 * step.to(tl.float32))[:, None, None], half_scale)
    steps = tl.div_rn(0.5 * values - half_zero, tl.where(half_scale > 0, half_scale, 1.0))
    steps = (tl.minimum(tl.maximum(steps, 0.0), levels) + HALF_WAY) - HALF_WAY
    parts = tl.where(inside, steps, 0.0).to(tl.int32) << (field * bits)
    target = codes + offset(head, slots) * size + offset(slot, size)[:, None] + tl.arange(0, padded)[None, :]
    tl.store(target, tl.sum(parts, 1).to(tl.uint8), mask=real[:, None] & (tl.arange(0, padded) < size)[None, :])


def pack(
    x: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype, rotate: bool = False, index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`codes, scale, zero_point` of the rows `index` of `x`, rotated if asked."""
    width = x.shape[3]
    groups, size = -(-width // group_size), -(-width // (8 // bits))
    if width > WIDEST or groups > MOST_GROUPS or x.dtype not in FLOATS or scale_dtype not in FLOATS:
        return NotImplemented
    if rotate and width & (width - 1):  # several blocks, whose number is no power of two
        x, rotate = hadamard(x), False
    x, head_stride, row_stride = spaced(x)
    slots = x.shape[2] if index is None else index.shape[2]
    codes = torch.empty((*x.shape[:2], slots, size), dtype=torch.uint8, device=x.device)
    scale, zero_point = (torch.empty((*x.shape[:2], slots, groups), dtype=scale_dtype, device=x.device) for _ in "sz")
    padded, setup = triton.next_power_of_2(size), launch("pack", x)
    rows = setup.rows(padded * (8 // bits), 4)
    _pack[triton.cdiv(slots, rows), x.shape[0] * x.shape[1]](
        x, x if index is None else index.contiguous(), codes, scale, zero_point, slots, head_stride, row_stride,
        torch.finfo(scale_dtype).max, width, size, padded, bits, group_size, groups,
        width.bit_length() - 1 if rotate else 0, width**-0.5, index is not None, rows,
        **setup.options(fused=False),
    )  # fmt: skip
    return codes, scale, zero_point


@triton.jit(do_not_specialize=["slots"])
def _unpack(
    codes, scale, zero_point, rows_out, slots, codes_head, codes_row, scale_head, scale_row, zero_head, zero_row,
    largest: tl.constexpr, width: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, bits: tl.constexpr,
    group_size: tl.constexpr, groups: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    head, slot = tl.program_id(1), tl.program_id(0) * rows + tl.arange(0, rows)
    real = slot < slots
    fields: tl.constexpr = 8 // bits
    within = tl.arange(0, padded)
    source = codes + offset(head, codes_head) + offset(slot, codes_row)[:, None] + within[None, :]
    packed = tl.load(source, mask=real[:, None] & (within < size)[None, :], other=0).to(tl.int32)
    field, byte = tl.arange(0, fields)[None, :, None], within[None, None, :]
    channel = field * size + byte
    inside = (byte < size) & (channel < width)
    code = (packed[:, None, :] >> (field * bits)) & ((1 << bits) - 1)
    steps = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0  # 2**23 + code, without a conversion
    half_zero, half_scale = tl.zeros_like(steps), tl.zeros_like(steps)
    for group in tl.static_range(groups):
        own = inside & (channel // group_size == group)
        zero = tl.load(zero_point + offset(head, zero_head) + offset(slot, zero_row) + group, mask=real, other=0)
        step = tl.load(scale + offset(head, scale_head) + offset(slot, scale_row) + group, mask=real, other=0)
        half_zero = tl.where(own, (0.5 * zero.to(tl.float32))[:, None, None], half_zero)
        half_scale = tl.where(own, (0.5 * step.to(tl.float32))[:, None, None], half_scale)
    values = 2 * (half_zero + steps * half_scale)
    values = tl.minimum(tl.maximum(values, -largest), largest).to(rows_out.dtype.element_ty)
    target = rows_out + offset(head, slots) * width + offset(slot, width)[:, None, None] + channel
    tl.store(target, values, mask=real[:, None, None] & inside)


def unpack(
    codes: Tensor, scale: Tensor, zero_point: Tensor, bits: int, group_size: int, width: int, dtype: torch.dtype
) -> Tensor:
    """The decoded rows in `dtype`."""
    groups, size = scale.shape[3], codes.shape[3]
    if width > WIDEST or groups > MOST_GROUPS or dtype not in FLOATS:
        return NotImplemented
    (codes, *of_codes), (scale, *of_scale), (zero_point, *of_zero) = map(spaced, (codes, scale, zero_point))
    decoded = torch.empty((*codes.shape[:3], width), dtype=dtype, device=codes.device)
    padded, setup = triton.next_power_of_2(size), launch("unpack", codes)
    rows = setup.rows(padded * (8 // bits), 4)
    _unpack[triton.cdiv(codes.shape[2], rows), codes.shape[0] * codes.shape[1]](
        codes, scale, zero_point, decoded, codes.shape[2], *of_codes, *of_scale, *of_zero,
        torch.finfo(dtype).max, width, size, padded, bits, group_size, groups, rows,
        **setup.options(fused=False),
    )  # fmt: skip
    return decoded


@triton.jit(do_not_specialize=["count"])
def _rotate(
    x, out, count, width: tl.constexpr, rounds: tl.constexpr, factor: tl.constexpr, rows: tl.constexpr
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, width)
    place = offset(row, width)[:, None] + channel[None, :]
    values = tl.load(x + place, mask=(row < count)[:, None], other=0).to(tl.float32)
    tl.store(out + place, rotated(values, rows, width, rounds, factor), mask=(row < count)[:, None])


def hadamard(x: Tensor) -> Tensor:
    """`x` times the orthonormal Walsh-Hadamard matrix, block by block, in float32."""
    block = hadamard_block(x.shape[-1])
    if x.dtype not in FLOATS or block > WIDEST:
        return NotImplemented
    x = x.contiguous()
    out, count, setup = torch.empty(x.shape, device=x.device), x.numel() // block, launch("rotate", x)
    rows = setup.rows(block, 4)
    _rotate[(triton.cdiv(count, rows),)](
        x, out, count, block, block.bit_length() - 1, block**-0.5, rows,
        **setup.options(fused=False),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["slots"])
def _take_rows(
    x, kept, out, slots, head_stride, row_stride, width: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr
):  # fmt: skip
    head, slot = tl.program_id(1), tl.program_id(0) * rows + tl.arange(0, rows)
    real, channel = slot < slots, tl.arange(0, padded)
    row = tl.load(kept + offset(head, slots) + slot, mask=real, other=0)
    mask = real[:, None] & (channel < width)[None, :]
    source = x + offset(head, head_stride) + offset(row, row_stride)[:, None] + channel[None, :]
    target = out + offset(head, slots) * width + offset(slot, width)[:, None] + channel[None, :]
    tl.store(target, tl.load(source, mask=mask, other=0), mask=mask)


def take_rows(x: Tensor, kept: Tensor) -> Tensor:
    """The rows `kept` `[batch, kv_heads, kept]` of `x` `[batch, kv_heads, rows, ...]`, as a new tensor."""
    x, head_stride, row_stride = spaced(x)
    slots, width = kept.shape[2], math.prod(x.shape[3:])
    out = torch.empty((*kept.shape, *x.shape[3:]), dtype=x.dtype, device=x.device)
    padded, setup = triton.next_power_of_2(width), launch("take_rows", x)
    rows = setup.rows(padded, x.element_size())
    _take_rows[triton.cdiv(slots, rows), kept.shape[0] * kept.shape[1]](
        x,
        kept.contiguous(),
        out,
        slots,
        head_stride,
        row_stride,
        width,
        padded,
        rows,
        **setup.options(fused=False),
    )
    return out
