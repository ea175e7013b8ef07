"""What is evaluated: `Problem`, `Grade`, `Task`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem: `id`, unique in its task and the same in every run; `prompt`, what the model is asked, without a
    chat template; `answer`, what the grader compares with."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Grade:
    """Whether a completion is right, and what was `found` in it as its answer (None: nothing)."""

    correct: bool
    found: str | None


@dataclass(frozen=True)
class Task:
    """A benchmark.

    `load(source)` gives the problems, in a fixed order, from a local file or folder, or with None from where `origin`
    says (a dataset of the hub and its split; nothing is downloaded for generated ones). `grade(completion, problem)`
    judges a completion without the prompt. `samples` a problem, `max_new_tokens` each; `chat`: whether the prompt goes
    into the model's chat template.
    """

    name: str
    origin: str
    load: Callable[[str | None], list[Problem]]
    grade: Callable[[str, Problem], Grade]
    samples: int = 1
    max_new_tokens: int = 32_768
    chat: bool = True
