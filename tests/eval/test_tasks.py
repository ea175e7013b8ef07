"""The tasks, on small files in the format of each dataset."""

import base64
import csv
import json
import pickle
import time
import zlib

import pytest

from kvcomp.eval import tasks
from kvcomp.eval.benchmarks import BOXED, LETTER, SOURCES, unboxed
from kvcomp.eval.chains import FAMILIES, TRAINING
from kvcomp.eval.sources import library
from kvcomp.eval.task import Grade
from kvcomp.eval.tasks import TASKS, custom, find

GPQA = {
    "Record ID": "rec06pnAkLOr2t2mp",
    "Question": " Which particle carries the strong force?\n",
    "Correct Answer": "Gluon\n",
    "Incorrect Answer 1": "Photon",
    "Incorrect Answer 2": "W boson",
    "Incorrect Answer 3": "Graviton",
    "Subdomain": "Physics",
}
PUBLIC = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
PRIVATE = [{"input": "5 6\n", "output": "11\n", "testtype": "stdin"}]


def pack(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def program(**changes):
    return {
        "question_title": "A. Sum",
        "question_content": "Print the sum of two numbers.",
        "platform": "atcoder",
        "question_id": "abc301_a",
        "contest_id": "abc301",
        "contest_date": "2023-05-13T00:00:00",
        "starter_code": "",
        "difficulty": "medium",
        "public_test_cases": json.dumps(PUBLIC),
        "private_test_cases": pack(json.dumps(PRIVATE)),
        "metadata": "{}",
        **changes,
    }


@pytest.fixture
def write(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".parquet":
            arrow = library("pyarrow")
            library("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
        elif path.suffix == ".csv":
            with path.open("w", newline="") as lines:
                table = csv.DictWriter(lines, rows[0])
                table.writeheader()
                table.writerows(rows)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_the_names_samples_and_limits_of_the_paper():
    table = {name: (task.samples, task.max_new_tokens) for name, task in TASKS.items() if task.chat}
    assert table == {
        "gsm8k": (4, 4096),
        "math500": (8, 32768),
        "aime25": (16, 32768),
        "aime26": (16, 32768),
        "hmmt25": (16, 32768),
        "gpqa-diamond": (8, 32768),
        "livecodebench-v6": (8, 32768),
    }
    assert set(TASKS) - set(table) == set(FAMILIES)
    assert all(source.known for source in SOURCES.values())


def test_gsm8k(write):
    rows = [{"question": f"How many? {i}", "answer": f"2 * 3 = <<2*3=6>>6\n#### 1,00{i % 10}"} for i in range(501)]
    problems = TASKS["gsm8k"].load(write(rows))
    assert len(problems) == 500
    assert (problems[7].id, problems[7].answer) == ("7", "1007")
    assert problems[7].prompt == "How many? 7 Put your final answer within \\boxed{}."


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.csv"])
def test_math500_of_every_file_type(write, name):
    row = {
        "problem": "Find $x$.",
        "solution": "It is $\\boxed{4}$, or rather $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    }
    (problem,) = TASKS["math500"].load(write([row], name))
    assert problem.id == "test/algebra/1.json"
    assert problem.prompt == f"Find $x$.\n{BOXED}"
    assert problem.answer == "\\frac{1}{2}"


def test_aliases_and_whole_solutions(write):
    rows = [{"Question": "a", "solution": "so $\\boxed{204}$"}, {"Question": "b", "answer": 70}]
    problems = TASKS["aime25"].load(write(rows))
    assert [(problem.id, problem.answer) for problem in problems] == [("0", "204"), ("1", "70")]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1} \\boxed{2} end", "2"),
        ("\\boxed{1", "\\boxed{1"),
    ],
)
def test_the_last_box(text, answer):
    assert unboxed(text) == answer


def test_hmmt_of_a_folder_in_two_files(write, tmp_path):
    for month in ("nov", "feb"):
        write([{"problem_idx": 1, "problem": month, "answer": "\\pi"}], f"hmmt/hmmt_{month}_2025.jsonl")
    (tmp_path / "hmmt" / "README.md").write_text("not data")
    problems = TASKS["hmmt25"].load(str(tmp_path / "hmmt"))
    assert [problem.id for problem in problems] == ["feb-1", "nov-1"]
    rows = [{"problem": "a", "answer": "1", "id": str(i)} for i in range(60)]
    assert [problem.id for problem in TASKS["hmmt25"].load(write(rows))] == [str(i) for i in range(60)]


def test_gpqa_options_are_shuffled_and_stay_so(write):
    rows = [{**GPQA, "Record ID": f"rec{i}", "Question": f"Which one, {i}?"} for i in range(40)]
    problems = TASKS["gpqa-diamond"].load(write(rows, "gpqa_diamond.csv"))
    assert {problem.answer for problem in problems} == set("ABCD")
    for problem in problems:
        assert f"\n{problem.answer}) Gluon\n" in problem.prompt
        assert problem.prompt.endswith(f"\n\n{LETTER}")
    backwards = TASKS["gpqa-diamond"].load(write(rows[::-1]))
    assert backwards[::-1] == problems


def test_the_order_of_gpqa_options_never_changes(write):
    (problem,) = TASKS["gpqa-diamond"].load(write([GPQA]))
    assert problem.id == "rec06pnAkLOr2t2mp"
    expected = "A) Gluon\nB) W boson\nC) Photon\nD) Graviton"
    assert problem.prompt == f"Which particle carries the strong force?\n\n{expected}\n\n{LETTER}"
    assert problem.answer == "A"


def test_livecodebench(write):
    functional = program(
        question_id="3045",
        starter_code="class Solution:\n    def add(self, a: int) -> int:\n        ",
        metadata='{"func_name": "add"}',
        private_test_cases=json.dumps(PRIVATE),
    )
    path = write([program(), program(question_id="hard", difficulty="hard"), functional])
    first, second = TASKS["livecodebench-v6"].load(path)
    assert (first.id, second.id) == ("abc301_a", "3045")
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6\n", "output": "11\n"}]
    assert json.loads(first.answer) == {"tests": tests, "function": None, "seconds": 6.0}
    assert json.loads(second.answer) == {"tests": tests, "function": "add", "seconds": 6.0}
    assert first.prompt.startswith("Print the sum of two numbers.\n\n") and "standard input" in first.prompt
    assert "def add(self, a: int) -> int:\n```" in second.prompt and "standard input" not in second.prompt


class Malicious:
    def __reduce__(self):
        return eval, ("1 / 0",)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (pack(Malicious()), "builtins.eval, and only text is allowed"),
        (pack(["a list"]), "a list, not text"),
        (pack("not json"), "refused"),
        (base64.b64encode(zlib.compress(b"garbage")).decode(), "refused"),
        (base64.b64encode(b"not zlib").decode(), "refused"),
        ("?!", "refused"),
    ],
)
def test_private_tests_that_are_not_text_are_refused(write, packed, reason):
    with pytest.raises(
        ValueError, match=rf"line 2: refused the private tests.*{reason}|line 2: {reason} the private tests"
    ):
        TASKS["livecodebench-v6"].load(write([program(), program(private_test_cases=packed)]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "no tests"),
        ({"public_test_cases": '[{"in": 1}]'}, "a test needs input and output"),
        ({"metadata": "{"}, "metadata: not JSON"),
        ({"metadata": None}, "metadata is an object"),
        ({"difficulty": "easy"}, "no problem in"),
    ],
)
def test_programs_that_cannot_be_judged(write, changes, reason):
    with pytest.raises(ValueError, match=reason):
        TASKS["livecodebench-v6"].load(write([program(**changes)]))


def test_a_missing_column_names_the_needed_and_the_found(write):
    with pytest.raises(
        ValueError, match="(?s)no column Incorrect Answer 2;.*Question, Correct.*found Record ID, Quest"
    ):
        TASKS["gpqa-diamond"].load(write([{k: v for k, v in GPQA.items() if k != "Incorrect Answer 2"}]))
    with pytest.raises(ValueError, match="line 2 has no column problem or question.*found text, answer.*known from"):
        TASKS["aime26"].load(write([{"problem": "a", "answer": 1}, {"text": "a", "answer": 1}]))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no problem in"),
        (["\n"], "no problem in"),
        ([{"problem": "a", "answer": 1}, "\n", "{oops\n"], "line 3: not JSON"),
        ([{"problem": "a", "answer": 1}, "7\n"], "line 2: a int, not a JSON object"),
        ([{"problem": "a", "answer": None}], "line 1: no answer"),
        ([{"problem": " ", "answer": ""}], "line 1: no answer"),
        ([{"problem": "a", "answer": 1, "id": 3}] * 2, "two problems with the id 3"),
    ],
)
def test_bad_rows_are_pointed_at(write, rows, reason):
    with pytest.raises(ValueError, match=reason):
        TASKS["aime25"].load(write(rows))


def test_bad_files_are_pointed_at(tmp_path, write):
    with pytest.raises(ValueError, match="no such file or folder"):
        TASKS["aime25"].load(str(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match="pass a file of type .jsonl"):
        TASKS["aime25"].load(str(tmp_path))
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(ValueError, match="pass a file of type .jsonl"):
        TASKS["aime25"].load(str(tmp_path / "rows.txt"))
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="rows.parquet: not parquet"):
        TASKS["aime25"].load(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.csv").write_text('problem,answer\n"a"b,1\n')
    with pytest.raises(ValueError, match="rows.csv, line .: not CSV"):
        TASKS["aime25"].load(str(tmp_path / "rows.csv"))


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that refuses connections."""
    constants = pytest.importorskip("huggingface_hub").constants
    pytest.importorskip("datasets")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("name", SOURCES)
def test_without_the_hub_the_way_is_told_at_once(no_hub, name):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"{name}: cannot load") as caught:
        TASKS[name].load(None)
    assert time.perf_counter() - start < 10
    message = str(caught.value)
    for part in SOURCES[name].parts:
        assert part.path in message and part.split in message
    assert "--task-file" in message
    assert ("gated" in message) == (name == "gpqa-diamond")


def test_what_is_told_to_run(no_hub):
    with pytest.raises(ValueError) as caught:
        TASKS["gsm8k"].load(None)
    assert "load_dataset('openai/gsm8k', 'main', split='test').to_json('gsm8k.jsonl')" in str(caught.value)
    assert "--task-file gsm8k.jsonl." in str(caught.value)
    with pytest.raises(ValueError, match="copy hmmt_feb_2025.jsonl and hmmt_nov_2025.jsonl into a folder hmmt25"):
        TASKS["hmmt25"].load(None)
    with pytest.raises(ValueError, match="hf download livecodebench/.* --include test.jsonl .*--include test6.jsonl"):
        TASKS["livecodebench-v6"].load(None)


def test_what_the_hub_is_asked_for(monkeypatch):
    hub, datasets = pytest.importorskip("huggingface_hub"), pytest.importorskip("datasets")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    asked = []

    def load_dataset(*arguments, **settings):
        asked.append((arguments, settings))
        return [{"problem": "a", "question": "b", "answer": "#### 1", "problem_idx": 1}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [problem.id for problem in TASKS["gsm8k"].load(None)] == ["0"]
    assert [problem.id for problem in TASKS["hmmt25"].load(None)] == ["feb-1", "nov-1"]
    with pytest.raises(ValueError, match="code_generation_lite, split test.*row 0 has no column question_content|diff"):
        TASKS["livecodebench-v6"].load(None)
    assert asked[0] == (("openai/gsm8k", "main"), {"split": "test"})
    assert [arguments for arguments, _ in asked[1:3]] == [("MathArena/hmmt_feb_2025",), ("MathArena/hmmt_nov_2025",)]
    root = "hf://datasets/livecodebench/code_generation_lite"
    files = [f"{root}/test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)]
    assert asked[3] == (("json",), {"data_files": {"test": files}, "split": "test"})


def test_the_hub_needs_its_package(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ValueError, match=r"datasets is not installed: pip install 'kvcomp\[eval\]'"):
        TASKS["gsm8k"].load(None)


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_families(family):
    task = TASKS[family]
    problems = task.load(None)
    assert [problem.id for problem in problems] == [f"{family}-{seed}" for seed in range(500)]
    assert len({problem.prompt for problem in problems}) == len({problem.answer for problem in problems}) == 500
    assert {len(problem.answer.split()) for problem in problems} == {task.max_new_tokens}
    assert not task.chat and task.samples == 1
    chain = FAMILIES[family](3)
    assert [*problems[3].prompt.split(), *problems[3].answer.split()] == [*chain.prompt, *chain.chain]


def test_generated_seeds():
    assert [problem.id for problem in TASKS["registers"].load("1000:1002")] == ["registers-1000", "registers-1001"]
    for wrong in ("a.jsonl", "5:5", "7", f"0:{TRAINING + 1}"):
        with pytest.raises(ValueError, match=rf"{wrong}.*FIRST:END.*1000:1400.*training"):
            TASKS["derivations"].load(wrong)


def test_a_file_of_your_own(write, monkeypatch):
    for kind in tasks.GRADES:
        monkeypatch.setitem(tasks.GRADES, kind, lambda text, problem, kind=kind: Grade(True, f"{kind} {text}"))
    rows = [
        {"question": "1 + 1?", "answer": 2},
        {"problem": "A or B?", "answer": "B", "grade": "choice", "id": "letters"},
        {"prompt": "Say yes.", "answer": "yes", "grade": "exact"},
        {"prompt": "Double it.", "answer": {"tests": [{"input": "1", "output": "2"}]}, "grade": "code"},
    ]
    task = find(write(rows, "mine.jsonl"))
    problems = task.load(None)
    assert task.name == "mine"
    assert [problem.id for problem in problems] == ["0", "letters", "2", "3"]
    assert [problem.prompt for problem in problems] == [
        f"1 + 1?\n{BOXED}",
        f"A or B?\n{LETTER}",
        "Say yes.",
        "Double it.",
    ]
    assert problems[0].answer == "2" and json.loads(problems[3].answer)["tests"][0]["output"] == "2"
    assert [task.grade("a", problem).found for problem in problems] == ["math a", "choice a", "exact a", "code a"]
    with pytest.raises(ValueError, match="leave out --task-file other.jsonl"):
        task.load("other.jsonl")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "a", "answer": 1, "grade": "maths"}, "line 1: no grader 'maths'; choose from math, choice"),
        ({"question": "a"}, "no column answer; the task needs the columns prompt or question or problem, answer"),
        ({"question": "a", "answer": "x", "grade": "code"}, "answer: not JSON"),
        ({"question": "a", "answer": "{}", "grade": "code"}, "the answer to a program is like"),
    ],
)
def test_bad_rows_of_your_own(write, row, reason):
    with pytest.raises(ValueError, match=reason):
        custom(write([row]))


def test_find():
    assert find("gsm8k") is TASKS["gsm8k"]
    with pytest.raises(ValueError, match="no task 'gsm9k'; choose from gsm8k, math500, .*registers, derivations"):
        find("gsm9k")
    with pytest.raises(ValueError, match="mine.jsonl: no such file"):
        find("mine.jsonl")
