"""A report as tables and sentences: for the terminal, and the cells that the HTML page shows too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcomp.memory import size
from kvcomp.report.figures import BreakEven, Figures, Report
from kvcomp.report.storage import PARTS

NONE = "-"


@dataclass(frozen=True)
class Sheet:
    """A table: `title`, `caption` (what the columns are, with units), `columns` and the text of every cell."""

    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]


def summary(report: Report) -> Sheet:
    """One line a compressor: bits, errors, and what the model does."""
    columns: list[tuple[str, Callable[[Figures], str]]] = [
        ("bits", lambda each: f"{each.bits:.2f}"),
        ("older", lambda each: f"{each.older_bits:.2f}"),
        ("@16", lambda each: f"{each.bits_at_16:.2f}"),
        ("K err %", lambda each: _percent(each.errors["key_error"])),
        ("V err %", lambda each: _percent(each.errors["value_error"])),
        ("K dB", lambda each: _number(each.errors["key_snr"], 1)),
        ("V dB", lambda each: _number(each.errors["value_snr"], 1)),
    ]
    if any(each.errors["output_error"] is not None for each in report.figures):
        columns.append(("out err %", lambda each: _percent(each.errors["output_error"])))
    if any(each.model is not None for each in report.figures):
        columns += [
            ("KL nats", lambda each: NONE if each.model is None else f"{each.model.kl:.5f}"),
            ("top-1 %", lambda each: NONE if each.model is None else _percent(each.model.top_1)),
            ("ppl", lambda each: NONE if each.model is None else f"{each.model.perplexity:.4f}"),
        ]
    caption = (
        "bits: stored bits per element of keys and values, positions included; older: without the recent rows; @16: of "
        "older rows without positions, exact rows counted at 16 bits. err: relative error of older rows, mean over "
        "layers and KV heads; dB: signal to noise; out: of the attention output. KL, top-1 agreement and perplexity: "
        "against the full cache."
    )
    full = next((each.model.full_perplexity for each in report.figures if each.model is not None), None)
    caption += "" if full is None else f" Perplexity of the full cache: {full:.4f}."
    caption += "".join(
        f" *{each.compressor}: added, the uniform setting with the bits nearest to those of {each.equal_bits_of}."
        for each in report.figures
        if each.equal_bits_of is not None
    )
    rows = [[_name(each), *(cell(each) for _, cell in columns)] for each in report.figures]
    return Sheet("Errors", caption, ["compressor", *(name for name, _ in columns)], rows)


def storage(report: Report) -> Sheet:
    """One line a compressor: bytes by part, and what a step needs besides."""
    columns: list[tuple[str, Callable[[Figures], str]]] = [
        *((part, partial(_part, part)) for part in PARTS),
        ("total", lambda each: size(each.stored)),
        ("ratio", lambda each: f"{each.full / each.stored:.2f}"),
        ("step", lambda each: size(each.decode_bytes) if each.decode_bytes else NONE),
        ("decoded", lambda each: size(each.layer_bytes) if each.layer_bytes else NONE),
    ]
    caption = (
        "Stored bytes of all layers by part (scales with zero points; exact: other rows in the model dtype); ratio: "
        "how many times as much a cache takes that keeps every row. Transient bytes of one layer, at least: step: "
        "logits and probabilities of a step that reads the codes; decoded: keys and values where a whole layer is "
        "decoded (prefill, other attentions)."
    )
    if any(each.model is not None for each in report.figures):
        columns.append(("cache", lambda each: NONE if each.model is None else size(each.model.held)))
        caption += " cache: held by the cache after reading, with new rows, room for more and recorded queries."
    rows = [[_name(each), *(cell(each) for _, cell in columns)] for each in report.figures]
    return Sheet("Bytes", caption, ["compressor", *(name for name, _ in columns)], rows)


def shares(report: Report) -> Sheet:
    """One line a compressor: where the error is, and how it goes with the range."""
    columns = {
        "V max/med": "value_spread", "V r": "value_fit", "V@2%": "value_top_2", "V@5%": "value_top_5",
        "V@10%": "value_top_10", "V sinks": "value_sinks", "K max/med": "key_spread", "K r": "key_fit",
        "K@5%": "key_top_5", "K sinks": "key_sinks",
    }  # fmt: skip
    rows = [
        [_name(each), *(_cell(name, each.errors[name]) for name in columns.values())] for each in report.figures
    ]  # fmt: skip
    caption = (
        "max/med: largest over median range (max - min over channels) of a row; r: correlation of a row's mean squared "
        "error with its range, over packed rows; @2%, @5%, @10%: share [%] of the squared error in so many of the "
        f"older rows, those of largest value range; sinks: in the first {report.settings['sinks']} tokens [%]. Means "
        "over layers and KV heads."
    )
    return Sheet("Where the error is", caption, ["compressor", *columns], rows)


def layers(report: Report, compressor: str) -> Sheet:
    """One line a layer, means over its KV heads."""
    columns = {
        "K err %": "key_error", "V err %": "value_error", "out err %": "output_error", "K max/med": "key_spread",
        "V max/med": "value_spread", "K r": "key_fit", "V r": "value_fit",
    }  # fmt: skip
    found = {name: dict(report.by_layer(compressor, name)) for name in columns.values()}
    rows = [
        [str(layer), *(_cell(name, held.get(layer)) for name, held in found.items())] for layer in found["key_error"]
    ]
    return Sheet(f"Layers: {compressor}", "Means over KV heads; columns as above.", ["layer", *columns], rows)


def sentence(each: BreakEven, report: Report) -> str:
    """A break-even in words."""
    pays = "pays" if each.pays else "does not pay"
    where = "these rows" if report.settings["source"] == "tensors" else "this model"
    error = "attention-weighted error" if each.weighted else "error"
    steps = [each.lower] if each.upper is None else [each.lower, each.upper]
    uniform = ", ".join(f"{name} at {bits:.2f} bit: {_cell('', removed)} %" for name, bits, removed in steps)
    rows = f"{_cell('', each.share)} % exact rows ({each.exact_by})"
    rows = f"It has none; {rows} would cost" if each.assumed else f"{rows} cost"
    return (
        f"{each.compressor}: {pays} on {where}. {rows} {each.cost:.2f} bit over {each.base_bits:.2f} and remove "
        f"{_cell('', each.carried)} % of the {error} (of keys' {_cell('', each.carried_keys)} %, of values' "
        f"{_cell('', each.carried_values)} %); break-even: the same bits on every row remove "
        f"{_cell('', each.needed)} % ({uniform})."
    )


def show(report: Report, console: Console, by_layer: bool = False) -> None:
    """Prints the tables, what was read, the break-evens and the notes; with `by_layer` a table of the layers of each
    compressor."""
    sheets = [summary(report), storage(report), shares(report)]
    if by_layer:
        sheets += [layers(report, each.compressor) for each in report.figures]
    for sheet in sheets:
        console.print(_rich(sheet))
    console.print(escape(f"{report.settings['source']}: {read(report)}"), highlight=False)
    if report.break_even:
        console.print("[bold]Break-even of exact rows[/bold] (counted at 16 bits)")
    for each in report.break_even:
        console.print(escape(sentence(each, report)), style="green" if each.pays else "yellow", highlight=False)
    for note in report.notes:
        console.print(escape(note), style="dim", highlight=False)


def read(report: Report) -> str:
    """What was read, and in which dtype."""
    shape = " x ".join(map(str, report.settings["shape"]))
    return f"{shape} {'rows' if report.settings['source'] == 'tensors' else 'tokens'}, {report.settings['dtype']}"


def _rich(sheet: Sheet) -> Table:
    table = Table(
        title=escape(sheet.title), caption=escape(sheet.caption), title_justify="left", caption_justify="left"
    )
    for index, column in enumerate(sheet.columns):
        side = {"justify": "right", "no_wrap": True} if index else {"min_width": 20, "overflow": "fold"}
        table.add_column(escape(column), **side)  # type: ignore[arg-type]
    for row in sheet.rows:
        table.add_row(*map(escape, row))
    return table


def _part(part: str, each: Figures) -> str:
    return size(each.bytes[part]) if each.bytes[part] else NONE


def _name(each: Figures) -> str:
    return each.compressor if each.equal_bits_of is None else f"*{each.compressor}"


def _cell(name: str, value: float | None) -> str:
    """A ratio or correlation as it is, everything else in percent."""
    return _number(value, 2) if name.endswith(("spread", "fit")) else _percent(value)


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.2f}"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
