"""Bytes that a cache holds, by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from kvcomp.cache import CompressedCache
    from kvcomp.storage import RowStorage

ROW_PARTS = ("keys", "values", "codes", "scales", "exact", "positions")


@dataclass(frozen=True)
class Memory:
    """Bytes of the storage behind each part of a cache, whether filled or not.

    Of the compressed layers: `keys`, `values`: rows in the model dtype that are neither packed nor exact; `codes`,
    `scales`: packed rows, scales with their zero points; `exact`: exact rows; `positions`: the true position of each
    row; `queries`: the recent and the remembered queries kept for scoring; `mass`: accumulated attention.
    `other_layers`: transformers' own layers (sliding windows). `full`: what a cache that keeps every token would hold
    for the same text. `rows` of `seen` tokens are stored per KV head. `elements`: numbers in the stored keys and values
    of the compressed layers.
    """

    keys: int
    values: int
    codes: int
    scales: int
    exact: int
    positions: int
    queries: int
    mass: int
    other_layers: int
    full: int
    rows: int
    seen: int
    elements: int

    @classmethod
    def of(cls, cache: CompressedCache) -> Memory:
        """Measures `cache` as it is now."""
        storages = [layer.storage for layer in cache.compressed if layer.storage.buffer is not None]
        stock = [layer for layer in cache.layers if layer not in cache.compressed]
        other = nbytes(tensor for layer in stock for tensor in held_tensors(vars(layer)))
        seen = cache.compressed[0].count.seen
        token = [(kv.keys[:, :, :1], kv.values[:, :, :1]) for kv in (storage.buffer for storage in storages) if kv]
        return cls(
            **row_parts(storages),
            queries=nbytes(tensor for layer in cache.compressed for tensor in layer.query_tensors),
            other_layers=other,
            full=sum(key.nbytes + value.nbytes for key, value in token) * seen + other,
            rows=max((storage.rows for storage in storages), default=0),
            seen=seen,
            elements=sum(
                storage.rows * (key.numel() + value.numel())
                for storage, (key, value) in zip(storages, token, strict=True)
            ),
        )

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part; together `total`."""
        return {name: getattr(self, name) for name in (*ROW_PARTS, "mass", "queries", "other_layers")}

    @property
    def total(self) -> int:
        """All bytes held."""
        return sum(self.parts.values())

    @property
    def bits_per_element(self) -> float:
        """Bits that the rows take, with their positions and the room for more, over the keys and values stored."""
        return 8 * sum(self.parts[name] for name in ROW_PARTS) / self.elements if self.elements else 0.0

    @property
    def compression(self) -> float:
        """Bytes of the full cache over bytes held; below 1 while the text is shorter than the storage."""
        return self.full / self.total if self.total else 1.0

    def __str__(self) -> str:
        listed = ", ".join(f"{name.replace('_', ' ')} {size(count)}" for name, count in self.parts.items() if count)
        return (
            f"{size(self.total)} for {self.rows} of {self.seen} tokens per head ({listed}), "
            f"{self.bits_per_element:.1f} bits per element; "
            f"full cache {size(self.full)}, {self.compression:.1f} times as much"
        )


def row_parts(storages: list[RowStorage]) -> dict[str, int]:
    """Bytes of the rows of some layers by part, and of their accumulated attention."""
    buffers = [storage.buffer for storage in storages if storage.buffer is not None]
    packed = [storage.packed for storage in storages if storage.packed is not None]
    exact = [storage.exact for storage in storages if storage.exact is not None]
    return {
        "keys": nbytes(kv.keys for kv in buffers),
        "values": nbytes(kv.values for kv in buffers),
        "codes": nbytes(tensor for part in packed for tensor in part.codes),
        "scales": nbytes(tensor for part in packed for tensor in part.scales),
        "exact": nbytes(tensor for kv in exact for tensor in (kv.keys, kv.values)),
        "positions": nbytes([part.positions for part in packed] + [part.positions for part in (*buffers, *exact)]),
        "mass": nbytes([part.mass for part in packed] + [part.mass for part in (*buffers, *exact)]),
    }


def size(count: int) -> str:
    """Bytes in the largest binary unit that keeps the number above 1."""
    number, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def held_tensors(value: object) -> Iterator[Tensor]:
    """The tensors in `value`, through dicts and lists, but for the single numbers that layers keep as tensors."""
    if isinstance(value, Tensor) and value.ndim:
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from held_tensors(part)


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()  # an address would be 0 on the meta device
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())
