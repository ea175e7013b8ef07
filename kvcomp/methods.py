"""A compressor from the options of a command: the name of a method, its settings, a quantizer."""

from __future__ import annotations

import json
from typing import Any

from kvcomp.core import Compressor
from kvcomp.evict import METHODS
from kvcomp.pipeline import Pipeline
from kvcomp.quant.spec import parse_compressor


def build_method(
    name: str, budget: int, protect_prompt: bool, settings: list[str], quantize: str | None = None
) -> Compressor | None:
    """The compressor that the options describe; None for `full` without a quantizer. Raises ValueError for an unknown
    name or setting."""
    stages = [stage for stage in (_evictor(name, budget, protect_prompt, settings), _quantizer(quantize)) if stage]
    return Pipeline(tuple(stages)) if len(stages) > 1 else stages[0] if stages else None


def _evictor(name: str, budget: int, protect_prompt: bool, settings: list[str]) -> Compressor | None:
    if name == "full":
        if settings or protect_prompt:
            raise ValueError("--method full evicts nothing, so it takes neither --set nor --protect-prompt")
        return None
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; choose one of {', '.join(METHODS)}, or full")
    values = dict(_setting(text) for text in settings)
    try:
        return METHODS[name](budget=budget, protect_prompt=protect_prompt, **values)
    except TypeError as error:
        raise ValueError(
            f"{name} does not take the settings {sorted(values)}: {error}; see `kvcomp methods`"
        ) from error


def _quantizer(text: str | None) -> Compressor | None:
    if text is None or text.strip() == "full":
        return None
    compressor = parse_compressor(text)
    if compressor.unpacked is None or compressor.budget is not None:
        raise ValueError(f"--quantize takes one quantizer, such as k8v4, got {text!r}; eviction is set by --method")
    return compressor


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--set takes name=value, got {text!r}")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return name, value
