"""Skills, their spread over prompts, and what is said about counting."""

import math

import pytest

from cast_engine.run.summary import aggregate, count_warning, paired, score_prompts
from schemas.records import EvaluateMeta


def meta(prompt_id, kinds, scores, counted, expected):
    return EvaluateMeta(
        key=f"{prompt_id}-0000-0000",
        prompt_id=prompt_id,
        prompt="p",
        member=0,
        seed=1,
        atom_ids=tuple(f"a{i}" for i in range(len(kinds))),
        kinds=kinds,
        scores=scores,
        counted=counted,
        expected=expected,
    )


def two_prompts():
    return [
        meta("0" * 12, ("count", "object", "relation"), (1.0, 1.0, 0.0), (2, None, None), ("two", "Yes", "Yes")),
        meta("1" * 12, ("count", "object"), (0.0, 1.0), (3, None), ("one", "Yes")),
    ]


def test_skills_are_means_over_prompts():
    out = aggregate(score_prompts(two_prompts()))
    assert out["object"] == {"mean": 1.0, "se": 0.0, "n": 2}
    assert out["count"]["mean"] == 0.5
    assert out["count"]["se"] == pytest.approx(0.5)  # sample SD 0.7071 over sqrt(2)
    assert out["relation"]["n"] == 1
    assert out["atoms"]["mean"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert out["all_right"]["mean"] == 0.0
    assert out["over_count"]["mean"] == 0.5
    assert out["attribute"]["n"] == 0


def test_a_missing_verdict_is_left_out_not_zero():
    rows = [meta("0" * 12, ("count", "object"), (None, 1.0), (None, None), ("two", "Yes"))]
    scores = score_prompts(rows)["0" * 12].values
    assert scores["atoms"] == 1.0
    assert math.isnan(scores["count"])


def test_differences_are_paired_by_prompt():
    before = score_prompts(two_prompts())
    better = [m.model_copy(update={"scores": tuple(1.0 for _ in m.scores)}) for m in two_prompts()]
    out = paired(before, score_prompts(better))
    assert out["object"] == {"mean": 0.0, "se": 0.0, "n": 2}
    assert out["atoms"]["mean"] == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_a_fall_in_counting_is_said():
    assert count_warning({"count": {"mean": -0.05, "se": 0.02, "n": 9}}) is not None
    assert count_warning({"count": {"mean": -0.03, "se": 0.02, "n": 9}}) is None
