"""`operation`: a torch definition that a kernel of the same name and arguments may replace."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
LIBRARIES = {"cpu": ("numba", "kvcomp_kernels.cpu"), "cuda": ("triton", "kvcomp_kernels")}
"""By kind of device (AMD's is `cuda` too): what its kernels need, and the package that holds them."""
_enabled = True
_tracing: ContextVar[bool] = ContextVar("tracing", default=False)


def use_kernels(on: bool) -> None:
    """Whether kernels may run where they are installed; with False every operation runs its torch definition."""
    global _enabled
    _enabled = on


def operation(module: str, schema: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a definition whose kernels, if there are any, stand in a module named `module`.

    A call runs the kernel for the device of its first argument, unless there is none, a gradient is wanted through that
    argument, the kernel returns NotImplemented for what it was given, or `use_kernels(False)` was called. Under
    `torch.compile` it is the one node `torch.ops.kvcomp.<name>` with the arguments of `schema`, whose shapes are those
    of the definition.
    """

    def decorate(definition: Callable[P, R]) -> Callable[P, R]:
        name = definition.__name__

        @functools.wraps(definition)
        def choose(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0]
            assert isinstance(first, Tensor)
            if _enabled and not _tracing.get() and not (torch.is_grad_enabled() and first.requires_grad):
                kernel = getattr(_kernels(first.device.type, module), name, _none)
                with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
                    result = kernel(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return definition(*args, **kwargs)

        node = torch.library.custom_op(f"kvcomp::{name}", _row_major(choose), mutates_args=(), schema=schema)
        node.register_fake(_row_major(_without_values(definition)))

        @functools.wraps(definition)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return node(*args, **kwargs) if torch.compiler.is_compiling() else choose(*args, **kwargs)

        return run

    return decorate


def _none(*_: Any, **__: Any) -> Any:
    """Stands for a kernel that there is not."""
    return NotImplemented


def _row_major(function: Callable[P, Any]) -> Callable[P, Any]:
    """The compiler must know the strides of results, whatever kernel or definition makes them."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = function(*args, **kwargs)
        return tuple(part.contiguous() for part in result) if isinstance(result, tuple) else result.contiguous()

    return run


def _without_values(definition: Callable[P, R]) -> Callable[P, R]:
    """For tensors without values: the operations inside of a definition must not launch anything either."""

    @functools.wraps(definition)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _tracing.set(True)
        try:
            return definition(*args, **kwargs)
        finally:
            _tracing.reset(token)

    return run


@functools.cache
def _kernels(device: str, module: str) -> ModuleType | None:
    library, package = LIBRARIES.get(device, ("", ""))
    try:  # the second look is for an uninstalled checkout without kernels/ on its path
        if not library or any(importlib.util.find_spec(name) is None for name in (library, f"{package}.{module}")):
            return None
    except ModuleNotFoundError:
        return None
    return importlib.import_module(f"{package}.{module}")
