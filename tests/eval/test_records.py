import json

import pytest

from kvcomp.eval.records import Record, Records, append, line, read

SETTINGS = {"model": "m", "budget": 8}


def record(problem, sample=0, correct=True):
    return Record(problem, sample, correct, "4", True, False, 10, 100, 1.5, "so it is 4\nénd")


@pytest.fixture
def records(tmp_path):
    found = Records(tmp_path / "runs" / "run.jsonl", SETTINGS)
    found.open()
    return found


def test_a_record_comes_back_as_it_was(records):
    with records.part(0) as file:
        append(file, record("a"))
        append(file, record("b", 1, False))
    assert records.done() == {("a", 0): record("a"), ("b", 1): record("b", 1, False)}


def test_a_torn_last_line_costs_that_record_only(records):
    with records.part(0) as file:
        append(file, record("a"))
        append(file, record("b"))
    path, whole = records.parts[0], records.parts[0].read_bytes()
    first = len(line(record("a")).encode())
    for length in range(first, len(whole)):  # wherever the writing stopped, also inside a character
        path.write_bytes(whole[:length])
        assert [one.problem for one in read(path)] == ["a"]
        with records.part(0) as file:
            append(file, record("c"))
        assert [one.problem for one in read(path)] == ["a", "c"]


def test_a_bad_line_in_the_middle_is_named(records):
    records.path.write_text(line(record("a")) + "{}\n" + line(record("b")))
    with pytest.raises(ValueError, match="line 2 is no record"):
        read(records.path)


def test_parts_become_one_file_in_the_order_of_the_task(records):
    for process, names in ((0, "ac"), (1, "bd")):
        with records.part(process) as file:
            for name in names:
                append(file, record(name))
    assert [one.problem for one in records.merge([(name, 0) for name in "dcba"])] == list("dcba")
    assert [json.loads(text)["problem"] for text in records.path.read_text().splitlines()] == list("dcba")
    assert records.parts == []


def test_other_settings_are_refused_and_named(records):
    with pytest.raises(ValueError, match="budget: 8 there, 16 now"):
        Records(records.path, SETTINGS | {"budget": 16}).open()
    Records(records.path, SETTINGS).open()


def test_a_file_that_is_no_run_is_not_overwritten(tmp_path):
    (tmp_path / "notes.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="is not a run"):
        Records(tmp_path / "notes.jsonl", SETTINGS).open()
    assert (tmp_path / "notes.jsonl").read_text() == "mine"
