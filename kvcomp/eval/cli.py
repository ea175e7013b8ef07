"""The commands `kvcomp eval` and `kvcomp compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvcomp.eval.records import Record, read
from kvcomp.eval.stats import Summary, by_problem, difference
from kvcomp.evict import METHODS
from kvcomp.memory import size
from kvcomp.methods import build_method
from kvcomp.report.cli import plain_errors, wide

EXAMPLES = """[bold]Examples[/bold]

MATH-500 with a quarter of the rows, eight samples a problem, on every GPU of the machine:

  accelerate launch -m kvcomp.cli eval --model Qwen/Qwen3-4B --task math500 --budget 1024 --out vase.jsonl \\
      --samples 8 --temperature 0.6 --top-p 0.95 --batch 8 --device auto

Without the hub, on the small model that experiments/reasoner/train.py trains; then both runs side by side:

  kvcomp eval --model reasoner --task registers --method full --limit 100 --batch 50 --out full.jsonl
  kvcomp eval --model reasoner --task registers --method snapkv --budget 161 --interval 16 --set recent=48 \\
      --limit 100 --batch 50 --out snapkv.jsonl
  kvcomp compare full.jsonl snapkv.jsonl

A run that was stopped goes on with the same command."""

Settings: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the method, name=value; repeatable.")
]
Source: TypeAlias = Annotated[
    str | None, typer.Option(help="A local file or folder with the problems; seeds such as 0:100 for generated ones.")
]
Files: TypeAlias = Annotated[list[Path], typer.Argument(help="Files of kvcomp eval.", exists=True, dir_okay=False)]
console = Console(stderr=True)


def evaluate(
    model: Annotated[str, typer.Option(help="Hub id, folder, .gguf file, smollm2-135m, or reasoner.")],
    task: Annotated[str, typer.Option(help="gsm8k, math500, registers, ..., or a .jsonl file of your own.")],
    out: Annotated[Path, typer.Option(help="File of the completions, one line of JSON each.", dir_okay=False)],
    task_file: Source = None,
    limit: Annotated[int | None, typer.Option(help="First problems only.", min=1)] = None,
    samples: Annotated[int | None, typer.Option(help="Completions a problem; else the task's.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Completions at a time.", min=1)] = 1,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}; or full.")] = "vase-attnv",
    budget: Annotated[int, typer.Option(help="Rows kept per KV head.")] = 1024,
    interval: Annotated[int, typer.Option(help="New tokens between two compressions.")] = 64,
    protect_prompt: Annotated[bool, typer.Option(help="Never evict a prompt token.")] = False,
    set_: Settings = None,
    quantize: Annotated[str | None, typer.Option(help="How to pack the rows kept: k8v4, ...")] = None,
    seed: Annotated[int, typer.Option(help="Fixes eviction noise and sampling.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest completion; else the task's.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="With a temperature: mass to draw from.", max=1.0)] = 1.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    attention: Annotated[str, typer.Option(help="sdpa, eager or flash_attention_2.")] = "sdpa",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto: the one accelerate gives this process.")] = "cpu",
) -> None:
    """Solve the problems of a task with a compressed cache, and say how many answers are right."""
    settings = {name: value for name, value in locals().items() if name not in NOT_SETTINGS}
    with plain_errors(console):
        _evaluate(settings, out, batch, device)


NOT_SETTINGS = ("out", "batch", "device")
"""Options that change no result."""


def _evaluate(settings: dict[str, Any], out: Path, batch: int, device: str) -> None:
    from kvcomp.eval import run, tasks
    from kvcomp.eval.decode import Decoding
    from kvcomp.models import load

    task = tasks.find(settings["task"])
    compressor = build_method(
        settings["method"], settings["budget"], settings["protect_prompt"], settings["set_"] or [], settings["quantize"]
    )
    longest = settings["max_new_tokens"] or task.max_new_tokens
    how = Decoding(
        compressor, settings["interval"], longest, settings["temperature"], settings["top_p"], settings["seed"]
    )
    problems = task.load(settings["task_file"])[: settings["limit"]]
    place = _place(device)
    network, tokenizer = load(settings["model"], settings["dtype"], settings["attention"], place)
    samples = settings["samples"] or (task.samples if how.temperature else 1)
    settings = settings | {"samples": samples, "max_new_tokens": longest, "compressor": repr(compressor)}
    with _bar() as bar:
        line = bar.add_task(f"{task.name}, {settings['method']}", total=len(problems) * samples)
        records = run.evaluate(
            task, problems, network, tokenizer, how, out, settings, samples, batch, lambda record: bar.advance(line)
        )
    if _is_main():
        wide(stderr=True).print(table({out.name: records}))


def compare(files: Files) -> None:
    """Print the figures of runs, and the paired difference of each to the first one."""
    with plain_errors(console):
        short = len({path.name for path in files}) == len(files)
        runs = {path.name if short else str(path): read(path) for path in files}
        wide().print(table(runs))


def table(runs: dict[str, list[Record]]) -> Table:
    """A line a run; differences to the first one where there are several."""
    shown = Table("run", "problems", "right", "± error", "cut off", "looped", "tokens", "KV cache", "seconds")
    if len(runs) > 1:
        shown.add_column("difference, 95 %", no_wrap=True)
    first = next(iter(runs.values()))
    for name, records in runs.items():
        figures = Summary.of(records)
        cells = [
            name, str(figures.problems), f"{figures.accuracy:.3f}", f"{figures.error:.3f}", f"{figures.cut:.3f}",
            f"{figures.looped:.3f}", f"{figures.tokens:.0f}", size(round(figures.kv_bytes)), f"{figures.seconds:.1f}",
        ]  # fmt: skip
        if len(runs) > 1:
            change = difference(by_problem(records), by_problem(first))
            cells.append("" if records is first else f"{change.mean:+.3f} ({change.low:+.3f} to {change.high:+.3f})")
        shown.add_row(*cells)
    return shown


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not _is_main())


def _is_main() -> bool:
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def _place(device: str) -> str:
    if device != "auto":
        return device
    from accelerate import PartialState

    return str(PartialState().device)
