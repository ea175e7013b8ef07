"""The benchmarks of the VaSE paper: their datasets, and how a row becomes a problem.

No dataset could be downloaded to check the columns: `known` of every source says where their names are from.
"""

from __future__ import annotations

import hashlib
import re

from kvcomp.eval.sources import Part, Row, Source
from kvcomp.eval.task import Problem

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""Ends a prompt of mathematics."""
LETTER = "Please reason step by step, and put the letter of the correct option, A, B, C or D, within \\boxed{}."
"""Ends a multiple-choice prompt."""

_CARD = "the dataset card at huggingface.co/datasets/"
_VASE = "of github.com/terarachang/VaSE at 17df0fa, in eval/reasoning_tasks"
_MATH = {
    "question": ("problem", "question"),
    "answer": ("answer", "expected_answer", "final_answer", "solution"),
}


def mathematics(row: Row) -> Problem:
    """A problem with one short answer."""
    return Problem(row.id, f"{row.text('question')}\n{BOXED}", unboxed(row.text("answer")))


def gsm8k(row: Row) -> Problem:
    """The answer stands after `####`, the way to it before. The instruction is that of `load_gsm8k` of VaSE."""
    answer = row.text("answer").rpartition("####")[2].replace(",", "").strip()
    return Problem(row.id, f"{row.text('question')} Put your final answer within \\boxed{{}}.", answer)


def gpqa(row: Row) -> Problem:
    """Options are sorted by a hash of question and option: the same order in every run, for every order of rows."""
    question, correct = row.text("question"), row.text("correct")
    options = [correct, *(row.text(f"incorrect {i}") for i in (1, 2, 3))]
    order = sorted(options, key=lambda option: hashlib.sha256(f"{question}\0{option}".encode()).digest())
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip("ABCD", order, strict=True))
    return Problem(row.id, f"{question}\n\n{listed}\n\n{LETTER}", "ABCD"[order.index(correct)])


def unboxed(text: str) -> str:
    """What is in the last `\\boxed{}`, where a column holds the whole solution; else the text."""
    start, depth = text.rfind("\\boxed{"), 0
    for match in re.finditer(r"(?<!\\)[{}]", text[start:]) if start >= 0 else ():
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return text[start + len("\\boxed{") : start + match.start()].strip()
    return text


_LIST = (
    Source(
        "gsm8k",
        (Part("openai/gsm8k", "test", "main"),),
        _MATH,
        {"id": ("id",)},
        known=f"{_CARD}openai/gsm8k, and load_gsm8k in my_utils.py {_VASE}",
    ),
    Source(
        "math500",
        (Part("HuggingFaceH4/MATH-500", "test"),),
        _MATH,
        {"id": ("unique_id", "id")},
        known="all 500 rows of a copy of its test.jsonl",
    ),
    Source(
        "aime25",
        (Part("math-ai/aime25", "test"),),
        _MATH,
        {"id": ("id", "problem_idx")},
        known=f"{_CARD}math-ai/aime25; data/aime25/test.jsonl {_VASE}, has the same",
    ),
    Source(
        "aime26",
        (Part("math-ai/aime26", "test"),),
        _MATH,
        {"id": ("id", "problem_idx")},
        known=f"data/aime26/test.jsonl {_VASE}, which its convert_aime26.py copied from the split",
    ),
    Source(
        "hmmt25",
        (
            Part("MathArena/hmmt_feb_2025", "train", prefix="feb-"),
            Part("MathArena/hmmt_nov_2025", "train", prefix="nov-"),
        ),
        _MATH,
        {"id": ("problem_idx", "id")},
        known=f"data/hmmt/convert_hmmt25.py {_VASE}; problem_idx only from the cards of MathArena's other datasets",
    ),
    Source(
        "gpqa-diamond",
        (Part("Idavidrein/gpqa", "train", "gpqa_diamond"),),
        {
            "question": ("Question",),
            "correct": ("Correct Answer",),
            **{f"incorrect {i}": (f"Incorrect Answer {i}",) for i in (1, 2, 3)},
        },
        {"id": ("Record ID", "id")},
        note="It is gated: accept its terms at huggingface.co/datasets/Idavidrein/gpqa and run `hf auth login`.",
        known="public programs that read it; its own card and files are gated",
    ),
    Source(
        "livecodebench-v6",
        (
            Part(
                "livecodebench/code_generation_lite",
                "test",
                files=("test.jsonl", *(f"test{i}.jsonl" for i in range(2, 7))),
            ),
        ),
        {
            "question": ("question_content", "question"),
            "difficulty": ("difficulty",),
            "public": ("public_test_cases",),
            "private": ("private_test_cases",),
            "metadata": ("metadata",),
            "id": ("question_id",),
        },
        {"starter": ("starter_code",)},
        note="It is 4.5 GB, and its tests take several GB of memory.",
        known=f"{_CARD}livecodebench/code_generation_lite at 6b6b032, and data/livecodebench/download_tests.py {_VASE}",
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in _LIST}
"""The datasets by the name of their task."""
