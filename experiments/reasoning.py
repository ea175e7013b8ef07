"""Accuracy of the small reasoning model with each method: the pilot, the main table, the budget sweep, the front.

Each point of a study (`studies.py`) solves the same problems of both families greedily, compressing every `interval`
tokens; a chain is right if every word of it is.

    python experiments/reasoning.py main [--problems 400] [--seeds 2]
    python experiments/reasoning.py pilot | sweep | front | vase | replay
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from machine import write_results
from reasoner.oracle import AttentionOracle, Oracle, largest_weights, until
from rich.console import Console
from rich.progress import Progress
from studies import RECENT, STUDIES, Point, Study
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcomp.core import Compressor
from kvcomp.eval import run, tasks
from kvcomp.eval.chains import FAMILIES, Chain
from kvcomp.eval.decode import Decoding, decode
from kvcomp.eval.records import Record
from kvcomp.eval.stats import Summary
from kvcomp.models import REASONER, load

INTERVAL, BATCH = 16, 100


@dataclass(frozen=True)
class Reasoner:
    """The model, and the problems of each family with their tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    work: dict[str, list[run.Work]]

    @classmethod
    def load(cls, name: str, first: int, problems: int, dtype: str) -> Reasoner:
        """The problems with seeds `first` to `first + problems - 1`."""
        model, tokenizer = load(name, dtype)
        found = {family: tasks.find(family) for family in FAMILIES}
        seeds = f"{first}:{first + problems}"
        return cls(
            model, tokenizer,
            {family: run.work(task, task.load(seeds), tokenizer, 1) for family, task in found.items()},
        )  # fmt: skip

    def length(self, family: str) -> int:
        """Tokens of a whole text, prompt and chain; the same for all problems."""
        first = self.work[family][0]
        return len(first.ids) + len(first.problem.answer.split())

    def check(self, points: list[Point]) -> None:
        """Raises ValueError for a point that cannot hold what it protects, before any work."""
        for point, family in itertools.product(points, FAMILIES):
            compressor = None if point.told else point.compressor(self.length(family))
            if compressor is not None:
                compressor.check_prompt(len(self.work[family][0].ids))

    def answers(self, family: str) -> dict[str, str]:
        """The right chain of each problem."""
        return {one.problem.id: one.problem.answer for one in self.work[family]}

    def solve(self, point: Point, family: str, seed: int) -> list[Record]:
        """One record a problem."""
        if point.told:
            return list(self._with_oracle(point, family))
        task, compressor = tasks.find(family), point.compressor(self.length(family))
        how = Decoding(compressor, INTERVAL, task.max_new_tokens, seed=seed)
        return list(run.complete(task, self.work[family], self.model, self.tokenizer, how, BATCH))

    def _with_oracle(self, point: Point, family: str) -> Iterator[Record]:
        """Batch by batch, as the oracle knows its rows by their place."""
        task = tasks.find(family)
        budget = int(self.length(family) * point.fraction)
        for start in range(0, len(self.work[family]), BATCH):
            batch = self.work[family][start : start + BATCH]
            ids, begin = torch.tensor([one.ids for one in batch]), time.perf_counter()
            how = Decoding(self._oracle(point, budget, batch), INTERVAL, task.max_new_tokens)
            for done in decode(self.model, ids, [one.problem.id for one in batch], set(), how):
                yield run.record(task, batch[done.row], done, self.tokenizer, time.perf_counter() - begin)

    @torch.no_grad()
    def _oracle(self, point: Point, budget: int, batch: list[run.Work]) -> Compressor:
        """What `point` is told, of the problems of a batch."""
        if point.told == "facts":
            return Oracle(budget, until([_chain(one) for one in batch]), recent=RECENT)
        texts = [" ".join([one.problem.prompt, one.problem.answer]) for one in batch]
        weights = largest_weights(self.model, torch.tensor(self.tokenizer(texts).input_ids))
        return AttentionOracle(budget, weights, recent=RECENT)


def row(
    point: Point, family: str, seed: int, length: int, records: list[Record], answers: dict[str, str]
) -> dict[str, Any]:
    """A line of the results, for paired tests with a figure for each problem, in the order of the seeds: `right` has a
    1 for one that is solved, `before` the share of its chain before the first wrong word. `answers`: right chains."""
    records = sorted(records, key=_number)
    return {
        "name": point.name,
        "family": family,
        "fraction": point.fraction,
        "budget": None if point.fraction == 1 else int(length * point.fraction),
        "quantizer": point.quantizer,
        "seed": seed,
        "compressor": point.name if point.told else repr(point.compressor(length)),
        **asdict(Summary.of(records)),
        "right": "".join(str(int(record.correct)) for record in records),
        "before": [round(before(record.completion, answers[record.problem]), 4) for record in records],
    }


def before(completion: str, answer: str) -> float:
    """The share of the words of `answer` before the first one that `completion` has not."""
    wanted = answer.split()
    pairs = itertools.zip_longest(completion.split()[: len(wanted)], wanted)
    return next((index for index, (said, word) in enumerate(pairs) if said != word), len(wanted)) / len(wanted)


def _chain(one: run.Work) -> Chain:
    return Chain(one.problem.prompt.split(), one.problem.answer.split())


def _number(record: Record) -> int:
    return int(record.problem.rpartition("-")[2])


def main(
    study: Annotated[Study, typer.Argument(help="Which points.")],
    model: Annotated[str, typer.Option(help="A model that solves both families.")] = REASONER,
    problems: Annotated[int, typer.Option(help="Problems of each family.", min=1)] = 200,
    first: Annotated[int, typer.Option(help="Seed of the first problem.", min=0)] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds of the methods that draw noise.", min=1)] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Points of these names only; repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
) -> None:
    """Solve the problems with every point of a study and write results/reasoning_<study>.json."""
    torch.set_num_threads(threads)
    reasoner = Reasoner.load(model, first, problems, dtype)
    points = [point for point in STUDIES[study]() if not only or point.name in only]
    reasoner.check(points)
    jobs = [
        (point, family, seed) for point in points for family in FAMILIES for seed in range(seeds if point.drawn else 1)
    ]
    rows = []
    with Progress(console=Console(stderr=True)) as bar:
        line = bar.add_task(study.value, total=len(jobs))
        for point, family, seed in jobs:
            bar.update(line, description=f"{study.value}: {point.name}, {family}")
            records, answers = reasoner.solve(point, family, seed), reasoner.answers(family)
            rows.append(row(point, family, seed, reasoner.length(family), records, answers))
            bar.advance(line)
    settings: dict[str, Any] = {
        "model": model, "problems": problems, "first": first, "seeds": seeds, "dtype": dtype,
        "recent": RECENT, "window": RECENT, "interval": INTERVAL,
    }  # fmt: skip
    path = write_results(f"reasoning_{study.value}", rows, **settings)
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
