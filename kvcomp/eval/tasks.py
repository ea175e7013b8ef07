"""The tasks by name: the benchmarks of the VaSE paper, generated problem families, and files of your own."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from kvcomp.eval import grade as graders
from kvcomp.eval.benchmarks import BOXED, LETTER, SOURCES, gpqa, gsm8k, mathematics
from kvcomp.eval.chains import FAMILIES, TRAINING
from kvcomp.eval.livecodebench import programming
from kvcomp.eval.sources import SUFFIXES, Row, Source
from kvcomp.eval.task import Grade, Problem, Task

SEEDS = "0:500"
"""The problems of a generated family, unless others are asked for."""

Build: TypeAlias = Callable[[Row], Problem | None]
"""Makes a problem of a row; None: the row is not part of the task."""

GRADES: dict[str, Callable[[str, Problem], Grade]] = {
    "math": graders.math,
    "choice": graders.choice,
    "exact": graders.exact,
    "code": graders.code,
}
"""The graders by the name they have in a file of your own."""


def find(name: str) -> Task:
    """A task by its name, or that of a file of your own by its path."""
    if name in TASKS:
        return TASKS[name]
    if Path(name).suffix.lower() in SUFFIXES:
        return custom(name)
    raise ValueError(f"no task {name!r}; choose from {', '.join(TASKS)}, or pass a file ({', '.join(SUFFIXES)})")


def custom(path: str | Path) -> Task:
    """The task of a file of your own, one problem a row; it is read at once.

    Columns: `prompt`, asked as it is, or `question` or `problem`, asked with the instruction of its grader; `answer`;
    and if you like `id` and `grade`: math (the default), choice, exact or code.
    """
    columns = {"question": ("prompt", "question", "problem"), "answer": ("answer",)}
    source = Source(str(path), (), columns, {"id": ("id",), "grade": ("grade",), "prompt": ("prompt",)})
    kinds: dict[str, str] = {}

    def build(row: Row) -> Problem:
        problem, kinds[row.id] = _own(row)
        return problem

    problems = _problems(source, build, str(path))

    def load(other: str | None) -> list[Problem]:
        if other is not None:
            raise ValueError(f"{path} is both the task and its file: leave out --task-file {other}")
        return list(problems)

    def grade(completion: str, problem: Problem) -> Grade:
        return GRADES[kinds[problem.id]](completion, problem)

    return Task(Path(path).stem, str(path), load, grade)


def _own(row: Row) -> tuple[Problem, str]:
    """The problem of a row of a file of your own, and the name of its grader."""
    kind = str(row.values.get("grade") or "math").strip()
    if kind not in GRADES:
        raise ValueError(f"{row.where}: no grader {kind!r}; choose from {', '.join(GRADES)}")
    answer = row.text("answer")
    if kind == "code":
        tests = row.parsed("answer")
        if not isinstance(tests, dict) or not tests.get("tests"):
            wanted = '{"tests": [{"input": "1", "output": "2"}], "function": null, "seconds": 6.0}'
            raise ValueError(f"{row.where}: the answer to a program is like {wanted}, got {answer[:40]}")
    instruction = "" if "prompt" in row.values else {"math": BOXED, "choice": LETTER}.get(kind, "")
    return Problem(row.id, "\n".join(filter(None, [row.text("question"), instruction])), answer), kind


def _problems(source: Source, build: Build, path: str | None, limit: int | None = None) -> list[Problem]:
    built = (problem for row in source.rows(path) if (problem := build(row)) is not None)
    problems = list(islice(built, limit))
    if not problems:
        raise ValueError(f"{source.name}: no problem in {path or source.origin}; pass the whole dataset")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise ValueError(f"{source.name}: two problems with the id {problem.id}; give every row an id of its own")
        seen.add(problem.id)
    return problems


def _benchmark(
    name: str, build: Build, kind: str, samples: int, tokens: int = 32_768, limit: int | None = None
) -> Task:
    source = SOURCES[name]
    return Task(name, source.origin, lambda path: _problems(source, build, path, limit), GRADES[kind], samples, tokens)


def _seeds(source: str | None) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", source or SEEDS)
    seeds = range(int(match[1]), int(match[2])) if match else range(0)
    if not seeds or seeds[-1] >= TRAINING:
        raise ValueError(
            f"{source!r}: the file of a generated task is a range of seeds, FIRST:END without END, like 1000:1400, "
            f"below {TRAINING}: those from there on are for training"
        )
    return seeds


def _generated(family: str) -> Task:
    """Seeds 0 to 499, or those of a source like 1000:1400; all chains are equally long and end at the limit."""
    make = FAMILIES[family]

    def load(source: str | None) -> list[Problem]:
        made = ((seed, make(seed)) for seed in _seeds(source))
        return [Problem(f"{family}-{seed}", " ".join(one.prompt), " ".join(one.chain)) for seed, one in made]

    return Task(family, f"generated, seeds {SEEDS}", load, graders.exact, 1, len(make(0).chain), chat=False)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _benchmark("gsm8k", gsm8k, "math", samples=4, tokens=4096, limit=500),
        _benchmark("math500", mathematics, "math", samples=8),
        _benchmark("aime25", mathematics, "math", samples=16),
        _benchmark("aime26", mathematics, "math", samples=16),
        _benchmark("hmmt25", mathematics, "math", samples=16),
        _benchmark("gpqa-diamond", gpqa, "choice", samples=8),
        _benchmark("livecodebench-v6", programming, "code", samples=8),
        *map(_generated, FAMILIES),
    )
}
"""Every task by its name.

Samples and limits are those of `eval/reasoning_tasks/myscripts` of github.com/terarachang/VaSE at bfa2692; its limit
counts the prompt too, `max_new_tokens` does not. The first 500 problems of GSM8K; all of MATH-500, of both AIME, of
HMMT February and November 2025 and of GPQA Diamond; those of medium difficulty of LiveCodeBench v6.
"""
