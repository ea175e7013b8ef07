"""Batched decoding for evaluation: finished rows leave the batch, and no row's result depends on the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvcomp import CompressedCache, noise
from kvcomp.core import Compressor
from kvcomp.memory import held_tensors, nbytes

LOOP = 48
"""Tokens that a repetition must cover, and three periods at least, to be called a loop."""


@dataclass(frozen=True)
class Decoding:
    """How to decode. `compressor` None: the full cache. `temperature` 0: greedy; else tokens are drawn from the fewest
    most likely ones whose mass reaches `top_p`. `seed` fixes the draws and the noise of the compressor."""

    compressor: Compressor | None = None
    interval: int = 64
    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or above, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


@dataclass(frozen=True)
class Decoded:
    """The new tokens of row `row`, without the one that ends a text; whether that came (`finished`), else the length
    limit; bytes of the row's share of the cache at the end."""

    row: int
    tokens: list[int]
    finished: bool
    kv_bytes: int


@torch.no_grad()
def decode(
    model: PreTrainedModel, prompts: Int[Tensor, "batch tokens"], names: Sequence[str], ends: set[int], how: Decoding
) -> Iterator[Decoded]:
    """Each row as soon as it is finished.

    Rows have no padding, so prompts are equally long: with padding, the rows of the shorter texts would be compressed
    at other times than when they are alone. `names` tells the rows apart for the draws; `ends`: tokens that end a text.
    """
    cache: Cache = _cache(model, how)
    alive, ids = list(range(len(prompts))), prompts.to(model.device)
    new: list[list[int]] = [[] for _ in alive]
    keys = torch.tensor([_key(name) for name in names], device=model.device)
    for step in range(how.max_new_tokens):
        logits = model(ids, cache=cache, logits_to_keep=1).logits[:, -1]
        picked = pick(logits, keys[alive], step, how)
        ended = [token in ends for token in picked.tolist()]
        for row, token, end in zip(alive, picked.tolist(), ended, strict=True):
            new[row] += [] if end else [token]
        last = step == how.max_new_tokens - 1
        if any(ended) or last:
            share = _bytes(cache) // len(alive)
            yield from (
                Decoded(row, new[row], end, share) for row, end in zip(alive, ended, strict=True) if end or last
            )
            staying = [index for index, end in enumerate(ended) if not end]
            if last or not staying:
                return
            cache.batch_select_indices(torch.tensor(staying, device=model.device))
            alive, picked = [alive[index] for index in staying], picked[staying]
        ids = picked[:, None]


def pick(
    logits: Float[Tensor, "batch vocabulary"], keys: Int[Tensor, " batch"], step: int, how: Decoding
) -> Int[Tensor, " batch"]:
    """The next token of each row: the likeliest, or one drawn with a number in (0, 1) that is a hash of the seed, the
    row's key and the step, so that neither the batch nor the device's generator matters."""
    if how.temperature == 0:
        return logits.argmax(-1)
    sorted_logits, order = (logits.float() / how.temperature).sort(dim=-1, descending=True, stable=True)
    mass = sorted_logits.softmax(-1).cumsum(-1)
    allowed = torch.cat([torch.ones_like(mass[:, :1], dtype=torch.bool), mass[:, :-1] < how.top_p], dim=-1)
    limit = mass.masked_fill(~allowed, 0.0).amax(-1)
    target = noise.uniform(keys, how.seed, step, stream=noise.SAMPLING) * limit
    index = torch.searchsorted(mass, target[:, None]).clamp_max(mass.shape[-1] - 1)
    return order.gather(1, index)[:, 0]


def loops(tokens: Sequence[int]) -> bool:
    """Whether the end of `tokens` repeats itself: the last `max(LOOP, 3 * period)` tokens have a period."""
    count = len(tokens)
    for period in range(1, count // 3 + 1):
        length = max(LOOP, 3 * period)
        if length > count:
            return False
        tail = tokens[count - length :]
        if tail[period:] == tail[:-period]:
            return True
    return False


def _cache(model: PreTrainedModel, how: Decoding) -> Cache:
    if how.compressor is None:
        return DynamicCache(config=model.config)
    return CompressedCache(model, how.compressor, how.interval, how.seed)


def _bytes(cache: Cache) -> int:
    if isinstance(cache, CompressedCache):
        return cache.memory().total
    return nbytes(tensor for layer in cache.layers for tensor in held_tensors(vars(layer)))


def _key(name: str) -> int:
    """32 bits of a hash, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
