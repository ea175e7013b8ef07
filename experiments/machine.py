"""What a figure must carry: command, versions, commit, machine."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
WRITTEN = ("results", "figures", "README.md")
"""What experiments write beside this file."""


def provenance() -> dict[str, Any]:
    """Command line, date, commit, versions, processor and, if any, the GPU. The commit has a `+` if files differ from
    it, other than those that experiments write."""
    sources = [":(top)", *(f":(exclude){name}" for name in WRITTEN)]
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+" if _git("status", "--porcelain", "-uno", "--", *sources) else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        **_gpu(),
    }


def write_results(name: str, rows: list[dict[str, Any]], *, out: Path | None = None, **settings: Any) -> Path:
    """Writes `rows` with their provenance to `out`, or to `results/<name>.json`."""
    path = RESULTS / f"{name}.json" if out is None else out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": provenance(), "settings": settings, "rows": rows}, indent=1) + "\n")
    return path


def _git(*arguments: str) -> str:
    return _output("git", *arguments)


def _output(*command: str) -> str:
    """What a command prints; nothing if it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {"gpu": torch.cuda.get_device_name(), "driver": drivers[0] if drivers else None, "cuda": torch.version.cuda}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
