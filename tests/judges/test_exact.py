from __future__ import annotations

import numpy as np
import pytest

from cast_engine.errors import UserError
from cast_engine.graphs.grammar import parse
from cast_engine.judges.base import Judge
from cast_engine.judges.exact_judge import ExactJudge
from cast_engine.judges.load import load_judge
from cast_engine.judges.templates import NEUTRAL_QUESTION, answer_text, variants
from cast_engine.tinyworld import prompts, render, scenes
from cast_engine.tinyworld.scenes import Scene, SceneObject
from schemas.job import ScoreConfig

PROMPT = "a red circle to the left of two blue squares"


def picture(*objects: SceneObject) -> np.ndarray:
    return render.render(Scene(prompts.spec_of("a circle"), objects))


LEFT = SceneObject("circle", "red", 12, 12, 6)
RIGHT = (SceneObject("square", "blue", 52, 12, 7), SceneObject("square", "blue", 52, 52, 7))


def test_a_right_picture() -> None:
    judge: Judge = ExactJudge()
    (result,) = judge.score([picture(LEFT, *RIGHT)], [parse(PROMPT)])
    assert result.scores.tolist() == [1.0] * 7
    assert result.scores.dtype == result.mass.dtype == np.float32
    assert result.maps.dtype == result.neutral.dtype == np.float16
    assert result.answers == ("one", "Yes", "Yes", "Yes", "two", "Yes", "Yes")
    assert result.maps.shape == (7, 8, 8)
    assert np.allclose(result.maps.astype(np.float64).mean((1, 2)), 1, atol=2e-3)
    assert (result.neutral == 1).all()
    assert (result.mass == 1).all()
    circle, relation, square = result.maps[0], result.maps[3], result.maps[4]
    assert (result.maps[1] == circle).all()
    assert (result.maps[2] == circle).all()
    assert circle[:3, :3].sum() == pytest.approx(64, rel=1e-2)
    assert circle[:, 4:].sum() == 0
    assert square[:, :5].sum() == 0
    assert ((relation > 0) == ((circle > 0) | (square > 0))).all()


def test_an_absent_object_is_looked_for_among_what_was_drawn() -> None:
    graph = parse(PROMPT)
    (result,) = ExactJudge().score([picture(LEFT)], [graph])
    assert result.scores.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert result.answers[3:] == ("No", "zero", "No", "No")
    assert (result.maps == result.maps[0]).all()  # the circle is all there is
    (result,) = ExactJudge().score([picture(*RIGHT)], [graph])
    assert result.scores.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (result.maps == result.maps[4]).all()


def test_what_is_no_shape_counts_as_drawn() -> None:
    blob = np.full((64, 64, 3), scenes.BACKGROUND, np.uint8)
    blob[8:16, 8:40] = scenes.RGB["green"]
    (result,) = ExactJudge().score([blob], [parse("a circle")])
    assert result.scores.tolist() == [0, 0]
    assert (result.maps[0] > 0).sum() == 4


def test_nothing_drawn_gives_uniform_maps() -> None:
    (result,) = ExactJudge().score([picture()], [parse(PROMPT)])
    assert not result.scores.any()
    assert (result.maps == 1).all()


def test_wrong_count_and_colour() -> None:
    image = picture(SceneObject("circle", "green", 12, 12, 6), SceneObject("circle", "red", 12, 40, 6), *RIGHT[:1])
    (result,) = ExactJudge().score([image], [parse(PROMPT)])
    assert result.scores.tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert result.answers[0] == "two"


def test_real_scenes_score_one_and_batches_agree() -> None:
    rng = np.random.default_rng(0)
    drawn = [scenes.sample(rng, s) for s in prompts.sample_specs(rng, "train", 200)]
    images, graphs = list(render.render_batch(drawn)), [parse(prompts.text_of(s.spec)) for s in drawn]
    results = ExactJudge(16).score(images, graphs)
    assert np.mean(np.concatenate([r.scores for r in results])) >= 0.995
    assert results[5].maps.shape == (len(graphs[5].atoms), 16, 16)
    (alone,) = ExactJudge(16).score(images[5:6], graphs[5:6])
    assert (alone.maps == results[5].maps).all()
    assert np.isfinite(np.concatenate([r.maps.reshape(-1) for r in results])).all()


def test_identity_and_loading() -> None:
    judge = load_judge(ScoreConfig(judge="exact"))
    assert isinstance(judge, ExactJudge)
    assert judge.name == "exact"
    assert len(judge.model_sha256) == 64
    assert judge.model_sha256 == ExactJudge().model_sha256 != ExactJudge(16).model_sha256


def test_foreign_input_is_a_user_error() -> None:
    with pytest.raises(UserError, match="dog"):
        ExactJudge().score([picture()], [parse("two dogs")])
    with pytest.raises(UserError, match="64"):
        ExactJudge().score([np.zeros((32, 32, 3), np.uint8)], [parse("a circle")])
    with pytest.raises(UserError, match="grid"):
        ExactJudge(7)


def test_answer_variants_are_geneval2s() -> None:
    count, attribute, _ = parse("three metal zebras").atoms
    assert variants(count) == ["three", "Three", " three", " Three", "3", " 3"]
    assert variants(attribute) == ["Yes", "yes", " yes", " Yes"]
    assert variants(count.model_copy(update={"expected": "eleven"}))[-2:] == ["other", " other"]
    assert answer_text(count.question) == "How many zebras are in the image? Answer in one word."
    assert NEUTRAL_QUESTION
