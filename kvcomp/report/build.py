"""From rows and compressors to a report: every layer, every compressor, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from kvcomp.core import KV, Compressor, Observed
from kvcomp.quant.spec import describe
from kvcomp.report.break_even import Comparison, comparison, quantizer_of
from kvcomp.report.figures import BreakEven, Figures, HeadFigures, ModelFigures, Point, Report, mean
from kvcomp.report.inputs import DEFAULT, Compressors, GivenLayers, check_sinks, layers_of, named
from kvcomp.report.measure import Pair, contributions, measure_head, sample
from kvcomp.report.provenance import provenance
from kvcomp.report.storage import Stored

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and how many there are."""
POINTS = 600
"""Rows of each compressor that `Report.points` keeps."""


@dataclass
class Measured:
    """What is gathered about one compressor while layers go by."""

    compressor: Compressor
    shown: str | None
    errors: tuple[float, float] = (0.0, 0.0)
    stored: Stored = field(default_factory=Stored)
    heads: list[HeadFigures] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)


@dataclass
class Measurements:
    """What is measured: the compressors `shown`, by name; `added`: which of them stand for the same bits as another;
    `comparisons`: the break-evens; `unjudged`: quantizers that have none."""

    shown: dict[str, Compressor]
    added: dict[str, str]
    comparisons: list[Comparison]
    unjudged: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, compressors: Compressors, like: KV, compare: bool) -> Measurements:
        """With `compare`, each quantizer with exact rows gets a uniform one of nearly equal bits beside it."""
        shown = named(compressors)
        found = [comparison(name, compressor, like) for name, compressor in shown.items()] if compare else []
        unjudged = [
            name for (name, each), judged in zip(shown.items(), found, strict=False)
            if judged is None and quantizer_of(each) is not None
        ]  # fmt: skip
        given = {describe(each.base) for each in found if each is not None and not each.assumed}
        comparisons = [
            each for each in found if each is not None and not (each.assumed and describe(each.base) in given)
        ]
        added = {}
        texts = {describe(compressor) for compressor in shown.values()}
        for each in comparisons:
            text = key = describe(each.nearest)
            if not each.assumed and text not in texts:
                while key in shown:  # a user's name for something else
                    key += " (uniform)"
                shown[key], added[key] = each.nearest, each.name
                texts.add(text)
        return cls(shown, added, comparisons, unjudged)

    def measured(self) -> list[Measured]:
        """One for each compressor shown, and for each that only a comparison needs."""
        listed = [Measured(compressor, name) for name, compressor in self.shown.items()]
        texts = {describe(compressor) for compressor in self.shown.values()}
        for compressor in (compressor for each in self.comparisons for compressor in each.compressors):
            if describe(compressor) not in texts:
                texts.add(describe(compressor))
                listed.append(Measured(compressor, None))
        return listed


def report_tensors(
    keys: GivenLayers,
    values: GivenLayers,
    queries: GivenLayers | None = None,
    compressors: Compressors = DEFAULT,
    *,
    scaling: float | None = None,
    seed: int = 0,
    sinks: int = 4,
    compare: bool = True,
    progress: Progress | None = None,
) -> Report:
    """What each compressor does to these keys and values, without a model.

    `keys`, `values` `[batch, kv_heads, tokens, head_dim]`, torch or numpy, or a list of such, one a layer; float16,
    bfloat16 or float32. `queries` `[batch, query_heads, window, head_dim]`, those of the newest tokens, all after RoPE:
    without them there are no errors of the attention output, and the break-even is not weighted by attention. `scaling`
    of the logits: None for `head_dim ** -0.5`. `compressors`: texts of `kvcomp.quant.spec`, `Compressor` objects, or a
    mapping of names to these. `sinks`: how many first tokens the shares call sinks and the correlations leave out, as
    the experiment of VaSE (arXiv 2606.03928) does. `compare=False` measures no break-even and adds no compressor.

    Raises ValueError for shapes that do not fit, NaN and infinity, a text that cannot be read, and rows of which a
    quantizer would pack none.
    """
    check_sinks(sinks)
    layers = layers_of(keys, values, queries, scaling, seed)
    todo = Measurements.of(compressors, layers[0][0], compare)
    kv, seen = layers[0]
    settings = {
        **provenance(), "source": "tensors", "layers": len(layers), "shape": list(kv.keys.shape),
        "dtype": str(kv.keys.dtype).removeprefix("torch."), "seed": seed, "sinks": sinks,
        "window": 0 if seen.queries is None else seen.queries.shape[2],
    }  # fmt: skip
    return assemble(todo, measure_layers(layers, len(layers), todo, sinks, progress), settings, [], {})


def measure_layers(
    layers: Iterable[tuple[KV, Observed]],
    count: int,
    todo: Measurements,
    sinks: int,
    progress: Progress | None,
    window: int | None = None,
) -> list[Measured]:
    """Compresses `count` layers with everything in `todo`, and throws the result away layer by layer. `window`: as in
    `Pair.of`."""
    measured = todo.measured()
    for index, (kv, seen) in enumerate(layers):
        share = -(-POINTS // (count * kv.keys.shape[1]))
        for step, each in enumerate(measured):
            _measure(each, Pair.of(kv, seen, each.compressor, window), sinks, share)
            if progress is not None:
                progress("measuring", index * len(measured) + step + 1, count * len(measured))
    return measured


def _measure(each: Measured, pair: Pair, sinks: int, points: int) -> None:
    """Adds one layer to what is known about a compressor."""
    queries = pair.seen.queries
    each.stored.add(pair.result, pair.whole, 0 if queries is None else queries.shape[1])
    for head, part in enumerate(pair.heads()):
        keys, values = (float(side.sum()) for side in contributions(part))
        each.errors = each.errors[0] + keys, each.errors[1] + values
        figures = measure_head(part, each.shown or "", head, sinks)
        numbers = (keys, values, *asdict(figures).values())
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            raise ValueError(
                f"errors in layer {pair.seen.layer} overflow with {each.compressor!r}: scale the rows down"
            )
        if each.shown is not None:
            each.heads.append(figures)
            each.points += sample(part, head, points, sinks)


def assemble(
    todo: Measurements,
    measured: list[Measured],
    settings: dict[str, Any],
    notes: list[str],
    model: dict[str, ModelFigures],
) -> Report:
    """The report of all that was measured; `model`: figures of a model by the name of the compressor."""
    errors = {describe(each.compressor): each.errors for each in measured}
    weighted = bool(settings["window"])
    shown = [each for each in measured if each.shown is not None]
    judged = [each.result(errors, weighted) for each in todo.comparisons]
    return Report(
        [_figures(each, todo.added, model) for each in shown],
        [each for each in judged if each is not None],
        [head for each in shown for head in each.heads],
        {str(each.shown): each.points for each in shown},
        [*notes, *_notes(settings, judged, shown), *_unjudged(todo)],
        {**settings, "compressors": {str(each.shown): repr(each.compressor) for each in shown}},
    )


def _figures(each: Measured, added: dict[str, str], model: dict[str, ModelFigures]) -> Figures:
    stored, name = each.stored, str(each.shown)
    columns = [column for column in asdict(each.heads[0]) if column not in ("compressor", "layer", "head")]
    return Figures(
        name, repr(each.compressor), added.get(name), stored.parts, stored.full, stored.bits, stored.older_bits,
        stored.bits_at_16, stored.decode_bytes, stored.layer_bytes,
        {column: mean(getattr(head, column) for head in each.heads) for column in columns}, model.get(name),
    )  # fmt: skip


def _notes(settings: dict[str, Any], judged: list[BreakEven | None], shown: list[Measured]) -> list[str]:
    notes = [
        f"Correlations leave out the first {settings['sinks']} tokens, as the experiment of VaSE (arXiv 2606.03928) "
        "does."
    ]
    if not settings["window"]:
        notes.append("No queries were given: no error of the attention output, no weights in the break-even.")
    if settings["dtype"] == "float32":
        notes.append(
            "The rows are float32, so exact and recent rows are stored in 32 bits; break-even and plots count exact "
            "rows at 16 bits."
        )
    if any(each.compressor.accumulates or each.compressor.remembers for each in shown):
        notes.append("Methods that accumulate attention or remember queries were given the recorded queries only.")
    if any(each is None for each in judged):
        notes.append("A quantizer without any error has no break-even.")
    return notes


def _unjudged(todo: Measurements) -> list[str]:
    if not todo.unjudged:
        return []
    return [
        f"No break-even for {', '.join(todo.unjudged)}: either no uniform setting has more bits and a smaller error, "
        "or the rows are too few for a share of them to be exact."
    ]
