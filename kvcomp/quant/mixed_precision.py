"""Mixed precision: most rows in few bits per channel, the exact ones in the model dtype."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

from kvcomp import ops
from kvcomp.core import Kept, Rows, ValueRows
from kvcomp.quant.base import Quantizer
from kvcomp.quant.packed import AffineRows, PackedRows

SUPPORTED = (2, 4, 8)


@dataclass(frozen=True)
class MixedPrecision(Quantizer):
    """Asymmetric min-max codes per row and group of channels; see `kvcomp.ops.packed` for the format.

    `bits` (2, 4 or 8; default 4) for keys and values alike, or `key_bits`, `value_bits`. `group_size` channels share a
    scale and a zero point of 16 bit each (None: a whole row in 8 bits, else at most 64). `rotate_keys` multiplies keys
    by a Walsh-Hadamard matrix before they are packed, which spreads channels of large magnitude; queries are rotated
    instead when codes are read. Bits per element without exact rows: `bits + 32 / group_size`.

    Raises ValueError for unsupported bits, a group size below 1 or above head_dim, and a rotation of a head_dim that 8
    does not divide.

    Source: per-token groups as in KIVI (arXiv 2402.02750) for values, here for keys too, so that rows stay independent
    of each other and eviction moves codes; rotation as in QuaRot (arXiv 2404.00456), after RoPE; exact rows by value
    range from the observation of VaSE (arXiv 2606.03928) that these rows have the largest error.
    """

    bits: InitVar[int | None] = None
    key_bits: int | None = None
    value_bits: int | None = None
    _: KW_ONLY
    group_size: int | None = None
    rotate_keys: bool = False
    exact: float = 0.05

    def __post_init__(self, bits: int | None) -> None:
        super().__post_init__()
        if bits is not None and self.key_bits is not None and self.value_bits is not None:
            raise ValueError(
                f"MixedPrecision: bits={bits} has no effect beside key_bits={self.key_bits} and "
                f"value_bits={self.value_bits}; give these alone"
            )
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, 4 if bits is None else bits)
            if getattr(self, name) not in SUPPORTED or type(getattr(self, name)) is not int:
                raise ValueError(f"MixedPrecision: {name} must be 2, 4 or 8, got {getattr(self, name)!r}")
        if self.group_size is not None:
            self.require(group_size=1)

    @classmethod
    def k8v4(cls, **settings: Any) -> MixedPrecision:
        """Nearly lossless: most of the error of 4 bits is in the keys, so they get 8."""
        return cls(**{"key_bits": 8, "value_bits": 4, "exact": 0.0} | settings)

    @classmethod
    def k4v4_rotated(cls, **settings: Any) -> MixedPrecision:
        """Rotation halves the squared error of 4-bit keys on SmolLM2 and costs no bit."""
        return cls(**{"bits": 4, "rotate_keys": True, "exact": 0.0} | settings)

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ValueError if groups are wider than a row, or a row of that width cannot be rotated."""
        if self.group_size is not None and self.group_size > head_dim:
            raise ValueError(
                f"MixedPrecision: group_size={self.group_size} is above head_dim={head_dim}; lower it, or leave it out"
            )
        if self.rotate_keys:
            ops.hadamard_block(head_dim)

    def pack(self, keys: Rows, values: ValueRows, index: Kept | None = None) -> tuple[PackedRows, PackedRows]:
        """Keys, rotated if asked, and values, each with its bits."""
        assert self.key_bits is not None and self.value_bits is not None
        return (
            AffineRows.of(keys, self.key_bits, self._group(self.key_bits, keys.shape[-1]), self.rotate_keys, index),
            AffineRows.of(values, self.value_bits, self._group(self.value_bits, values.shape[-1]), index=index),
        )

    def _group(self, bits: int, width: int) -> int:
        return self.group_size or (width if bits == 8 else min(64, width))
