"""The command line on a tiny model in a folder."""

import re

import pytest
from support import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvcomp.cli import app
from kvcomp.evict import METHODS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0").save_pretrained(path)
    tiny().save_pretrained(path)
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, ["generate", *arguments])


def words(count):
    return " ".join(f"w{1 + index % 90}" for index in range(count))


def test_the_answer_goes_to_stdout_and_the_memory_to_stderr(folder):
    result = run("--model", folder, "--prompt", words(150), "--budget", "128", "--max-new-tokens", "70")
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"w\d+", result.stdout)) > 60  # w0 is a special token and not printed
    assert "70 tokens in" in result.stderr and "of 219 tokens per head" in result.stderr


def test_the_same_seed_gives_the_same_sample_and_another_one_does_not(folder):
    common = [
        "--model",
        folder,
        "--prompt",
        words(150),
        "--budget",
        "128",
        "--max-new-tokens",
        "60",
        "--temperature",
        "1.5",
    ]
    first, again, other = (run(*common, "--seed", seed).stdout for seed in ("0", "0", "1"))
    assert first == again != other


@pytest.mark.parametrize("method", [*METHODS, "full"])
def test_every_method_runs_and_room_for_all_gives_the_full_answer(folder, method):
    common = ["--model", folder, "--prompt", words(10), "--max-new-tokens", "20"]
    protected = [] if method == "full" else ["--protect-prompt"]
    result = run(*common, "--method", method, "--budget", "256", *protected)
    assert result.exit_code == 0, result.output
    assert result.stdout == run(*common, "--method", "full").stdout


def test_settings_reach_the_method(folder):
    few = ["--model", folder, "--prompt", words(40), "--max-new-tokens", "30", "--interval", "8", "--method", "snapkv"]
    result = run(*few, "--budget", "16", "--set", "window=4", "--set", "recent=4")
    assert result.exit_code == 0 and re.search(r"for 1[6-9]|2\d of 69 tokens", result.stderr)


def test_rows_are_packed_with_and_without_eviction(folder):
    common = ["--model", folder, "--prompt", words(90), "--max-new-tokens", "60", "--quantize", "k8v4 recent=32"]
    both = run(*common, "--budget", "100")
    assert both.exit_code == 0 and re.search(r"for 1[0-6]\d of 149 tokens per head .*codes", both.stderr)
    alone = run(*common, "--method", "full")
    assert alone.exit_code == 0 and re.search(r"for 149 of 149 tokens per head .*codes", alone.stderr)


def test_a_prompt_from_a_file_and_from_stdin(folder, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(words(12))
    common = ["--model", folder, "--budget", "128", "--max-new-tokens", "5"]
    from_file = run(*common, "--prompt-file", str(path))
    from_stdin = CliRunner().invoke(app, ["generate", *common, "--prompt", "-"], input=words(12))
    assert from_file.exit_code == from_stdin.exit_code == 0
    assert from_file.stdout == from_stdin.stdout != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "w1", "--budget", "60"], "budget=60 leaves no row to choose"),
        (["--prompt", "w1", "--method", "snap"], "no method 'snap'; choose one of vase-attnv"),
        (["--prompt", "w1", "--set", "windows=3"], "does not take the settings"),
        (["--prompt", "w1", "--set", "window"], "name=value, got 'window'"),
        (["--prompt", "w1", "--dtype", "int8"], "dtype must be one of"),
        (["--prompt", " "], "prompt is empty"),
        ([], "either --prompt or --prompt-file"),
        (["--prompt", words(200), "--budget", "150", "--protect-prompt"], "prompt of 200 tokens"),
        (["--prompt", "w1", "--interval", "0"], "interval must be an int of at least 1, got 0"),
        (["--prompt", "w1", "--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["--prompt", "w1", "--method", "full", "--set", "window=3"], "neither --set nor --protect-prompt"),
        (["--prompt", "w1", "--quantize", "k8"], "does not say value_bits"),
        (["--prompt", "w1", "--quantize", "snapkv budget=99"], "one quantizer, such as k8v4"),
    ],
)
def test_mistakes_end_with_two_and_one_plain_line(folder, arguments, message):
    result = run("--model", folder, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


def test_a_prompt_that_is_no_text(folder, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xff\xfe\x00w")
    result = run("--model", folder, "--prompt-file", str(path))
    assert result.exit_code == 2 and "prompt.txt is not UTF-8" in result.stderr.replace("\n", "")


def test_a_model_that_is_not_there(tmp_path):
    result = run("--model", str(tmp_path / "nothing.gguf"), "--prompt", "hello")
    assert result.exit_code == 2 and "there is no file" in result.stderr


def test_help_teaches():
    assert "Examples" in run("--help").stdout and "--protect-prompt" in run("--help").stdout
    assert "80GB" in CliRunner().invoke(app, ["plan", "--help"]).stdout
    listed = CliRunner().invoke(app, ["methods"]).stdout
    assert all(name in listed for name in METHODS)
