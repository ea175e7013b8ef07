"""What every method works on: the rows of one layer (`KV`), what is known about them (`Observed`), and `Compressor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvcomp import noise
from kvcomp.dispatch import operation
from kvcomp.rotary import Rotary

Rows: TypeAlias = Float[Tensor, "batch kv_heads rows head_dim"]
ValueRows: TypeAlias = Float[Tensor, "batch kv_heads rows value_dim"]
Positions: TypeAlias = Int[Tensor, "batch kv_heads rows"]
Score: TypeAlias = Float[Tensor, "batch kv_heads rows"]
Kept: TypeAlias = Int[Tensor, "batch kv_heads kept"]
Queries: TypeAlias = Float[Tensor, "batch query_heads window head_dim"]

PAD = -1
"""Position of a row that holds padding, not a token."""
EMPTY = -2
"""Position of a slot that holds nothing, where heads store their rows in parts of different length."""


@dataclass(frozen=True)
class KV:
    """The stored rows of one layer, oldest first.

    `keys` `[batch, kv_heads, rows, head_dim]` after RoPE; `values` likewise; `positions` `[batch, kv_heads, rows]`, the
    RoPE position of each row, `PAD` for padding. `mass` `[batch, kv_heads, rows]` is the attention that a row has
    received since it was stored, mean over the query heads of its group; only methods with `accumulates` have it.
    """

    keys: Rows
    values: ValueRows
    positions: Positions
    mass: Score | None = None

    @classmethod
    def of(cls, keys: Rows, values: ValueRows, mass: Score | None = None) -> KV:
        """Rows at positions 0, 1, 2, ... without padding: for work on plain tensors."""
        positions = torch.arange(keys.shape[2], dtype=torch.int32, device=keys.device)
        return cls(keys, values, positions.expand(keys.shape[:3]), mass)

    @property
    def rows(self) -> int:
        """Number of stored rows, the same for every head."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return self.keys.shape[-1]

    @property
    def slot_positions(self) -> Positions:
        """The positions in the order in which rows are stored."""
        return self.positions

    @property
    def pads(self) -> Tensor:
        """Bool `[batch, kv_heads, rows]`: the rows that hold padding."""
        return self.positions == PAD

    def take(self, kept: Kept) -> KV:
        """The rows `kept` `[batch, kv_heads, kept]`, in that order, as new tensors."""
        return self.map(lambda tensor: take_rows(tensor, kept))

    def map(self, change: Callable[[Tensor], Tensor]) -> KV:
        """The same with every tensor replaced by `change` of it."""
        mass = None if self.mass is None else change(self.mass)
        return KV(change(self.keys), change(self.values), change(self.positions), mass)

    @property
    def tensors(self) -> list[Tensor]:
        """Keys, values, positions and, if there is any, mass."""
        return [tensor for tensor in (self.keys, self.values, self.positions, self.mass) if tensor is not None]

    def join(self, other: KV) -> KV:
        """These rows, then those of `other`."""
        mass = None if self.mass is None or other.mass is None else torch.cat([self.mass, other.mass], dim=2)
        keys, values, positions = (
            torch.cat([getattr(kv, name) for kv in (self, other)], dim=2) for name in ("keys", "values", "positions")
        )
        return KV(keys, values, positions, mass)

    def add_mass(self, mass: Score) -> KV:
        """The same rows with more accumulated attention, in new tensors."""
        assert self.mass is not None
        return replace(self, mass=self.mass + mass)

    def without_newest(self, skip: int) -> KV:
        """A view without the `skip` newest rows."""
        return KV.map(self, lambda tensor: tensor[:, :, : self.rows - skip])


@operation("pack", "(Tensor x, Tensor kept) -> Tensor")
def take_rows(x: Tensor, kept: Kept) -> Tensor:
    """The rows `kept` `[batch, kv_heads, kept]` of `x` `[batch, kv_heads, rows, ...]`, as a new tensor."""
    batch = torch.arange(kept.shape[0], device=kept.device)[:, None, None]
    head = torch.arange(kept.shape[1], device=kept.device)[None, :, None]
    return x[batch, head, kept.to(torch.int64)]  # whole rows: on CPU three times faster than gather


@dataclass(frozen=True)
class Observed:
    """What a method may know besides the rows themselves.

    `queries` `[batch, query_heads, window, head_dim]`: the last queries after RoPE, oldest first, `query_positions`
    `[batch, window]` their positions (`PAD` for padding; None: the newest rows asked, one query each). `remembered`
    `[batch, kv_heads, remembered, head_dim]`: older ones before RoPE, `remembered_positions` their positions; only
    methods that set `remembers` have them. `scaling` multiplies the logits (None: `head_dim ** -0.5`). `layer`: index
    in the model. `phase`: `prefill` while the prompt is read, else `decode`. `round`: compressions of this layer before
    this one. `prompt_end` `[batch]`: the position after the last prompt token. `padded`: some row is padding. `seed`:
    of the noise. `rotary`: the rotary embedding of the layer.
    """

    queries: Queries | None = None
    query_positions: Int[Tensor, "batch window"] | None = None
    scaling: float | None = None
    layer: int = 0
    phase: Literal["prefill", "decode"] = "decode"
    round: int = 0
    prompt_end: Int[Tensor, " batch"] | None = None
    padded: bool = False
    seed: int = 0
    rotary: Rotary | None = None
    remembered: Rows | None = None
    remembered_positions: Positions | None = None

    def uniform(self, positions: Positions) -> Score:
        """A number in (0, 1) for each row, from (seed, layer, round, KV head, position) and nothing else."""
        return noise.token_noise(positions, noise.signed(self.seed), self.layer, self.round)

    def gumbel(self, positions: Positions) -> Score:
        """Standard Gumbel noise for each row, `-log(-log u)` of `uniform`."""
        return -(-self.uniform(positions).log()).log()

    def last(self, window: int) -> Observed:
        """The same with at most the `window` newest queries."""
        if self.queries is None or self.queries.shape[2] <= window:
            return self
        positions = None if self.query_positions is None else self.query_positions[:, -window:]
        return replace(self, queries=self.queries[:, :, -window:], query_positions=positions)


@runtime_checkable
class Compressor(Protocol):
    """One stage that makes the cache of a layer smaller. A frozen dataclass without state."""

    @property
    def budget(self) -> int | None:
        """Rows per KV head after `compress`; None if it keeps them all."""
        ...

    @property
    def window(self) -> int:
        """Queries wanted in `Observed`; 0 for none."""
        ...

    @property
    def accumulates(self) -> bool:
        """Whether `KV.mass` is wanted."""
        ...

    @property
    def remembers(self) -> int:
        """Older queries per KV head wanted in `Observed.remembered`; 0 for none."""
        ...

    @property
    def unpacked(self) -> int | None:
        """Newest rows that stay in the model dtype while older ones are packed; None if nothing is packed."""
        ...

    def compress(self, kv: KV, seen: Observed) -> KV:
        """A smaller `KV`; the rows given are not changed."""
        ...

    def check_prompt(self, tokens: int) -> None:
        """Raise ValueError if a prompt of `tokens` tokens cannot be held as this method promises."""
        ...

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError if rows of `head_dim` channels cannot be compressed."""
        ...
