"""kvcomp: the KV cache of a reasoning model, kept small for the whole of a long chain of thought."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcomp.core import KV, Compressor, Observed
from kvcomp.pipeline import Pipeline

if TYPE_CHECKING:
    from kvcomp.cache import CompressedCache
    from kvcomp.memory import Memory

__version__ = "0.1.0"
_LATE = {"CompressedCache": "kvcomp.cache", "Memory": "kvcomp.memory"}  # what needs transformers
__all__ = ["KV", "CompressedCache", "Compressor", "Memory", "Observed", "Pipeline", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
