"""`kvcomp eval` on a small random model: stopped, gone on with, in batches, in several processes."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvcomp import models
from kvcomp.cli import app
from kvcomp.eval import run, tasks
from kvcomp.eval.decode import Decoding
from kvcomp.eval.records import read
from kvcomp.eval.task import Problem
from kvcomp.evict import SnapKV, VaSE
from kvcomp.quant import MixedPrecision

ROOT = Path(__file__).parents[2]
OPTIONS = [
    "eval", "--task", "registers", "--limit", "7", "--batch", "3", "--method", "vase-attnv",
    "--budget", "64", "--interval", "16", "--set", "recent=16", "--set", "window=16", "--max-new-tokens", "60",
]  # fmt: skip


@pytest.fixture(scope="module")
def reasoner(random_reasoner):
    return models.load(str(random_reasoner))


def evaluate(reasoner, path, compressor, count=6, batch=1, family="registers", new=80, **settings):
    task = tasks.find(family)
    how = Decoding(compressor, 16, new, **settings)
    return run.evaluate(task, task.load(f"0:{count}"), *reasoner, how, path, {"how": repr(how)}, batch_size=batch)


def untimed(records):
    return [{name: value for name, value in asdict(record).items() if name != "seconds"} for record in records]


@pytest.mark.parametrize(
    ("compressor", "settings"),
    [
        (None, {}),
        (SnapKV(64, recent=16, window=16), {}),
        (VaSE(64, recent=16, window=16) | MixedPrecision(bits=8, recent=16, exact=0.0), {}),
        (VaSE(64, recent=16, window=16), {"temperature": 1.0, "top_p": 0.95, "seed": 5}),
    ],
    ids=["full", "snapkv", "packed", "drawn"],
)
def test_the_batch_size_changes_no_record(reasoner, tmp_path, compressor, settings):
    runs = [
        untimed(evaluate(reasoner, tmp_path / f"{size}.jsonl", compressor, batch=size, **settings)) for size in (1, 4)
    ]
    assert runs[0] == runs[1]


@dataclass(frozen=True)
class Watched(VaSE):
    """VaSE-AttnV that remembers what it kept: layer, round, positions."""

    kept: list = field(default_factory=list, compare=False)

    def compress(self, kv, seen):
        kept = super().compress(kv, seen)
        self.kept.append((seen.layer, seen.round, kept.positions.clone()))
        return kept


def test_the_batch_size_changes_no_kept_row(reasoner, tmp_path):
    found = []
    for size in (1, 2, 6):
        method = Watched(64, recent=16, window=16)
        evaluate(reasoner, tmp_path / f"{size}.jsonl", method, batch=size)
        rounds = {(layer, number) for layer, number, _ in method.kept}
        found.append(
            {
                (layer, number): torch.cat([rows for *which, rows in method.kept if which == [layer, number]])
                for layer, number in rounds
            }
        )
    first, *others = found
    assert len(first) > 4 and max(map(len, first.values())) == 6
    for other in others:
        assert first.keys() == other.keys() and all(torch.equal(first[key], other[key]) for key in first)


def test_a_stopped_run_goes_on_where_it_was(reasoner, tmp_path, monkeypatch):
    whole = evaluate(reasoner, tmp_path / "whole.jsonl", None, batch=2)
    made, record = [], run.record

    def failing(*arguments):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(record(*arguments))
        return made[-1]

    path = tmp_path / "stopped.jsonl"
    monkeypatch.setattr(run, "record", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate(reasoner, path, None, batch=2)
    part = path.with_name("stopped.jsonl.part0")
    assert len(read(part)) == 3
    part.write_bytes(part.read_bytes() + b'{"problem": "registers-3", "sam')
    monkeypatch.setattr(run, "record", record)
    assert untimed(evaluate(reasoner, path, None, batch=2)) == untimed(whole)
    assert untimed(read(path)) == untimed(whole)
    assert not part.exists()


def test_a_finished_run_does_no_work_again(reasoner, tmp_path, monkeypatch):
    first = evaluate(reasoner, tmp_path / "run.jsonl", None)
    monkeypatch.setattr(run, "decode", None)
    assert evaluate(reasoner, tmp_path / "run.jsonl", None) == first


def test_other_settings_do_not_go_on_with_a_run(reasoner, tmp_path):
    evaluate(reasoner, tmp_path / "run.jsonl", None, count=1)
    with pytest.raises(ValueError, match="other settings"):
        evaluate(reasoner, tmp_path / "run.jsonl", SnapKV(64, recent=16, window=16), count=1)


def test_samples_without_a_temperature_are_refused(reasoner, tmp_path):
    task = tasks.find("registers")
    with pytest.raises(ValueError, match="4 samples a problem would be equal"):
        run.evaluate(task, task.load("0:1"), *reasoner, Decoding(), tmp_path / "run.jsonl", {}, samples=4)
    assert not list(tmp_path.iterdir())


def test_batches_hold_prompts_of_one_length():
    lengths = [3, 4, 3, 3, 4, 5, 3]
    todo = [run.Work(Problem(str(index), "", ""), 0, (0,) * length) for index, length in enumerate(lengths)]
    found = [[one.problem.id for one in batch] for batch in run.batches(todo, 2)]
    assert found == [["0", "2"], ["1", "4"], ["3", "6"], ["5"]]
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        list(run.batches(todo, 0))


def test_problems_must_be_there_and_have_ids_of_their_own(reasoner):
    task = tasks.find("registers")
    with pytest.raises(ValueError, match="has no problems"):
        run.work(task, [], reasoner[1], 1)
    with pytest.raises(ValueError, match="the same id"):
        run.work(task, [replace(task.load("0:1")[0], id="x")] * 2, reasoner[1], 1)


def command(*arguments, launcher=("-m", "kvcomp.cli")):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    return subprocess.run(
        [sys.executable, *launcher, *arguments], capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT
    )


TWO = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "kvcomp.cli")


@pytest.fixture(scope="module")
def one(random_reasoner, tmp_path_factory):
    """The file that one process writes."""
    path = tmp_path_factory.mktemp("run") / "one.jsonl"
    done = command(*OPTIONS, "--model", str(random_reasoner), "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert sorted(each.name for each in path.parent.iterdir()) == ["one.jsonl", "one.jsonl.settings.json"]
    return path


def of_two_processes(random_reasoner, path):
    """What two processes leave at `path`, without the seconds, and nothing beside it."""
    done = command(*OPTIONS, "--model", str(random_reasoner), "--out", str(path), launcher=TWO)
    assert done.returncode == 0, done.stderr
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, f"{path.name}.settings.json"]
    return untimed(read(path))


def test_two_processes_write_the_file_of_one(random_reasoner, one, tmp_path):
    path = tmp_path / "two.jsonl"
    assert of_two_processes(random_reasoner, path) == untimed(read(one)) and len(read(path)) == 7
    settings = json.loads(path.with_name("two.jsonl.settings.json").read_text())
    assert settings["budget"] == 64 and settings["task"] == "registers"
    shown = command("compare", str(one), str(path))
    assert shown.returncode == 0 and "+0.000 (+0.000 to +0.000)" in " ".join(shown.stdout.split())


def test_two_processes_go_on_with_what_three_left_behind(random_reasoner, one, tmp_path):
    path, lines = tmp_path / "run.jsonl", one.read_bytes().splitlines(keepends=True)
    path.with_name("run.jsonl.settings.json").write_bytes(one.with_name("one.jsonl.settings.json").read_bytes())
    for process, written in enumerate((lines[0] + lines[3][:40], lines[1], lines[5] + lines[6])):
        path.with_name(f"run.jsonl.part{process}").write_bytes(written)
    assert of_two_processes(random_reasoner, path) == untimed(read(one))
    kept = [json.loads(lines[index])["seconds"] for index in (0, 1, 5, 6)]
    assert [read(path)[index].seconds for index in (0, 1, 5, 6)] == kept  # not made again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "algebra"), "no task 'algebra'"),
        (("--method", "magic"), "no method 'magic'"),
        (("--samples", "2"), "2 samples a problem would be equal"),
        (("--budget", "20"), "raise budget"),
    ],
)
def test_a_mistake_is_told_before_any_work(random_reasoner, tmp_path, arguments, message, capfd):
    options = [*OPTIONS, "--model", str(random_reasoner), "--out", str(tmp_path / "run.jsonl"), *arguments]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert message in " ".join((done.stderr + capfd.readouterr().err).split())
    assert not list(tmp_path.iterdir())


def test_a_sampled_token_does_not_depend_on_torch(reasoner, tmp_path):
    torch.manual_seed(1)
    first = evaluate(reasoner, tmp_path / "a.jsonl", None, count=2, temperature=1.0)
    torch.manual_seed(2)
    assert untimed(first) == untimed(evaluate(reasoner, tmp_path / "b.jsonl", None, count=2, temperature=1.0))
