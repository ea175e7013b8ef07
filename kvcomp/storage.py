"""`RowStorage`: the rows of a layer; those in the model dtype in one buffer that is written in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcomp.core import KV, Score
from kvcomp.quant.mixed import MixedKV, Packed


class RowStorage:
    """Packed and exact rows as the compressor returned them, and a buffer for the newest rows.

    `least` rows are in the buffer after a compression: the budget, or what a quantizer leaves unpacked; it has room for
    `interval` more. More rows than that get a larger buffer, which `replace` gives back. With `least` None the buffer
    grows by an eighth. `with_mass`: the rows have a place for accumulated attention.
    """

    def __init__(self, least: int | None, interval: int, with_mass: bool):
        self.least, self.interval, self.with_mass = least, interval, with_mass
        self.buffer: KV | None = None
        self.buffered = 0  # rows of the buffer in use
        self.packed: Packed | None = None
        self.exact: KV | None = None
        self.unused = 0  # slots that each head leaves empty

    @property
    def recent(self) -> KV:
        """View of the rows in the buffer, unused slots included."""
        assert self.buffer is not None, "no rows yet"
        return self.buffer.without_newest(self.buffer.rows - self.buffered)

    @property
    def kv(self) -> KV:
        """All rows."""
        if self.packed is None or self.exact is None:
            return self.recent
        return MixedKV(self.packed, self.exact, self.recent, self.rows)

    @property
    def rows(self) -> int:
        """Rows of each head."""
        older = 0 if self.packed is None or self.exact is None else self.packed.rows + self.exact.rows
        return older + self.buffered - self.unused

    @property
    def newest(self) -> Tensor:
        """Largest position stored, `[batch]`."""
        return self.kv.slot_positions[:, 0].amax(-1)

    @property
    def capacity(self) -> int:
        """Rows that the buffer has room for; 0 before the first ones."""
        return 0 if self.buffer is None else self.buffer.rows

    def wanted(self, rows: int) -> int:
        """Capacity of a buffer made for `rows` rows."""
        if self.least is None:
            return rows + max(self.interval, rows // 8)
        usual = self.least + self.interval
        # A prompt gets what it needs. What grows beyond the usual size later grows step by step, while drafting.
        return max(rows + (self.interval if self.buffer is not None and rows > usual else 0), usual)

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Makes room for as many rows as `keys` `[batch, kv_heads, new, head_dim]` has."""
        rows = self.buffered + keys.shape[2]
        if self.buffer is None or rows > self.capacity:
            old, self.buffer = self.buffer, self._empty(keys, values, self.wanted(rows))
            if old is not None:
                self._write(0, old.without_newest(old.rows - self.buffered))

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Adds rows behind the others; `positions` `[batch, new]`."""
        self.reserve(keys, values)
        positions = positions[:, None].expand(keys.shape[:3])
        mass = torch.zeros(keys.shape[:3], device=keys.device) if self.with_mass else None
        self._write(self.buffered, KV(keys.detach(), values.detach(), positions, mass))
        self.buffered += keys.shape[2]

    def drop(self, tokens: int) -> None:
        """Forgets the newest `tokens` rows, which must be in the buffer."""
        self.buffered -= tokens

    def replace(self, kv: KV) -> None:
        """Holds `kv` and nothing else, in a buffer of the usual size."""
        recent = kv.recent if isinstance(kv, MixedKV) else kv
        if self.capacity != self.wanted(recent.rows):
            self.buffer = None  # frees the rows of a long prompt before the final buffer is made
            self.buffer = self._empty(recent.keys, recent.values, self.wanted(recent.rows))
        self._write(0, recent)
        self.buffered = recent.rows
        self.packed, self.exact = (kv.packed, kv.exact) if isinstance(kv, MixedKV) else (None, None)
        self.unused = 0
        self.unused = self.rows - kv.rows

    def add_mass(self, mass: Score) -> None:
        """Adds attention `[batch, kv_heads, rows]` received by the rows, in time order."""
        kv, recent = self.kv, self.recent
        if isinstance(kv, MixedKV):
            mass = torch.zeros_like(kv.slot_positions, dtype=mass.dtype).scatter_(2, kv.order, mass)
            first, second, mass = mass.split([part.rows for part in kv.parts], dim=2)
            self.packed, self.exact = kv.packed.add_mass(first), kv.exact.add_mass(second)
        assert recent.mass is not None
        recent.mass.add_(mass)

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `change` of it; the batch is the first axis."""
        self.buffer = None if self.buffer is None else self.buffer.map(change)
        self.packed = None if self.packed is None else self.packed.map(change)
        self.exact = None if self.exact is None else self.exact.map(change)

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
        for target, source in zip(self.buffer.tensors, kv.tensors, strict=True):
            shared = target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            target[:, :, start : start + kv.rows] = source.clone() if shared else source
