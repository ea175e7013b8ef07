"""Rows in 2, 4 or 8 bits per channel: packing, unpacking, and the two products that decoding takes from codes.

The packed format, version 1. A row of `width` channels is cut into groups of `group_size`, the last of which may be
short. In float32, per group: `zero_point = min`, rounded down to 16 bit; `scale = (max - zero_point) / (2**bits - 1)`,
rounded up to 16 bit, so that no code has to be clamped; `code = round_half_even((x - zero_point) / scale)`; decoded,
`x' = zero_point + code * scale`, so `|x - x'| <= scale / 2`. A constant group that 16 bit can hold has scale 0 and
decodes to its zero point. Decoded rows are clamped to the finite numbers of their dtype; float32 numbers below the
least bfloat16, -3.39e38, become that. With `n = 8 / bits` codes in a byte and `bytes = ceil(width / n)`, byte `j` holds
channel `j + i * bytes` in its bits `i * bits` and up. Differences and products are taken of halves, as the range of a
group may exceed the largest float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvcomp.core import Kept, Rows, take_rows
from kvcomp.dispatch import operation

Codes = UInt8[Tensor, "batch kv_heads rows bytes"]
Groups = Float[Tensor, "batch kv_heads rows groups"]
BLOCK = 1024
"""Rows whose codes the definitions turn into floats at a time."""


@operation(
    "pack",
    "(Tensor x, int bits, int group_size, ScalarType scale_dtype, bool rotate=False, Tensor? index=None)"
    " -> (Tensor, Tensor, Tensor)",
)
def pack(
    x: Float[Tensor, "batch kv_heads stored width"],
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype,
    rotate: bool = False,
    index: Int[Tensor, "batch kv_heads rows"] | None = None,
) -> tuple[Codes, Groups, Groups]:
    """`codes, scale, zero_point` of the rows `index` of `x` (None: all), a row of zeros where the index is negative.

    `rotate`: of `hadamard` of the rows. They must be finite: a NaN spoils its group.
    """
    x = rows_at(x, index)
    if rotate:
        x = hadamard(x)
    groups = -(-x.shape[-1] // group_size)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group_size - x.shape[-1]), value=torch.nan)
    grouped = padded.unflatten(-1, (groups, group_size))  # what fills the last group must not count
    low = grouped.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(-1)
    high = grouped.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(-1)
    zero_point, levels = _round_down(low, scale_dtype), 2**bits - 1
    half_zero = 0.5 * zero_point.float()
    # A tensor, as CUDA would multiply by the rounded inverse of a number.
    steps = torch.full((), float(levels), device=x.device)
    scale = _round_up(2 * ((0.5 * high - half_zero).clamp_min(0) / steps), scale_dtype)
    half_scale = 0.5 * scale.float()
    steps = (0.5 * grouped - half_zero[..., None]) / half_scale.where(half_scale > 0, 1.0)[..., None]
    codes = steps.nan_to_num(0.0).round().clamp(0, levels).flatten(-2)[..., : x.shape[-1]]
    return _to_bytes(codes.to(torch.uint8), bits), scale, zero_point


@operation(
    "pack",
    "(Tensor codes, Tensor scale, Tensor zero_point, int bits, int group_size, int width, ScalarType dtype) -> Tensor",
)
def unpack(
    codes: Codes, scale: Groups, zero_point: Groups, bits: int, group_size: int, width: int, dtype: torch.dtype
) -> Float[Tensor, "batch kv_heads rows width"]:
    """The decoded rows in `dtype`."""
    half_scale, half_zero = (_by_channel(0.5 * part.float(), group_size, width) for part in (scale, zero_point))
    return narrowed(2 * (half_zero + _from_bytes(codes, bits, width).float() * half_scale), dtype)


@operation("pack", "(Tensor query, Tensor codes, Tensor scale, Tensor zero_point, int bits, int group_size) -> Tensor")
def packed_dot(
    query: Float[Tensor, "batch kv_heads queries width"],
    codes: Codes,
    scale: Groups,
    zero_point: Groups,
    bits: int,
    group_size: int,
) -> Float[Tensor, "batch kv_heads queries rows"]:
    """`q . x'` for every row, in float32: per group `scale * (q . code) + zero_point * sum(q)`."""
    width = query.shape[-1]
    grouped = _grouped(query, group_size)
    logits = torch.einsum("bhqg,bhng->bhqn", grouped.sum(-1), zero_point.float())
    for part in _blocks(codes.shape[2]):
        floats = _grouped(_from_bytes(codes[:, :, part], bits, width).float(), group_size)
        dots = torch.einsum("bhqgc,bhngc->bhqng", grouped, floats)
        logits[..., part] += (dots * scale[:, :, None, part].float()).sum(-1)
    return logits


@operation(
    "pack",
    "(Tensor weights, Tensor codes, Tensor scale, Tensor zero_point, int bits, int group_size, int width) -> Tensor",
)
def packed_weighted_sum(
    weights: Float[Tensor, "batch kv_heads queries rows"],
    codes: Codes,
    scale: Groups,
    zero_point: Groups,
    bits: int,
    group_size: int,
    width: int,
) -> Float[Tensor, "batch kv_heads queries width"]:
    """`sum_i weights_i x'_i` in float32: per group `(weights * scale) . codes + weights . zero_point`."""
    total = torch.einsum("bhqn,bhng->bhqg", weights, zero_point.float())[..., None].expand(-1, -1, -1, -1, group_size)
    for part in _blocks(codes.shape[2]):
        floats = _grouped(_from_bytes(codes[:, :, part], bits, width).float(), group_size)
        scaled = weights[:, :, :, part, None] * scale[:, :, None, part].float()
        total = total + torch.einsum("bhqng,bhngc->bhqgc", scaled, floats)
    return total.flatten(-2)[..., :width]


def rows_at(x: Rows, index: Kept | None) -> Float[Tensor, "batch kv_heads slots head_dim"]:
    """The rows `index` of `x` (None: all), a row of zeros where the index is negative."""
    if index is None:
        return x
    return take_rows(x, index.clamp_min(0)).masked_fill_((index < 0)[..., None], 0)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; what a scale that was rounded up carries beyond its largest number becomes that."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def hadamard_block(width: int) -> int:
    """Channels that rotate together: the largest power of two that divides `width`. Raises ValueError below 8."""
    block = width & -width
    if block < 8:
        raise ValueError(
            f"rotation needs a head_dim that 8 divides, got {width} (largest power of two in it: {block}): set "
            "rotate_keys=False"
        )
    return block


@operation("pack", "(Tensor x) -> Tensor")
def hadamard(x: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
    """`x` times the orthonormal Walsh-Hadamard matrix, block by block, in float32; its own inverse.

    `log2(block)` rounds of sums and differences instead of a product, so that a row's result has the same bits in any
    batch and on any device. Raises ValueError for a width that 8 does not divide.
    """
    block = hadamard_block(int(x.shape[-1]))  # the rounds depend on it, so it is fixed where sizes are symbolic
    rotated = (x.float() * block**-0.5).unflatten(-1, (-1, block))  # first, so that sums overflow no sooner
    half = 1
    while half < block:
        first, second = rotated.unflatten(-1, (-1, 2, half)).unbind(-2)
        rotated = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return rotated.flatten(-2)


def _blocks(rows: int) -> list[slice]:
    return [slice(start, start + BLOCK) for start in range(0, rows, BLOCK)]


def _grouped(x: Tensor, group_size: int) -> Tensor:
    """`[..., groups, group_size]`, the last group filled up with zeros."""
    groups = -(-x.shape[-1] // group_size)
    return torch.nn.functional.pad(x, (0, groups * group_size - x.shape[-1])).unflatten(-1, (groups, group_size))


def _by_channel(groups: Tensor, group_size: int, width: int) -> Tensor:
    return groups.repeat_interleave(group_size, dim=-1)[..., :width]


def _to_bytes(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    size = -(-codes.shape[-1] // per_byte)
    fields = torch.nn.functional.pad(codes, (0, size * per_byte - codes.shape[-1])).unflatten(-1, (per_byte, size))
    packed = fields[..., 0, :].clone()
    for index in range(1, per_byte):
        packed |= fields[..., index, :] << (index * bits)
    return packed


def _from_bytes(codes: Tensor, bits: int, width: int) -> Tensor:
    fields = [(codes >> (index * bits)) & (2**bits - 1) for index in range(8 // bits)]
    return torch.cat(fields, dim=-1)[..., :width]


def _round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The least number of `dtype` that is not below `x >= 0`."""
    rounded = x.to(dtype)
    return _next(rounded, rounded.float() < x, +1)


def _round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest finite number of `dtype` that is not above `x`."""
    largest = torch.finfo(dtype).max
    rounded = x.clamp(-largest, largest).to(dtype)
    above = rounded.float() > x.clamp(-largest, largest)
    return _next(rounded, above, torch.where(rounded > 0, -1, 1))


def _next(x: Tensor, where: Tensor, step: Tensor | int) -> Tensor:
    """`x` with its bits moved by `step`, away from zero or towards it, at `where`."""
    if x.dtype == torch.float32:
        return x
    bits = x.view(torch.int16)
    return torch.where(where, bits + step, bits).to(torch.int16).view(x.dtype)
