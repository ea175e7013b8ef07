"""kvcomp: the KV cache of a reasoning model, kept small for the whole of a long chain of thought."""

from kvcomp.cache import CompressedCache
from kvcomp.core import KV, Compressor, Observed
from kvcomp.memory import Memory
from kvcomp.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["KV", "CompressedCache", "Compressor", "Memory", "Observed", "Pipeline", "__version__"]
