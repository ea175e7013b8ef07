"""Rows in 2, 4 or 8 bits on CPU, compiled by numba: decoding them, and the products that attention takes from codes.

Names, arguments and results are those of the definitions in `kvcomp.ops.packed`. A row is decoded into a few vectors
that stay in the nearest cache and serve all query heads of its KV head, so no decoded row reaches memory. The loops are
written for the compiler to make vectors of: integers of 32 bit and slices of equal length.
"""

# A kernel has no types until numba compiles it for those of its arguments.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from kvcomp.ops.packed import hadamard_block

FREE = {"reassoc", "contract", "nsz"}
"""A sum may be taken in any order and fused with its products; not so in `unpack`, which has one right answer."""
BLOCK = 128
"""Rows that are summed up before they are added to the others: in one long sum the small terms would be rounded off."""
SMALL = 1 << 18
"""Codes below which a second thread costs more than it saves."""


def _compiled(**options: Any) -> Callable[[Any], Any]:
    """`njit` that keeps what it compiles for later processes where there is a place for it."""

    def compiled(function: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # neither the package nor the user has a folder that can be written
            return njit(nogil=True, **options)(function)

    return compiled


@_compiled(inline="always")
def _decode(codes, bits, floats):
    size, mask = codes.shape[0], np.int32((1 << bits) - 1)
    for field in range(8 // bits):
        part = floats[field * size : field * size + size]
        for byte in range(size):
            part[byte] = np.float32((np.int32(codes[byte]) >> np.int32(field * bits)) & mask)


@_compiled(fastmath=FREE)
def _packed_dot(query, sums, codes, scale, zero_point, logits, bits, group_size):
    floats = np.empty(codes.shape[2] * (8 // bits), np.float32)
    for head in range(codes.shape[0]):
        for row in range(codes.shape[1]):
            _decode(codes[head, row], bits, floats)
            for one in range(query.shape[1]):
                total = np.float32(0)
                for group in range(scale.shape[2]):
                    first = group * group_size
                    left = query[head, one, first : first + group_size]
                    right = floats[first : first + len(left)]
                    dot = np.float32(0)
                    for channel in range(len(left)):
                        dot += left[channel] * right[channel]
                    total += dot * scale[head, row, group] + sums[head, one, group] * zero_point[head, row, group]
                logits[head, one, row] = total


@_compiled(fastmath=FREE)
def _packed_weighted_sum(weights, codes, scale, zero_point, total, bits, group_size):
    floats = np.empty(codes.shape[2] * (8 // bits), np.float32)
    part, shift = np.empty(total.shape[1:], np.float32), np.empty((total.shape[1], scale.shape[2]), np.float32)
    for head in range(codes.shape[0]):
        total[head] = 0
        for start in range(0, codes.shape[1], BLOCK):
            part[:], shift[:] = 0, 0
            for row in range(start, min(start + BLOCK, codes.shape[1])):
                _decode(codes[head, row], bits, floats)
                for one in range(len(part)):
                    for group in range(scale.shape[2]):
                        first = group * group_size
                        factor = weights[head, one, row] * scale[head, row, group]
                        shift[one, group] += weights[head, one, row] * zero_point[head, row, group]
                        left = part[one, first : first + group_size]
                        right = floats[first : first + len(left)]
                        for channel in range(len(left)):
                            left[channel] += factor * right[channel]
            for one in range(len(part)):
                for channel in range(part.shape[1]):
                    total[head, one, channel] += part[one, channel] + shift[one, channel // group_size]


@_compiled()
def _unpack(codes, half_scale, half_zero, rows, bits, group_size):
    floats = np.empty(codes.shape[2] * (8 // bits), np.float32)
    for head in range(codes.shape[0]):
        for row in range(codes.shape[1]):
            _decode(codes[head, row], bits, floats)
            for group in range(half_scale.shape[2]):
                first = group * group_size
                left = rows[head, row, first : first + group_size]
                right = floats[first : first + len(left)]
                scale, zero = half_scale[head, row, group], half_zero[head, row, group]
                for channel in range(len(left)):
                    left[channel] = np.float32(2) * (zero + right[channel] * scale)


@_compiled()
def _hadamard(rows, block):
    for row in range(len(rows)):
        for start in range(0, rows.shape[1], 8):  # the first three rounds, in registers
            eight = rows[row, start : start + 8]
            a, b, c, d, e, f, g, h = eight[0], eight[1], eight[2], eight[3], eight[4], eight[5], eight[6], eight[7]
            a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
            a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
            a, b, c, d, e, f, g, h = a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h
            eight[0], eight[1], eight[2], eight[3], eight[4], eight[5], eight[6], eight[7] = a, b, c, d, e, f, g, h
        half = 8
        while half < block:
            for start in range(0, rows.shape[1], 2 * half):
                left, right = rows[row, start : start + half], rows[row, start + half : start + 2 * half]
                for channel in range(half):
                    first, second = left[channel], right[channel]
                    left[channel], right[channel] = first + second, first - second
            half *= 2


def hadamard(x: Tensor) -> Tensor:
    """`x` times the orthonormal Walsh-Hadamard matrix; the same bits as the definition."""
    block = hadamard_block(x.shape[-1])
    rotated = (x.float() * block**-0.5).contiguous()
    _hadamard(rotated.view(-1, x.shape[-1]).numpy(), block)
    return rotated


def packed_dot(query: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor, bits: int, group_size: int) -> Tensor:
    """`q . x'` of every query and row."""
    groups, width = scale.shape[3], query.shape[3]
    sums = torch.nn.functional.pad(query, (0, groups * group_size - width)).unflatten(-1, (groups, group_size)).sum(-1)
    logits = query.new_empty(*query.shape[:3], codes.shape[2], dtype=torch.float32)
    _run(_packed_dot, [query, sums, codes, scale, zero_point, logits], bits, group_size)
    return logits


def packed_weighted_sum(
    weights: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor, bits: int, group_size: int, width: int
) -> Tensor:
    """`sum_i weights_i x'_i`."""
    total = weights.new_empty(*weights.shape[:3], width, dtype=torch.float32)
    _run(_packed_weighted_sum, [weights, codes, scale, zero_point, total], bits, group_size)
    return total


def unpack(
    codes: Tensor, scale: Tensor, zero_point: Tensor, bits: int, group_size: int, width: int, dtype: torch.dtype
) -> Tensor:
    """The decoded rows in `dtype`."""
    rows = torch.empty(*codes.shape[:3], width)
    _run(_unpack, [codes, 0.5 * scale.float(), 0.5 * zero_point.float(), rows], bits, group_size)
    largest = torch.finfo(dtype).max
    return rows.clamp_(-largest, largest).to(dtype)


def _run(kernel: Callable[..., None], tensors: list[Tensor], bits: int, group_size: int) -> None:
    """Runs `kernel` on all KV heads, the last of the tensors being the result; in parts if torch uses threads."""
    arrays = [_by_head(tensor) for tensor in tensors]
    heads, threads = len(arrays[0]), torch.get_num_threads()
    if threads == 1 or heads == 1 or sum(array.size for array in arrays) < SMALL:
        kernel(*arrays, bits, group_size)
        return
    parts = [slice(heads * part // threads, heads * (part + 1) // threads) for part in range(threads)]
    list(_pool(threads).map(lambda part: kernel(*(array[part] for array in arrays), bits, group_size), parts))


def _by_head(tensor: Tensor) -> np.ndarray[Any, Any]:
    """`[batch * kv_heads, ...]`, sharing memory where the tensor is contiguous; 16-bit floats as float32."""
    floats = tensor.float() if tensor.is_floating_point() else tensor
    array: np.ndarray[Any, Any] = floats.detach().contiguous().flatten(0, 1).numpy()
    return array


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kvcomp")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)
