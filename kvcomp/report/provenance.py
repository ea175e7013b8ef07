"""What is needed to measure the same again: the command and the versions."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import kvcomp


def provenance() -> dict[str, Any]:
    """Command line, date, versions, number of threads."""
    program = Path(sys.argv[0]).name if sys.argv[0] else "python"
    return {
        "command": shlex.join([program, *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "kvcomp": kvcomp.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
