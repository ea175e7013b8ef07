"""The experiments on the small reasoning model; a few problems each."""

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import first_error
import machine
import pytest
import readme
import reads_by_range
import reasoning
import studies
import torch
from page import figures
from page.claims import Claim
from page.points import Points
from reasoner import oracle, train
from reasoning import Reasoner
from studies import Point, method
from transformers import DynamicCache
from weights import attention_weights

from kvcomp.eval import tasks
from kvcomp.eval.chains import FAMILIES
from kvcomp.eval.decode import Decoding, decode
from kvcomp.eval.records import Record
from kvcomp.evict import Random, StreamingLLM
from kvcomp.models import REASONER

PROBLEMS = 8


@pytest.fixture(scope="module")
def reasoner(random_reasoner):
    """Random weights, and as the answers to the problems what this very model says with the full cache."""
    loaded = Reasoner.load(str(random_reasoner), 700, PROBLEMS, "float32")
    for family, work in loaded.work.items():
        ids = torch.tensor([one.ids for one in work])
        said = {
            one.row: one.tokens for one in decode(loaded.model, ids, [""] * PROBLEMS, set(), Decoding(None, 16, 80))
        }
        words = loaded.tokenizer.convert_ids_to_tokens
        loaded.work[family] = [
            replace(one, problem=replace(one.problem, answer=" ".join(words(said[row]))))
            for row, one in enumerate(work)
        ]
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_is_read_from_rows_that_the_oracle_still_needs(family):
    """The value of a name stands after the last place where a value follows the name."""
    reads = 0
    for seed in range(10):
        chain = FAMILIES[family](seed)
        words, until = chain.prompt + chain.chain, oracle.needed_until(chain)
        for position in range(len(chain.prompt) + 60, len(words) - 1):
            if words[position + 1].startswith("#"):  # name value #step
                name, value = words[position - 1 : position + 1]
                held = [j for j in range(position - 1) if words[j] == name and words[j + 1].isdigit()][-1]
                assert words[held + 1] == value and min(until[held : held + 2]) >= position - 1
                reads += 1
    assert reads > 500


@pytest.mark.parametrize("family", FAMILIES)
def test_needed_rows_fit_in_a_quarter_beside_the_recent_ones(family):
    for seed in range(20):
        chain = FAMILIES[family](seed)
        until = oracle.needed_until(chain)
        budget = len(until) // 4
        for now in range(budget, len(until)):
            needed = sum(1 for row in range(now - studies.RECENT) if until[row] > now)
            assert needed + studies.RECENT + 4 <= budget


@pytest.fixture(scope="module")
def trained():
    """The published weights and a few problems."""
    return Reasoner.load(REASONER, 700, 24, "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracles_solve_most_of_what_the_full_cache_does_and_a_window_none(trained, family):
    window = Point("window", lambda budget: StreamingLLM(budget, recent=studies.RECENT))
    full, facts, attention, worst = (
        sum(one.correct for one in trained.solve(point, family, 0))
        for point in (studies.FULL, studies.ORACLE, studies.ATTENTION_ORACLE, window)
    )
    assert full >= 20 and facts >= 12 and attention >= 16 and worst == 0


def test_the_attention_oracle_is_told_the_largest_weight_that_is_still_to_come(trained):
    ids = torch.tensor([one.ids for one in trained.work["registers"][:2]])
    told, weights = oracle.largest_weights(trained.model, ids), attention_weights(trained.model, ids)
    for layer, head, now, row in ((0, 0, 0, 0), (1, 1, 40, 17), (3, 0, 80, 80), (2, 1, ids.shape[1] - 1, 5)):
        to_come = weights[layer][:, head, :, now:, row]
        torch.testing.assert_close(told[layer][:, head, now, row], to_come.amax((1, 2)).half())
    assert all((of_layer[:, :, -1] == 0).all() for of_layer in told)


def test_attention_weights_are_those_of_each_query_head_and_leave_the_model_as_it_was(trained):
    ids, before = torch.tensor([trained.work["registers"][0].ids]), trained.model.config._attn_implementation
    (found, *_), config = attention_weights(trained.model, ids), trained.model.config
    assert trained.model.config._attn_implementation == before
    assert found.shape[1:3] == (config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads)
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))
    assert (found.triu(1) == 0).all()


def test_the_first_error_is_traced_to_a_row_that_was_evicted(reasoner):
    compressor = Random(60, recent=16)
    with torch.no_grad():
        losses = first_error.first_losses(reasoner, "registers", compressor)
    assert len(losses) == PROBLEMS and sum(loss is not None for loss in losses) > PROBLEMS // 2
    for loss in filter(None, losses):
        assert loss.expected != loss.given and 0 < loss.weight <= 1
        assert loss.row < loss.lost <= loss.position


def test_first_errors_are_printed_from_the_command_line():
    script = Path(first_error.__file__)
    command = [sys.executable, str(script), "--method", "streaming-llm", "--problems", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=script.parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 of 2 chains go wrong") and "lost row" in done.stdout


def test_without_eviction_nothing_is_lost(reasoner):
    with torch.no_grad():
        assert first_error.first_losses(reasoner, "derivations", StreamingLLM(4096)) == [None] * PROBLEMS


def test_every_point_of_every_study_can_be_built(trained):
    for study, points in studies.STUDIES.items():
        names = [(point.name, point.fraction, point.quantizer) for point in points()]
        assert len(set(names)) == len(names), study
        for point in points():
            for family in FAMILIES:
                length = trained.length(family)
                compressor, budget = point.compressor(length), int(length * point.fraction)
                assert compressor is None or compressor.budget in (None, budget)
        trained.check(points())


def test_a_point_that_cannot_hold_the_prompt_is_refused_before_any_work(trained):
    with pytest.raises(ValueError, match="protect_prompt=True must keep"):
        trained.check([replace(method("random", protect_prompt=True), fraction=0.1)])


def test_a_study_solves_any_task_and_leaves_what_it_has_when_it_is_stopped(random_reasoner, tmp_path, monkeypatch):
    problems = [{"prompt": one.prompt, "answer": "none", "grade": "exact", "id": one.id} for one in _some_problems()]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in problems))
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    settings = {"model": str(random_reasoner), "task": [str(file)], "problems": 3, "first": 1, "name": "mine"}
    with pytest.raises(ValueError, match="mine: budgets are fractions of a length above the prompt's"):
        reasoning.main(studies.Study.sweep, **settings)
    reasoning.main(studies.Study.sweep, **settings, length=240, only=["oracle", "snapkv"], interval=8, batch=2)
    rows = json.loads((tmp_path / "mine.json").read_text())["rows"]
    assert [(row["family"], row["budget"]) for row in rows] == [("mine", rows) for rows in (120, 90, 60, 30, 15)]
    assert all(row["right"] == "000" and row["problems"] == 3 and "before" not in row for row in rows)
    longest = max(len(one["prompt"].split()) for one in problems[1:])
    assert all(0 < row["tokens"] <= 240 - longest for row in rows)

    left, solve = [1, 1], Reasoner.solve
    monkeypatch.setattr(Reasoner, "solve", lambda self, *point: left.pop() and solve(self, *point))
    with pytest.raises(IndexError):
        reasoning.main(studies.Study.sweep, **settings | {"name": "stopped"}, length=240, only=["snapkv"])
    assert len(json.loads((tmp_path / "stopped.partial.json").read_text())["rows"]) == 2
    assert not (tmp_path / "stopped.json").exists()


def _some_problems():
    return [tasks.find(family).load(f"{seed}:{seed + 1}")[0] for seed, family in enumerate([*FAMILIES, *FAMILIES])]


def test_rows_that_are_read_are_counted_among_those_with_large_value_ranges(trained):
    ids = torch.tensor([one.ids for one in trained.work["registers"][:2]])
    rows = reads_by_range.rows_of("reasoner", trained.model, ids)
    cache, now = DynamicCache(config=trained.model.config), 3 * ids.shape[1] // 4
    weights = attention_weights(trained.model, ids, cache=cache)
    chosen = slice(reads_by_range.SINKS, now - reads_by_range.RECENT)
    for row, layer, attention in zip(rows, cache.layers, weights, strict=True):
        read = inside = 0
        for text, head in itertools.product(range(2), range(layer.values.shape[1])):
            values = layer.values[text, head, chosen]
            order = (values.amax(-1) - values.amin(-1)).argsort(descending=True)[: len(values) // 4].tolist()
            most = attention[text, head, :, now:, chosen].amax((0, 1)).tolist()
            found = {index for index, weight in enumerate(most) if weight >= 0.1}
            read, inside = read + len(found), inside + len(found & set(order))
        assert row["read"] == pytest.approx(read / (2 * layer.values.shape[1] * len(values)))
        assert row["read_in_largest_quarter"] == pytest.approx(inside / max(read, 1))
        assert sum(row["weight_by_tenth"]) == pytest.approx(1.0, abs=1e-5)
    assert sum(row["read"] for row in rows) > 0


def test_the_page_shows_what_the_results_say(reasoner, tmp_path, monkeypatch):
    points, draw = [studies.FULL, method("random", protect_prompt=True), method("snapkv")], random.Random(0)

    def records():
        return [
            Record(f"x-{seed}", 0, draw.random() < 0.5, None, True, False, 10, 1000, 1.0, "a b c")
            for seed in range(PROBLEMS)
        ]

    answers = {f"x-{seed}": "a b d d" for seed in range(PROBLEMS)}
    rows = [
        reasoning.row(point, family, 0, reasoner.length(family), records(), answers)
        for point in points
        for family in FAMILIES
    ]
    assert all(len(row["right"]) == PROBLEMS and row["before"] == [0.5] * PROBLEMS for row in rows)
    found = Points({"rows": rows})
    table = readme.main_table(found)
    right = {point.name: sum(row["right"].count("1") for row in rows if row["name"] == point.name) for point in points}
    for point in points:
        line = next(line for line in table.splitlines() if line.startswith(f"| {point.name} |"))
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[4].startswith(f"{100 * right[point.name] / (2 * PROBLEMS):.1f} ± ")
    change = 100 * (right["snapkv"] - right["full cache"]) / (2 * PROBLEMS)
    assert f"{change:+.1f} (" in table
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    figures.accuracy("plot", figures.curves(found, lambda key: 100 * key[1], lambda key: key[0]), "rows")
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("right", "verdict"), [("1" * 20, "reproduced"), ("0" * 20, "the opposite"), ("01" * 10, "undecided")]
)
def test_a_claim_is_judged_by_the_interval_of_the_difference(right, verdict):
    claim = Claim("better", "main", "snapkv", "random", 5.0, "somewhere")
    row = {"quantizer": "", "family": "registers"}
    rows = [
        {**row, "name": "snapkv", "fraction": 0.25, "before": right},
        {**row, "name": "random", "fraction": 0.25, "before": "0110" * 5},
    ]
    found = Points({"rows": rows})
    assert claim.verdict(found) == verdict
    assert claim.line(found)[1] == "+5.0"


@pytest.mark.parametrize(("right", "verdict"), [("1" * 19 + "0", "reproduced"), ("01" * 10, "a larger loss")])
def test_a_loss_against_the_full_cache_is_reproduced_unless_it_is_larger(right, verdict):
    claim = Claim("close", "main", "snapkv", "full cache", -6.0, "somewhere")
    row = {"quantizer": "", "family": "registers"}
    rows = [
        {**row, "name": "snapkv", "fraction": 0.25, "before": right},
        {**row, "name": "full cache", "fraction": 1.0, "before": "1" * 20},
    ]
    assert claim.verdict(Points({"rows": rows})) == verdict


def test_training_draws_the_same_batch_again_and_no_problem_of_the_evaluation():
    tokens, labels = train.batch(3, 0)
    again = train.batch(3, 0)
    assert all(torch.equal(one, other) for one, other in zip((tokens, labels), again, strict=True))
    assert not torch.equal(tokens, train.batch(4, 0)[0])
    kept = labels >= 0
    assert torch.equal(tokens[kept], labels[kept]) and 0.3 < kept.float().mean() < 0.95


def test_training_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "LEVELS", 1)
    with torch.enable_grad():
        train.train(tmp_path / "model", final=2, minutes=5.0, device="cpu")
    facts = json.loads((tmp_path / "model" / "training.json").read_text())
    assert facts["number"] == 2 and facts["left"] == 0 and len(facts["sha256"]) == 64
    assert (tmp_path / "model" / "tokenizer.json").exists()
