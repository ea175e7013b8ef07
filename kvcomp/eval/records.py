"""Completions on disk: JSON lines that survive a killed run and can be gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Record:
    """One completion: which, what it says, how it was judged, what it took.

    `finished`: it ended by itself, not at the length limit. `loops`: its end repeats itself. `tokens`: new ones.
    `kv_bytes`: its share of the cache at the end. `seconds`: from the start of its batch to its end.
    """

    problem: str
    sample: int
    correct: bool
    found: str | None
    finished: bool
    loops: bool
    tokens: int
    kv_bytes: int
    seconds: float
    completion: str

    @property
    def key(self) -> tuple[str, int]:
        """Problem and sample."""
        return self.problem, self.sample


class Records:
    """The file of a run, and beside it `<file>.settings.json` and, while it runs, a part for each process.

    Raises ValueError where `path` holds a run with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.settings_path = path.with_name(path.name + ".settings.json")

    def open(self) -> None:
        """Make the folder, write or check the settings."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.settings_path.exists():
            if self.path.exists():
                raise ValueError(
                    f"{self.path} exists without {self.settings_path.name}: it is not a run; use another file"
                )
            write_whole(self.settings_path, json.dumps(self.settings, indent=1) + "\n")
            return
        before = json.loads(self.settings_path.read_text("utf-8"))
        changed = {
            name: (before.get(name), self.settings.get(name))
            for name in before.keys() | self.settings.keys()
            if before.get(name) != self.settings.get(name)
        }
        if changed:
            told = "; ".join(f"{name}: {old!r} there, {new!r} now" for name, (old, new) in sorted(changed.items()))
            raise ValueError(
                f"{self.path} holds a run with other settings ({told}); use another file or the same settings"
            )

    @property
    def parts(self) -> list[Path]:
        """The parts of processes that have not been merged."""
        return sorted(self.path.parent.glob(f"{self.path.name}.part*"))

    def done(self) -> dict[tuple[str, int], Record]:
        """What is on disk, from the file and every part."""
        return {record.key: record for path in (self.path, *self.parts) if path.exists() for record in read(path)}

    def part(self, process: int) -> TextIO:
        """The part of a process, to append lines to; a torn last line is cut off first."""
        path = self.path.with_name(f"{self.path.name}.part{process}")
        if path.exists():
            repair(path)
        return path.open("a", encoding="utf-8")

    def merge(self, order: Iterable[tuple[str, int]]) -> list[Record]:
        """Everything in one file, in the order of the task; the parts are removed."""
        done, parts = self.done(), self.parts
        records = [done[key] for key in order if key in done]
        write_whole(self.path, "".join(line(record) for record in records))
        for part in parts:
            part.unlink()
        return records


def line(record: Record) -> str:
    """The record as a line of JSON."""
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


def append(file: TextIO, record: Record) -> None:
    """One line more, on the disk when this returns."""
    file.write(line(record))
    file.flush()
    os.fsync(file.fileno())


def read(path: Path) -> list[Record]:
    """The records of a file. A last line without its newline was torn and is left out; a bad one before is a
    ValueError."""
    records = []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            records.append(Record(**json.loads(text)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no record of kvcomp eval: {error}") from error
    return records


def repair(path: Path) -> None:
    """Cut off a last line without a newline."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def write_whole(path: Path, text: str) -> None:
    """Write `path` so that it is either as before or complete."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
