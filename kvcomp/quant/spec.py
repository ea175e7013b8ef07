"""A compressor in one line of text, such as `int4 g64 exact=0.05` or `vase-attnv budget=512 | k8v4`, and back."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from kvcomp.core import KV, Compressor, Observed
from kvcomp.evict import METHODS
from kvcomp.pipeline import Composable, Pipeline
from kvcomp.quant.base import Quantizer
from kvcomp.quant.bitsandbytes import BitsAndBytes
from kvcomp.quant.mixed_precision import MixedPrecision

FULL = "full"
BITS = {"int8": 8, "int4": 4, "int2": 2}
BITSANDBYTES = {"nf4": "nf4", "fp4": "fp4", "bnb_int8": "int8"}
KNOWN = (
    "settings k8v4 (any k<bits>v<bits>), k4v4_rotated, int8, int4, int2, nf4, fp4, bnb_int8, full; words g<channels> "
    "(group or block size), k<bits>, v<bits>, rotated, exact=<share>, exact_by=<value_range|key_range|random|none>, "
    "sinks=<rows>, recent=<rows>; before a |: the name of an eviction method with budget=<rows> and its settings"
)
"""What `parse_compressor` understands, for messages and help texts."""


@dataclass(frozen=True)
class Full(Composable):
    """Keeps every row as it is; `window`: how many of the last queries are recorded."""

    window: int = 0
    budget = None
    accumulates = False

    def compress(self, kv: KV, seen: Observed) -> KV:
        """`kv` itself."""
        return kv


def parse_compressor(text: str) -> Compressor:
    """The compressor that `text` describes; stages of a pipeline are separated by `|`.

    A quantizer is one setting and words in any order: `k8v4 recent=128`, `int4 g32 exact=0.05 exact_by=random`, `k4 v2
    rotated`. Rows are exact only where `exact` says so. An evictor is its name in `kvcomp.evict.METHODS` and settings:
    `snapkv budget=512 window=32`. Raises ValueError for a word that is unknown, given twice or of no use in its place,
    with all that is known, and for values that the compressor refuses.
    """
    stages = [_stage(part.split(), text) for part in text.split("|")]
    return stages[0] if len(stages) == 1 else Pipeline(tuple(stages))


def describe(compressor: Compressor) -> str:
    """A short text for `compressor`, which `parse_compressor` reads where it is one of kvcomp's own; else its repr."""
    if type(compressor) is Pipeline:
        return " | ".join(describe(stage) for stage in compressor.stages)
    if compressor == Full():
        return FULL
    if type(compressor) is MixedPrecision:  # a subclass may do something else, so it is told apart by its repr
        keys, values = compressor.key_bits, compressor.value_bits
        words = [f"int{keys}" if keys == values else f"k{keys}v{values}"]
        words += ["rotated"] if compressor.rotate_keys else []
        words += [f"g{compressor.group_size}"] if compressor.group_size else []
        return " ".join(words + _shared(compressor))
    if type(compressor) is BitsAndBytes:
        name = next(name for name, kind in BITSANDBYTES.items() if kind == compressor.format)
        size = compressor.block_size
        return " ".join([name, *([f"g{size}"] if size else []), *_shared(compressor)])
    return _evictor_text(compressor)


def _shared(quantizer: Quantizer) -> list[str]:
    """Words for the settings that every quantizer has, where they differ from what a text without them means."""
    words = [f"exact={quantizer.exact!r}"] if quantizer.exact else []
    usual = {"exact_by": "value_range", "sinks": 4, "recent": 64}
    return words + [
        f"{name}={getattr(quantizer, name)}" for name, value in usual.items() if getattr(quantizer, name) != value
    ]


def _evictor_text(compressor: Compressor) -> str:
    names = {build: name for name, build in METHODS.items() if isinstance(build, type)}
    if type(compressor) not in names:
        return repr(compressor)
    words = [names[type(compressor)]]
    for field in fields(compressor):  # type: ignore[arg-type]
        value = getattr(compressor, field.name)
        if field.init and (field.default is MISSING or value != field.default):
            words.append(f"{field.name}={value if isinstance(value, str) else json.dumps(value)}")
    return " ".join(words)


def _stage(words: list[str], text: str) -> Compressor:
    if not words:
        raise ValueError(f"there is no compressor in {text!r}; known: {KNOWN}")
    if words[0] in METHODS:
        return _evictor(words)
    settings: dict[str, Any] = {}
    for word in words:
        for name, value in _setting(word, text).items():
            if name in settings:
                raise ValueError(f"{text!r} says {name} twice")
            settings[name] = value
    if FULL in settings:
        if len(settings) > 1:
            raise ValueError(f"{FULL} packs nothing, so it takes no other word, got {' '.join(words)!r}")
        return Full()
    return _bitsandbytes(settings, text) if "format" in settings else _mixed(settings, text)


def _mixed(settings: dict[str, Any], text: str) -> MixedPrecision:
    both = settings.pop("bits", None)
    if both is not None and not settings.keys().isdisjoint(("key_bits", "value_bits")):
        raise ValueError(f"{text!r} says bits twice: give either int{both} or k<bits> and v<bits>")
    bits = {name: settings.pop(name, both) for name in ("key_bits", "value_bits")}
    if None in bits.values():
        missing = next(name for name, value in bits.items() if value is None)
        raise ValueError(f"{text!r} does not say {missing}; known: {KNOWN}")
    return MixedPrecision(**bits, **{"exact": 0.0} | settings)


def _bitsandbytes(settings: dict[str, Any], text: str) -> Compressor:
    if "group_size" in settings:
        settings["block_size"] = settings.pop("group_size")
    wrong = sorted(settings.keys() & {"bits", "key_bits", "value_bits", "rotate_keys"})
    if wrong:
        raise ValueError(f"{settings['format']} takes no {', '.join(wrong)} ({text!r})")
    return BitsAndBytes(**{"exact": 0.0} | settings)


def _evictor(words: list[str]) -> Compressor:
    settings: dict[str, Any] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"{words[0]} takes settings name=value, got {word!r}")
        if name in settings:
            raise ValueError(f"{' '.join(words)!r} says {name} twice")
        settings[name] = _value(value)
    if "budget" not in settings:
        raise ValueError(f"{words[0]} needs a budget: write for example '{words[0]} budget=1024'")
    try:
        return METHODS[words[0]](**settings)
    except TypeError as error:
        raise ValueError(f"{words[0]} does not take the settings {sorted(settings)}: {error}") from error


def _setting(word: str, text: str) -> dict[str, Any]:
    """What one word of a quantizer sets."""
    name, equals, value = word.partition("=")
    word = word if equals else name.replace("-", "_")
    if word == FULL:
        return {FULL: True}
    if word in BITS:
        return {"bits": BITS[word]}
    if word in BITSANDBYTES:
        return {"format": BITSANDBYTES[word]}
    if word == "rotated":
        return {"rotate_keys": True}
    if group := re.fullmatch(r"g(\d+)", word):
        return {"group_size": int(group[1])}
    if bits := re.fullmatch(r"(?:k(\d+))?(?:v(\d+))?(_rotated)?", word):
        found = {"key_bits": bits[1], "value_bits": bits[2]}
        given: dict[str, Any] = {name: int(value) for name, value in found.items() if value is not None}
        if given:
            return given | ({"rotate_keys": True} if bits[3] else {})
    if name in ("exact", "exact_by", "sinks", "recent") and value:
        return {name: _value(value)}
    raise ValueError(f"unknown word {word!r} in {text!r}; known: {KNOWN}")


def _value(text: str) -> Any:
    """A number or truth value where `text` is one, else the text."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
