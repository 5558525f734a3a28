"""Scores from logits, and their averages, on hand-worked numbers."""

import math

import pytest
import torch

from cast_engine.numerics.soft_tifa import aggregate, answer_probability, geometric_mean


def test_a_shared_first_token_counts_twice_only_in_geneval2_mode():
    logits = torch.tensor([[2.0, 0.0]]).log()  # probabilities 1 and 0
    assert answer_probability(logits, [[0, 0]], "geneval2").item() == pytest.approx(2.0)
    assert answer_probability(logits, [[0, 0]], "dedup").item() == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_are_missing_not_zero(bad):
    logits = torch.zeros(3, 4)
    logits[1, 3] = bad
    logits[2, 0] = -math.inf  # a masked token is no failure
    values = answer_probability(logits, [[0], [0], [0]], "dedup")
    assert values[0].item() == pytest.approx(0.25)
    assert values[1].isnan()
    assert values[2].item() == 0.0


def test_no_spelling_is_missing():
    assert answer_probability(torch.zeros(1, 4), [[]], "dedup").isnan().all()


def test_half_precision_logits_are_added_in_float32():
    logits = torch.zeros(1, 5000, dtype=torch.bfloat16)
    assert answer_probability(logits, [[7]], "dedup").item() == pytest.approx(1 / 5000, rel=1e-5)


def test_answers_may_share_a_position():
    logits = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    rows = torch.tensor([1, 0, 1])
    values = answer_probability(logits, [[0], [1], [0, 1]], "dedup", rows)
    want = logits.softmax(-1)
    assert values.tolist() == pytest.approx([want[1, 0].item(), want[0, 1].item(), 1.0])


def test_averages_leave_missing_scores_out_and_say_none_for_nothing():
    got = aggregate([[1.0, math.nan], [0.0, 0.5], [math.nan]], [["a", "b"], ["a", "a"], ["c"]], [2, 2, 1])
    assert got["per_skill"] == {"a": 50.0, "b": None, "c": None}
    assert got["per_atomicity"] == {1: None, 2: 50.0}
    assert got["total_am"] == pytest.approx(100 * (1.0 + 0.25) / 2)
    assert geometric_mean([0.0, 0.5]) == 0.0
