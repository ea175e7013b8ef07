"""Where problems come from: datasets of the hub, and local files with the same columns."""

from __future__ import annotations

import csv
import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
"""The types of local files."""
TIMEOUT = 5.0
"""Seconds to wait for the hub: its own client tries again for 23 seconds when there is no network."""

Table: TypeAlias = Iterator[tuple[str, dict[str, Any]]]
"""Rows of a file or split, each after the words that say where it stands."""


@dataclass(frozen=True)
class Part:
    """One split of one dataset of the hub.

    `files` of the repository are read as JSON lines where it has no configuration that can be loaded. `prefix` goes
    before the ids of this part, and marks local files: those with the prefix, less its dash, in their name.
    """

    path: str
    split: str
    config: str | None = None
    files: tuple[str, ...] = ()
    prefix: str = ""

    def __str__(self) -> str:
        config = f", config {self.config}" if self.config else ""
        files = f", files {' '.join(self.files)}" if self.files else ""
        return f"{self.path}{config}, split {self.split}{files}"

    def arguments(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """What to call `datasets.load_dataset` with."""
        if self.files:
            urls = [f"hf://datasets/{self.path}/{name}" for name in self.files]
            return ("json",), {"data_files": {self.split: urls}, "split": self.split}
        return (self.path, *([self.config] if self.config else [])), {"split": self.split}


@dataclass(frozen=True)
class Row:
    """A row: `where` it stands, for messages; its `id`, unique and stable; its `values` by role, not by column."""

    where: str
    id: str
    values: Mapping[str, Any]

    def text(self, role: str) -> str:
        """A value as text; lists and objects as JSON."""
        value = self.values.get(role)
        if value is None or value == "":
            raise ValueError(f"{self.where}: no {role}; every row needs one")
        text = json.dumps(value) if isinstance(value, (list, dict)) else str(value)
        return text.strip()

    def parsed(self, role: str) -> Any:
        """A value that is JSON, or was before it was stored."""
        value = self.values.get(role)
        return _parsed(value, f"{self.where}, {role}") if isinstance(value, str) else value


@dataclass(frozen=True)
class Source:
    """The `parts` of a benchmark, and its columns: for every role the names it may have, that of the hub first.

    Names are compared without case, and with `_` for a space. Rows without a column for an `optional` role are fine;
    without one for `id`, the id is the index in the split. `note`: what else it takes to download the parts. `known`:
    where the names of the columns are known from.
    """

    name: str
    parts: tuple[Part, ...]
    columns: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""
    known: str = ""

    @property
    def origin(self) -> str:
        """The parts, in words."""
        return " and ".join(map(str, self.parts))

    def rows(self, source: str | None) -> Iterator[Row]:
        """Rows of a local file or folder, or with None of the hub."""
        counts: Counter[str] = Counter()
        for prefix, table in self._hub() if source is None else self._local(Path(source)):
            for where, raw in table:
                values = self._roles(where, raw)
                identity = values.get("id")
                identity = counts[prefix] if identity is None or identity == "" else identity
                counts[prefix] += 1
                yield Row(where, f"{prefix}{identity}", values)

    def _roles(self, where: str, raw: dict[str, Any]) -> dict[str, Any]:
        names = {_plain(name): name for name in raw}
        values = {}
        for role, accepted in {**self.columns, **self.optional}.items():
            found = next((names[_plain(name)] for name in accepted if _plain(name) in names), None)
            if found is not None:
                values[role] = raw[found]
            elif role in self.columns:
                needs = ", ".join(" or ".join(names) for names in self.columns.values())
                raise ValueError(
                    f"{self.name}: {where} has no column {' or '.join(accepted)}; the task needs the columns {needs} "
                    f"and found {', '.join(map(str, raw)) or 'none'}: rename them"
                    + (f" (its names are known from {self.known})" if self.known else "")
                )
        return values

    def _local(self, path: Path) -> Iterator[tuple[str, Table]]:
        for file in data_files(path):
            marks = (part.prefix for part in self.parts if part.prefix and part.prefix.strip("-") in file.stem.lower())
            yield next(marks, ""), read(file)

    def _hub(self) -> Iterator[tuple[str, Table]]:
        datasets, hub, constants = map(library, ("datasets", "huggingface_hub", "huggingface_hub.constants"))
        for part in self.parts:
            arguments, settings = part.arguments()
            try:
                if not constants.HF_HUB_OFFLINE:
                    hub.get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
                loaded = datasets.load_dataset(*arguments, **settings)
            # Every layer below raises its own kind: httpx, huggingface_hub, fsspec, pyarrow, datasets.
            except Exception as error:
                raise ValueError(self._unreachable(part, error)) from error
            yield part.prefix, ((f"{part}, row {number}", dict(row)) for number, row in enumerate(loaded))

    def _unreachable(self, part: Part, error: Exception) -> str:
        reason = (str(error).strip().splitlines() or [""])[0]
        commands, saved = [], []
        for one in self.parts:
            if one.files:
                include = " ".join(f"--include {name}" for name in one.files)
                commands.append(f"hf download {one.path} --repo-type dataset {include} --local-dir {self.name}")
                continue
            call = ", ".join(repr(argument) for argument in one.arguments()[0])
            saved.append(f"{one.path.split('/')[1] if one.prefix else self.name}.jsonl")
            code = f"load_dataset({call}, split={one.split!r}).to_json({saved[-1]!r})"
            commands.append(f'python -c "from datasets import load_dataset; {code}"')
        result = saved[0] if len(saved) == 1 else self.name
        carry = f"copy {' and '.join(saved)} into a folder {result} here" if len(saved) > 1 else f"copy {result} here"
        cache = (
            "" if part.files else " HF_HUB_OFFLINE=1 takes the dataset from the cache of this machine, if it is there."
        )
        return (
            f"{self.name}: cannot load {part} from the hub ({type(error).__name__}: {reason}). "
            f"{self.note + ' ' if self.note else ''}On a machine with network run\n  "
            + "\n  ".join(commands)
            + f"\nthen {carry} and pass --task-file {result}.{cache}"
        )


def library(name: str) -> Any:
    """A package of the extra `eval`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise ValueError(f"{error.name} is not installed: pip install 'kvcomp[eval]'") from error


def data_files(path: Path) -> list[Path]:
    """The file itself, or the data files in a folder by name."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files or files[0].suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: pass a file of type {', '.join(SUFFIXES)}, or the folder that such files are in")
    return files


def read(path: Path) -> Table:
    """The rows of a data file."""
    readers = {".jsonl": _lines, ".json": _array, ".parquet": _parquet, ".csv": _csv}
    return readers[path.suffix.lower()](path)


def _lines(path: Path) -> Table:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield (where := f"{path}, line {number}"), _object(_parsed(line, where), where)


def _array(path: Path) -> Table:
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):  # `to_json` of datasets writes lines whatever the name
        yield from _lines(path)
        return
    for number, row in enumerate(_parsed(text, str(path)), 1):
        yield (where := f"{path}, entry {number}"), _object(row, where)


def _csv(path: Path) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            for row in rows:
                yield f"{path}, line {rows.line_num}", {str(name): value for name, value in row.items()}
        except csv.Error as error:
            raise ValueError(f"{path}, line {rows.line_num}: not CSV ({error}); save it as .jsonl") from error


def _parquet(path: Path) -> Table:
    parquet = library("pyarrow.parquet")
    try:
        batches = parquet.ParquetFile(path).iter_batches(16)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path}, row {number}", row
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not parquet ({error})") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); write one JSON object a line, or an array of them") from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a {type(row).__name__}, not a JSON object")
    return row


def _plain(name: str) -> str:
    return str(name).strip().lower().replace(" ", "_")
