from __future__ import annotations

import itertools

import numpy as np
import pytest

from cast_engine.errors import UserError
from cast_engine.tinyworld import prompts, render, scenes
from cast_engine.tinyworld.scenes import GroupSpec, Scene, SceneObject, Spec


def sampled(n: int, seed: int = 0) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [scenes.sample(rng, s) for s in prompts.sample_specs(rng, "train", n)]


def box_gap(a: SceneObject, b: SceneObject) -> float:
    (l1, t1, r1, b1), (l2, t2, r2, b2) = a.box, b.box
    return max(l2 - r1, l1 - r2, t2 - b1, t1 - b2)


def test_scenes_fulfil_their_specification() -> None:
    for scene in sampled(700):
        spec = scene.spec
        for i, group in enumerate(spec.groups):
            members = [o for o in scene.objects if o.group == i]
            assert len(members) == group.count
            assert {o.shape for o in members} == {group.shape}
            assert len({o.colour for o in members}) == 1
            assert group.colour in (None, members[0].colour)
            assert all(box_gap(a, b) >= 2.99 for a, b in itertools.combinations(members, 2))
        for o in scene.objects:
            left, top, right, bottom = o.box
            assert min(left, top) >= 1
            assert max(right, bottom) <= scenes.SIZE - 1
            assert 4.8 <= o.r <= 7.2


def test_relations_hold_with_a_margin() -> None:
    seen = set()
    for scene in sampled(700, seed=1):
        relation = scene.spec.relation
        if len(scene.spec.groups) == 1:
            continue
        seen.add(relation)
        a, b = ([o for o in scene.objects if o.group == i] for i in (0, 1))
        gap = min(box_gap(x, y) for x in a for y in b)
        if relation in ("to the right of", "under", "below"):
            a, b = b, a
        if relation in ("to the left of", "to the right of"):
            assert max(o.x for o in a) + 5 < min(o.x for o in b)
        elif relation is not None:
            assert max(o.y for o in a) + 4.9 < min(o.y for o in b)
        if relation in scenes.TOUCHING:
            assert gap < 1
            assert a[0].colour != b[0].colour
        else:
            assert gap >= (6.4 if relation in ("above", "below") else 4.4)
    assert seen == {None, *scenes.RELATIONS}


@pytest.mark.parametrize(
    ("groups", "relation"),
    [
        ((GroupSpec(1, "circle"), GroupSpec(2, "circle")), None),
        ((GroupSpec(5, "circle"),), None),
        ((GroupSpec(1, "star"),), None),
        ((GroupSpec(1, "circle", "pink"),), None),
        ((GroupSpec(1, "circle"),), "above"),
        ((GroupSpec(1, "circle"), GroupSpec(2, "cross")), "behind"),
        ((GroupSpec(1, "circle", "red"), GroupSpec(2, "cross", "red")), "under"),
    ],
)
def test_impossible_specifications_are_refused(groups: tuple[GroupSpec, ...], relation: str | None) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Spec(groups, relation)


def test_the_same_seed_draws_the_same_picture() -> None:
    a, b = render.render_batch(sampled(80)), render.render_batch(sampled(80))
    assert a.dtype == np.uint8
    assert a.shape == (80, 64, 64, 3)
    assert (a == b).all()
    assert (render.render(sampled(80)[70]) == a[70]).all()


@pytest.mark.parametrize("shape", scenes.SHAPES)
def test_pixels_carry_colour_and_area(shape: str) -> None:
    r = 6.3
    image = render.render(Scene(Spec((GroupSpec(1, shape),)), (SceneObject(shape, "red", 30.2, 33.7, r),)))
    hx, hy = (e * r for e in scenes.HALF_EXTENT[shape])
    arm = scenes.CROSS_ARM * r
    area = {
        "circle": np.pi * r * r,
        "square": 4 * hx * hy,
        "triangle": 2 * hx * hy,
        "cross": 2 * 4 * r * arm - 4 * arm * arm,
    }[shape]
    drop = (scenes.BACKGROUND[2] - image[..., 2].astype(float)) / (scenes.BACKGROUND[2] - scenes.RGB["red"][2])
    assert drop.sum() == pytest.approx(area, rel=0.04)
    rows, columns = np.nonzero(drop > 0.5)
    assert (columns.min() + columns.max() + 1) / 2 == pytest.approx(30.2, abs=0.6)
    assert (rows.min() + rows.max() + 1) / 2 == pytest.approx(33.7, abs=1.1)
    assert tuple(image[33, 30]) == scenes.RGB["red"]
    assert tuple(image[0, 0]) == scenes.BACKGROUND


def test_text_and_specification_round_trip() -> None:
    for spec in prompts.all_specs()[::37]:
        assert prompts.spec_of(prompts.text_of(spec)) == spec
        assert len(prompts.text_of(spec).split()) <= prompts.MAX_WORDS
        assert set(prompts.text_of(spec).split()) <= set(prompts.VOCABULARY)
    wanted = Spec((GroupSpec(4, "circle", "red"), GroupSpec(2, "square", "blue")), "to the left of")
    assert prompts.spec_of("Four red circles to  the left of two blue squares.") == wanted
    assert prompts.text_of(Spec((GroupSpec(1, "cross", "green"), GroupSpec(2, "triangle")))) == (
        "a green cross and two triangles"
    )


@pytest.mark.parametrize("text", ["", "a dog", "five red circles", "red circles", "a circle behind a square", "and"])
def test_foreign_prompts_are_a_user_error(text: str) -> None:
    with pytest.raises(UserError) as error:
        prompts.spec_of(text)
    assert "\n" not in str(error.value)


def test_splits_are_disjoint_and_deterministic() -> None:
    drawn = {name: prompts.split(name, 2000, 3) for name in ("train", "validation", "test")}
    for name, texts in drawn.items():
        assert len(set(texts)) == 2000
        assert {prompts.spec_split(prompts.spec_of(t)) for t in texts} == {name}
    assert not set(drawn["train"]) & set(drawn["test"])
    assert prompts.split("train", 50, 3) == drawn["train"][:50]
    assert prompts.split("train", 50, 4) != drawn["train"][:50]
    assert prompts.spec_split(prompts.spec_of("a red circle")) == "train"  # the hash may never change
    share = np.mean([prompts.spec_split(s) == "train" for s in prompts.all_specs()])
    assert share == pytest.approx(0.8, abs=0.01)


def test_prompts_mostly_have_two_groups_and_a_relation() -> None:
    specs = [prompts.spec_of(t) for t in prompts.split("train", 3000, 0)]
    assert np.mean([s.relation is not None for s in specs]) == pytest.approx(0.75, abs=0.05)
    assert np.mean([g.colour is None for s in specs for g in s.groups]) == pytest.approx(0.15, abs=0.03)


def test_too_many_prompts_are_a_user_error() -> None:
    with pytest.raises(UserError, match="at most"):
        prompts.split("test", 10**6, 0)
    with pytest.raises(UserError, match="no split"):
        prompts.split("dev", 1, 0)
