"""Counter-based random numbers: each is a hash of its counters, so nothing is stored and no generator is touched.

The hash chains the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain) over the counters. All arithmetic is
on 32-bit words held in int64, so CPU, GPU and Triton agree bit for bit on the integers.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvcomp.dispatch import operation

WORD = 0xFFFFFFFF
TOKENS, SKETCH, SAMPLING = 0, 1, 2
"""First counter of a stream: one for numbers of rows, one for random projections, one to draw tokens."""


def uniform(last: Tensor, seed: int, *counters: int | Tensor, stream: int = TOKENS) -> Tensor:
    """Float32 in (0, 1), an odd multiple of 2**-24, of the broadcast shape of `counters` and `last`.

    `seed` counts modulo 2**64; `counters` and `last`, integers or integer tensors, modulo 2**32.
    """
    state = torch.full((), stream, dtype=torch.int64, device=last.device)
    for word in (seed & WORD, (seed >> 32) & WORD, *counters, last):
        if isinstance(word, Tensor):
            word = word.to(last.device, torch.int64)
        state = _mix(state ^ (word & WORD))
    return ((state >> 9).float() + 0.5) * 2.0**-23


def signed(seed: int) -> int:
    """The number of 64 bit, with a sign as torch wants it, that stands for the same seed."""
    return (seed + 2**63) % 2**64 - 2**63


@operation("noise", "(Tensor positions, int seed, int layer, int round) -> Tensor")
def token_noise(
    positions: Int[Tensor, "batch kv_heads rows"], seed: int, layer: int, round: int
) -> Float[Tensor, "batch kv_heads rows"]:
    """A number in (0, 1) for each row, from (seed, layer, round, KV head, position) and nothing else."""
    heads = torch.arange(positions.shape[1], device=positions.device)
    return uniform(positions, seed, layer, round, heads[:, None])


def normal(
    shape: tuple[int, ...], seed: int, *counters: int | Tensor, device: torch.device | str = "cpu"
) -> Float[Tensor, "..."]:
    """Standard normal numbers of `shape` (Box-Muller); a tensor counter must broadcast against `shape`."""
    index = torch.arange(math.prod(shape), device=device).reshape(shape)
    radius = (-2.0 * uniform(2 * index, seed, *counters, stream=SKETCH).log()).sqrt()
    return radius * (2.0 * math.pi * uniform(2 * index + 1, seed, *counters, stream=SKETCH)).cos()


def _mix(word: Tensor) -> Tensor:
    word = (word + 0x9E3779B9) & WORD  # an odd constant, so that zero does not map to zero
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & WORD
    return word ^ (word >> 16)
