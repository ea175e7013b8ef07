"""Rows in the block formats of bitsandbytes. The library is imported when the first row is packed or unpacked."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from dataclasses import KW_ONLY, dataclass
from types import ModuleType
from typing import Literal, get_args

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from kvcomp import ops
from kvcomp.core import Kept, Rows, ValueRows
from kvcomp.quant.base import Quantizer
from kvcomp.quant.packed import PackedRows

Format = Literal["nf4", "fp4", "int8"]
BLOCK_SIZES = {
    "nf4": tuple(2**power for power in range(5, 13)),
    "fp4": tuple(2**power for power in range(5, 13)),
    "int8": tuple(2**power for power in range(4, 13)),
}
"""Channels that may share one absmax. bitsandbytes 0.50.2 has more for 8 bits on CPU, but on CUDA none below 64."""
LARGEST_DEFAULT = 64
LEAST_8_BIT_ON_CUDA = 64


@dataclass(frozen=True)
class BitsAndBytes(Quantizer):
    """Blockwise codes of bitsandbytes: each block of `block_size` channels of a row has its absmax in float32.

    `absmax = max |x|` over the block; `code` is the index of the number in the table of `format` that is nearest to
    `x / absmax`; decoded, `x' = absmax * table[code]`. Bits per element without exact rows: 4 (nf4, fp4) or 8 (int8),
    `+ 32 / block_size`.

    - nf4: NormalFloat4, 16 quantiles of a normal distribution (QLoRA, arXiv 2305.14314): `quantize_4bit`.
    - fp4: a sign, two bits of exponent, one of mantissa: 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1: `quantize_4bit`.
    - int8: what `quantize_blockwise` makes, the only 8-bit format with a `block_size`. Not integers, but the signed
      dynamic 8-bit code (arXiv 1511.04561), finer near zero; LLM.int8(), one scale per row, is another function.

    `block_size` is a power of two, 32 (int8: 16) to 4096, and must divide the width of keys and of values, so that
    rows are packed independently of each other; None: the largest that does, up to 64. On CUDA, int8 needs at least 64.
    On Gaussian rows nf4 is not more exact than `MixedPrecision(4)` with as many bits, and fp4 and int8 are less so.

    Raises ValueError for an unknown format or block size, if bitsandbytes is not installed, and for a width that the
    block size does not divide.
    """

    format: Format = "nf4"
    _: KW_ONLY
    block_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in get_args(Format):
            raise ValueError(f"BitsAndBytes: format must be one of {', '.join(get_args(Format))}, got {self.format!r}")
        sizes = BLOCK_SIZES[self.format]
        if self.block_size is not None:
            self.require(block_size=sizes[0])
            if self.block_size not in sizes:
                raise ValueError(
                    f"BitsAndBytes: block_size for {self.format} must be one of {_listed(sizes)}, got {self.block_size}"
                )
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError("bitsandbytes is not installed: pip install 'kvcomp[bnb]'")

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ValueError if blocks do not fill a row of `head_dim` channels."""
        self._block_size(head_dim)

    def pack(self, keys: Rows, values: ValueRows, index: Kept | None = None) -> tuple[PackedRows, PackedRows]:
        """Keys and values in the same format, each with the block size for its width."""
        sizes = [self._block_size(rows.shape[-1]) for rows in (keys, values)]
        if self.format == "int8" and keys.is_cuda and min(sizes) < LEAST_8_BIT_ON_CUDA:
            raise ValueError(
                f"BitsAndBytes: on CUDA int8 needs blocks of at least {LEAST_8_BIT_ON_CUDA} channels, got {min(sizes)} "
                f"for rows of {keys.shape[-1]} and {values.shape[-1]}; raise block_size, or use MixedPrecision(8)"
            )
        packed = [
            BlockRows.of(ops.rows_at(x, index), self.format, size)
            for x, size in zip((keys, values), sizes, strict=True)
        ]
        return packed[0], packed[1]

    def _block_size(self, width: int) -> int:
        """Channels of a block in rows of `width` channels."""
        sizes = BLOCK_SIZES[self.format]
        fitting = [size for size in sizes if width % size == 0]
        if not fitting:
            other = ", or format='int8'" if width % BLOCK_SIZES["int8"][0] == 0 else ""
            raise ValueError(
                f"BitsAndBytes: head_dim={width} is no multiple of {sizes[0]}, the smallest block of {self.format}; "
                f"use MixedPrecision{other}"
            )
        if self.block_size is None:
            return max(size for size in fitting if size <= LARGEST_DEFAULT)
        if self.block_size not in fitting:
            raise ValueError(
                f"BitsAndBytes: block_size={self.block_size} does not divide head_dim={width}; block sizes that do: "
                f"{_listed(fitting)}"
            )
        return self.block_size


@dataclass(frozen=True)
class BlockRows(PackedRows):
    """Rows in a format of bitsandbytes: `codes`, of 4 bits the first of two in the upper half of a byte, and `absmax`
    per block."""

    codes: UInt8[Tensor, "batch kv_heads rows bytes"]
    absmax: Float32[Tensor, "batch kv_heads rows blocks"]
    format: Format
    block_size: int

    @classmethod
    def of(cls, rows: Rows, format: Format, block_size: int) -> BlockRows:
        """Packs finite `rows` of float32, float16 or bfloat16, whose width `block_size` must divide."""
        width = rows.shape[-1]
        assert width % block_size == 0, (width, block_size)
        library, per_byte = _library(), 1 if format == "int8" else 2
        if format == "int8":
            codes, state = library.quantize_blockwise(rows, code=_dynamic(rows.device), blocksize=block_size)
        else:
            codes, state = library.quantize_4bit(rows, blocksize=block_size, quant_type=format)
        codes = codes.view(*rows.shape[:3], width // per_byte)
        absmax = state.absmax.view(*rows.shape[:3], width // block_size)
        return cls(width, rows.dtype, codes, absmax, format, block_size)

    def unpack(self) -> Rows:
        """The rows, decoded, in `dtype`."""
        # The library reads memory from the first element on, so a view with strides would give it other rows.
        codes, absmax = self.codes.contiguous(), self.absmax.contiguous().flatten()
        library, settings = _library(), {"blocksize": self.block_size, "dtype": self.dtype}
        if self.format == "int8":
            state = library.QuantState(absmax, code=_dynamic(codes.device), **settings)
            return library.dequantize_blockwise(codes, state)
        # One block a line: on CPU the library takes wrong absmax where blocks do not fill the last axis.
        shape = torch.Size((absmax.numel(), self.block_size))
        state = library.QuantState(absmax, shape, quant_type=self.format, **settings)
        return library.dequantize_4bit(codes.view(-1, 1), state).view(*codes.shape[:3], self.width)


def _listed(sizes: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, sizes))


@functools.cache
def _library() -> ModuleType:
    """`bitsandbytes.functional`. Its warning that products of 4-bit matrices lack the package `kernels` is held back:
    there are none here."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes.functional")
    finally:
        logger.setLevel(level)


@functools.cache
def _dynamic(device: torch.device) -> Tensor:
    """The 256 numbers of the signed dynamic 8-bit code."""
    return _library().create_dynamic_map().to(device)
