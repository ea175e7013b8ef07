"""Programs as answers: the code in a completion, and whether it passes the tests of a problem."""

from __future__ import annotations

import json
import re
import secrets
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from kvcomp.eval import sandbox

MEMORY = 4 << 30
"""Bytes of address space of a program, as in LiveCodeBench."""
OUTPUT = 1 << 20
"""Bytes it may write beyond twice the expected output."""
MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing", "builtins"),
)
"""What a program may use without importing it, names and modules, as in LiveCodeBench: LeetCode works like that."""

_SETUP = """\
import importlib, os, sys, types
sys.setrecursionlimit(50_000)
sys.set_int_max_str_digits(50_000)
sys.modules["__main__"] = types.ModuleType("__main__")
scope = vars(sys.modules["__main__"])
modules = {name: importlib.import_module(name) for name in MODULES}
for module in modules.values():
    public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    scope.update((name, getattr(module, name)) for name in public)
scope.update(modules)
exec(compile(SOURCE, "program.py", "exec"), scope)
"""
_CALL = """
value = getattr(scope["Solution"](), FUNCTION) if "Solution" in scope else scope[FUNCTION]
value = value(*arguments)
sys.stdout.flush()
data = ("\\n" + MARK + modules["json"].dumps(value) + "\\n").encode()
while data:
    data = data[os.write(channel, data):]
"""


@dataclass(frozen=True)
class Tests:
    """The tests of a problem: each a pair of input and expected output; the `function` to call with the input, one
    JSON value a line, or None for a program that reads it; and the `seconds` that each may take."""

    cases: tuple[tuple[str, str], ...]
    function: str | None
    seconds: float


def tests(answer: str) -> Tests:
    """The tests in the answer of a problem: JSON, `{"tests": [{"input", "output"}], "function", "seconds"}`.

    Raises ValueError if it is anything else.
    """
    try:
        read = json.loads(answer)
        cases = tuple((str(case["input"]), str(case["output"])) for case in read["tests"])
        function, seconds = read.get("function"), float(read.get("seconds", 6.0))
        if function is not None:
            cases = tuple((_arguments(given), json.dumps(json.loads(expected))) for given, expected in cases)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"the tests of a program cannot be read ({error!r}): {answer[:80]}") from error
    if not cases or not seconds > 0 or not (function is None or str(function).isidentifier()):
        raise ValueError(f"{len(cases)} tests, function {function!r}, {seconds} seconds: pass tests that can be run")
    return Tests(cases, function, seconds)


def _arguments(lines: str) -> str:
    """The arguments of a test, one JSON value a line, as one JSON list."""
    return json.dumps([json.loads(line) for line in lines.split("\n") if line.strip()])


def block(text: str) -> str | None:
    """The last closed fenced block marked python, py or python3; without one, the last with no mark; else None."""
    marked: str | None = None
    plain: str | None = None
    mark: str | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = re.fullmatch(r"\s*```\s*([\w+-]*).*", line)
        if mark is None:
            if fence:
                mark, lines = fence[1].lower(), []
        elif fence and not fence[1]:
            code = textwrap.dedent("\n".join(lines)) + "\n"
            if mark in ("python", "py", "python3"):
                marked = code
            elif not mark:
                plain = code
            mark = None
        elif fence:
            mark, lines = fence[1].lower(), []  # The block before it never closed.
        else:
            lines.append(line)
    return marked if marked is not None else plain


def passes(code: str, wanted: Tests) -> bool:
    """Whether the code passes every test; the first that it fails is the last that is run."""
    return all(_passes(code, given, expected, wanted) for given, expected in wanted.cases)


def _passes(code: str, given: str, expected: str, wanted: Tests) -> bool:
    """Whether it passes one. What is expected stays in this process, so that the program cannot find it."""
    mark = secrets.token_hex(16)
    program = wrapped(code) if wanted.function is None else wrapped(code, wanted.function, mark)
    ran = sandbox.run(program, given, wanted.seconds, MEMORY, OUTPUT + 2 * len(expected))
    if ran.status != "ok":
        return False
    if wanted.function is None:
        return same_output(ran.stdout, expected)
    _, found, result = ran.stdout.rpartition(mark)
    try:
        return bool(found) and json.loads(result) == json.loads(expected)
    except (ValueError, RecursionError):
        return False


def wrapped(code: str, function: str | None = None, mark: str = "") -> str:
    """A program that runs the code as `__main__` with the names of `MODULES`.

    With a function, its arguments are read as a JSON list before that, and what it returns is written as JSON after
    `mark`, where nothing that the code prints can be taken for it. A method of the class `Solution` if there is one.
    """
    setup = f"MODULES, SOURCE = {MODULES!r}, {code!r}\n{_SETUP}"
    if function is None:
        return setup
    read = "import json, os, sys\narguments, channel = json.load(sys.stdin), os.dup(1)\n"
    return f"{read}{setup}FUNCTION, MARK = {function!r}, {mark!r}\n{_CALL}"


def same_output(output: str, expected: str) -> bool:
    """Whether a program wrote what is expected: the same lines, but for spaces at their ends and empty lines at the end
    and the beginning; words as they are, or numbers of the same decimal value (`1.0` is `1`, `0.33` is not `1/3`).

    Source: LiveCodeBench, `testing_util.py`; it compares numbers only if the whole line is numbers, and spaces between
    words.
    """
    ours, theirs = ([line.split() for line in text.strip().split("\n")] for text in (output, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return len(ours) == len(theirs) and all(a == b or _same_number(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_number(ours: str, theirs: str) -> bool:
    try:
        return Decimal(ours) == Decimal(theirs)
    except (InvalidOperation, ValueError):
        return False
