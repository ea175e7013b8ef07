"""What a report is written to: tables, JSON, CSV, plots, and a page that needs nothing else."""

import base64
import csv
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from support import run_python

from kvcomp.report import ModelFigures, Report, report_tensors, table
from kvcomp.report.build import Measurements, assemble, measure_layers
from kvcomp.report.cli import write
from kvcomp.report.inputs import layers_of
from kvcomp.report.plots import _label, draw
from kvcomp.report.provenance import _commit

NAMES = ["k8v4", "int4 g32 exact=0.1", "a <b> & [bold]c[/bold] \"d\" 'e'"]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report():
    """Two layers, as of a model: a name with markup in it, and a full cache without any error."""
    torch.manual_seed(0)
    keys, values, queries = torch.randn(2, 1, 2, 200, 64), torch.randn(2, 1, 2, 200, 64), torch.randn(2, 1, 4, 16, 64)
    layers = layers_of(list(keys), list(values), list(queries), None, 0)
    todo = Measurements.of(dict(zip(NAMES, ["k8v4", "int4 g32 exact=0.1", "full"], strict=True)), layers[0][0], True)
    settings = report_tensors(keys[0], values[0], queries[0], ["int8"]).settings | {"source": "a/model"}
    measured = measure_layers(layers, 2, todo, 4, None)
    model = {name: ModelFigures(0.001, 0.99, 12.5, 12.25, 100, 12345) for name in NAMES}
    return assemble(todo, measured, settings, ["Layers 1 are left out."], model)


@pytest.fixture(scope="module")
def folder(report, tmp_path_factory):
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("report") / "new" / "folder"
    names = [each.name for each in write(report, path)]
    assert names == [
        "report.json", "report.csv", "report.html",
        "error_by_layer.png", "error_against_range.png", "error_against_bits.png",
    ]  # fmt: skip
    return path


class Page(HTMLParser):
    """Counts tags, gathers attributes and the text of cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.cells, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data
        self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def test_json_holds_everything(report, folder):
    text = (folder / "report.json").read_text()
    assert Report.from_json(text) == report
    held = json.loads(text)
    assert held["format"] == "kvcomp report" and held["version"] == 1
    assert {"command", "kvcomp", "torch", "transformers", "seed", "window", "dtype", "machine", "compressors"} <= set(
        held["settings"]
    )
    assert held["settings"]["compressors"]["k8v4"].startswith("MixedPrecision(")
    for text in ("{}", '{"format": "kvcomp report", "version": 2}', "[]"):
        with pytest.raises(ValueError, match="no kvcomp report of version 1"):
            Report.from_json(text)
    with pytest.raises(KeyError, match="nothing"):
        report.of("nothing")


def test_csv_has_a_line_for_each_head(report, folder):
    with (folder / "report.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(report.heads) == 2 * 2 * len(report.figures)
    for line, head in zip(lines, report.heads, strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in asdict(head).items()}


def test_the_tables_show_every_compressor(report):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    table.show(report, console, by_layer=True)
    text = console.export_text()
    for each in report.figures:
        assert text.count(each.compressor[:10]) >= 4
        assert f"Layers: {each.compressor}" in text
    assert NAMES[2] in text  # not read as markup
    assert "does not pay on this model" in text and "Perplexity of the full cache: 12.2500" in text
    assert "Layers 1 are left out." in text and "Correlations leave out the first 4 tokens" in text
    assert "added, the uniform setting" in text.replace("\n", " ")


def test_plots_are_images(folder):
    for path in folder.glob("*.png"):
        data = path.read_bytes()
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert data.startswith(b"\x89PNG") and width > 900 and height > 500


def test_without_any_error_there_is_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    rows = torch.ones(1, 1, 100, 64)
    for compressors, queries in ((["full"], None), (["full", "vase-attnv budget=95"], rows), (["int4"], rows)):
        folder = tmp_path / compressors[-1]
        names = {each.name for each in write(report_tensors(rows, rows, queries, compressors), folder)}
        assert {"report.json", "report.csv", "report.html"} <= names and "error_against_range.png" not in names


def test_the_commit_is_that_of_a_folder_that_git_tracks(tmp_path):
    def git(*arguments):
        return subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True, text=True).stdout

    git("init")
    (tmp_path / "__init__.py").write_text("")
    assert _commit(tmp_path) == {}
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=b", "commit", "-m", "c")
    head = git("rev-parse", "HEAD").strip()
    assert _commit(tmp_path) == {"commit": head}
    (tmp_path / "__init__.py").write_text("changed")
    assert _commit(tmp_path) == {"commit": head + "+"}


def test_labels_are_shown_as_they_are(tmp_path):
    pytest.importorskip("matplotlib")
    rows = torch.randn(1, 1, 90, 16)
    report = report_tensors(rows, rows, compressors={"a $\\frac$ b": "int4", "_hidden": "int8"})
    assert len(draw(report)) == 3
    assert _label("_a $ b") == r" _a \$ b"


def test_numbers_are_written_before_plots_are_drawn(report, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("kvcomp.report.plots.draw", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(report, tmp_path)
    assert Report.from_json((tmp_path / "report.json").read_text()) == report and (tmp_path / "report.csv").exists()


def test_the_page_needs_nothing_else(report, folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not page.open
    assert not page.all("script") and not page.all("link")
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "data"):
            assert not re.match(r"(?i)\s*(https?:)?//", attributes.get(name) or "")
    assert "@import" not in text and "url(" not in text
    images = page.all("img")
    assert len(images) == 3
    for image in images:
        assert len(image["alt"]) > 40 and NAMES[2] in image["alt"]
        kind, data = image["src"].split(",", 1)
        assert kind == "data:image/png;base64" and base64.b64decode(data).startswith(b"\x89PNG")
    assert len(page.all("table")) == 3 + len(report.figures)
    for sheet in (table.summary(report), table.shares(report), table.storage(report)):
        for cell in [*sheet.columns, *(cell for row in sheet.rows for cell in row)]:
            assert cell in page.cells
    assert all(table.sentence(each, report) in page.text for each in report.break_even)


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed (Debian: apt install chromium)")
def test_a_browser_shows_tables_and_figures(folder, tmp_path):
    # The page counts what was really laid out and decoded, in a copy, as it has no script of its own.
    count = (
        "<script>addEventListener('load', () => { const shown = (tag, ok) => "
        "[...document.getElementsByTagName(tag)].filter(ok).length; document.title = "
        "'tables ' + shown('table', e => e.rows.length > 1 && e.closest('details') === null && e.offsetHeight > 40) + "
        "' figures ' + shown('img', e => e.complete && e.naturalWidth > 900 && e.offsetWidth > 500) + "
        "' wide ' + (document.documentElement.scrollWidth > innerWidth) })</script>"
    )
    copy = tmp_path / "copy.html"
    copy.write_text((folder / "report.html").read_text().replace("</body>", count + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [BROWSER, *options, "--window-size=1300,2000", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", shown.stdout)
    assert title is not None, shown.stderr[-500:]
    assert title[1] == "tables 3 figures 3 wide false"


def test_imports_and_mistakes_without_matplotlib():
    code = """
import sys, torch
import kvcomp, kvcomp.cli, kvcomp.report
assert not {"matplotlib", "pandas", "bitsandbytes"} & set(sys.modules), "imported early"
sys.modules["matplotlib"] = None
from pathlib import Path
from kvcomp.quant.spec import parse_compressor
from kvcomp.report import report_tensors
from kvcomp.report.cli import write
rows = torch.randn(1, 1, 90, 16)
report = report_tensors(rows, rows, compressors=["int4"])
def attempt(call):
    try:
        call()
    except (ValueError, TypeError) as error:
        print(type(error).__name__, error)
attempt(lambda: write(report, Path("never")))
attempt(lambda: report_tensors(rows, rows, compressors=[4]))
attempt(lambda: parse_compressor("int4 exact=much"))
from typer.testing import CliRunner
done = CliRunner().invoke(kvcomp.cli.app, ["report", "--model", "m", "--out", "never"])
print(done.exit_code, done.stderr.replace("\\n", " "))
print(Path("never").exists())
"""
    lines = run_python(code).splitlines()
    assert lines[0].startswith("ValueError plots and the HTML page need matplotlib: pip install 'kvcomp[report]'")
    assert lines[1].startswith("TypeError 4 is no Compressor: pass for example")
    assert lines[2].endswith("exact must be a float, got 'much'")
    assert lines[3].startswith("2 error: plots and the HTML page need matplotlib") and lines[4] == "False"
