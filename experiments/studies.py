"""What is compared on the small reasoning model: methods at budgets.

A budget is a fraction of the length of a whole text. All methods keep the same `recent` rows (at most a quarter of the
budget) and look at the same `window` of queries where they look at any; R-KV keeps the window of its own repository.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from value_range import ValueRange

from kvcomp.core import Compressor
from kvcomp.evict import METHODS, RKV, Random, Replay, SnapKV, VaSE
from kvcomp.pipeline import Pipeline
from kvcomp.quant.spec import parse_compressor

RECENT = 32
COMMON: dict[str, Any] = {"recent": RECENT}
WINDOWED: dict[str, Any] = {"recent": RECENT, "window": RECENT}

Build: TypeAlias = Callable[[int], Compressor | None]


class Study(StrEnum):
    """What is compared."""

    pilot = "pilot"
    main = "main"
    sweep = "sweep"
    front = "front"
    vase = "vase"
    replay = "replay"


@dataclass(frozen=True)
class Point:
    """A method at a budget; `drawn`: its result depends on the seed; `told`: of an oracle, what it knows of the rest of
    the chain."""

    name: str
    build: Build | None
    fraction: float = 0.25
    drawn: bool = False
    quantizer: str = ""
    told: Literal["", "facts", "attention"] = ""

    def compressor(self, length: int) -> Compressor | None:
        """For texts of `length` tokens; None: the full cache."""
        stages = [self.build(int(length * self.fraction))] if self.build and self.fraction < 1 else []
        stages += [parse_compressor(self.quantizer)] if self.quantizer else []
        found = [stage for stage in stages if stage is not None]
        return Pipeline(tuple(found)) if len(found) > 1 else found[0] if found else None


FULL = Point("full cache", None, 1.0)
ORACLE = Point("oracle", None, told="facts")
ATTENTION_ORACLE = Point("attention oracle", None, told="attention")


def pilot() -> list[Point]:
    """The steps from SnapKV to VaSE, and what the largest value ranges are worth, as in the pilot of the paper."""
    plain = {**WINDOWED, "sinks": 4}
    return [
        FULL,
        Point("Random", lambda b: Random(b, **COMMON), drawn=True),
        Point("largest value ranges evicted", lambda b: ValueRange(b, keep="smallest", **COMMON)),
        Point("smallest value ranges evicted", lambda b: ValueRange(b, keep="largest", **COMMON)),
        Point("SnapKV", lambda b: SnapKV(b, **plain)),
        Point("SnapKV + sampling", lambda b: VaSE(b, protected=0, **plain), drawn=True),
        Point("SnapKV + budget/16 V slots", lambda b: VaSE(b, protected=b // 16, stochastic=False, **plain)),
        Point("SnapKV + budget/4 V slots", lambda b: VaSE(b, stochastic=False, **plain)),
        Point("SnapKV + sampling + budget/16 V slots", lambda b: VaSE(b, protected=b // 16, **plain), drawn=True),
        Point("VaSE attnv (sampling + budget/4 V slots)", lambda b: VaSE(b, **plain), drawn=True),
        Point("CurDKV (fixed G)", lambda b: METHODS["curdkv"](budget=b, **COMMON), drawn=True),
        Point("VaSE dkv (G resampled)", lambda b: VaSE(b, scorer="dkv", **COMMON), drawn=True),
        ORACLE,
    ]


DRAWN = ("vase-attnv", "vase-dkv", "curdkv", "random")
WITH_WINDOW = ("vase-attnv", "snapkv", "rkv-simplified", "expected-attention", "replay")
OWN_RECENT = ("rkv", "h2o", "tova")
"""Methods that say themselves how many recent rows they keep."""


def method(name: str, protect_prompt: bool = False) -> Point:
    """A method of `kvcomp.evict.METHODS` with the rows and the window that all share."""
    shared = {} if name in OWN_RECENT else WINDOWED if name in WITH_WINDOW else COMMON
    if name == "h2o" and protect_prompt:
        shared = COMMON  # half of the budget beside the prompt is more than there is

    def build(budget: int) -> Compressor:
        settings = shared | {"protect_prompt": protect_prompt, "budget": budget}
        if shared:
            settings["recent"] = recent_rows(budget)
        if name == "rkv-simplified":
            return replace(RKV.simplified(4096), **settings)  # its own recent rows do not fit in every budget
        return METHODS[name](**settings)

    return Point(name + (" + prompt" if protect_prompt else ""), build, drawn=name in DRAWN)


def recent_rows(budget: int) -> int:
    """The newest rows that all keep."""
    return min(RECENT, budget // 4)


def main_table() -> list[Point]:
    """Every method at a quarter of the rows, with and without protection of the prompt."""
    return [FULL, *(method(name, pinned) for name in METHODS for pinned in (False, True)), ORACLE, ATTENTION_ORACLE]


SWEPT = ("replay", "vase-attnv", "vase-dkv", "snapkv", "rkv-simplified", "curdkv", "expected-attention", "random")


def sweep() -> list[Point]:
    """A half to a sixteenth of the rows; less than a quarter does not hold the prompt."""
    free = [*(method(name) for name in SWEPT), ORACLE, ATTENTION_ORACLE]
    pinned = [method("random", protect_prompt=True)]
    points = {1 / 2: free + pinned, 3 / 8: free + pinned, 1 / 4: free + pinned, 1 / 8: free, 1 / 16: free}
    return [replace(point, fraction=fraction) for fraction, those in points.items() for point in those]


QUANTIZERS = ("", "k8v4 recent=16", "int4 rotated recent=16", "int4 rotated exact=0.05 recent=16")


FRONT = {"replay": (1 / 2, 3 / 8, 1 / 4), "vase-attnv": (3 / 4, 1 / 2)}
"""Fractions of the rows: Replay solves all there is to solve with a half, VaSE-AttnV hardly anything with less."""


def front() -> list[Point]:
    """Eviction, quantization, and both: accuracy against bytes."""
    bases = [FULL, *(replace(method(name), fraction=part) for name, parts in FRONT.items() for part in parts)]
    return [replace(base, quantizer=quantizer) for base in bases for quantizer in QUANTIZERS]


def vase() -> list[Point]:
    """Each setting of VaSE-AttnV on its own, from the one with few V slots, which did best in the pilot."""
    start: dict[str, Any] = {**WINDOWED, "sinks": 4}
    changed: dict[str, dict[str, Any]] = {
        "budget/16 V slots": {},
        "temperature 0.5": {"temperature": 0.5},
        "temperature 2": {"temperature": 2.0},
        "no sampling": {"stochastic": False},
        "no pooling": {"pool": 1},
        "no sinks": {"sinks": 0},
        "window 64": {"window": 64},
        "slots by variance": {"magnitude": "variance"},
    }

    def build(change: dict[str, Any]) -> Build:
        return lambda b: VaSE(b, protected=b // 16, **start | change)

    points = [Point(f"VaSE attnv, {name}", build(change), drawn=True) for name, change in changed.items()]
    return [Point("SnapKV", lambda b: SnapKV(b, **start)), *points]


def replay() -> list[Point]:
    """Replay, and each of its settings changed on its own."""
    changed: dict[str, dict[str, Any]] = {
        "": {},
        ", remembers 64": {"remembers": 64},
        ", remembers 256": {"remembers": 256},
        ", share 0.3": {"share": 0.3},
        ", share 1": {"share": 1.0},
        ", asked far away": {"ahead": 512},
    }

    def build(change: dict[str, Any]) -> Build:
        return lambda b: Replay(b, **WINDOWED, **change)

    return [FULL, *(Point(f"Replay{name}", build(change)) for name, change in changed.items())]


STUDIES = {
    Study.pilot: pilot,
    Study.main: main_table,
    Study.sweep: sweep,
    Study.front: front,
    Study.vase: vase,
    Study.replay: replay,
}
