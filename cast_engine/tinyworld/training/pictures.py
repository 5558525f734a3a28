"""Training pictures and what is to be known about them. Runs in worker processes: NumPy only, no torch.

Pictures show train specifications only. Captions are noisy on purpose, like captions found on the web: a model that has
learned them well still draws the wrong number or the wrong side now and then, which is what training by reward then
has to repair. A caption, too, is always a train specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cast_engine.graphs.grammar import parse
from cast_engine.tinyworld import prompts, render, scenes
from cast_engine.tinyworld.scenes import COLOURS, MAX_COUNT, RELATIONS, SHAPES, GroupSpec, Spec
from cast_engine.tinyworld.verify import Detection, detect_batch, related, verify_detections

Array = npt.NDArray[Any]
CAPTIONS = 8
"""Noisy captions drawn per picture."""
GRID = 8


@dataclass(frozen=True)
class CaptionNoise:
    """Probabilities that a caption says something other than the picture shows; per group, or per relation."""

    count: float = 0.40
    relation: float = 0.40
    colour: float = 0.12
    shape: float = 0.06
    group: float = 0.03  # one group more or less in the caption
    near: float = 0.8  # share of wrong counts that are off by one

    def caption(self, rng: np.random.Generator, spec: Spec) -> Spec:
        """Return what a careless writer says about a picture of `spec`."""
        for _ in range(50):
            try:
                said = self._once(rng, spec)
            except ValueError:
                continue
            if prompts.spec_split(said) == "train":
                return said
        return spec

    def _once(self, rng: np.random.Generator, spec: Spec) -> Spec:
        groups = [self._group(rng, g) for g in spec.groups]
        relation = spec.relation
        if len(groups) == 2 and rng.random() < self.relation:
            relation = (None, *RELATIONS)[rng.integers(len(RELATIONS) + 1)]
        if rng.random() < self.group:
            if len(groups) == 2:
                groups, relation = [groups[rng.integers(2)]], None
            else:
                extra = prompts.sample_specs(rng, "train", 1)[0]
                groups, relation = [groups[0], extra.groups[0]], extra.relation if len(extra.groups) == 2 else None
        return Spec(tuple(groups), relation)

    def _group(self, rng: np.random.Generator, g: GroupSpec) -> GroupSpec:
        count, colour, shape = g.count, g.colour, g.shape
        if rng.random() < self.count:
            near = [c for c in (count - 1, count + 1) if 1 <= c <= MAX_COUNT]
            others = [c for c in range(1, MAX_COUNT + 1) if c != count]
            pool = near if rng.random() < self.near else others
            count = pool[rng.integers(len(pool))]
        if colour is not None and rng.random() < self.colour:
            colour = [c for c in COLOURS if c != colour][rng.integers(len(COLOURS) - 1)]
        if rng.random() < self.shape:
            shape = [s for s in SHAPES if s != shape][rng.integers(len(SHAPES) - 1)]
        return GroupSpec(count, shape, colour)


@lru_cache(maxsize=1)
def spec_ids() -> dict[Spec, int]:
    """Return the index of every specification in `prompts.all_specs`."""
    return {spec: i for i, spec in enumerate(prompts.all_specs())}


def draw(seed: int, shard: int, count: int, split: prompts.Split, noise: dict[str, float]) -> dict[str, Array]:
    """Draw one shard of pictures; the same arguments give the same pictures.

    Returns:
        images: uint8 [n, 64, 64, 3]; spec: int32 [n]; captions: int32 [n, `CAPTIONS`], indices of specifications.
    """
    rng = np.random.default_rng([seed, shard, {"train": 0, "validation": 1, "test": 2}[split]])
    ids, writer = spec_ids(), CaptionNoise(**noise)
    specs = prompts.sample_specs(rng, split, count)
    images = render.render_batch([scenes.sample(rng, s) for s in specs])
    said = [[ids[writer.caption(rng, s)] for _ in range(CAPTIONS)] for s in specs] if split == "train" else []
    return {
        "images": images,
        "spec": np.array([ids[s] for s in specs], np.int32),
        "captions": np.array(said, np.int32).reshape(-1, CAPTIONS),
    }


def facts(images: npt.NDArray[np.uint8]) -> dict[str, Array]:
    """Read off what is true of each picture, by the exact verifier.

    Returns:
        count: uint8 [n, shapes]; colour: bool [n, shapes, colours], all objects of the shape have that colour;
        relation: bool [n, shapes, shapes, relations]; mass: uint8 [n, shapes, 64], pixels of the shape per grid cell.
    """
    n, s = len(images), len(SHAPES)
    out = {
        "count": np.zeros((n, s), np.uint8),
        "colour": np.zeros((n, s, len(COLOURS)), bool),
        "relation": np.zeros((n, s, s, len(RELATIONS)), bool),
        "mass": np.zeros((n, s, GRID * GRID), np.uint8),
    }
    for i, found in enumerate(detect_batch(images)):
        of_shape = [[d for d in found if d.shape == shape] for shape in SHAPES]
        for j, objects in enumerate(of_shape):
            out["count"][i, j] = len(objects)
            if not objects:
                continue
            out["mass"][i, j] = _mass(objects)
            colours = {d.colour for d in objects}
            if len(colours) == 1:
                out["colour"][i, j, COLOURS.index(colours.pop())] = True
            for k, others in enumerate(of_shape):
                if k != j and others:
                    out["relation"][i, j, k] = [related(objects, r, others) for r in RELATIONS]
    return out


def _mass(objects: Sequence[Detection]) -> npt.NDArray[np.uint8]:
    mask = np.zeros((scenes.SIZE, scenes.SIZE), bool)
    for d in objects:
        mask |= d.mask
    cell = scenes.SIZE // GRID
    pixels: npt.NDArray[np.uint8] = mask.reshape(GRID, cell, GRID, cell).sum((1, 3)).reshape(-1).astype(np.uint8)
    return pixels


def draw_merged(seed: int, shard: int, count: int) -> dict[str, Array]:
    """Draw pictures that no prompt of the world describes: one shape, more than four times or in two colours.

    A judge meets such pictures among a model's samples.
    """
    rng = np.random.default_rng([seed, shard, 3])
    drawn: list[scenes.Scene] = []
    while len(drawn) < count:
        spec = prompts.sample_specs(rng, "train", 1)[0]
        if len(spec.groups) != 2 or spec.relation in scenes.TOUCHING:
            continue
        scene = scenes.sample(rng, spec)
        shape, colour = spec.groups[0].shape, scene.objects[0].colour
        one_colour = len(scene.objects) > MAX_COUNT and rng.random() < 0.7
        objects = (replace(o, shape=shape, colour=colour if one_colour else o.colour) for o in scene.objects)
        drawn.append(scenes.Scene(spec, tuple(objects)))
    images = render.render_batch(drawn)
    return {"images": images, **facts(images)}


def draw_with_facts(
    seed: int, shard: int, count: int, split: prompts.Split, noise: dict[str, float]
) -> dict[str, Array]:
    """Return `draw` and `facts` of the same pictures."""
    drawn = draw(seed, shard, count, split, noise)
    return {**drawn, **facts(drawn["images"])}


@dataclass(frozen=True)
class Marks:
    """How a picture does by its prompt: which atoms hold, and by how much each count is off."""

    kinds: tuple[str, ...]
    ok: tuple[bool, ...]
    excess: tuple[int, ...]


def marks(images: npt.NDArray[np.uint8], texts: Sequence[str]) -> list[Marks]:
    """Judge pictures by their prompts with the exact verifier."""
    result = []
    for found, text in zip(detect_batch(images), texts, strict=True):
        graph = parse(text)
        verdicts = verify_detections([d for d in found if d.shape], graph)
        excess = [
            (v.counted or 0) - (graph.node(a.nodes[0]).count or 0)
            for a, v in zip(graph.atoms, verdicts, strict=True)
            if a.kind == "count"
        ]
        result.append(Marks(tuple(str(a.kind) for a in graph.atoms), tuple(v.ok for v in verdicts), tuple(excess)))
    return result


def noise_dict(noise: CaptionNoise) -> dict[str, float]:
    """Return the probabilities as a plain dictionary, for workers and records."""
    return asdict(noise)
