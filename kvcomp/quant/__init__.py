"""Quantization methods: each is one file and one frozen dataclass."""

from kvcomp.quant.base import Quantizer
from kvcomp.quant.bitsandbytes import BitsAndBytes, BlockRows
from kvcomp.quant.mixed import MixedKV
from kvcomp.quant.mixed_precision import MixedPrecision
from kvcomp.quant.packed import AffineRows, PackedRows

__all__ = ["AffineRows", "BitsAndBytes", "BlockRows", "MixedKV", "MixedPrecision", "PackedRows", "Quantizer"]
