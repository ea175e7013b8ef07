"""Accuracy of the small reasoning model with each method: the pilot, the main table, the budget sweep, the front.

Each point solves the same problems of both families greedily; a chain is right if every word of it is. A budget is a
fraction of the length of a whole text. All methods keep the same `recent` rows, look at the same `window` of queries
where they look at any, and compress every `interval` tokens; R-KV keeps the window of its own repository.

    python experiments/reasoning.py main [--problems 400] [--seeds 2]
    python experiments/reasoning.py pilot | sweep | front
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import torch
import typer
from machine import write_results
from reasoner.oracle import Oracle, until
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from value_range import ValueRange

from kvcomp.core import Compressor
from kvcomp.eval import run, tasks
from kvcomp.eval.chains import FAMILIES, Chain
from kvcomp.eval.decode import Decoding, decode
from kvcomp.eval.records import Record
from kvcomp.eval.stats import Summary
from kvcomp.evict import METHODS, RKV, Random, SnapKV, VaSE
from kvcomp.models import REASONER, load
from kvcomp.pipeline import Pipeline
from kvcomp.quant.spec import parse_compressor

RECENT, INTERVAL, BATCH = 32, 16, 100
COMMON: dict[str, Any] = {"recent": RECENT}
WINDOWED: dict[str, Any] = {"recent": RECENT, "window": RECENT}

Build: TypeAlias = Callable[[int], Compressor | None]


class Study(StrEnum):
    """What is compared."""

    pilot = "pilot"
    main = "main"
    sweep = "sweep"
    front = "front"


@dataclass(frozen=True)
class Point:
    """A method at a budget; `drawn`: its result depends on the seed; `oracle`: it is told what will be needed."""

    name: str
    build: Build | None
    fraction: float = 0.25
    drawn: bool = False
    quantizer: str = ""
    oracle: bool = False

    def compressor(self, length: int) -> Compressor | None:
        """For texts of `length` tokens; None: the full cache."""
        stages = [self.build(int(length * self.fraction))] if self.build and self.fraction < 1 else []
        stages += [parse_compressor(self.quantizer)] if self.quantizer else []
        found = [stage for stage in stages if stage is not None]
        return Pipeline(tuple(found)) if len(found) > 1 else found[0] if found else None


FULL = Point("full cache", None, 1.0)
ORACLE = Point("oracle", None, oracle=True)


def pilot() -> list[Point]:
    """The steps from SnapKV to VaSE, and what the largest value ranges are worth, as in the pilot of the paper."""
    plain = {**WINDOWED, "sinks": 4}
    return [
        FULL,
        Point("Random", lambda b: Random(b, **COMMON), drawn=True),
        Point("largest value ranges evicted", lambda b: ValueRange(b, keep="smallest", **COMMON)),
        Point("smallest value ranges evicted", lambda b: ValueRange(b, keep="largest", **COMMON)),
        Point("SnapKV", lambda b: SnapKV(b, **plain)),
        Point("SnapKV + sampling", lambda b: VaSE(b, protected=0, **plain), drawn=True),
        Point("SnapKV + budget/16 V slots", lambda b: VaSE(b, protected=b // 16, stochastic=False, **plain)),
        Point("SnapKV + budget/4 V slots", lambda b: VaSE(b, stochastic=False, **plain)),
        Point("SnapKV + sampling + budget/16 V slots", lambda b: VaSE(b, protected=b // 16, **plain), drawn=True),
        Point("VaSE attnv (sampling + budget/4 V slots)", lambda b: VaSE(b, **plain), drawn=True),
        Point("CurDKV (fixed G)", lambda b: METHODS["curdkv"](budget=b, **COMMON), drawn=True),
        Point("VaSE dkv (G resampled)", lambda b: VaSE(b, scorer="dkv", **COMMON), drawn=True),
        ORACLE,
    ]


DRAWN = ("vase-attnv", "vase-dkv", "curdkv", "random")
WITH_WINDOW = ("vase-attnv", "snapkv", "expected-attention")
OWN_RECENT = ("rkv", "rkv-simplified", "h2o", "tova")
"""Methods that say themselves how many recent rows they keep."""


def method(name: str, protect_prompt: bool = False) -> Point:
    """A method of `kvcomp.evict.METHODS` with the rows and the window that all share."""
    settings = {} if name in OWN_RECENT else WINDOWED if name in WITH_WINDOW else COMMON
    if name == "h2o" and protect_prompt:
        settings = COMMON  # half of the budget beside the prompt is more than there is
    if name == "rkv-simplified":
        build: Build = lambda b: replace(RKV.simplified(b, protect_prompt=protect_prompt), **WINDOWED)  # noqa: E731
    else:
        build = lambda b: METHODS[name](budget=b, protect_prompt=protect_prompt, **settings)  # noqa: E731
    return Point(name + (" + prompt" if protect_prompt else ""), build, drawn=name in DRAWN)


def main_table() -> list[Point]:
    """Every method at a quarter of the rows, with and without protection of the prompt."""
    return [FULL, *(method(name, pinned) for name in METHODS for pinned in (False, True)), ORACLE]


SWEPT = ("vase-attnv", "vase-dkv", "snapkv", "rkv-simplified", "curdkv", "expected-attention", "random")


def sweep() -> list[Point]:
    """A half to a quarter of the rows."""
    points = [*(method(name) for name in SWEPT), method("random", protect_prompt=True), ORACLE]
    return [replace(point, fraction=fraction) for fraction in (1 / 2, 3 / 8, 1 / 4) for point in points]


QUANTIZERS = ("", "k8v4 recent=16", "int4 recent=16", "int4 rotated recent=16")


def front() -> list[Point]:
    """Eviction, quantization, and both: accuracy against bytes."""
    points = [replace(FULL, quantizer=quantizer) for quantizer in QUANTIZERS]
    for name in ("vase-attnv", "rkv-simplified"):
        base = method(name)
        for fraction in (3 / 4, 1 / 2, 1 / 4):
            points += [replace(base, fraction=fraction, quantizer=quantizer) for quantizer in QUANTIZERS]
    return points


STUDIES = {Study.pilot: pilot, Study.main: main_table, Study.sweep: sweep, Study.front: front}


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
            compressor = None if point.oracle else point.compressor(self.length(family))
            if compressor is not None:
                compressor.check_prompt(len(self.work[family][0].ids))

    def answers(self, family: str) -> dict[str, str]:
        """The right chain of each problem."""
        return {one.problem.id: one.problem.answer for one in self.work[family]}

    def solve(self, point: Point, family: str, seed: int) -> list[Record]:
        """One record a problem."""
        if point.oracle:
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
            oracle = Oracle(budget, until([_chain(one) for one in batch]), recent=RECENT)
            how = Decoding(oracle, INTERVAL, task.max_new_tokens)
            for done in decode(self.model, ids, [one.problem.id for one in batch], set(), how):
                yield run.record(task, batch[done.row], done, self.tokenizer, time.perf_counter() - begin)


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
        "compressor": "oracle" if point.oracle else repr(point.compressor(length)),
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
