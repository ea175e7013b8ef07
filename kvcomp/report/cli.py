"""The command `kvcomp report`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bar

from kvcomp.quant.spec import KNOWN
from kvcomp.report.build import Progress
from kvcomp.report.figures import Report
from kvcomp.report.inputs import DEFAULT, named

EXAMPLES = f"""[bold]Examples[/bold]

Two settings on a text of your own, with tables, plots and a page in a folder:

  kvcomp report --model Qwen/Qwen3-0.6B --text notes.txt --compressor k8v4 --compressor "int4 exact=0.05" --out report

An evictor before a quantizer, in 16 bit, errors of the rows only:

  kvcomp report --model ./my-model --compressor "vase-attnv budget=512 | k4v4_rotated" --dtype bfloat16 --no-predict

[bold]A compressor[/bold]: {KNOWN}."""
NARROWEST = 120
"""Columns of a terminal that the tables ask for; they wrap in a narrower one."""
CHARACTERS = 32
"""Characters of the text that are looked at for each token that is read."""


Text: TypeAlias = Annotated[
    Path | None, typer.Option(help="What is read; else Python's help topics.", exists=True, dir_okay=False)
]
Out: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder for report.json, .csv, .html and PNG plots.", file_okay=False)
]


def wide(stderr: bool = False) -> Console:
    """A console of at least `NARROWEST` columns."""
    printed = Console(stderr=stderr)
    return printed if printed.width >= NARROWEST else Console(width=NARROWEST, stderr=stderr)


def report(
    model: Annotated[str, typer.Option(help="Hub id, folder, .gguf file, or smollm2-135m.")],
    text: Text = None,
    compressor: Annotated[list[str] | None, typer.Option(help=f"Repeatable; without it: {', '.join(DEFAULT)}.")] = None,
    out: Out = None,
    plots: Annotated[bool, typer.Option(help="With --out: draw plots and the page (extra `report`).")] = True,
    layers: Annotated[bool, typer.Option(help="Print a table of the layers of each compressor.")] = False,
    predict: Annotated[bool, typer.Option(help="Read the text through each cache: KL, top-1, perplexity.")] = True,
    length: Annotated[int, typer.Option(help="Tokens of the text; the second half is predicted.", min=2)] = 2048,
    window: Annotated[int, typer.Option(help="Last queries by which rows are judged.", min=1)] = 64,
    chunk: Annotated[int, typer.Option(help="Tokens of one forward while predicting.", min=1)] = 64,
    interval: Annotated[int, typer.Option(help="New tokens between two compressions.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Fixes all noise.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    attention: Annotated[str, typer.Option(help="sdpa, eager or flash_attention_2.")] = "sdpa",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")] = "cpu",
) -> None:
    """What compressors cost in bits and in errors on a model: rows, attention, predictions, and whether exact rows pay.

    The report goes to standard output, the progress to standard error.
    """
    console = Console(stderr=True)
    with plain_errors(console):
        compressors = named(compressor or DEFAULT)
        _prepare(out, plots)
        name, content = _text(text)
        source = (model, dtype, attention, device)
        settings = {"window": window, "chunk": chunk, "interval": interval, "seed": seed, "predict": predict}
        made = _measured(content[: CHARACTERS * length], length, source, compressors, settings, name, console)
    from kvcomp.report import table

    table.show(made, wide(), layers)
    if out is not None:
        with plain_errors(console):
            for path in write(made, out, plots):
                console.print(f"written: {escape(str(path))}", soft_wrap=True)


@contextmanager
def plain_errors(console: Console) -> Iterator[None]:
    """Ends the command with 2 and one line where the user asked for what cannot be done, without a traceback."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        console.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from error


def _prepare(out: Path | None, plots: bool) -> None:
    """Looks for all that writing needs before anything is measured, and makes the folder."""
    if out is None:
        return
    if plots:
        from kvcomp.report.plots import require_matplotlib

        require_matplotlib()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {out}: {error}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write into the folder {out}: no permission")


def write(report: Report, folder: Path, plots: bool = True) -> list[Path]:
    """Writes `report.json`, `report.csv` and, with `plots`, `report.html` and the PNG files, the numbers
    first. Raises ValueError if matplotlib is needed and not installed."""
    from kvcomp.report import html
    from kvcomp.report import plots as drawing

    if plots:
        drawing.require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.json", folder / "report.csv"]
    paths[0].write_text(report.to_json() + "\n", encoding="utf-8")
    report.write_csv(paths[1])
    if plots:
        drawn = drawing.draw(report)
        paths += [folder / "report.html", *drawing.write(drawn, folder)]
        html.write(report, drawn, paths[2])
    return paths


def _text(path: Path | None) -> tuple[str, str]:
    """Name and content of what is read. Raises ValueError if it is no text or empty."""
    if path is None:
        from pydoc_data import topics

        return "pydoc_data.topics", "\n\n".join(topics.topics.values())
    try:
        content = path.read_text("utf-8")
    except UnicodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not content.strip():
        raise ValueError(f"{path} is empty")
    return str(path), content


def _measured(
    text: str,
    length: int,
    source: tuple[str, str, str, str],
    compressors: dict[str, Any],
    settings: dict[str, Any],
    name: str,
    console: Console,
) -> Report:
    from kvcomp.models import load
    from kvcomp.report.model import quantization_report

    with console.status(f"loading {escape(source[0])}"):
        network, tokenizer = load(*source)
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)
    told = {"source": source[0], "text": name, "attention": source[2], "device": source[3]}
    with _progress(console) as progress:
        return quantization_report(network, inputs, compressors, **settings, progress=progress, settings=told)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar for each thing that is being done."""
    with Bar(console=console) as bar:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield advance
