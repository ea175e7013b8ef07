"""`ShapesOnly`: what a compressor does to the number of rows, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcomp.core import KV, Compressor, Observed, Queries
from kvcomp.pipeline import Composable, stages_of
from kvcomp.quant.base import Quantizer
from kvcomp.quant.mixed import MixedKV, Packed, Part
from kvcomp.remembered import RememberedQueries, pack_queries


@dataclass(frozen=True)
class ShapesOnly(Composable):
    """Does to the shapes of rows what `compressor` does to rows, where every head keeps as many rows of each part.

    So it is with an evictor that keeps at least as many `recent` rows as the quantizer behind it; else see
    `extra_rows`. Packed rows are taken to be evicted first; in place of an exact one a newer row would become exact.

    Raises ValueError for a stage that packs rows and is no `Quantizer`, or stands before one that evicts.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        for index, stage in enumerate(self.stages):
            if stage.unpacked is None:
                continue
            if not isinstance(stage, Quantizer):
                raise ValueError(f"cannot plan with {stage!r}: it packs rows and is no kvcomp.quant.Quantizer")
            if any(later.budget is not None for later in self.stages[index + 1 :]):
                raise ValueError(f"cannot plan with {self.compressor!r}: put the stage that packs rows last")

    @property
    def stages(self) -> tuple[Compressor, ...]:
        """One compressor after the other."""
        return stages_of(self.compressor)

    @property
    def budget(self) -> int | None:
        """As `compressor`."""
        return self.compressor.budget

    @property
    def window(self) -> int:
        """As `compressor`."""
        return self.compressor.window

    @property
    def accumulates(self) -> bool:
        """As `compressor`."""
        return self.compressor.accumulates

    @property
    def remembers(self) -> int:  # type: ignore[override]
        """As `compressor`."""
        return self.compressor.remembers

    @property
    def unpacked(self) -> int | None:  # type: ignore[override]
        """As `compressor`."""
        return self.compressor.unpacked

    def compress(self, kv: KV, seen: Observed) -> KV:
        """Rows without content."""
        for stage in self.stages:
            kv = _pack(kv, stage) if isinstance(stage, Quantizer) else _evict(kv, stage.budget or kv.rows)
        return kv


def extra_rows(compressor: Compressor) -> int:
    """Packed rows per head that a real cache may hold beyond those of `ShapesOnly`; 0: it holds as many for any text.

    An evictor with fewer `recent` rows (`r`) than the quantizer behind it (`R`) may evict what is not packed yet. Then
    `R - r` of the newest rows may be packed, and as many more as there should be exact rows.
    """
    stages = ShapesOnly(compressor).stages
    quantizer = next((stage for stage in stages if isinstance(stage, Quantizer)), None)
    recent = min((getattr(stage, "recent", 0) for stage in stages if stage.budget is not None), default=None)
    if quantizer is None or recent is None or recent >= quantizer.recent:
        return 0
    older = max((compressor.budget or 0) - quantizer.recent, 0)
    return quantizer.recent - recent + quantizer.exact_rows(older) if older else 0


def extra_bytes(compressor: Compressor, row: KV) -> int:
    """Bytes of `extra_rows` in a layer in which every head has a `row` like this one."""
    count = extra_rows(compressor)
    quantizer = next((stage for stage in ShapesOnly(compressor).stages if isinstance(stage, Quantizer)), None)
    if not count or quantizer is None:
        return 0
    packed = _packed_like(row, quantizer)
    held = [*packed.keys.tensors.values(), *packed.values.tensors.values(), packed.positions]
    held += [packed.mass] if packed.mass is not None else []
    return count * sum(tensor.nbytes for tensor in held)


def _evict(kv: KV, budget: int) -> KV:
    excess = kv.rows - budget
    if excess <= 0:
        return kv
    if not isinstance(kv, MixedKV):
        return _rows(kv, budget)
    left = []
    for part in kv.parts:
        gone = min(part.rows, excess)
        excess -= gone
        left.append(part.rows - gone)
    return MixedKV(_rows(kv.packed, left[0]), _rows(kv.exact, left[1]), _rows(kv.recent, left[2]), budget)


def _pack(kv: KV, quantizer: Quantizer) -> KV:
    recent = min(quantizer.recent, kv.rows)
    if kv.rows == recent:
        return kv
    dense = kv.recent if isinstance(kv, MixedKV) else kv
    packed = kv.packed if isinstance(kv, MixedKV) else _packed_like(dense, quantizer)
    older, before = kv.rows - recent, kv.packed.rows if isinstance(kv, MixedKV) else 0
    exact = min(quantizer.exact_rows(older), older - before)  # a packed row never becomes exact
    return MixedKV(_rows(packed, older - exact), _rows(dense, exact), _rows(dense, recent), kv.rows)


def remember(held: RememberedQueries, queries: Queries, kv_heads: int) -> None:
    """What `held.add` does to the number of queries."""
    batch, heads, new, width = queries.shape
    count = min((held.rows.rows if held.rows else 0) + new * heads // kv_heads, held.size)
    row = pack_queries(torch.zeros(1, 1, 1, width, dtype=queries.dtype))
    held.rows = row.map(_without_content(batch, kv_heads, count))
    held.positions = torch.empty(batch, kv_heads, count, dtype=torch.int32, device="meta")


def _packed_like(kv: KV, quantizer: Quantizer) -> Packed:
    """One packed row per head, as `quantizer` makes it of one real row."""
    batch, heads = kv.keys.shape[:2]
    zeros = [torch.zeros(1, 1, 1, rows.shape[-1], dtype=rows.dtype) for rows in (kv.keys, kv.values)]
    keys, values = (rows.map(_without_content(batch, heads, 1)) for rows in quantizer.pack(*zeros))
    first = _rows(kv, 1)
    return Packed(keys, values, first.positions, first.mass)


def _without_content(batch: int, heads: int, count: int) -> Callable[[Tensor], Tensor]:
    """What makes one row into `count` of them."""
    return lambda held: torch.empty(batch, heads, count, *held.shape[3:], dtype=held.dtype, device="meta")


def _rows(part: Part, count: int) -> Part:
    return part.map(lambda tensor: sized(tensor, count))


def sized(tensor: Tensor, rows: int) -> Tensor:
    """A tensor like `tensor` `[batch, heads, ...]` with `rows` rows, without content."""
    return tensor.new_empty(*tensor.shape[:2], rows, *tensor.shape[3:])
