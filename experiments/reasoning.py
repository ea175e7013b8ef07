"""Accuracy of a reasoning model with each method: the pilot, the main table, the budget sweep, the front.

Each point of a study (`studies.py`) solves the same problems greedily, compressing every `interval` tokens: those of
both generated families with the small model here, where a chain is right if every word of it is, or any task of
`kvcomp eval` with any model.

    python experiments/reasoning.py main [--problems 400] [--seeds 2]
    python experiments/reasoning.py pilot | sweep | front | vase | replay
    python experiments/reasoning.py main --model Qwen/Qwen3-4B --task gsm8k --length 2048 --device cuda \\
        --dtype bfloat16 --interval 64 --batch 16 --name qwen3_main
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from machine import write_results
from reasoner.oracle import AttentionOracle, Oracle, largest_weights, until
from rich.console import Console
from rich.progress import Progress
from studies import RECENT, STUDIES, Point, Study, recent_rows
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcomp.core import Compressor
from kvcomp.eval import run, tasks
from kvcomp.eval.chains import FAMILIES, Chain
from kvcomp.eval.decode import Decoding, decode
from kvcomp.eval.records import Record
from kvcomp.eval.stats import Summary
from kvcomp.eval.task import Task
from kvcomp.models import REASONER, load

INTERVAL, BATCH = 16, 100


@dataclass(frozen=True)
class Reasoner:
    """The model, and by task the problems with their tokens. `longest`: tokens of a whole text, of tasks that do not
    say it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tasks: dict[str, Task]
    work: dict[str, list[run.Work]]
    longest: int | None = None
    interval: int = INTERVAL
    batch: int = BATCH

    @classmethod
    def load(
        cls, name: str, first: int, problems: int, dtype: str, names: Sequence[str] = tuple(FAMILIES),
        device: str = "cpu", **settings: Any,
    ) -> Reasoner:  # fmt: skip
        """`problems` of each task from number `first` on, which is the seed of generated ones."""
        found, stop = [tasks.find(each) for each in names], first + problems
        loaded = {
            task.name: task.load(f"{first}:{stop}") if task.name in FAMILIES else task.load(None)[first:stop]
            for task in found
        }
        model, tokenizer = load(name, dtype, device=device)
        work = {task.name: run.work(task, loaded[task.name], tokenizer, 1) for task in found}
        return cls(model, tokenizer, {task.name: task for task in found}, work, **settings)

    def prompt(self, task: str) -> int:
        """Tokens of the longest prompt."""
        return max(len(one.ids) for one in self.work[task])

    def length(self, task: str) -> int:
        """Tokens of a whole text, prompt and answer, of which budgets are fractions."""
        if task in FAMILIES:
            return self.prompt(task) + len(self.work[task][0].problem.answer.split())
        if self.longest is None or self.longest <= self.prompt(task):
            raise ValueError(f"{task}: budgets are fractions of a length above the prompt's {self.prompt(task)} tokens")
        return self.longest

    def check(self, points: list[Point]) -> None:
        """Raises ValueError for a point that cannot hold what it protects, before any work."""
        for point, task in itertools.product(points, self.work):
            compressor = None if point.told else point.compressor(self.length(task))
            if compressor is not None:
                compressor.check_prompt(self.prompt(task))

    def answers(self, task: str) -> dict[str, str]:
        """The right answer to each problem, in their order; of a generated family the chain."""
        return {one.problem.id: one.problem.answer for one in self.work[task]}

    def solve(self, point: Point, name: str, seed: int) -> list[Record]:
        """One record a problem of the task `name`."""
        if point.told:
            return list(self._with_oracle(point, name))
        task, length = self.tasks[name], self.length(name)
        new = task.max_new_tokens if name in FAMILIES else length - self.prompt(name)
        how = Decoding(point.compressor(length), self.interval, new, seed=seed)
        return list(run.complete(task, self.work[name], self.model, self.tokenizer, how, self.batch))

    def row(self, point: Point, name: str, seed: int) -> dict[str, Any]:
        """A line of the results: `point` solves the task `name`."""
        return row(point, name, seed, self.length(name), self.solve(point, name, seed), self.answers(name))

    def _with_oracle(self, point: Point, family: str) -> Iterator[Record]:
        """Batch by batch, as the oracle knows its rows by their place."""
        task = self.tasks[family]
        budget = int(self.length(family) * point.fraction)
        for start in range(0, len(self.work[family]), self.batch):
            batch = self.work[family][start : start + self.batch]
            ids, begin = torch.tensor([one.ids for one in batch]), time.perf_counter()
            how = Decoding(self._oracle(point, budget, batch), self.interval, task.max_new_tokens)
            for done in decode(self.model, ids, [one.problem.id for one in batch], set(), how):
                yield run.record(task, batch[done.row], done, self.tokenizer, time.perf_counter() - begin)

    @torch.no_grad()
    def _oracle(self, point: Point, budget: int, batch: list[run.Work]) -> Compressor:
        """What `point` is told, of the problems of a batch."""
        if point.told == "facts":
            return Oracle(budget, until([_chain(one) for one in batch]), recent=recent_rows(budget))
        texts = tuple(" ".join([one.problem.prompt, one.problem.answer]) for one in batch)
        return AttentionOracle(budget, _weights(self.model, self.tokenizer, texts), recent=recent_rows(budget))


@functools.lru_cache(maxsize=len(FAMILIES))  # the same for every budget
def _weights(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> list[Tensor]:
    return largest_weights(model, torch.tensor(tokenizer(list(texts)).input_ids))


def row(
    point: Point, family: str, seed: int, length: int, records: list[Record], answers: dict[str, str]
) -> dict[str, Any]:
    """A line of the results, for paired tests with a figure for each problem, in the order of `answers`: `right` has a
    1 for one that is solved, `before` the share of a generated chain before its first wrong word."""
    order = {problem: place for place, problem in enumerate(answers)}
    records = sorted(records, key=lambda record: order[record.problem])
    chains = [round(before(record.completion, answers[record.problem]), 4) for record in records]
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
        **({"before": chains} if family in FAMILIES else {}),
    }


def before(completion: str, answer: str) -> float:
    """The share of the words of `answer` before the first one that `completion` has not."""
    wanted = answer.split()
    pairs = itertools.zip_longest(completion.split()[: len(wanted)], wanted)
    return next((index for index, (said, word) in enumerate(pairs) if said != word), len(wanted)) / len(wanted)


def _chain(one: run.Work) -> Chain:
    return Chain(one.problem.prompt.split(), one.problem.answer.split())


def main(
    study: Annotated[Study, typer.Argument(help="Which points.")],
    model: Annotated[str, typer.Option(help="Hub id, folder, or reasoner.")] = REASONER,
    task: Annotated[list[str] | None, typer.Option(help="As in kvcomp eval; else both generated families.")] = None,
    length: Annotated[int | None, typer.Option(help="Longest text, in tokens, of which budgets are fractions.")] = None,
    problems: Annotated[int, typer.Option(help="Problems of each task.", min=1)] = 200,
    first: Annotated[int, typer.Option(help="Number of the first one; of generated ones the seed.", min=0)] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds of the methods that draw noise.", min=1)] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Points of these names only; repeatable.")] = None,
    interval: Annotated[int, typer.Option(help="New tokens between two compressions.", min=1)] = INTERVAL,
    batch: Annotated[int, typer.Option(help="Problems at a time.", min=1)] = BATCH,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    name: Annotated[str | None, typer.Option(help="In results, without .json; else reasoning_<study>.")] = None,
) -> None:
    """Solve the problems with every point of a study and write a file of results."""
    torch.set_num_threads(threads)
    reasoner = Reasoner.load(
        model, first, problems, dtype, task or list(FAMILIES), device, longest=length, interval=interval, batch=batch
    )
    points = [point for point in STUDIES[study]() if not only or point.name in only]
    reasoner.check(points)
    jobs = [
        (point, each, seed)
        for point in points
        for each in reasoner.work
        if each in FAMILIES or not point.told
        for seed in range(seeds if point.drawn else 1)
    ]
    settings: dict[str, Any] = {
        "model": model, "problems": problems, "first": first, "seeds": seeds, "dtype": dtype,
        "recent": RECENT, "window": RECENT, "interval": interval,
    }  # fmt: skip
    name, rows = name or f"reasoning_{study.value}", []
    with Progress(console=Console(stderr=True)) as bar:
        line = bar.add_task(study.value, total=len(jobs))
        for point, each, seed in jobs:
            bar.update(line, description=f"{study.value}: {point.name}, {each}")
            rows.append(reasoner.row(point, each, seed))
            bar.advance(line)
            path = write_results(f"{name}.partial", rows, **settings)  # what there is when a study is stopped
    typer.echo(f"wrote {path.rename(path.with_name(f'{name}.json'))}")


if __name__ == "__main__":
    typer.run(main)
