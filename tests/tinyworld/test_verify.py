from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cast_engine.errors import UserError
from cast_engine.graphs.grammar import parse
from cast_engine.tinyworld import prompts, render, scenes, verify
from cast_engine.tinyworld.components import components
from cast_engine.tinyworld.scenes import RGB, Scene, SceneObject, Spec
from schemas.graph import AtomKind, SceneGraph

N = 2500


@pytest.fixture(scope="module")
def world() -> tuple[list[Scene], np.ndarray, list[SceneGraph]]:
    rng = np.random.default_rng(7)
    drawn = [scenes.sample(rng, s) for s in prompts.sample_specs(rng, "test", N)]
    return drawn, render.render_batch(drawn), [parse(prompts.text_of(s.spec)) for s in drawn]


def share_right(images: np.ndarray, graphs: list[SceneGraph]) -> float:
    return float(np.mean([v.ok for found in verify.verify_batch(images, graphs) for v in found]))


def blurred(images: np.ndarray, sigma: float) -> np.ndarray:
    kernel = np.exp(-(np.arange(-4, 5) ** 2) / (2 * sigma**2))
    kernel /= kernel.sum()
    soft = np.pad(images.astype(np.float32), ((0, 0), (4, 4), (4, 4), (0, 0)), mode="edge")
    soft = sum(k * soft[:, i : i + 64] for i, k in enumerate(kernel))
    soft = sum(k * soft[:, :, i : i + 64] for i, k in enumerate(kernel))
    return np.rint(soft).astype(np.uint8)


def noisy(images: np.ndarray, amount: int) -> np.ndarray:
    noise = np.random.default_rng(1).integers(-amount, amount + 1, images.shape)
    return np.clip(images.astype(int) + noise, 0, 255).astype(np.uint8)


def test_what_was_drawn_is_verified(world: tuple[list[Scene], np.ndarray, list[SceneGraph]]) -> None:
    drawn, images, graphs = world
    assert {s.spec.relation for s in drawn} == {None, *scenes.RELATIONS}
    assert share_right(images, graphs) >= 0.999


@pytest.mark.parametrize("change", ["noise 6", "noise 12", "blur 0.7", "blur 1.0", "blur and noise", "tint", "dark"])
def test_soft_and_noisy_pictures_are_verified(
    change: str, world: tuple[list[Scene], np.ndarray, list[SceneGraph]]
) -> None:
    images, graphs = world[1][:800], world[2][:800]
    gain = np.random.default_rng(2).uniform(0.94, 1.06, (800, 1, 1, 3))
    changed = {
        "noise 6": lambda: noisy(images, 6),
        "noise 12": lambda: noisy(images, 12),
        "blur 0.7": lambda: blurred(images, 0.7),
        "blur 1.0": lambda: blurred(images, 1.0),
        "blur and noise": lambda: noisy(blurred(images, 0.7), 6),
        "tint": lambda: np.clip(images * gain, 0, 255).astype(np.uint8),
        "dark": lambda: (images * 0.85).astype(np.uint8),
    }[change]()
    assert share_right(changed, graphs) >= 0.998


def test_other_prompts_are_refused(world: tuple[list[Scene], np.ndarray, list[SceneGraph]]) -> None:
    """Judge each picture by another one's prompt; the truth comes from the scene's geometry."""
    drawn, images, graphs = world
    right = wrong = relations = 0
    for scene, image, graph in zip(drawn[:1500], images, graphs[1:], strict=False):
        for atom, verdict in zip(graph.atoms, verify.verify(image, graph), strict=True):
            groups = [[o for o in scene.objects if o.shape == graph.node(n).noun] for n in atom.nodes]
            node = graph.node(atom.nodes[0])
            if atom.kind is AtomKind.OBJECT:
                truth = bool(groups[0])
            elif atom.kind is AtomKind.COUNT:
                truth = len(groups[0]) == node.count
                assert verdict.counted == len(groups[0])
            elif atom.kind is AtomKind.ATTRIBUTE:
                truth = bool(groups[0]) and all(o.colour == node.attribute for o in groups[0])
            else:
                predicate = graph.edges[0].predicate
                if predicate not in ("to the left of", "to the right of") or not all(groups):
                    if not all(groups):
                        assert not verdict.ok
                    continue
                a, b = groups if predicate == "to the left of" else groups[::-1]
                margin = min(o.x for o in b) - max(o.x for o in a)
                if abs(margin) < 1.5:  # too close to call from pixels
                    continue
                truth, relations = margin > 0, relations + 1
            right, wrong = right + (verdict.ok == truth), wrong + (verdict.ok != truth)
    assert relations > 20
    assert right / (right + wrong) >= 0.999


def two(dx: float, dy: float, relation: str) -> bool:
    """Whether a red circle is found in a relation to a blue square `dx`, `dy` px from it."""
    spec = prompts.spec_of(f"a red circle {relation} a blue square")
    circle = SceneObject("circle", "red", 32 - dx / 2, 32 - dy / 2, 6.0)
    square = SceneObject("square", "blue", 32 + dx / 2, 32 + dy / 2, 7.0, 1)
    graph = parse(prompts.text_of(spec))
    return verify.verify(render.render(Scene(spec, (circle, square))), graph)[graph.atoms.index(edge_atom(graph))].ok


def edge_atom(graph: SceneGraph):
    return next(a for a in graph.atoms if a.edge)


@pytest.mark.parametrize(
    ("dx", "dy", "holds"),
    [
        (0, 12.1, {"on top of"}),  # 6 + 6.02 px: they just touch
        (0, 14.0, {"on top of"}),
        (0, 18.5, {"above"}),
        (0, -12.1, {"under"}),
        (0, -18.5, {"below"}),
        (16, 0, {"to the left of"}),
        (-16, 0, {"to the right of"}),
        (20, 20, {"to the left of", "above"}),
        (-20, -20, {"to the right of", "below"}),
        (9, 12, {"to the left of", "on top of"}),
    ],
)
def test_relations_mean_what_the_scenes_say(dx: float, dy: float, holds: set[str]) -> None:
    assert {r for r in scenes.RELATIONS if two(dx, dy, r)} == holds


def test_detections_name_shape_colour_and_pixels() -> None:
    objects = (
        SceneObject("circle", "purple", 15.3, 20.1, 6.5),
        SceneObject("cross", "yellow", 45.0, 40.5, 6.0, 1),
    )
    image = render.render(Scene(prompts.spec_of("a circle and a cross"), objects))
    found = sorted(verify.detect(image), key=lambda d: d.cx)
    assert [(d.shape, d.colour) for d in found] == [("circle", "purple"), ("cross", "yellow")]
    for d, o in zip(found, objects, strict=True):
        assert (abs(d.cx - o.x) <= 1, abs(d.cy - o.y) <= 1) == (True, True)
        assert d.score > 0.9
        assert np.allclose(image[d.mask].mean(0), RGB[o.colour], atol=25)
    assert not (found[0].mask & found[1].mask).any()
    graph = parse("a purple circle to the left of two green crosses")
    verdicts = {a.id: v for a, v in zip(graph.atoms, verify.verify(image, graph), strict=True)}
    assert {k: v.ok for k, v in verdicts.items()} == {
        "n0.count": True, "n0.attribute": True, "n0.object": True, "e0": True,
        "n1.count": False, "n1.attribute": False, "n1.object": True,
    }  # fmt: skip
    assert verdicts["n1.count"].counted == 1
    assert (verdicts["e0"].mask == (found[0].mask | found[1].mask)).all()


def test_nothing_there_is_nothing_found() -> None:
    blank = np.full((64, 64, 3), 226, np.uint8)
    graph = parse("a red circle above a cross")
    assert verify.detect(blank) == []
    for verdict in verify.verify(blank, graph):
        assert not verdict.ok
        assert not verdict.mask.any()
    assert verify.detect(noisy(blank, 12)) == []
    static = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3)).astype(np.uint8)
    assert not any(d.shape for found in verify.detect_batch(static) for d in found)
    assert verify.detect_batch([]) == []


def test_batch_and_single_agree(world: tuple[list[Scene], np.ndarray, list[SceneGraph]]) -> None:
    _, images, graphs = world
    for image, graph, batch in zip(images[:20], graphs, verify.verify_batch(images[:20], graphs[:20]), strict=False):
        for a, b in zip(verify.verify(image, graph), batch, strict=True):
            assert (a.ok, a.counted) == (b.ok, b.counted)
            assert (a.mask == b.mask).all()


@pytest.mark.parametrize(
    ("text", "word"), [("a red dog", "dog"), ("a pink circle", "pink"), ("a circle behind a cross", "behind")]
)
def test_foreign_graphs_are_a_user_error(text: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        verify.verify(np.zeros((64, 64, 3), np.uint8), parse(text))


def test_foreign_images_are_a_user_error() -> None:
    with pytest.raises(UserError, match="64"):
        verify.detect(np.zeros((128, 128, 3), np.uint8))


def test_components_match_a_flood_fill() -> None:
    rng = np.random.default_rng(3)
    classes = (rng.integers(0, 3, (6, 20, 30)) * (rng.random((6, 20, 30)) < 0.8)).astype(np.uint8)
    found = components(classes)
    labels = np.full(classes.shape, -1)
    count = 0
    for seed in np.argwhere(classes > 0).tolist():
        if labels[tuple(seed)] >= 0:
            continue
        stack = [tuple(seed)]
        while stack:
            b, y, x = stack.pop()
            if not (0 <= y < 20 and 0 <= x < 30) or labels[b, y, x] >= 0 or classes[b, y, x] != classes[tuple(seed)]:
                continue
            labels[b, y, x] = count
            stack += [(b, y + 1, x), (b, y - 1, x), (b, y, x + 1), (b, y, x - 1)]
        count += 1
    assert (found.labels == labels).all()
    assert len(found.area) == count
    for i in range(count):
        b, y, x = np.nonzero(labels == i)
        assert (found.image[i], found.kind[i], found.area[i]) == (b[0], classes[b[0], y[0], x[0]], len(b))
        box = (found.left[i], found.top[i], found.right[i], found.bottom[i])
        assert box == (x.min(), y.min(), x.max() + 1, y.max() + 1)
    assert (components(classes, min_area=5).area >= 5).all()


def test_scenes_are_values() -> None:
    scene = scenes.sample(np.random.default_rng(0), prompts.spec_of("two circles"))
    assert dataclasses.replace(scene) == scene
    assert isinstance(scene.spec, Spec)
