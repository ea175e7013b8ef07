"""Bytes that a cache holds, by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from kvcomp.cache import CompressedCache


@dataclass(frozen=True)
class Memory:
    """Bytes of the storage behind each part of a cache, whether filled or not.

    `keys`, `values`: of the compressed layers; `positions`: the true position of each row; `queries`: the recent
    queries kept for scoring; `mass`: accumulated attention; `other_layers`: transformers' own layers (sliding windows).
    `full`: what a cache that keeps every token would hold for the same text. `rows` of `seen` tokens are stored per KV
    head.
    """

    keys: int
    values: int
    positions: int
    queries: int
    mass: int
    other_layers: int
    full: int
    rows: int
    seen: int

    @classmethod
    def of(cls, cache: CompressedCache) -> Memory:
        """Measures `cache` as it is now."""
        storages = [layer.storage.buffer for layer in cache.compressed if layer.storage.buffer is not None]
        recent = [layer.recent_queries for layer in cache.compressed]
        stock = [layer for layer in cache.layers if layer not in cache.compressed]
        other = _nbytes(tensor for layer in stock for tensor in _held(vars(layer)))
        seen, rows = cache.compressed[0].count.seen, max(layer.storage.rows for layer in cache.compressed)
        token = sum(kv.keys[:, :, :1].nbytes + kv.values[:, :, :1].nbytes for kv in storages)
        return cls(
            keys=_nbytes(kv.keys for kv in storages),
            values=_nbytes(kv.values for kv in storages),
            positions=_nbytes(kv.positions for kv in storages),
            queries=_nbytes(tensor for log in recent for tensor in (log.buffer, log.buffer_positions)),
            mass=_nbytes(kv.mass for kv in storages),
            other_layers=other,
            full=token * seen + other,
            rows=rows,
            seen=seen,
        )

    @property
    def total(self) -> int:
        """All bytes held."""
        return self.keys + self.values + self.positions + self.queries + self.mass + self.other_layers

    @property
    def compression(self) -> float:
        """Bytes of the full cache over bytes held; below 1 while the text is shorter than the storage."""
        return self.full / self.total if self.total else 1.0

    def __str__(self) -> str:
        parts = {"keys": self.keys, "values": self.values, "positions": self.positions, "queries": self.queries}
        parts |= {"mass": self.mass, "other layers": self.other_layers}
        listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
        return (
            f"{size(self.total)} for {self.rows} of {self.seen} tokens per head ({listed}); "
            f"full cache {size(self.full)}, {self.compression:.1f} times as much"
        )


def size(count: int) -> str:
    """Bytes in the largest binary unit that keeps the number above 1."""
    number, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def _held(value: object) -> Iterator[Tensor]:
    """The tensors in `value`, through dicts and lists, but for the single numbers that layers keep as tensors."""
    if isinstance(value, Tensor) and value.ndim:
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _held(part)


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())
