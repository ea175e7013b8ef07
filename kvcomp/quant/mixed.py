"""`MixedKV`: the rows of a layer in three parts: packed, exact, and recent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from kvcomp import ops
from kvcomp.core import EMPTY, KV, Kept, Positions, Rows, Score, ValueRows, take_rows
from kvcomp.quant.packed import AffineRows, PackedRows


@dataclass(frozen=True)
class Packed:
    """The packed rows of a layer, in any order. `positions`, `mass`: as in `KV`; `EMPTY` marks an unused slot."""

    keys: PackedRows
    values: PackedRows
    positions: Positions
    mass: Score | None = None

    @property
    def rows(self) -> int:
        """Number of slots, the same for every head."""
        return self.positions.shape[2]

    @property
    def codes(self) -> list[Tensor]:
        """The codes of keys and values."""
        return [rows.tensors["codes"] for rows in (self.keys, self.values)]

    @property
    def scales(self) -> list[Tensor]:
        """What turns codes into numbers: all else that packed keys and values store."""
        sides = (self.keys.tensors, self.values.tensors)
        return [tensor for held in sides for name, tensor in held.items() if name != "codes"]

    def take(self, kept: Kept) -> Packed:
        """The rows `kept` `[batch, kv_heads, kept]`, in that order: codes, not decoded ones."""
        return self.map(lambda tensor: take_rows(tensor, kept))

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """The same with every tensor replaced by `change` of it."""
        mass = None if self.mass is None else change(self.mass)
        return Packed(self.keys.map(change), self.values.map(change), change(self.positions), mass)

    def add_mass(self, mass: Score) -> Packed:
        """The same rows with more accumulated attention, in new tensors."""
        assert self.mass is not None
        return replace(self, mass=self.mass + mass)

    def join(self, other: Packed) -> Packed:
        """These rows, then those of `other`."""
        mass = None if self.mass is None or other.mass is None else torch.cat([self.mass, other.mass], dim=2)
        positions = torch.cat([self.positions, other.positions], dim=2)
        return Packed(self.keys.join(other.keys), self.values.join(other.values), positions, mass)

    def extended(self, other: Packed) -> Packed:
        """These rows and those of `other`, as new tensors; slots that a head leaves empty stand behind its rows."""
        full = int((self.positions != EMPTY).sum(-1).min())  # slots before this one are in use by every head
        uneven = self.map(lambda tensor: tensor[:, :, full:]).join(other)
        return self.map(lambda tensor: tensor[:, :, :full]).join(only(uneven, uneven.positions != EMPTY))


class MixedKV(KV):
    """Rows of which most are packed; `exact` and `recent` ones are in the model dtype.

    `keys`, `values`, `positions` and `mass` give all `rows` in time order, keys and values decoded; that is worked out
    when it is asked for and kept as long as this object. In store, heads may differ in how many rows of each part they
    have: a slot that a head leaves unused has the position `EMPTY`, and every head has equally many in all.
    """

    def __init__(self, packed: Packed, exact: KV, recent: KV, rows: int):
        vars(self).update(packed=packed, exact=exact, recent=recent, _rows=rows)

    packed: Packed
    exact: KV
    recent: KV
    _rows: int

    @property
    def parts(self) -> tuple[Packed, KV, KV]:
        """Packed, exact and recent rows."""
        return self.packed, self.exact, self.recent

    @property
    def rows(self) -> int:
        """Number of stored rows, the same for every head."""
        return self._rows

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return self.packed.keys.width

    @property
    def slot_positions(self) -> Positions:
        """Positions in the order of the parts, unused slots included."""
        return torch.cat([part.positions for part in self.parts], dim=2)

    @cached_property
    def order(self) -> Tensor:
        """Slots of the rows `[batch, kv_heads, rows]` in time order, padding first."""
        positions = self.slot_positions
        return positions.argsort(dim=-1, stable=True)[:, :, positions.shape[2] - self.rows :]

    @cached_property
    def keys(self) -> Rows:
        """Decoded keys in time order."""
        return self._decoded(self.packed.keys, self.exact.keys, self.recent.keys)

    @cached_property
    def values(self) -> ValueRows:
        """Decoded values in time order."""
        return self._decoded(self.packed.values, self.exact.values, self.recent.values)

    @cached_property
    def positions(self) -> Positions:
        """Positions in time order."""
        return self.slot_positions.gather(2, self.order)

    @cached_property
    def mass(self) -> Score | None:
        """Accumulated attention in time order."""
        masses = [part.mass for part in self.parts if part.mass is not None]
        return torch.cat(masses, dim=2).gather(2, self.order) if masses else None

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """Attention of the queries `[batch, query_heads, new, head_dim]` of the `new` newest rows, from the codes;
        see `ops.packed_decode`."""
        keys, values = self.packed.keys, self.packed.values
        scaling = self.head_dim**-0.5 if scaling is None else scaling
        dense = [self.exact.keys, self.exact.values, self.recent.keys, self.recent.values]
        positions = [part.positions for part in self.parts]
        if not isinstance(keys, AffineRows) or not isinstance(values, AffineRows) or values.rotated:
            return ops.attend(query, keys.dot, values.weighted_sum, dense, positions, scaling)
        return ops.packed_decode(
            query, ops.hadamard(query) if keys.rotated else query,
            keys.parts, values.parts, dense, positions,
            [keys.bits, values.bits], [keys.group_size, values.group_size], scaling,
        )  # fmt: skip

    def _decoded(self, packed: PackedRows, *dense: Tensor) -> Tensor:
        return take_rows(torch.cat([packed.unpack(), *dense], dim=2), self.order)

    def take(self, kept: Kept) -> MixedKV:
        """The rows `kept` `[batch, kv_heads, kept]`; packed ones stay packed, and the order is again that of time."""
        slots = self.order.gather(2, kept.to(torch.int64)).sort(dim=-1).values
        packed, exact = self.packed.rows, self.packed.rows + self.exact.rows
        return MixedKV(
            _within(self.packed, slots, 0), _within(self.exact, slots, packed), _within(self.recent, slots, exact),
            kept.shape[2],
        )  # fmt: skip


Part = TypeVar("Part", Packed, KV)


def taken(part: Part, index: Tensor, used: Tensor) -> Part:
    """The rows `index` of a part; where `used` is false, an empty slot."""
    moved = part.take(index.where(used, 0))
    moved.positions.masked_fill_(~used, EMPTY)
    return moved


def _within(part: Part, slots: Tensor, start: int) -> Part:
    """Those of the ascending `slots` that belong to `part`, whose first one is `start`."""
    first, last = ((slots < edge).sum(-1, keepdim=True) for edge in (start, start + part.rows))
    index = torch.arange(int((last - first).max()), device=slots.device) + first
    own = slots.gather(2, index.clamp_max(slots.shape[2] - 1)) - start
    return taken(part, own, index < last)


def only(part: Part, chosen: Tensor) -> Part:
    """The `chosen` rows in their order, as new tensors; heads with fewer than others get empty slots at the end."""
    return taken(part, *compacted(chosen))


def compacted(chosen: Tensor) -> tuple[Kept, Tensor]:
    """Indices of the `chosen` rows of each head, in their order, as many as any head has; and which of them are used,
    as heads with fewer are filled up."""
    count = chosen.sum(-1, keepdim=True)
    index = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True)[:, :, : int(count.max())]
    return index, torch.arange(index.shape[2], device=index.device) < count
