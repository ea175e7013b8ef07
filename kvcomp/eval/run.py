"""Running a task: what is to be done, in which batches, by which process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcomp.eval.decode import Decoded, Decoding, decode, loops
from kvcomp.eval.records import Record, Records, append
from kvcomp.eval.task import Problem, Task
from kvcomp.models import encode

Key = tuple[str, int]


@dataclass(frozen=True)
class Work:
    """One completion to make: sample `sample` of `problem`, whose prompt has the tokens `ids`."""

    problem: Problem
    sample: int
    ids: tuple[int, ...]

    @property
    def key(self) -> Key:
        """As `Record.key`."""
        return self.problem.id, self.sample


def evaluate(
    task: Task,
    problems: Sequence[Problem],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    how: Decoding,
    path: Path,
    settings: dict[str, Any],
    samples: int = 1,
    batch_size: int = 1,
    progress: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Every record of the run at `path`, those of an earlier start included; each process returns all.

    The processes that `accelerate launch` started share the work. Greedy results depend on neither `batch_size` nor the
    number of processes but for the rounding of sums, drawn ones neither. `settings` say what run this is.
    """
    from accelerate import PartialState

    state, records = PartialState(), Records(path, settings)
    if samples > 1 and how.temperature == 0:
        raise ValueError(f"{samples} samples a problem would be equal at temperature 0; set a temperature or samples=1")
    if state.is_main_process:
        records.open()
    state.wait_for_everyone()
    done = records.done()
    state.wait_for_everyone()  # a process that reads later would share the rest out differently
    todo = work(task, problems, tokenizer, samples)
    order = [one.key for one in todo]
    mine = [one for one in todo if one.key not in done][state.process_index :: state.num_processes]
    with records.part(state.process_index) as file:
        for made in complete(task, mine, model, tokenizer, how, batch_size):
            append(file, made)
            progress(made)
    state.wait_for_everyone()
    if state.is_main_process:
        records.merge(order)
    state.wait_for_everyone()
    return list(records.done().values())


def complete(
    task: Task,
    todo: Sequence[Work],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    how: Decoding,
    batch_size: int = 1,
) -> Iterator[Record]:
    """The record of each completion as soon as it is finished."""
    ends = end_tokens(model, tokenizer)
    for batch in batches(todo, batch_size):
        start, ids = time.perf_counter(), torch.tensor([one.ids for one in batch])
        names = [f"{one.problem.id}/{one.sample}" for one in batch]
        for done in decode(model, ids, names, ends, how):
            yield record(task, batch[done.row], done, tokenizer, time.perf_counter() - start)


def work(task: Task, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, samples: int) -> list[Work]:
    """All that a run consists of, problem by problem. Raises ValueError if there is none or ids are not unique."""
    if not problems:
        raise ValueError(f"{task.name} has no problems")
    if len({problem.id for problem in problems}) < len(problems):
        raise ValueError(f"{task.name} has {len(problems)} problems, but some have the same id")
    tokens = [tuple(encode(tokenizer, one.prompt, task.chat)["input_ids"][0].tolist()) for one in problems]
    return [Work(one, sample, ids) for one, ids in zip(problems, tokens, strict=True) for sample in range(samples)]


def batches(todo: Sequence[Work], size: int) -> Iterator[list[Work]]:
    """At most `size` at a time whose prompts are equally long, so that no row needs padding."""
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, got {size}")
    waiting: dict[int, list[Work]] = defaultdict(list)
    for one in todo:
        group = waiting[len(one.ids)]
        group.append(one)
        if len(group) == size:
            yield waiting.pop(len(one.ids))
    yield from waiting.values()


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end a text: those of the model's generation settings and the tokenizer's."""
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = set(found if isinstance(found, list) else [found])
    return {int(token) for token in ends | {tokenizer.eos_token_id} if token is not None}


def record(task: Task, one: Work, done: Decoded, tokenizer: PreTrainedTokenizerBase, seconds: float) -> Record:
    """The completion `done`, graded."""
    completion = tokenizer.decode(done.tokens, skip_special_tokens=True)
    grade = task.grade(completion, one.problem)
    return Record(
        problem=one.problem.id,
        sample=one.sample,
        correct=grade.correct,
        found=grade.found,
        finished=done.finished,
        loops=not done.finished and loops(done.tokens),
        tokens=len(done.tokens),
        kv_bytes=done.kv_bytes,
        seconds=round(seconds, 3),
        completion=completion,
    )
