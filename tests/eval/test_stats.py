import math

import numpy as np
import pytest

from kvcomp.eval.records import Record
from kvcomp.eval.stats import Summary, by_problem, difference


def run(scores):
    """A run with these right and wrong samples by problem."""
    return [
        Record(f"p{problem}", sample, bool(right), None, bool(right), not right, 10 + sample, 1000, 2.0, "")
        for problem, samples in enumerate(scores)
        for sample, right in enumerate(samples)
    ]


def test_pass_at_1_is_the_mean_over_problems_of_the_mean_over_samples():
    figures = Summary.of(run([[1, 1], [1, 0], [0, 0], [0, 0]]))
    assert (figures.problems, figures.samples, figures.accuracy) == (4, 8, 0.375)
    means = [1.0, 0.5, 0.0, 0.0]
    spread = math.sqrt(sum((mean - 0.375) ** 2 for mean in means) / 3)
    assert figures.error == pytest.approx(spread / 2)
    assert figures.cut == figures.looped == pytest.approx(5 / 8)
    assert (figures.tokens, figures.kv_bytes, figures.seconds) == (10.5, 1000, 2.0)


def test_the_interval_of_a_difference_holds_the_truth_95_times_in_100():
    """On drawn problems whose true paired difference is 0.2."""
    random, held = np.random.default_rng(0), 0
    for trial in range(200):
        hard = random.random(100)
        one, other = random.random(100) < hard, random.random(100) < hard - 0.2
        truth = (hard - np.clip(hard - 0.2, 0, 1)).mean()
        found = difference(by_problem(run(one[:, None])), by_problem(run(other[:, None])), seed=trial)
        assert found.low <= found.mean <= found.high
        held += found.low <= truth <= found.high
    assert 180 <= held <= 199


def test_pairing_makes_the_interval_of_equal_runs_a_point():
    scores = [[i % 2] for i in range(50)]
    found = difference(by_problem(run(scores)), by_problem(run(scores)))
    assert (found.mean, found.low, found.high) == (0.0, 0.0, 0.0)


def test_runs_over_other_problems_are_refused():
    with pytest.raises(ValueError, match="3 problems are in one of them only"):
        difference(by_problem(run([[1]] * 5)), by_problem(run([[1]] * 2)))
    with pytest.raises(ValueError, match="no completion"):
        Summary.of([])
