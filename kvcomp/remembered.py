"""`RememberedQueries`: the most novel of all past queries of a layer, in few bits, for methods that replay them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvcomp.core import PAD, Positions, Queries, Rows, Score, take_rows
from kvcomp.evict.base import best
from kvcomp.quant.packed import AffineRows
from kvcomp.rotary import Rotary

BITS, GROUP_SIZE = 4, 64
AT_ONCE = 512
"""New queries of a KV head that are judged together."""


@dataclass
class RememberedQueries:
    """At most `size` queries per KV head, before RoPE, in 4 bits per channel.

    The query heads of a group share them. A query goes when one like it has come since: those stay that are the most
    novel, `novelty_i = 1 - max_{j newer} cos(q_i - m, q_j - m)`, `m` the mean of those judged together. Padding goes
    first.
    """

    size: int
    rotary: Rotary | None
    rows: AffineRows | None = None
    positions: Positions | None = None

    def add(self, queries: Queries, positions: Int[Tensor, "batch new"], kv_heads: int) -> None:
        """Takes new queries, after RoPE, oldest first. Raises NotImplementedError where RoPE cannot be undone."""
        if self.rotary is None:
            raise NotImplementedError("remembered queries have RoPE undone, but the rotary embedding is not known")
        group, new = queries.shape[1] // kv_heads, queries.shape[2]
        step = max(AT_ONCE // group, 1)
        for stop in range(new % step or step, new + 1, step):  # from the end, so that padding in front does not matter
            part = slice(max(stop - step, 0), stop)
            plain = self.rotary.unrotate(queries[:, :, part], positions[:, None, part]).to(queries.dtype)
            by_head = plain.unflatten(1, (kv_heads, group)).transpose(2, 3).flatten(2, 3)
            self._add(by_head, positions[:, None, part, None].expand(-1, kv_heads, -1, group).flatten(2))

    def _add(self, queries: Rows, positions: Positions) -> None:
        rows = pack_queries(queries.contiguous())
        if self.rows is not None and self.positions is not None:
            rows, positions = self.rows.join(rows), torch.cat([self.positions, positions], dim=2)
        if rows.rows > self.size:
            kept = best(novelty(rows.unpack(), positions), self.size)
            rows, positions = rows.map(lambda tensor: take_rows(tensor, kept)), positions.gather(2, kept)
        self.rows, self.positions = rows, positions.contiguous()

    @property
    def queries(self) -> Rows | None:
        """`[batch, kv_heads, remembered, head_dim]`, before RoPE, oldest first; None before the first."""
        return None if self.rows is None else self.rows.unpack()

    @property
    def tensors(self) -> list[Tensor]:
        """All that is stored."""
        return [] if self.rows is None or self.positions is None else [*self.rows.tensors.values(), self.positions]

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `change` of it; the batch is the first axis."""
        if self.rows is not None and self.positions is not None:
            self.rows, self.positions = self.rows.map(change), change(self.positions)


def pack_queries(queries: Rows) -> AffineRows:
    """`queries` as they are stored."""
    return AffineRows.of(queries, BITS, GROUP_SIZE)


def novelty(queries: Float[Tensor, "batch kv_heads rows width"], positions: Positions) -> Score:
    """How unlike all newer rows each one is, 0 to 2; `-inf` for padding."""
    pads = positions == PAD
    real = (~pads)[..., None]
    rows = queries.float() * real
    centred = (rows - rows.sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp_min(1)) * real
    unit = torch.nn.functional.normalize(centred, dim=-1)
    count = unit.shape[2]
    older = torch.full((count, count), -4.0, device=unit.device).tril()  # added, as that is 4 times faster than a mask
    most_alike = (unit @ unit.transpose(2, 3)).add_(older).amax(-1).clamp_min(-1.0)
    return (1.0 - most_alike).masked_fill(pads, -torch.inf)
