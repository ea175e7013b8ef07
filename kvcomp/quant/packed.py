"""`PackedRows`: keys or values in few bits per channel, one row independent of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvcomp import ops
from kvcomp.core import Kept, Rows

BLOCK = 256
"""Rows that are unpacked at a time where codes cannot be used as they are."""

Packing = TypeVar("Packing", bound="PackedRows")


@dataclass(frozen=True)
class PackedRows(ABC):
    """Packed rows `[batch, kv_heads, rows, width]`, decoded in `dtype`.

    Every tensor of a subclass has the axes `[batch, kv_heads, rows]` first, so that rows move by gather and are packed
    once in their life.
    """

    width: int
    dtype: torch.dtype

    @abstractmethod
    def unpack(self) -> Rows:
        """The rows, decoded, in `dtype`."""

    def dot(self, query: Tensor) -> Tensor:
        """`q . x` of each query `[batch, kv_heads, queries, width]` and row, `[batch, kv_heads, queries, rows]`,
        float32."""
        parts = [query @ part.unpack().float().transpose(2, 3) for part in self._blocks()]
        return torch.cat(parts, dim=-1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`sum_i w_i x_i` for `weights` `[batch, kv_heads, queries, rows]`: `[batch, kv_heads, queries, width]`,
        float32."""
        total = weights.new_zeros(*weights.shape[:3], self.width)
        for share, part in zip(weights.split(BLOCK, dim=-1), self._blocks(), strict=True):
            total += share @ part.unpack().float()
        return total

    def _blocks(self: Packing) -> list[Packing]:
        return [self[:, :, start : start + BLOCK] for start in range(0, max(self.rows, 1), BLOCK)]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return next(iter(self.tensors.values())).shape[2]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is stored, by name."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    @property
    def settings(self) -> dict[str, Any]:
        """All else: what must be equal for rows to be joined."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in self.tensors}

    def map(self: Packing, change: Callable[[Tensor], Tensor]) -> Packing:
        """The same with every tensor replaced by `change` of it."""
        return self._with({name: change(tensor) for name, tensor in self.tensors.items()})

    def __getitem__(self: Packing, index: Any) -> Packing:
        return self.map(lambda tensor: tensor[index])

    def join(self: Packing, other: Packing) -> Packing:
        """These rows, then those of `other`. Raises ValueError if they are packed in another way."""
        if type(other) is not type(self) or other.settings != self.settings:
            raise ValueError(
                f"rows packed as {self.settings} cannot be joined with {other.settings}: a row is packed once; use one "
                "quantizer, with one setting, for one cache"
            )
        pairs = {name: [tensor, other.tensors[name]] for name, tensor in self.tensors.items()}
        return self._with({name: torch.cat(pair, dim=2) for name, pair in pairs.items()})

    def _with(self: Packing, tensors: dict[str, Tensor]) -> Packing:
        return replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AffineRows(PackedRows):
    """Rows in the packed format of `kvcomp.ops.packed`; `rotated`: each is `hadamard` of what it stands for."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    bits: int
    group_size: int
    rotated: bool = False

    @classmethod
    def of(cls, rows: Rows, bits: int, group_size: int, rotated: bool = False, index: Kept | None = None) -> AffineRows:
        """Packs the rows `index` of the finite `rows` (None: all), a row of zeros where the index is negative.

        Scale and zero point are bfloat16 for float32 rows, else in the dtype of the rows. Raises ValueError for rows so
        large that their rotation overflows float32.
        """
        scale_dtype = torch.bfloat16 if rows.dtype == torch.float32 else rows.dtype
        codes, scale, zero_point = ops.pack(rows, bits, group_size, scale_dtype, rotated, index)
        overflows = scale.isinf() | (zero_point.abs() == torch.finfo(scale_dtype).max)
        if rotated and bool(overflows.any()):
            largest = float(ops.rows_at(rows, index).abs().max())
            raise ValueError(f"keys up to {largest:.1e} overflow when they are rotated: set rotate_keys=False")
        return cls(rows.shape[-1], rows.dtype, codes, scale, zero_point, bits, group_size, rotated)

    @property
    def parts(self) -> list[Tensor]:
        """Codes, scale and zero point."""
        return [self.codes, self.scale, self.zero_point]

    def unpack(self) -> Rows:
        """The rows, decoded, in `dtype`."""
        dtype = torch.float32 if self.rotated else self.dtype
        rows = ops.unpack(self.codes, self.scale, self.zero_point, self.bits, self.group_size, self.width, dtype)
        return ops.narrowed(ops.hadamard(rows), self.dtype) if self.rotated else rows

    def dot(self, query: Tensor) -> Tensor:
        """`q . x`, from the codes; a rotation is applied to the queries instead of the rows."""
        query = ops.hadamard(query) if self.rotated else query
        return ops.packed_dot(query, self.codes, self.scale, self.zero_point, self.bits, self.group_size)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`sum_i w_i x_i`, from the codes; a rotation is undone in the sum."""
        total = ops.packed_weighted_sum(
            weights, self.codes, self.scale, self.zero_point, self.bits, self.group_size, self.width
        )
        return ops.hadamard(total) if self.rotated else total
