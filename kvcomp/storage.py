"""`RowStorage`: the rows of a layer in one buffer that is allocated once and written in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcomp.core import KV


class RowStorage:
    """Room for `budget + interval` rows, of which the first `rows` are in use.

    More rows than that get a larger buffer, which `replace` gives back. Without a budget the buffer grows by an eighth.
    `with_mass`: the rows have a place for accumulated attention.
    """

    def __init__(self, budget: int | None, interval: int, with_mass: bool):
        self.budget, self.interval, self.with_mass = budget, interval, with_mass
        self.buffer: KV | None = None
        self.rows = 0

    @property
    def kv(self) -> KV:
        """View of the rows in use."""
        assert self.buffer is not None, "no rows yet"
        return self.buffer.without_newest(self.buffer.rows - self.rows)

    @property
    def capacity(self) -> int:
        """Rows that the buffer has room for; 0 before the first ones."""
        return 0 if self.buffer is None else self.buffer.rows

    def wanted(self, rows: int) -> int:
        """Capacity of a buffer made for `rows` rows."""
        if self.budget is None:
            return rows + max(self.interval, rows // 8)
        usual = self.budget + self.interval
        # A prompt gets what it needs. What grows beyond the usual size later grows step by step, while drafting.
        return max(rows + (self.interval if self.buffer is not None and rows > usual else 0), usual)

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Makes room for as many rows as `keys` `[batch, kv_heads, new, head_dim]` has."""
        rows = self.rows + keys.shape[2]
        if self.buffer is None or rows > self.capacity:
            old, self.buffer = self.buffer, self._empty(keys, values, self.wanted(rows))
            if old is not None:
                self._write(0, old.without_newest(old.rows - self.rows))

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Adds rows behind the others; `positions` `[batch, new]`."""
        self.reserve(keys, values)
        positions = positions[:, None].expand(keys.shape[:3])
        mass = torch.zeros(keys.shape[:3], device=keys.device) if self.with_mass else None
        self._write(self.rows, KV(keys.detach(), values.detach(), positions, mass))
        self.rows += keys.shape[2]

    def replace(self, kv: KV) -> None:
        """Holds `kv` and nothing else, in a buffer of the usual size."""
        if self.capacity != self.wanted(kv.rows):
            self.buffer = None  # frees the rows of a long prompt before the final buffer is made
            self.buffer = self._empty(kv.keys, kv.values, self.wanted(kv.rows))
        self._write(0, kv)
        self.rows = kv.rows

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `change` of it; the batch is the first axis."""
        if self.buffer is not None:
            mass = None if self.buffer.mass is None else change(self.buffer.mass)
            keys, values, positions = map(change, (self.buffer.keys, self.buffer.values, self.buffer.positions))
            self.buffer = KV(keys, values, positions, mass)

    def _empty(self, keys: Tensor, values: Tensor, rows: int) -> KV:
        batch, heads = keys.shape[:2]
        with torch.inference_mode(False):  # else the buffer could not be written outside of the mode
            return KV(
                torch.empty(batch, heads, rows, keys.shape[-1], dtype=keys.dtype, device=keys.device),
                torch.empty(batch, heads, rows, values.shape[-1], dtype=values.dtype, device=values.device),
                torch.empty(batch, heads, rows, dtype=torch.int32, device=keys.device),
                torch.empty(batch, heads, rows, device=keys.device) if self.with_mass else None,
            )

    def _write(self, start: int, kv: KV) -> None:
        assert self.buffer is not None
        for target, source in zip(_tensors(self.buffer), _tensors(kv), strict=True):
            shared = target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            target[:, :, start : start + kv.rows] = source.clone() if shared else source


def _tensors(kv: KV) -> list[Tensor]:
    return [tensor for tensor in (kv.keys, kv.values, kv.positions, kv.mass) if tensor is not None]
