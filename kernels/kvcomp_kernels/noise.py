"""Random numbers of rows on a GPU; the hash is that of `kvcomp.noise`."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcomp.noise import TOKENS, WORD
from kvcomp_kernels.launch import launch, offset, spaced


@triton.jit
def mix(state, word):
    """The hash of `state` and another word, both of 32 bit."""
    word = (state ^ word.to(tl.uint32)) + 0x9E3779B9
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit(do_not_specialize=["count", "heads", "low", "high", "layer", "round"])
def _token_noise(
    positions,
    out,
    count,
    heads,
    head_stride,
    row_stride,
    low,
    high,
    layer,
    round,
    stream: tl.constexpr,
    rows: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(0) * rows + tl.arange(0, rows)
    position = tl.load(positions + offset(head, head_stride) + offset(row, row_stride), mask=row < count, other=0)
    state = mix(mix(tl.full([rows], stream, tl.uint32), low), high)
    state = mix(mix(mix(mix(state, layer), round), head % heads), position)
    number = ((state >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    tl.store(out + offset(head, count) + row, number, mask=row < count)


def token_noise(positions: Tensor, seed: int, layer: int, round: int) -> Tensor:
    """A number in (0, 1) for each row, from (seed, layer, round, KV head, position) and nothing else."""
    positions, head_stride, row_stride = spaced(positions)
    batch, heads, count = positions.shape
    words = [number & WORD for number in (seed, seed >> 32, layer, round)]
    out, setup = torch.empty(positions.shape, device=positions.device), launch("noise", positions)
    _token_noise[triton.cdiv(count, setup.numbers), batch * heads](
        positions, out, count, heads, head_stride, row_stride, *words, TOKENS, setup.numbers,
        **setup.options(fused=False),
    )  # fmt: skip
    return out
