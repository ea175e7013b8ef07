"""What a report holds: figures of every compressor, layer and KV head; read and written as JSON, written as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

FORMAT = "kvcomp report"
VERSION = 1
Point: TypeAlias = tuple[int, int, float, float, float, float]
"""Layer, KV head, and of one row the value range, value MSE, key range, key MSE."""


@dataclass(frozen=True)
class HeadFigures:
    """Errors of one compressor in one layer and KV head. Batch rows are pooled. None: does not exist, as there is no
    error, there are no queries, or the median is 0.

    Errors are those of the rows older than the `recent` ones (of an evictor: of the rows it keeps). `key_error`,
    `value_error`: `|X - X'|_F / |X|_F`; `key_snr`, `value_snr`: `-20 log10` of it, in dB. `output_error`: the same of
    the attention output of the recorded queries, all rows included. `key_spread`, `value_spread`: largest over median
    `Range(x) = max(x) - min(x)` over channels. `value_top_2` ... `key_top_10`: share of the squared error in the 2, 5
    and 10 % of the rows with the largest value range; `value_sinks`, `key_sinks`: in the first tokens. `value_fit`,
    `key_fit`: Pearson correlation of a row's mean squared error with its own range, over the packed rows without the
    first tokens.
    """

    compressor: str
    layer: int
    head: int
    key_error: float
    value_error: float
    key_snr: float | None
    value_snr: float | None
    output_error: float | None
    key_spread: float | None
    value_spread: float | None
    value_top_2: float | None
    value_top_5: float | None
    value_top_10: float | None
    key_top_2: float | None
    key_top_5: float | None
    key_top_10: float | None
    value_sinks: float | None
    key_sinks: float | None
    value_fit: float | None
    key_fit: float | None


@dataclass(frozen=True)
class ModelFigures:
    """What a model does through the compressed cache, beside the full one, on `tokens` predicted tokens.

    `kl`: mean of `sum_t p log(p / q)` per token in nats, p with the full and q with the compressed cache; `top_1`:
    share of tokens whose most likely token is the same; `perplexity`, `full_perplexity`: exp of the mean negative
    log-likelihood; `held`: bytes the cache held at the end, buffers and recorded queries included.
    """

    kl: float
    top_1: float
    perplexity: float
    full_perplexity: float
    tokens: int
    held: int


@dataclass(frozen=True)
class Figures:
    """One compressor. Errors are means over layers and KV heads, as in `HeadFigures`.

    `equal_bits_of`: the compressor for which this one was added, as it takes as many bits. `bytes`: stored bytes by
    part, over all layers: codes, scales (and zero points), exact (rows in the model dtype), recent (the newest ones),
    positions. `full`: bytes of the rows in the model dtype. `bits`: stored bits per element of keys and values;
    `older_bits`: the same without recent rows; `bits_at_16`: `older_bits` without positions, exact rows counted at 16
    bits. Of what a layer takes for a moment these are lower bounds: `decode_bytes`: logits and probabilities of one
    step, read from codes; `layer_bytes`: its keys and values, decoded. 0 where nothing is packed, and the first of them
    where the query heads are not known.
    """

    compressor: str
    settings: str
    equal_bits_of: str | None
    bytes: dict[str, int]
    full: int
    bits: float
    older_bits: float
    bits_at_16: float
    decode_bytes: int
    layer_bytes: int
    errors: dict[str, float | None]
    model: ModelFigures | None = None

    @property
    def stored(self) -> int:
        """All bytes that are stored."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class BreakEven:
    """Whether exact rows of a quantizer pay, against the same bits spent on every row.

    `share` of the rows are exact, chosen by `exact_by`, at a cost of `cost` bits per element over `base` (no exact rows
    but the sinks). `carried`: share of the error of `base` that these rows carry; `carried_keys`, `carried_values`: of
    the error from keys and from values alone. `lower`, `upper`: the uniform settings next to the same bits, `(name,
    bits, share of the error removed)`; `needed`: share removed at equal bits, by a mixture of the two. `weighted`: the
    error is weighted by attention. `assumed`: the compressor has no exact rows; this is what some would do.
    """

    compressor: str
    share: float
    exact_by: str
    assumed: bool
    weighted: bool
    base: str
    base_bits: float
    cost: float
    carried: float
    carried_keys: float
    carried_values: float
    lower: tuple[str, float, float]
    upper: tuple[str, float, float] | None
    needed: float

    @property
    def pays(self) -> bool:
        """Whether the exact rows carry more than the same bits remove elsewhere."""
        return self.carried > self.needed


@dataclass(frozen=True)
class Report:
    """Everything measured. `points`: some rows of each compressor; `notes`: what was left out; `settings`: what is
    needed to measure the same again."""

    figures: list[Figures]
    break_even: list[BreakEven]
    heads: list[HeadFigures]
    points: dict[str, list[Point]]
    notes: list[str]
    settings: dict[str, Any]

    def of(self, compressor: str) -> Figures:
        """The figures of one compressor. Raises KeyError for another name."""
        return next((each for each in self.figures if each.compressor == compressor), None) or _missing(compressor)

    def by_layer(self, compressor: str, name: str) -> list[tuple[int, float]]:
        """`(layer, mean over its heads)` of one field of `HeadFigures`, where it exists."""
        values: dict[int, list[float]] = {}
        for head in self.heads:
            if head.compressor == compressor and getattr(head, name) is not None:
                values.setdefault(head.layer, []).append(getattr(head, name))
        return [(layer, fmean(found)) for layer, found in sorted(values.items())]

    def to_json(self) -> str:
        """The whole report as JSON, in a format with a version."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The inverse of `to_json`. Raises ValueError for something else."""
        held = json.loads(text)
        if not isinstance(held, dict) or held.get("format") != FORMAT or held.get("version") != VERSION:
            raise ValueError(f"this is no {FORMAT} of version {VERSION}")
        return cls(
            [_figures(each) for each in held["figures"]],
            [_break_even(each) for each in held["break_even"]],
            [HeadFigures(**each) for each in held["heads"]],
            {name: [_point(*point) for point in points] for name, points in held["points"].items()},
            held["notes"],
            held["settings"],
        )

    def write_csv(self, path: Path) -> None:
        """One line for each compressor, layer and KV head; an empty cell where a figure does not exist."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(HeadFigures)])
            writer.writeheader()
            writer.writerows(asdict(head) for head in self.heads)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that exist; None if there is none."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _point(layer: int, head: int, *numbers: float) -> Point:
    value_range, value_error, key_range, key_error = numbers
    return layer, head, value_range, value_error, key_range, key_error


def _figures(held: dict[str, Any]) -> Figures:
    model = held.pop("model")
    return replace(Figures(**held), model=None if model is None else ModelFigures(**model))


def _break_even(held: dict[str, Any]) -> BreakEven:
    lower, upper = held.pop("lower"), held.pop("upper")
    return BreakEven(**held, lower=tuple(lower), upper=None if upper is None else tuple(upper))


def _missing(compressor: str) -> Figures:
    raise KeyError(f"the report has no compressor {compressor!r}")
