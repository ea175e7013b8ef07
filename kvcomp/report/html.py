"""A report as one HTML page that needs nothing else: style, tables and figures are inside it."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

from kvcomp.report import table
from kvcomp.report.figures import Report
from kvcomp.report.plots import Plot
from kvcomp.report.table import Sheet

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .55rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #888; } th:first-child, td:first-child { text-align: left; }
tbody tr:hover { background: #f3f6fa; }
.note, figcaption, p.caption { color: #555; font-size: .88rem; max-width: 60rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
li.pays { border-left: 4px solid #009e73; } li.loses { border-left: 4px solid #d55e00; }
ul.verdicts { list-style: none; padding: 0; } ul.verdicts li { padding: .3rem .8rem; margin: .5rem 0; }
summary { cursor: pointer; font-weight: 600; margin-top: .6rem; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .8rem; }
"""


def page(report: Report, plots: list[Plot]) -> str:
    """The whole page. Every figure is an image inside it with a text for those who do not see it."""
    settings = report.settings
    title = f"Quantization error report: {settings['source']}"
    verdicts = "".join(
        f'<li class="{"pays" if each.pays else "loses"}">{html.escape(table.sentence(each, report))}</li>'
        for each in report.break_even
    )
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="note">{html.escape(table.read(report))}; kvcomp {html.escape(str(settings["kvcomp"]))}, '
        f"{html.escape(str(settings['date']))}</p>",
        _sheet(table.summary(report)),
        f'<h2>Break-even of exact rows</h2><ul class="verdicts">{verdicts}</ul>' if verdicts else "",
        "<h2>Figures</h2>",
        *map(_figure, plots),
        _sheet(table.shares(report)),
        _sheet(table.storage(report)),
        "<h2>By layer</h2>",
        *(_folded(table.layers(report, each.compressor)) for each in report.figures),
        "<h2>Notes</h2><ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in report.notes) + "</ul>",
        f"<h2>Settings</h2><pre>{html.escape(json.dumps(settings, indent=1))}</pre>",
    ]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def write(report: Report, plots: list[Plot], path: Path) -> None:
    """Writes the page."""
    path.write_text(page(report, plots), encoding="utf-8")


def _sheet(sheet: Sheet) -> str:
    return f"<h2>{html.escape(sheet.title)}</h2>{_table(sheet)}"


def _folded(sheet: Sheet) -> str:
    return f"<details><summary>{html.escape(sheet.title)}</summary>{_table(sheet)}</details>"


def _table(sheet: Sheet) -> str:
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in sheet.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in sheet.rows
    )  # fmt: skip
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<p class="caption">{html.escape(sheet.caption)}</p>'
    )


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.png).decode("ascii")
    text = html.escape(plot.text, quote=True)
    return (
        f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(plot.title)}</figcaption></figure>"
    )
