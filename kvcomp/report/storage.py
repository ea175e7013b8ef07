"""Bytes of the compressed rows of a layer, by part, as counted from the tensors that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcomp.core import EMPTY, KV
from kvcomp.quant.mixed import MixedKV

PARTS = ("codes", "scales", "exact", "recent", "positions")


@dataclass
class Stored:
    """A sum over layers. `parts`: bytes by part; `elements`: of keys and values of all rows; `older_elements`: without
    recent ones; `older_positions`: bytes of their positions; `full`: bytes of all rows in the model dtype.
    `layer_bytes`, `decode_bytes`: as in `Figures`."""

    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    elements: int = 0
    older_elements: int = 0
    older_positions: int = 0
    full: int = 0
    exact_elements: int = 0
    layer_bytes: int = 0
    decode_bytes: int = 0

    def add(self, result: KV, original: KV, query_heads: int) -> None:
        """Adds a layer: `original` rows and the `result` of compressing them; `query_heads`: 0 if unknown."""
        batch, heads, rows = result.positions.shape
        widths = original.keys.shape[-1] + original.values.shape[-1]
        size = original.keys.element_size()
        parts = _parts(result)
        for name, count in parts.items():
            self.parts[name] += count
        recent = result.recent.positions if isinstance(result, MixedKV) else result.positions[:, :, :0]
        older = batch * heads * rows - int((recent != EMPTY).sum())
        self.elements += batch * heads * rows * widths
        self.older_elements += older * widths
        self.older_positions += parts["positions"] - recent.numel() * recent.element_size()
        self.full += original.keys.nbytes + original.values.nbytes
        self.exact_elements += parts["exact"] // size
        packed = isinstance(result, MixedKV) and result.packed.rows > 0
        self.layer_bytes = max(self.layer_bytes, batch * heads * rows * widths * size if packed else 0)
        self.decode_bytes = max(self.decode_bytes, 2 * 4 * batch * query_heads * rows if packed else 0)

    @property
    def bits(self) -> float:
        """Stored bits per element of keys and values, all parts included."""
        return 8 * sum(self.parts.values()) / self.elements

    @property
    def older_bits(self) -> float:
        """The same without recent rows."""
        held = sum(self.parts[name] for name in ("codes", "scales", "exact"))
        return 8 * (held + self.older_positions) / self.older_elements if self.older_elements else 0.0

    @property
    def bits_at_16(self) -> float:
        """`(1 - p) base + 16 p` with a share p of exact rows and `base = bits + (scale + zero point) / group_size`."""
        packed = 8 * (self.parts["codes"] + self.parts["scales"])
        return (packed + 16 * self.exact_elements) / self.older_elements if self.older_elements else 0.0


def _parts(result: KV) -> dict[str, int]:
    if not isinstance(result, MixedKV):
        return dict.fromkeys(PARTS, 0) | {"exact": _dense(result), "positions": _nbytes([result.positions])}
    return {
        "codes": _nbytes(result.packed.codes),
        "scales": _nbytes(result.packed.scales),
        "exact": _dense(result.exact),
        "recent": _dense(result.recent),
        "positions": _nbytes(part.positions for part in result.parts),
    }


def _dense(rows: KV) -> int:
    return _nbytes([rows.keys, rows.values])


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors once each has one of its own, as it has in a cache."""
    return sum(_owner(tensor).untyped_storage().nbytes() for tensor in tensors)


def _owner(tensor: Tensor) -> Tensor:
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
