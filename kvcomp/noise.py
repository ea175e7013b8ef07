"""Counter-based random numbers: each is a hash of its counters, so nothing is stored and no generator is touched.

The hash chains the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain) over the counters. All arithmetic is
on 32-bit words held in int64, so CPU, GPU and Triton agree bit for bit on the integers.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

WORD = 0xFFFFFFFF
TOKENS, SKETCH = 0, 1
"""First counter of a stream: one for numbers of tokens, one for random projections."""


def uniform(last: Tensor, *counters: int | Tensor, stream: int = TOKENS) -> Tensor:
    """Float32 in (0, 1), a multiple of 2**-24, of the broadcast shape of `counters` and `last`.

    `last` and `counters`: integers (negative and 64-bit ones are taken modulo 2**64), counters first, `last` last.
    """
    state: Tensor = torch.zeros((), dtype=torch.int64, device=last.device) + stream
    for counter in (*counters, last):
        word = torch.as_tensor(_signed(counter), dtype=torch.int64, device=last.device)
        state = _mix(state ^ (word & WORD))
        if isinstance(counter, int):  # a seed may have 64 bits; positions and indices have 32
            state = _mix(state ^ ((word >> 32) & WORD))
    return ((state >> 9).float() + 0.5) * 2.0**-23


def normal(shape: tuple[int, ...], *counters: int | Tensor, device: torch.device | str = "cpu") -> Float[Tensor, "..."]:
    """Standard normal numbers of `shape` (Box-Muller); a tensor counter must broadcast against `shape`."""
    index = torch.arange(math.prod(shape), device=device).reshape(shape)
    radius = (-2.0 * uniform(2 * index, *counters, stream=SKETCH).log()).sqrt()
    return radius * (2.0 * math.pi * uniform(2 * index + 1, *counters, stream=SKETCH)).cos()


def _mix(word: Tensor) -> Tensor:
    word = (word + 0x9E3779B9) & WORD  # an odd constant, so that zero does not map to zero
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & WORD
    return word ^ (word >> 16)


def _signed(counter: int | Tensor) -> int | Tensor:
    """An int modulo 2**64 as int64 holds it."""
    if isinstance(counter, Tensor):
        return counter
    counter %= 1 << 64
    return counter - (1 << 64) if counter >= 1 << 63 else counter
