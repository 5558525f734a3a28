from __future__ import annotations

import pytest
import torch

from cast_engine.numerics.soft_tifa import aggregate, answer_probability
from tests.parity.parity_vectors import cases


@pytest.mark.parametrize("case", cases("soft_tifa.json", "soft_tifa_question_probability"))
def test_probability_equals_the_published_code(case):
    logits = torch.tensor(case["inputs"]["logits"])[None]
    ids = list(case["inputs"]["first_token_id"].values())
    assert len(ids) == case["outputs"]["variant_count"]
    value = answer_probability(logits, [ids], "geneval2").item()
    assert value == pytest.approx(case["outputs"]["probability"], rel=1e-5, abs=1e-6)
    distinct = answer_probability(logits, [ids], "dedup").item()
    assert distinct == pytest.approx(logits.softmax(-1)[0, list(set(ids))].sum().item(), rel=1e-5)


@pytest.mark.parametrize("case", cases("soft_tifa.json", "soft_tifa_aggregate"))
def test_averages_equal_the_published_code(case):
    inputs, expected = case["inputs"], case["outputs"]
    got = aggregate(inputs["scores"], inputs["skills"], inputs["atom_count"])
    assert got["total_am"] == pytest.approx(expected["total_soft_tifa_am"], rel=1e-10)
    assert got["total_gm"] == pytest.approx(expected["total_soft_tifa_gm"], rel=1e-10)
    assert got["per_skill"] == pytest.approx(expected["per_skill"], rel=1e-10)
    accuracy = {int(n): row["accuracy"] for n, row in expected["per_atomicity"].items()}
    assert got["per_atomicity"] == pytest.approx(accuracy, rel=1e-10)
