"""Compares answers with math-verify, one a line. A script, started by `math_answer.Worker`.

Every line of stdin is JSON, `[reference, answer]`. For each, a line "parsed" is written to stdout as soon as the
reference is understood and then "right" or "wrong"; only "unparsable" if it is not. A process of its own, because a
comparison such as that of 10^{10^{10}} can only be ended by ending its process, and the time limit that math-verify
has needs the main thread.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY = 4 << 30
"""Bytes of address space: what a huge power may take."""


def parsed(text: str) -> list[Any]:
    """What math-verify finds in an answer: sympy objects, none if it cannot parse it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(), ExprExtractionConfig()]
    return parse(f"${text}$", extraction_config=targets, fallback_mode="no_fallback", parsing_timeout=None)


def judge(reference: str, answer: str, tell: Callable[[str], object]) -> str:
    """ "right", "wrong" or "unparsable", that is the reference; `tell("parsed")` is called in between."""
    from math_verify import verify

    try:
        expected = parsed(reference)
    except Exception:
        expected = []
    if not expected:
        return "unparsable"
    tell("parsed")
    try:
        return "right" if verify(expected, parsed(answer), timeout_seconds=None) else "wrong"
    # sympy raises nearly anything for an odd answer, also MemoryError and RecursionError.
    except Exception:
        return "wrong"


def main() -> None:
    """Answer every line; argument: seconds of processor time for each, after which the kernel ends the process."""
    seconds = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What the libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(word: str) -> None:
        print(word, file=answers, flush=True)

    import math_verify  # noqa: F401 -- before the first answer, whose time it would take

    logging.disable(logging.CRITICAL)
    tell("ready")
    for line in sys.stdin:
        reference, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        tell(judge(reference, answer, tell))
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
