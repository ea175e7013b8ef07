"""CurDKV: leverage of keys and values through a CUR decomposition."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kvcomp import noise, ops
from kvcomp.core import KV, Observed, Score
from kvcomp.evict.base import ScoreEvictor


@dataclass(frozen=True)
class CurDKV(ScoreEvictor):
    """`s_i = |k_i G|^2 |v_i G|^2` with one `G ~ N(0, 1 / rank)` `[head_dim, rank]` for the whole generation.

    `rank=None` uses the plain norms. `local_window=w` divides both factors by their sum in each block of `w` rows.

    Source: CurDKV (arXiv 2509.15038). The default is the baseline of VaSE (`cur_fixed_gauss` in
    github.com/terarachang/VaSE at bfa2692); the authors' own default, as in kvpress `cur_press.py` at 8bb29b9, is
    `CurDKV(budget, rank=None, local_window=16)`. Deviation: `G` differs by KV head and not by batch row.
    """

    _: KW_ONLY
    rank: int | None = 20
    local_window: int | None = None

    def __post_init__(self) -> None:
        self.require(**{name: 1 for name in ("rank", "local_window") if getattr(self, name) is not None})
        super().__post_init__()

    def score(self, kv: KV, seen: Observed) -> Score:
        """Product of the two leverages."""
        sketch = None if self.rank is None else gaussian_sketch(kv, seen, self.rank, resample=False)
        return key_value_leverage(kv, sketch, self.local_window)


def gaussian_sketch(kv: KV, seen: Observed, rank: int, resample: bool) -> Tensor:
    """`G` `[kv_heads, head_dim, rank]`, entries `N(0, 1 / rank)`; a new one each round if `resample`.

    Raises NotImplementedError if keys and values differ in size, as one `G` projects both.
    """
    sizes = kv.keys.shape[-1], kv.values.shape[-1]
    if sizes[0] != sizes[1]:
        raise NotImplementedError(f"one sketch cannot project keys of {sizes[0]} and values of {sizes[1]} channels")
    heads = torch.arange(kv.keys.shape[1], device=kv.keys.device)[:, None, None]
    shape = (1, kv.keys.shape[-1], rank)
    counters = (seen.layer, seen.round if resample else 0, heads)
    return noise.normal(shape, seen.seed, *counters, device=kv.keys.device) * rank**-0.5


def key_value_leverage(kv: KV, sketch: Tensor | None, local_window: int | None = None) -> Score:
    """`|k G|^2 |v G|^2` per row; both factors normalised over blocks of `local_window` rows if given."""
    if sketch is not None and local_window is None:
        return ops.sketched_leverage(kv.keys, kv.values, sketch)
    keys, values = ops.squared_norm(kv.keys, sketch), ops.squared_norm(kv.values, sketch)
    if local_window is not None:
        keys, values = (_normalise_blocks(norm, kv.pads, local_window) for norm in (keys, values))
    return keys * values


def _normalise_blocks(norm: Score, pads: Tensor, block: int) -> Score:
    """`norm` over its sum in each block of `block` rows; the first block starts at the first row that is no padding."""
    index = ((~pads).cumsum(-1) - 1).clamp_min(0) // block
    sums = torch.zeros_like(norm).scatter_add_(-1, index, norm.masked_fill(pads, 0.0))
    return norm / sums.gather(-1, index).clamp_min(torch.finfo(norm.dtype).tiny)
