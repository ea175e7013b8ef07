"""Figures of a report as PNG, drawn with matplotlib (the extra `report`)."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomp.report.figures import Figures, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Told apart by most people with a colour vision deficiency (Okabe and Ito, yellow replaced)."""
MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Plot:
    """A drawn figure: name of its file without ending, its title, what it shows (for readers who do not see it), the
    PNG."""

    name: str
    title: str
    text: str
    png: bytes


def require_matplotlib() -> None:
    """Raises ValueError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots and the HTML page need matplotlib: pip install 'kvcomp[report]', or leave plots out")


def draw(report: Report) -> list[Plot]:
    """Error by layer, error against range, error against bits; without those that would be empty, as nothing has such
    an error. Raises ValueError if matplotlib is not installed."""
    require_matplotlib()
    names = ", ".join(each.compressor for each in report.figures)
    drawn = [
        (
            "error_by_layer",
            "Relative error by layer, mean over KV heads. Dashed: added for equal bits.",
            f"Line plots of the relative error of keys, values and attention output by layer, for {names}",
            _by_layer(report),
        ),
        (
            "error_against_range",
            "Error of single rows against their range, both logarithmic; r: mean correlation within a layer and head, "
            "on linear scales. Some rows of every layer and head, none of the first tokens.",
            f"Scatter plots of the mean squared error of single rows against their range, keys and values, for {names}",
            _against_range(report),
        ),
        (
            "error_against_bits",
            "Errors against bits per element: lower and further left is better.",
            f"Each compressor as a point at its bits per element and its error: {names}",
            _against_bits(report),
        ),
    ]
    return [Plot(name, title, text, _png(figure)) for name, title, text, figure in drawn if figure is not None]


def write(plots: list[Plot], folder: Path) -> list[Path]:
    """Writes the PNG files and says where."""
    paths = [folder / f"{plot.name}.png" for plot in plots]
    for plot, path in zip(plots, paths, strict=True):
        path.write_bytes(plot.png)
    return paths


def _by_layer(report: Report) -> Figure | None:
    sides = {"key_error": "keys", "value_error": "values", "output_error": "attention output"}
    sides = {name: title for name, title in sides.items() if any(getattr(head, name) for head in report.heads)}
    if not sides:
        return None
    figure, axes = _panels(len(sides), share_y=True)
    for axis, (name, title) in zip(axes, sides.items(), strict=True):
        for each, style in _styles(report):
            points = [(layer, 100 * error) for layer, error in report.by_layer(each.compressor, name) if error]
            axis.plot(*_columns(points), label=_label(each.compressor), markersize=3.5, linewidth=1.2, **style)
        axis.set(title=title, xlabel="layer", yscale="log")
        _ticks(axis.yaxis)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("relative error [%]")
    return _finished(figure, axes)


def _against_range(report: Report) -> Figure | None:
    points = [point for found in report.points.values() for point in found]
    sides = {"values": (2, 3), "keys": (4, 5)}
    sides = {  # a logarithmic axis needs a point above 0
        title: (first, second)
        for title, (first, second) in sides.items()
        if any(point[first] > 0 and point[second] > 0 for point in points)
    }
    if not sides:
        return None
    figure, axes = _panels(len(sides), width=5.4)
    for axis, (title, columns) in zip(axes, sides.items(), strict=True):
        for each, style in _styles(report):
            both = [tuple(point[column] for column in columns) for point in report.points[each.compressor]]
            both = [point for point in both if min(point) > 0]
            fits = ", ".join(
                f"{side} {each.errors[name]:.2f}"
                for side, name in (("V", "value_fit"), ("K", "key_fit"))
                if each.errors[name] is not None
            )
            axis.plot(
                *_columns(both), label=_label(f"{each.compressor} (r: {fits})" if fits else each.compressor),
                linestyle="none", markersize=3, markeredgewidth=0, alpha=0.5,
                marker=style["marker"], color=style["color"],
            )  # fmt: skip
        axis.set(
            title=title, xlabel="range of the row, max - min over channels", ylabel="mean squared error of the row",
            xscale="log", yscale="log",
        )  # fmt: skip
        _ticks(axis.xaxis)
        _ticks(axis.yaxis)
    return _finished(figure, axes)


def _against_bits(report: Report) -> Figure | None:
    sides: dict[str, Callable[[Figures], float]] = {
        "keys and values: relative error [%]": lambda each: (
            50 * sum(each.errors[name] or 0.0 for name in ("key_error", "value_error"))
        ),
        "attention output: relative error [%]": lambda each: 100 * (each.errors["output_error"] or 0.0),
        "KL to the full cache [nats per token]": lambda each: 0.0 if each.model is None else each.model.kl,
    }
    sides = {title: error for title, error in sides.items() if any(map(error, report.figures))}
    if not sides:
        return None
    figure, axes = _panels(len(sides))
    for axis, (title, error) in zip(axes, sides.items(), strict=True):
        for each, style in _styles(report):
            if error(each) > 0:
                style["linestyle"] = "none"
                axis.plot([each.bits_at_16], [error(each)], label=_label(each.compressor), markersize=8, **style)
        axis.set(title=title, xlabel="bits per element (older rows, exact ones at 16)", yscale="log")
        axis.margins(0.12)
        _ticks(axis.yaxis)
    return _finished(figure, axes)


def _panels(count: int, share_y: bool = False, width: float = 4.2) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width * count, 8), 4.4), dpi=130, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, sharey=share_y)[0]
    for axis in axes:
        axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _ticks(axis: Any) -> None:
    """Plain numbers on a logarithmic axis: 1, 2 and 5 times a power of ten on a short one, so that none is without
    labels, and powers of ten on a long one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _styles(report: Report) -> Iterator[tuple[Figures, dict[str, Any]]]:
    """Each compressor with its colour and marker; one that was added for equal bits is drawn dashed."""
    for index, each in enumerate(report.figures):
        dashed = "--" if each.equal_bits_of is not None else "-"
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
        yield each, {"color": colour, "marker": marker, "linestyle": dashed}


def _label(text: str) -> str:
    """`text` as matplotlib shows it: $ would begin a formula, and what begins with _ is left out of a legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _columns(points: list[Any]) -> tuple[list[Any], list[Any]]:
    return [point[0] for point in points], [point[1] for point in points]


def _finished(figure: Figure, axes: list[Any]) -> Figure:
    """With one legend below all panels, in as many columns as the longest text leaves room for."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if found:
        room = 13 * figure.get_figwidth()  # characters of this size
        columns = min(len(found), 4, max(1, int(room / (max(map(len, found)) + 6))))
        legend = figure.legend(
            list(found.values()), list(found), loc="outside lower center", ncols=columns, fontsize=9, frameon=False
        )
        for handle in legend.legend_handles:
            if handle is not None:
                handle.set(alpha=1, markersize=6)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
