"""Perplexity of SmolLM2-135M-Instruct while each method evicts.

The model reads stretches of 2,048 tokens, 64 at a time, through a `CompressedCache` with 512 rows per KV head and
interval 64: from the ninth forward (576 rows) on, each forward ends with a compression. The perplexity is
`exp(mean(-ln p(token)))`, without a unit, over the second half of each stretch (tokens 1024 to 2047). Methods that draw
noise run with several seeds, others on each stretch. `Random(protect_prompt=True)` is left out: a text without a prompt
has nothing to protect.

    python experiments/perplexity.py --text math --math-file math500.jsonl [--field solution]
    python experiments/perplexity.py --text topics
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from machine import provenance, write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from value_range import ValueRange

from kvcomp import CompressedCache, models
from kvcomp.core import Compressor
from kvcomp.evict import (
    H2O,
    RKV,
    TOVA,
    VATP,
    CurDKV,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    Random,
    Replay,
    SnapKV,
    StreamingLLM,
    VaSE,
)

LENGTH, CHUNK, BUDGET = 2048, 64, 512
FULL, RESAMPLED, FIXED, RANDOM, SMALLEST = "full cache", "VaSE dkv", "CurDKV", "Random", "smallest value ranges kept"
ORDERS = [
    ("a new G at each round beats one fixed G", RESAMPLED, FIXED),
    ("evicting the largest value ranges is worse than random", RANDOM, SMALLEST),
]
"""What is expected: the statement, and the method that should have the lower and the higher perplexity."""


class Text(StrEnum):
    """Where the tokens come from."""

    math = "math"
    topics = "topics"


@dataclass(frozen=True)
class Method:
    """A line of the table; `drawn`: its result depends on the seed."""

    name: str
    compressor: Compressor
    drawn: bool = False


@dataclass(frozen=True)
class Run:
    """One stretch read once: `nll` in nats per token, `seconds`, and rows and rounds of the first layer at the end."""

    stretch: int
    seed: int
    nll: float
    seconds: float
    rows: int
    rounds: int


def methods(budget: int) -> list[Method]:
    """Every method at `budget` rows with its own defaults; the full cache is a budget that is never reached."""
    return [
        Method(FULL, StreamingLLM(LENGTH)),
        Method("VaSE attnv", VaSE(budget), drawn=True),
        Method("VaSE attnv, stochastic=False", VaSE(budget, stochastic=False)),
        Method(RESAMPLED, VaSE(budget, scorer="dkv"), drawn=True),
        Method("VaSE dkv, stochastic=False", VaSE(budget, scorer="dkv", stochastic=False), drawn=True),
        Method(FIXED, CurDKV(budget), drawn=True),
        Method("SnapKV", SnapKV(budget)),
        Method("Replay", Replay(budget)),
        Method("R-KV", RKV(budget)),
        Method("R-KV simplified", RKV.simplified(budget)),
        Method(RANDOM, Random(budget), drawn=True),
        Method("H2O", H2O(budget)),
        Method("StreamingLLM", StreamingLLM(budget)),
        Method("TOVA", TOVA(budget)),
        Method("KeyDiff", KeyDiff(budget)),
        Method("KeyNorm", KeyNorm(budget)),
        Method("VATP", VATP(budget)),
        Method("ExpectedAttention", ExpectedAttention(budget)),
        Method("largest value ranges kept", ValueRange(budget, keep="largest")),
        Method(SMALLEST, ValueRange(budget, keep="smallest")),
    ]


def chosen(names: list[str] | None) -> list[Method]:
    """The methods of these names, and always the full cache; None: all. Raises typer.BadParameter for another name."""
    found = methods(BUDGET)
    if unknown := set(names or ()) - {method.name for method in found}:
        raise typer.BadParameter(f"no method {sorted(unknown)}; there are {[method.name for method in found]}")
    return [method for method in found if not names or method.name in (FULL, *names)]


def read_text(text: Text, math_file: Path | None, field: str) -> str:
    """The parts of the text joined with blank lines. Raises typer.BadParameter if the math file is not given."""
    if text is Text.topics:
        return "\n\n".join(pydoc_data.topics.topics.values())
    if math_file is None:
        raise typer.BadParameter("--text math needs --math-file, a JSON Lines file such as MATH-500")
    lines = math_file.read_text(encoding="utf-8").splitlines()
    return "\n\n".join(json.loads(line)[field] for line in lines if line.strip())


def cut(text: str, tokenizer: PreTrainedTokenizerBase, count: int, skip: int = 0) -> torch.Tensor:
    """`count` disjoint stretches `[count, LENGTH]`, after `skip` others. Raises typer.BadParameter if the text is
    shorter."""
    tokens, stop = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids), (skip + count) * LENGTH
    if len(tokens) < stop:
        raise typer.BadParameter(f"the text has {len(tokens)} tokens, {skip + count} stretches need {stop}")
    return tokens[skip * LENGTH : stop].view(count, LENGTH)


def scored(
    model: PreTrainedModel, tokens: torch.Tensor, cache: CompressedCache
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Reads `tokens` through `cache` in chunks; logits `[n, vocabulary]` and targets `[n]` of the second half."""
    half = len(tokens) // 2
    for stop in range(CHUNK, len(tokens) + 1, CHUNK):
        # The logits of position p predict token p + 1, so the last of the first half counts already.
        count = min(max(stop - half + 1, 0), CHUNK)
        logits = model(tokens[None, stop - CHUNK : stop], cache=cache, logits_to_keep=max(count, 1)).logits[0]
        targets = tokens[stop - count + 1 : stop + 1] if count else tokens[:0]
        yield logits[: len(targets)].float(), targets


def mean_nll(model: PreTrainedModel, tokens: torch.Tensor, cache: CompressedCache) -> float:
    """Mean negative log-likelihood, in nats, of the second half of `tokens`, read through `cache` in chunks."""
    sums = [
        float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        for logits, targets in scored(model, tokens, cache)
    ]
    return sum(sums) / (len(tokens) - len(tokens) // 2)


def read_once(model: PreTrainedModel, method: Method, tokens: torch.Tensor, stretch: int, seed: int) -> Run:
    """Reads one stretch with a new cache."""
    start = time.perf_counter()
    cache = CompressedCache(model, method.compressor, interval=CHUNK, seed=seed)
    nll = mean_nll(model, tokens, cache)
    layer = cache.compressed[0]
    return Run(stretch, seed, nll, time.perf_counter() - start, layer.storage.rows, layer.count.round)


def measure(
    model: PreTrainedModel, method: Method, stretches: torch.Tensor, seed: int, seeds: int, advance: Callable[[], None]
) -> list[Run]:
    """All runs of one method. Seeds differ between stretches too, else one lucky `G` would count for all of them."""
    runs = []
    for index, tokens in enumerate(stretches):
        first = seed + index * seeds
        for drawn in range(first, first + (seeds if method.drawn else 1)):
            runs.append(read_once(model, method, tokens, index, drawn))
            advance()
    return runs


def perplexity(runs: list[Run]) -> float:
    """`exp` of the mean negative log-likelihood over `runs`, all of the same number of tokens."""
    return math.exp(statistics.fmean(run.nll for run in runs))


def summary(method: Method, runs: list[Run]) -> dict[str, Any]:
    """A line of the table: over all runs, over each stretch, and the lowest and highest seed of the first stretch."""
    by_stretch = [[run for run in runs if run.stretch == index] for index in range(runs[-1].stretch + 1)]
    first = [perplexity([run]) for run in by_stretch[0]]
    return {
        "method": method.name, "settings": repr(method.compressor), "perplexity": perplexity(runs),
        "stretches": [perplexity(part) for part in by_stretch], "first_lowest": min(first), "first_highest": max(first),
        "runs": [vars(run) for run in runs],
    }  # fmt: skip


def check_orders(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of `ORDERS` whose methods ran: the perplexities, whether the order holds, and in how many stretches."""
    found = {row["method"]: row for row in rows}
    checked = []
    for statement, lower, higher in ORDERS:
        if not {lower, higher} <= found.keys():
            continue
        low, high = found[lower], found[higher]
        pairs = list(zip(low["stretches"], high["stretches"], strict=True))
        checked.append(
            {
                "statement": statement,
                "lower": lower,
                "higher": higher,
                "perplexities": [low["perplexity"], high["perplexity"]],
                "holds": low["perplexity"] < high["perplexity"],
                "holds_in": sum(below < above for below, above in pairs),
                "stretches": len(pairs),
            }
        )
    return checked


def cells(row: dict[str, Any], full: float) -> list[str]:
    """The cells of a line, for the terminal and for Markdown."""
    spread = f"{row['first_lowest']:.3f} to {row['first_highest']:.3f}"
    stretches = " ".join(f"{value:.2f}" for value in row["stretches"])
    return [
        row["method"], f"{row['perplexity']:.3f}", f"{row['perplexity'] / full:.3f}", f"{row['stretches'][0]:.3f}",
        spread if row["first_lowest"] < row["first_highest"] else "", stretches, f"{len(row['runs'])}",
    ]  # fmt: skip


COLUMNS = ("method", "perplexity", "x full", "first stretch", "its seeds", "each stretch", "runs")


def sentence(order: dict[str, Any]) -> str:
    """One order in words."""
    verdict = "holds" if order["holds"] else "DOES NOT HOLD"
    low, high = order["perplexities"]
    return (
        f"{order['statement']}: {verdict} ({order['lower']} {low:.3f}, {order['higher']} {high:.3f}; "
        f"in {order['holds_in']} of {order['stretches']} stretches)"
    )


def show(table: list[list[str]], orders: list[dict[str, Any]]) -> None:
    """Prints the table and the orders."""
    printed = Table(title=f"perplexity of the second half of {LENGTH} tokens, budget {BUDGET}")
    for column in COLUMNS:
        printed.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for line in table:
        printed.add_row(*line)
    console = Console(width=140)
    console.print(printed)
    for order in orders:
        console.print(sentence(order))


def write_markdown(path: Path, text: str, table: list[list[str]], orders: list[dict[str, Any]], seed: int) -> None:
    """The same as Markdown next to the JSON file, with what is needed to repeat it."""
    told = json.loads(path.read_text())
    source, settings = told["provenance"], told["settings"]
    lines = [
        f"# Perplexity of SmolLM2-135M-Instruct, budget {BUDGET}, {text}", "",
        f"`{source['command']}`; seed {seed}; commit {settings['commit_at_start']}; {source['date']}; "
        f"{settings['minutes']:.1f} minutes.", "",
        f"{source['processor']}, {source['threads']} thread; Python {source['python']}, torch {source['torch']}, "
        f"transformers {source['transformers']}; float32.", "",
        f"Second half of {settings['stretches']} stretches of {LENGTH} tokens, after {settings['skip']} that were left "
        f"out, read in chunks of {CHUNK}, interval {CHUNK}: `exp` of the mean negative log-likelihood over all "
        "stretches and seeds. Each method keeps sinks and "
        "recent rows by its own defaults; the JSON file has every setting and run. `Random(protect_prompt=True)` is "
        "left out: this text has no prompt to protect.", "",
        "| " + " | ".join(COLUMNS) + " |", "| --- " + "| ---: " * (len(COLUMNS) - 1) + "|",
        *("| " + " | ".join(line) + " |" for line in table), "",
        *(f"- {sentence(order)}" for order in orders),
    ]  # fmt: skip
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main(
    text: Annotated[Text, typer.Option(help="what is read")] = Text.math,
    math_file: Annotated[Path | None, typer.Option(help="JSON Lines file for --text math, such as MATH-500")] = None,
    field: Annotated[str, typer.Option(help="field of the math file that is read")] = "problem",
    stretches: Annotated[int, typer.Option(min=1, help="disjoint stretches of 2,048 tokens")] = 4,
    skip: Annotated[int, typer.Option(min=0, help="stretches of the text left out before them")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="methods beside the full cache; repeatable")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="seeds on each stretch, for methods that draw noise")] = 3,
    seed: Annotated[int, typer.Option(help="first seed")] = 0,
    name: Annotated[str, typer.Option(help="files in experiments/results, without .json and .md")] = "perplexity",
) -> None:
    """Measure perplexity under eviction and write experiments/results/<name>.json and .md."""
    start, commit = time.perf_counter(), provenance()["commit"]
    torch.set_num_threads(1)
    tested, content = chosen(only), read_text(text, math_file, field)
    model, tokenizer = models.load(models.SMOLLM2, dtype="float32")
    tokens, rows = cut(content, tokenizer, stretches, skip), []
    with torch.no_grad(), Progress() as progress:
        task = progress.add_task("reading", total=stretches * sum(seeds if method.drawn else 1 for method in tested))
        for method in tested:
            progress.update(task, description=method.name)
            rows.append(summary(method, measure(model, method, tokens, seed, seeds, lambda: progress.advance(task))))
    orders, label = check_orders(rows), f"math ({field})" if text is Text.math else text.value
    table = [cells(row, rows[0]["perplexity"]) for row in sorted(rows, key=lambda row: float(row["perplexity"]))]
    path = write_results(
        name, rows, model=models.SMOLLM2, text=label, tokens_sha256=sha256(tokens.numpy().tobytes()).hexdigest(),
        stretches=stretches, skip=skip, seeds=seeds, seed=seed, length=LENGTH, chunk=CHUNK, interval=CHUNK,
        budget=BUDGET, commit_at_start=commit, minutes=(time.perf_counter() - start) / 60, orders=orders,
    )  # fmt: skip
    write_markdown(path, label, table, orders, seed)
    show(table, orders)
    print("written to", path, "and", path.with_suffix(".md"))


if __name__ == "__main__":
    typer.run(main)
