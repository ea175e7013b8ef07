"""`kvcomp report` on a tiny model in a folder."""

import json

import pytest
from support import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvcomp.cli import app
from kvcomp.report import Report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0").save_pretrained(path)
    tiny().save_pretrained(path)
    (path / "text.txt").write_text(" ".join(f"w{1 + index * index % 90}" for index in range(500)))
    return path


def run(folder, *arguments, text="text.txt"):
    source = ["--model", str(folder), *(["--text", str(folder / text)] if text else [])]
    return CliRunner().invoke(app, ["report", *source, *arguments])


def test_tables_go_to_stdout_and_files_to_the_folder(folder, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "here"
    compressors = ["--compressor", "k8v4 recent=16", "--compressor", "int4 exact=0.1 recent=16"]
    result = run(folder, *compressors, "--length", "160", "--out", str(out), "--layers", "--window", "8")
    assert result.exit_code == 0, result.output
    assert "Break-even of exact rows" in result.stdout and "Layers: k8v4 recent=16" in result.stdout
    assert f"{folder}: 1 x 160 tokens, float32" in result.stdout.replace("\n", "")
    assert "pay" in result.stdout and "KL nats" in result.stdout
    names = {path.name for path in out.iterdir()}
    assert names == {
        "report.json", "report.csv", "report.html",
        "error_by_layer.png", "error_against_range.png", "error_against_bits.png",
    }  # fmt: skip
    assert all(f"{name}" in result.stderr.replace("\n", "") for name in names)
    report = Report.from_json((out / "report.json").read_text())
    assert report.settings["shape"] == [1, 160] and report.settings["source"] == str(folder)
    assert report.settings["text"].endswith("text.txt")
    added = [each.compressor for each in report.figures if each.equal_bits_of]
    assert [each.compressor for each in report.figures][:2] == ["k8v4 recent=16", "int4 exact=0.1 recent=16"]
    assert len(added) == 1 and added[0] in result.stdout


def test_without_plots_and_without_predictions(folder, tmp_path):
    few = ["--compressor", "int4 recent=16", "--length", "100", "--no-predict", "--no-plots"]
    result = run(folder, *few, "--out", str(tmp_path), text=None)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.csv"}
    held = json.loads((tmp_path / "report.json").read_text())
    assert held["settings"]["text"] == "pydoc_data.topics" and held["figures"][0]["model"] is None
    assert "KL nats" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compressor", "int5"], "unknown word 'int5' in 'int5'; known: settings k8v4"),
        (["--compressor", "int4 recent=200", "--length", "100"], "all of them are recent"),
        (["--compressor", "int4", "--compressor", "int4"], "given twice"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
    ],
)
def test_mistakes_end_with_two_and_one_plain_line(folder, arguments, message):
    result = run(folder, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


def test_a_folder_that_cannot_be_made_is_told_before_the_work(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcomp.report.cli._measured", lambda *_: 1 / 0)
    (tmp_path / "file").write_text("in the way")
    result = run(folder, "--no-plots", "--out", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2 and "cannot make the folder" in result.stderr.replace("\n", " ")
    monkeypatch.setattr("os.access", lambda path, *_, **__: "locked" not in str(path))
    result = run(folder, "--no-plots", "--out", str(tmp_path / "locked"))
    assert result.exit_code == 2 and "no permission" in result.stderr.replace("\n", " ")


def test_a_file_that_cannot_be_written_is_told(folder, tmp_path):
    (tmp_path / "report.json").mkdir()
    few = ["--compressor", "int4 recent=16", "--length", "100", "--no-predict", "--no-plots"]
    result = run(folder, *few, "--out", str(tmp_path))
    assert result.exit_code == 2 and "report.json" in result.stderr and "K err %" in result.stdout


def test_texts_that_cannot_be_read(folder):
    (folder / "empty.txt").write_text(" \n")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00w")
    for name, message in (("empty.txt", "is empty"), ("bytes.txt", "is not UTF-8")):
        result = run(folder, text=name)
        assert result.exit_code == 2 and message in result.stderr.replace("\n", "")


def test_help_teaches():
    text = CliRunner().invoke(app, ["report", "--help"]).stdout
    assert "Examples" in text and "exact=<share>" in text
