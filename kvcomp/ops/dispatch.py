"""Whether an operation runs its torch definition or a kernel of the same name and arguments."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_enabled = True


def use_kernels(on: bool) -> None:
    """Whether kernels may run where they are installed; with False every operation runs its torch definition."""
    global _enabled
    _enabled = on


def with_kernel(definition: Callable[P, R]) -> Callable[P, R]:
    """`definition`, replaced at each call by the kernel of its name if there is one for the device of the first
    argument, and no gradient is wanted through that."""

    @functools.wraps(definition)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        wanted = _enabled and not (torch.is_grad_enabled() and first.requires_grad)
        return getattr(_kernels(first.device.type) if wanted else None, definition.__name__, definition)(
            *args, **kwargs
        )

    return run


@functools.cache
def _kernels(device: str) -> ModuleType | None:
    """Kernels for a kind of device: on CPU those of numba (the extra `cpu`) if that is installed."""
    if device != "cpu" or importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module("kvcomp_kernels.cpu.packed")
    except ModuleNotFoundError:  # an uninstalled checkout without kernels/ on its path
        return None
