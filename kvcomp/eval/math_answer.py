"""Whether two mathematical answers are equal, by math-verify: `equal`."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path

from kvcomp.eval.math_text import bases, tidy, words

SCRIPT = Path(__file__).with_name("math_worker.py")
SECONDS = 5.0
"""Processor time a comparison may take: that of math-verify for each of its steps. Over it, an answer is wrong."""
WALL = 20.0
"""Seconds a comparison may take on a machine that is busy with other work."""
START = 300.0
"""Seconds the import of sympy may take there."""


def equal(reference: str, answer: str) -> bool:
    """Whether an answer is the reference; `tidy` says how both are written first.

    Equal texts are equal. A base of a numeral (`2516_8`) may be left out, but a different one is wrong. math-verify
    decides the rest: `1/2` is `0.5`, `50\\%` is both `50` and `0.5`, `x=5` is `5`, a unit does not matter, numbers are
    compared to 6 decimals, lists without brackets are sets, tuples are ordered, `(1,2]` is not `[1,2]`.

    Raises ValueError for a reference that math-verify cannot parse, or not within `SECONDS`, and if math-verify is not
    installed. An answer that cannot be parsed, or not in time, is not equal.
    """
    expected, given = tidy(reference), tidy(answer, units=not re.search(r"(?<![\\A-Za-z])[A-Za-z]", reference))
    if not given:
        return False
    if words(expected) == words(given):
        return True
    if len(set(filter(None, (bases(expected), bases(given))))) == 2:
        return False
    verdict = WORKER.ask(expected, given)
    if verdict == "unparsable":
        raise ValueError(
            f"math-verify cannot parse the reference answer {reference!r} in time; correct it, or grade by exact"
        )
    return verdict == "right"


class Worker:
    """The process that compares: started when the first answer comes, and again after one that took too long.

    `ask` may be called from any thread; one comparison runs at a time. A fork of this process starts its own.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0

    def ask(self, reference: str, answer: str) -> str:
        """ "right", "wrong" or "unparsable", which is the reference."""
        with self.lock:
            try:
                return self._ask(f"{json.dumps([reference, answer])}\n".encode())
            except BaseException:
                self._stop()  # The next answer must not get this one's verdict.
                raise

    def close(self) -> None:
        """End the process."""
        with self.lock:
            self._stop()

    def _ask(self, line: bytes) -> str:
        process, deadline = self._running(), time.monotonic() + WALL
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            first = self._line(process, deadline)
        except BrokenPipeError:
            first = ""
        verdict = self._line(process, deadline) if first == "parsed" else first
        if verdict:
            return verdict
        self._stop()
        return "wrong" if first else "unparsable"

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if there is none that works for this one."""
        if self.process is not None and self.owner == os.getpid() and self.process.poll() is None:
            return self.process
        self._stop()
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("math_verify is not installed: pip install 'kvcomp[eval]'")
        command = [sys.executable, "-P", str(SCRIPT), str(SECONDS)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        self.owner = os.getpid()
        if self._line(self.process, time.monotonic() + START) != "ready":
            self._stop()
            raise ValueError("math-verify does not start; see the error of: python -c 'import math_verify'")
        return self.process

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> str:
        """The next line, without its end; "" if it is not there in time or the process has ended."""
        assert process.stdout is not None
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return ""
                byte = os.read(process.stdout.fileno(), 1)  # No more: the next line stays in the pipe.
                if not byte:
                    return ""
                line += byte
        return line.decode().strip()

    def _stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        if self.owner == os.getpid():
            process.kill()
            process.wait()


WORKER = Worker()
"""The one of this process."""
atexit.register(WORKER.close)


def _after_fork() -> None:
    """A lock that another thread held at the fork is never released in the child."""
    WORKER.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
