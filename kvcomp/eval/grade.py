"""The graders: whether a completion has the answer of its problem.

All but `exact` ignore what a model thinks before `</think>`. A completion that opens `<think>` and never closes it has
no answer; one without either is read as a whole, also where the prompt opened the thinking and it never ended.
"""

from __future__ import annotations

import re

from kvcomp.eval import math_answer, math_text, programs
from kvcomp.eval.task import Grade, Problem

_LETTER = (
    r"(?:\(([A-D])\)|([A-D])(?![\w'])(?=\s*(?:[.,;:)*$\]}]|$))|([B-D])(?=\s))"
    r"(?!\s*(?:,|/|or\b|and\b)\s*\(?[A-D]\b)"  # Two letters are no choice.
)
_STATED = re.compile(
    r"(?i:\b(?:answer|option|choice)\**(?:\s+(?:is|would\s+be|must\s+be)\b\s*:?|\s*:)"
    r"[\s*$]{0,20}(?:\\text\s*\{)?(?:the\s+)?(?:option|choice|letter)?[\s*]{0,20})" + _LETTER,
    re.MULTILINE,
)
_CORRECT = re.compile(r"(?i:\b(?:option|choice|answer)\s+)[(*]*([A-D])[)*]*(?i:\s+is\s+(?:the\s+)?(?:correct|right)\b)")
_ALONE = re.compile(r"[\s*_$(\[]*([A-D])[\s*_$)\].:]*")
_BOXED = re.compile(r"[\s*$({]*([A-D])(?:[\s*$)}]*|[).:].*)", re.DOTALL)


def math(completion: str, problem: Problem) -> Grade:
    """The answer of a mathematical problem: found by `math_text.find`, compared by `math_answer.equal`.

    Raises ValueError for a reference that cannot be parsed, or if math-verify is not installed. An answer that cannot
    be parsed, or compared in 5 seconds, is wrong.
    """
    found = math_text.find(completion)
    return Grade(found is not None and math_answer.equal(problem.answer, found), found)


def choice(completion: str, problem: Problem) -> Grade:
    """A multiple-choice letter, A to D, a capital.

    The first of these that there is: the last box, with the letter alone (`C`, `(C)`, `\\text{C}`) or before its text
    (`C) 12 m`); the last that is stated: "answer is (C)", "Answer: **C**", "the correct option is C", "option C is
    correct"; the last line if it is nothing but the letter, as in `**C**` or `(C).`. A letter in a sentence is not an
    answer ("the answer is A cat"), nor are two ("B or C"); a box with anything else is a wrong one.

    Raises ValueError if the reference is not a letter.
    """
    if problem.answer not in ("A", "B", "C", "D"):
        raise ValueError(f"the answer of a choice is A, B, C or D, got {problem.answer[:40]!r}: correct it")
    text = math_text.thought(completion)
    found = None if text is None else _choice(text)
    return Grade(found == problem.answer, found)


def _choice(text: str) -> str | None:
    if "\\boxed{" in text:
        box = math_text.boxed(text)
        match = _BOXED.fullmatch(re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*(?=\{)", "", box or ""))
        return match[1] if match else box
    stated = [*_STATED.finditer(text), *_CORRECT.finditer(text)]
    if stated:
        last = max(stated, key=lambda match: match.start(match.lastindex or 0))
        return next(filter(None, last.groups()))
    lines = text.rstrip().splitlines()
    alone = _ALONE.fullmatch(lines[-1]) if lines else None
    return alone[1] if alone else None


def exact(completion: str, problem: Problem) -> Grade:
    """The whole completion, nothing ignored but how words are spaced. It is what is found."""
    return Grade(completion.split() == problem.answer.split(), completion)


def code(completion: str, problem: Problem) -> Grade:
    """A Python program: the last fenced block (`programs.block`), which has to pass all tests in the sandbox.

    The answer of the problem is JSON, see `programs.tests`. A program that reads standard input is compared by
    `programs.same_output`; what a function returns by `==`, tuples as lists, floats as they are, like LiveCodeBench.

    Raises ValueError for tests that cannot be read, and where there is no Linux.
    """
    wanted = programs.tests(problem.answer)
    text = math_text.thought(completion)
    found = None if text is None else programs.block(text)
    return Grade(found is not None and programs.passes(found, wanted), found)
