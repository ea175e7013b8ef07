"""Problems of LiveCodeBench: what is asked, and the tests of a program."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from typing import Any

from kvcomp.eval.sources import Row
from kvcomp.eval.task import Problem

SECONDS = 6.0
"""Time limit of a test, the default of LiveCodeBench (VaSE: 30)."""
COMPLETE = "Complete this code, and end with all of it in one block:\n\n```python\n{starter}\n```"
"""Ends a prompt with starter code."""
WRITE = (
    "Write a Python program that reads the input from standard input and writes the answer to standard output, and end "
    "with all of it in one block:\n\n```python\n# your program\n```"
)
"""Ends a prompt without."""


def programming(row: Row) -> Problem | None:
    """The problem of a row; None if its difficulty is not medium, as in the paper.

    The answer is JSON: `tests`, public ones and then private ones, each `input` and `output`; `function`, the name of
    the one to call, or null for a program that reads standard input; `seconds` a test may take.
    """
    if row.text("difficulty").lower() != "medium":
        return None
    packed = row.text("private")
    private = row.parsed("private") if packed.startswith("[") else unpack(packed, row.where)
    try:
        tests = [
            {"input": str(one["input"]), "output": str(one["output"])} for one in [*row.parsed("public"), *private]
        ]
        function = row.parsed("metadata").get("func_name")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{row.where}: a test needs input and output, metadata is an object ({error!r})") from error
    if not tests:
        raise ValueError(f"{row.where}: no tests; take the file with all columns")
    starter = str(row.values.get("starter") or "").rstrip()
    prompt = f"{row.text('question')}\n\n{COMPLETE.format(starter=starter) if starter else WRITE}"
    return Problem(row.id, prompt, json.dumps({"tests": tests, "function": function, "seconds": SECONDS}))


class TextOnly(pickle.Unpickler):
    """A pickle of a string needs no class; one that names any could run code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse."""
        raise pickle.UnpicklingError(f"it wants {module_name}.{global_name}, and only text is allowed")


def unpack(packed: str, where: str) -> list[dict[str, str]]:
    """Private tests: JSON, pickled as a string, compressed by zlib, in base64."""
    try:
        text = TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(packed, validate=True)))).load()
        if not isinstance(text, str):
            raise pickle.UnpicklingError(f"a {type(text).__name__}, not text")
        tests: list[dict[str, str]] = json.loads(text)
    # A damaged pickle may raise nearly anything.
    except Exception as error:
        raise ValueError(f"{where}: refused the private tests ({error}); download the file again") from error
    return tests
