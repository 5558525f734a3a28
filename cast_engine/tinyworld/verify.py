"""Reads the tiny world's pictures back: which shapes, of which colour, where; and judges a scene graph by it.

Pixels are sorted into the five colours by hue and strength of colour, equal neighbours are joined into components,
and each component's outline is compared with templates of the four shapes at several sizes. What an atom means:

- object: at least one component of that shape;
- count: the number of components of that shape, of any colour;
- attribute: there are objects of that shape, and all of them have the colour;
- relation: both nouns are there, and all their objects stand as `cast_engine.tinyworld.scenes` defines it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cast_engine.errors import UserError
from cast_engine.tinyworld.components import Components, components
from cast_engine.tinyworld.render import render_batch
from cast_engine.tinyworld.scenes import (
    APART_GAP,
    BACKGROUND,
    COLOURS,
    RELATIONS,
    RGB,
    SHAPES,
    SIZE,
    TOUCH_GAP,
    TOUCHING,
    GroupSpec,
    Scene,
    SceneObject,
    Spec,
)
from schemas.graph import Atom, AtomKind, SceneGraph

Mask = npt.NDArray[np.bool_]
Image = npt.NDArray[np.uint8]

_NO_COLOUR, _FULL_COLOUR = 0.12, 0.88  # shares of a colour's distance from grey that still count as none, and as all
_HALF_COLOUR = 0.45  # strength between the two from which a pixel belongs to an object
_MIN_AREA = 16  # px; the smallest shape drawn covers about 40
_MIN_SIDE, _MAX_SIDE = 6, 21  # px of a bounding box
_MAX_ASPECT = 1.55
_MIN_SCORE = 0.78  # overlap with the best template below which a component is no known shape
_GRID = 16  # templates are compared on boxes stretched to this many points a side
_SOFTNESS = (0.0, 0.6, 0.9, 1.2)  # px; what decoders do to edges
_CHUNK = 64  # pictures worked on at once
_BITS = 6  # bits per channel of the colour table


@dataclass(frozen=True)
class Detection:
    """One component of one colour.

    Attributes:
        shape: the best fitting shape, or "" for a component that is none of them.
        colour: its colour.
        cx: centre of its bounding box, px.
        cy: centre of its bounding box, px.
        mask: bool [64, 64], its pixels.
        score: overlap with the best template (Tanimoto: intersection over union, for soft outlines).
    """

    shape: str
    colour: str
    cx: float
    cy: float
    mask: Mask
    score: float


@dataclass(frozen=True)
class Verdict:
    """Whether an atom holds, the pixels it is about (none if nothing is there), and for counts the number found."""

    ok: bool
    mask: Mask
    counted: int | None = None


@lru_cache(maxsize=1)
def _colour_table() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return for every colour, indexed by the top bits of r, g, b, the nearest of the five and its strength.

    Between the background and an object only the strength changes: it is the share of the pixel that the object
    covers, and the direction in the plane of colour differences tells which object.

    Returns:
        uint8 1.. (index into `COLOURS` plus one), and float32 in [0, 1].
    """
    levels = (np.arange(1 << _BITS) + 0.5) * (256 >> _BITS)
    r, g, b = np.meshgrid(levels, levels, levels, indexing="ij")
    centre = _chroma(np.array(BACKGROUND, np.float64))
    colours = np.stack([_chroma(np.array(RGB[c], np.float64)) for c in COLOURS]) - centre
    full = np.linalg.norm(colours, axis=-1)
    offset = _chroma(np.stack([r, g, b], -1)) - centre
    best = (offset @ (colours / full[:, None]).T).argmax(-1)
    share = np.linalg.norm(offset, axis=-1) / full[best]
    strength = np.clip((share - _NO_COLOUR) / (_FULL_COLOUR - _NO_COLOUR), 0.0, 1.0)
    return (best + 1).astype(np.uint8).reshape(-1), strength.astype(np.float32).reshape(-1)


def _chroma(rgb: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the two colour-difference coordinates of RGB values (grey is the origin)."""
    r, g, b = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    return np.stack([r - (g + b) / 2, (g - b) * (np.sqrt(3.0) / 2)], -1)


@dataclass(frozen=True)
class _Paint:
    """Colour per pixel [B, H, W]: the nearest of the five (1..), how strong it is, and both as a class (0: none)."""

    hue: npt.NDArray[np.uint8]
    strength: npt.NDArray[np.float32]
    classes: npt.NDArray[np.uint8]


def _paint(images: Image) -> _Paint:
    hues, strengths = _colour_table()
    top = images.astype(np.int32) >> (8 - _BITS)
    index = (top[..., 0] << 2 * _BITS) | (top[..., 1] << _BITS) | top[..., 2]
    hue, strength = hues[index], strengths[index]
    return _Paint(hue, strength, hue * (strength >= _HALF_COLOUR))


@lru_cache(maxsize=1)
def _templates() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the outlines each shape can leave: several sizes, positions within a pixel, and softnesses.

    Returns:
        [T, grid * grid] in [0, 1] without repeats, [T] their sums of squares, and [T] the index of the shape.
    """
    scenes = [
        Scene(Spec((GroupSpec(1, shape),)), (SceneObject(shape, "red", 32 + i / 4, 32 + j / 4, r),))
        for shape in SHAPES
        for r in np.arange(4.75, 7.5, 0.25).tolist()
        for i, j in itertools.product(range(4), repeat=2)
    ]
    sharp = render_batch(scenes)[:, 18:46, 18:46]  # the rest is background
    soft = [_paint(_blur(sharp, sigma)) for sigma in _SOFTNESS]
    outlines = np.concatenate([_outlines(p, components(p.classes)) for p in soft])
    kinds = np.tile(np.repeat(np.arange(len(SHAPES)), len(scenes) // len(SHAPES)), len(_SOFTNESS))
    outlines, first = np.unique(outlines, axis=0, return_index=True)
    return outlines, (outlines**2).sum(1), kinds[first]


def _blur(images: Image, sigma: float) -> Image:
    """Return pictures [B, n, n, 3] blurred by a Gaussian of `sigma` px, edges repeated."""
    if sigma == 0:
        return images
    at = np.arange(images.shape[1])
    kernel = np.exp(-((at[:, None] - at) ** 2) / (2 * sigma**2)).astype(np.float32)
    kernel /= kernel.sum(1, keepdims=True)
    channels = kernel @ images.astype(np.float32).transpose(0, 3, 1, 2) @ kernel.T
    return np.rint(channels).astype(np.uint8).transpose(0, 2, 3, 1)


def _outlines(paint: _Paint, found: Components) -> npt.NDArray[np.float32]:
    """Return how much each component covers around its bounding box, stretched to a fixed grid.

    The soft edge counts (it tells a small circle from a blurred square), other components do not.

    Returns:
        [N, grid * grid] in [0, 1].
    """
    _, height, width = paint.hue.shape
    steps = (np.arange(_GRID) + 0.5) / _GRID
    x = np.floor(found.left[:, None] - 1 + steps * (found.right - found.left + 2)[:, None]).astype(np.int64)
    y = np.floor(found.top[:, None] - 1 + steps * (found.bottom - found.top + 2)[:, None]).astype(np.int64)
    row, column = np.clip(y, 0, height - 1)[:, :, None], np.clip(x, 0, width - 1)[:, None, :]
    at = (found.image[:, None, None] * height + row) * width + column
    label = found.labels.reshape(-1)[at]
    own = (label == np.arange(len(found.image))[:, None, None]) | (
        (label < 0) & (paint.hue.reshape(-1)[at] == found.kind[:, None, None])
    )
    cover: npt.NDArray[np.float32] = paint.strength.reshape(-1)[at] * own
    return cover.reshape(len(cover), -1)


def _shapes(paint: _Paint, found: Components) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return per component the index of the best shape (-1: none) and its overlap with it."""
    if not len(found.image):
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    outline, (templates, squares, kinds) = _outlines(paint, found), _templates()
    common = outline @ templates.T
    overlap = common / ((outline**2).sum(1)[:, None] + squares - common)
    nearest = overlap.argmax(1)
    best, score = kinds[nearest], overlap[np.arange(len(nearest)), nearest]
    w, h = found.right - found.left, found.bottom - found.top
    longer, shorter = np.maximum(w, h), np.minimum(w, h)
    fits = (score >= _MIN_SCORE) & (shorter >= _MIN_SIDE) & (longer <= _MAX_SIDE) & (longer <= _MAX_ASPECT * shorter)
    return np.where(fits, best, -1), score


def detect_batch(images: Sequence[Image] | Image) -> list[list[Detection]]:
    """Find everything drawn in each picture, shapes that are none of the four (`shape` "") included.

    Args:
        images: uint8 RGB pictures [64, 64, 3].

    Raises:
        UserError: a picture is not of the tiny world's size.
    """
    for image in images:
        if image.shape != (SIZE, SIZE, 3) or image.dtype != np.uint8:
            raise UserError(
                f"an image of shape {image.shape} and type {image.dtype}",
                where="tiny-world verifier",
                expected=f"uint8 [{SIZE}, {SIZE}, 3]",
                do="use the exact judge only with the tiny world's models",
            )
    result: list[list[Detection]] = []
    for start in range(0, len(images), _CHUNK):
        result += _detect_chunk(np.stack(list(images[start : start + _CHUNK])))
    return result


def drawn_pixels(images: Sequence[Image] | Image) -> npt.NDArray[np.bool_]:
    """Return what is drawn in each picture, known shape or not, by its pixels alone: bool [B, H, W].

    Args:
        images: uint8 RGB pictures of one size.
    """
    return components(_paint(np.stack(list(images))).classes, _MIN_AREA).labels >= 0


def _detect_chunk(images: Image) -> list[list[Detection]]:
    result: list[list[Detection]] = [[] for _ in images]
    paint = _paint(images)
    found = components(paint.classes, _MIN_AREA)
    shape, score = _shapes(paint, found)
    for i, b in enumerate(found.image.tolist()):
        result[b].append(
            Detection(
                shape=SHAPES[shape[i]] if shape[i] >= 0 else "",
                colour=COLOURS[found.kind[i] - 1],
                cx=float(found.left[i] + found.right[i]) / 2,
                cy=float(found.top[i] + found.bottom[i]) / 2,
                mask=found.labels[b] == i,
                score=float(score[i]),
            )
        )
    return result


def detect(image: Image) -> list[Detection]:
    """Find the shapes in one picture (uint8 [64, 64, 3])."""
    return [d for d in detect_batch([image])[0] if d.shape]


def verify(image: Image, graph: SceneGraph) -> list[Verdict]:
    """Judge a picture by a scene graph, atom by atom in the graph's order.

    Raises:
        UserError: the graph asks for what the tiny world does not have.
    """
    return verify_detections(detect(image), graph)


def verify_batch(images: Sequence[Image] | Image, graphs: Sequence[SceneGraph]) -> list[list[Verdict]]:
    """Judge many pictures at once, each by its own graph."""
    return [verify_detections(d, g) for d, g in zip(detect_batch(images), graphs, strict=True)]


def verify_detections(found: Sequence[Detection], graph: SceneGraph) -> list[Verdict]:
    """Judge what was found in a picture by a scene graph."""
    of_node: dict[str, list[Detection]] = {}
    for node in graph.nodes:
        if node.noun not in SHAPES or node.attribute not in (None, *COLOURS):
            words = " ".join(w for w in (node.attribute, node.noun) if w)
            raise UserError(
                f"{words!r} in {graph.prompt!r}",
                where="tiny-world verifier",
                expected=f"shapes {', '.join(SHAPES)} and colours {', '.join(COLOURS)}",
                do="use a vision-language judge for such prompts",
            )
        of_node[node.id] = [d for d in found if d.shape == node.noun]
    return [_verdict(atom, graph, of_node) for atom in graph.atoms]


def _verdict(atom: Atom, graph: SceneGraph, of_node: dict[str, list[Detection]]) -> Verdict:
    node, objects = graph.node(atom.nodes[0]), of_node[atom.nodes[0]]
    mask = union([d for n in atom.nodes for d in of_node[n]])
    if atom.kind is AtomKind.OBJECT:
        return Verdict(bool(objects), mask)
    if atom.kind is AtomKind.COUNT:
        return Verdict(len(objects) == node.count, mask, len(objects))
    if atom.kind is AtomKind.ATTRIBUTE:
        return Verdict(bool(objects) and all(d.colour == node.attribute for d in objects), mask)
    edge = next(e for e in graph.edges if e.id == atom.edge)
    if edge.predicate not in RELATIONS:
        raise UserError(
            f"{edge.predicate!r} in {graph.prompt!r}",
            where="tiny-world verifier",
            expected=f"one of the relations {', '.join(RELATIONS)}",
            do="use a vision-language judge for such prompts",
        )
    return Verdict(related(of_node[edge.subject], edge.predicate, of_node[edge.object]), mask)


def union(found: Sequence[Detection]) -> Mask:
    """Return the pixels of all detections together: bool [64, 64]."""
    mask = np.zeros((SIZE, SIZE), bool)
    for d in found:
        mask |= d.mask
    return mask


def related(subject: Sequence[Detection], predicate: str, target: Sequence[Detection]) -> bool:
    """Whether two groups stand in a relation; an empty group stands in none."""
    if not subject or not target:
        return False
    if predicate in ("to the right of", "under", "below"):  # each is the reverse of another relation
        subject, target = target, subject
    if predicate in ("to the left of", "to the right of"):
        return max(d.cx for d in subject) < min(d.cx for d in target)
    if max(d.cy for d in subject) >= min(d.cy for d in target):
        return False
    first, second = union(subject), union(target)
    if predicate in TOUCHING:
        return _within(first, second, TOUCH_GAP + 1)
    return not _within(first, second, APART_GAP)


def _within(first: Mask, second: Mask, distance: int) -> bool:
    """Whether some pixel of one mask is at most so many steps (king's moves) from one of the other."""
    rows = first.copy()
    for step in range(1, distance + 1):
        rows[step:] |= first[:-step]
        rows[:-step] |= first[step:]
    grown = rows.copy()
    for step in range(1, distance + 1):
        grown[:, step:] |= rows[:, :-step]
        grown[:, :-step] |= rows[:, step:]
    return bool((grown & second).any())
