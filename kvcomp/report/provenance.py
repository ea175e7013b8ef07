"""What is needed to measure the same again: the command and the versions."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import kvcomp


def provenance() -> dict[str, Any]:
    """Command line, date, versions, machine, number of threads; `commit` where kvcomp is run from its repository."""
    program = Path(sys.argv[0]).name if sys.argv[0] else "python"
    return {
        "command": shlex.join([program, *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "kvcomp": kvcomp.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": _machine(),
        "threads": torch.get_num_threads(),
        **_commit(Path(kvcomp.__file__).parent),
    }


def _machine() -> str:
    """The processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.processor() or 'unknown processor')}, {platform.machine()}"


def _commit(folder: Path) -> dict[str, str]:
    """Commit of the folder if git tracks it, with a + if it was changed since; a folder of installed packages may lie
    in the repository of something else."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")}
    except (OSError, subprocess.SubprocessError):
        return {}
