"""Scenes of the tiny world: coloured shapes on a light grey 64x64 picture, one or two groups, one relation.

Coordinates are pixels, x to the right and y downwards, pixel (row, column) covers [column, column+1] x [row, row+1].
An object's centre (x, y) is the centre of its bounding box.

Relations are properties of positions, so that what is drawn and what is verified agree. With S the subject's objects
and O the object's, *gap* the smallest number of empty pixels (Chebyshev) between the two groups:

=====================  =====================================================================================
``to the left of``     every centre of S lies left of every centre of O
``to the right of``    every centre of S lies right of every centre of O
``on top of``          every centre of S lies above every centre of O, and gap <= `TOUCH_GAP`
``under``              every centre of S lies below every centre of O, and gap <= `TOUCH_GAP`
``above``              every centre of S lies above every centre of O, and gap >= `APART_GAP`
``below``              every centre of S lies below every centre of O, and gap >= `APART_GAP`
=====================  =====================================================================================

Drawn scenes keep a margin to each of these limits. GenEval 2's "in front of" and "behind" are left out: flat shapes
of one size show no depth other than by occlusion, which would destroy the counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

SIZE = 64
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "yellow", "green", "blue", "purple")
BACKGROUND = (226, 226, 226)
RGB: dict[str, tuple[int, int, int]] = {
    "red": (222, 40, 40),
    "yellow": (238, 206, 24),
    "green": (34, 166, 62),
    "blue": (36, 92, 222),
    "purple": (160, 44, 196),
}
RELATIONS = ("to the left of", "to the right of", "on top of", "under", "above", "below")
TOUCHING = ("on top of", "under")
MAX_COUNT = 4
TOUCH_GAP = 2
APART_GAP = 4
HALF_EXTENT: dict[str, tuple[float, float]] = {  # half width and half height of a shape, in units of its radius
    "circle": (1.0, 1.0),
    "square": (0.86, 0.86),
    "triangle": (1.04, 0.92),
    "cross": (1.0, 1.0),
}
CROSS_ARM = 0.29  # half-width of a cross's arms over its radius; thicker arms get read as circles once blurred

_BORDER = 1.5  # px between a bounding box and the picture's edge
_PEER_GAP = 3.0  # px between bounding boxes of one group, so that components can be counted
_GROUP_GAP = 4.5  # px between bounding boxes of two groups that do not touch
_APART = 6.5  # px between the zones of two groups that must be seen apart
_CENTRE_MARGIN = 5.0  # px by which every centre of the upper of two touching groups lies above the lower's
_RADIUS = {1: 7.2, 2: 7.2, 3: 7.0, 4: 6.8, 5: 6.6, 6: 6.4, 7: 6.2, 8: 6.0}  # largest radius by number of objects
_MIN_RADIUS = 5.4
_SMALLEST = 4.8  # what crowded scenes may shrink to


@dataclass(frozen=True)
class GroupSpec:
    """What a prompt says of one group; `colour` None leaves it open (any colour is right)."""

    count: int
    shape: str
    colour: str | None = None


@dataclass(frozen=True)
class Spec:
    """What a prompt says: one group, or two (of different shapes) with or without a relation."""

    groups: tuple[GroupSpec, ...]
    relation: str | None = None

    def __post_init__(self) -> None:
        """Refuse what the world cannot show."""
        if not 1 <= len(self.groups) <= 2 or (self.relation is not None and len(self.groups) != 2):
            raise ValueError("a scene has one or two groups, and a relation needs two")
        for g in self.groups:
            if g.shape not in SHAPES or g.colour not in (None, *COLOURS) or not 1 <= g.count <= MAX_COUNT:
                raise ValueError(f"the tiny world has no {g}")
        if self.relation is not None and self.relation not in RELATIONS:
            raise ValueError(f"the tiny world has no relation {self.relation!r}")
        if len(self.groups) == 2:
            first, second = self.groups
            if first.shape == second.shape:
                raise ValueError("two groups must differ in shape")
            if self.relation in TOUCHING and first.colour is not None and first.colour == second.colour:
                raise ValueError("touching groups must differ in colour, or they would be one object")


@dataclass(frozen=True)
class SceneObject:
    """One shape: centre and radius in pixels, and the index of the group it belongs to."""

    shape: str
    colour: str
    x: float
    y: float
    r: float
    group: int = 0

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Return left, top, right, bottom in pixels."""
        hx, hy = HALF_EXTENT[self.shape]
        return self.x - hx * self.r, self.y - hy * self.r, self.x + hx * self.r, self.y + hy * self.r


@dataclass(frozen=True)
class Scene:
    """A picture's content, and the specification it was drawn for."""

    spec: Spec
    objects: tuple[SceneObject, ...]


_Zone = tuple[float, float, float, float]  # left, top, right, bottom


class _Layout:
    """Places objects one by one by rejection; plain floats are faster than arrays at this size."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.pool: list[float] = []

    def uniform(self, low: float, high: float) -> float:
        if not self.pool:
            self.pool = self.rng.random(128).tolist()
        return low + (high - low) * self.pool.pop()

    def place(
        self,
        group: GroupSpec,
        colour: str,
        index: int,
        zone: _Zone,
        radius: tuple[float, float],
        others: list[SceneObject],
    ) -> list[SceneObject] | None:
        """Scatter one group inside a zone, away from `others`; None if it did not fit."""
        placed: list[SceneObject] = []
        hx, hy = HALF_EXTENT[group.shape]
        for _ in range(group.count):
            for _ in range(40):
                r = self.uniform(*radius)
                x0, x1 = zone[0] + hx * r, zone[2] - hx * r
                y0, y1 = zone[1] + hy * r, zone[3] - hy * r
                if x1 < x0 or y1 < y0:
                    continue
                new = SceneObject(group.shape, colour, self.uniform(x0, x1), self.uniform(y0, y1), r, index)
                if _clear(new, placed, _PEER_GAP) and _clear(new, others, _GROUP_GAP):
                    placed.append(new)
                    break
            else:
                return None
        return placed


def _clear(new: SceneObject, others: list[SceneObject], gap: float) -> bool:
    """Whether the bounding boxes are at least `gap` apart in x or in y."""
    a, b, c, d = new.box
    for other in others:
        left, top, right, bottom = other.box
        if a - right < gap and left - c < gap and b - bottom < gap and top - d < gap:
            return False
    return True


def sample(rng: np.random.Generator, spec: Spec) -> Scene:
    """Draw a random scene that fulfils the specification exactly.

    Args:
        rng: source of all randomness; the same state gives the same scene.
        spec: what must be visible. Groups without a colour get one at random.

    Returns:
        A scene whose objects lie inside the picture.
    """
    layout = _Layout(rng)
    low, high = _MIN_RADIUS, _RADIUS[sum(g.count for g in spec.groups)]
    while True:
        for _ in range(10):
            colours = _colours(layout, spec)
            if spec.relation is None:
                found = _scatter(layout, spec, colours, (low, high))
            elif spec.relation in TOUCHING:
                found = _stack(layout, spec, colours, (low, high))
            else:
                found = _split(layout, spec, colours, (low, high))
            if found is not None:
                return Scene(spec, tuple(found))
        low, high = max(_SMALLEST, low * 0.97), max(_MIN_RADIUS, high * 0.95)


def _colours(layout: _Layout, spec: Spec) -> list[str]:
    """Fill in the colours that the specification leaves open; touching groups get different ones."""
    colours = [g.colour for g in spec.groups]
    for i, colour in enumerate(colours):
        if colour is None:
            taken = colours if spec.relation in TOUCHING else []
            free = [c for c in COLOURS if c not in taken]
            colours[i] = free[int(layout.uniform(0, len(free)))]
    return [c for c in colours if c is not None]


def _scatter(layout: _Layout, spec: Spec, colours: list[str], radius: tuple[float, float]) -> list[SceneObject] | None:
    """Place every group anywhere in the picture."""
    zone = (_BORDER, _BORDER, SIZE - _BORDER, SIZE - _BORDER)
    objects: list[SceneObject] = []
    for i, group in enumerate(spec.groups):
        placed = layout.place(group, colours[i], i, zone, radius, objects)
        if placed is None:
            return None
        objects += placed
    return objects


def _split(layout: _Layout, spec: Spec, colours: list[str], radius: tuple[float, float]) -> list[SceneObject] | None:
    """Place the groups on two sides of a random line: left/right of each other, or above/below and apart."""
    sideways = spec.relation in ("to the left of", "to the right of")
    gap = _GROUP_GAP if sideways else _APART
    line = layout.uniform(SIZE * 0.28, SIZE * 0.72)
    near, far = (_BORDER, line - gap / 2), (line + gap / 2, SIZE - _BORDER)
    zones = (near, far) if spec.relation in ("to the left of", "above") else (far, near)
    objects: list[SceneObject] = []
    for i, (group, (a, b)) in enumerate(zip(spec.groups, zones, strict=True)):
        zone = (a, _BORDER, b, SIZE - _BORDER) if sideways else (_BORDER, a, SIZE - _BORDER, b)
        placed = layout.place(group, colours[i], i, zone, radius, [])
        if placed is None:
            return None
        objects += placed
    return objects


def _stack(layout: _Layout, spec: Spec, colours: list[str], radius: tuple[float, float]) -> list[SceneObject] | None:
    """Place one group in a band above the other, then lower it until the groups touch."""
    upper = 0 if spec.relation == "on top of" else 1
    bands: dict[int, list[SceneObject]] = {}
    for i in (upper, 1 - upper):
        height = 2 * radius[1] + layout.uniform(0.5, 7.0)
        width = SIZE - 2 * _BORDER
        inner = layout.uniform(min(width, 17.0 * spec.groups[i].count), width)  # narrow groups meet more often
        left = layout.uniform(_BORDER, SIZE - _BORDER - inner)
        top = _BORDER if i == upper else SIZE - _BORDER - height
        placed = layout.place(spec.groups[i], colours[i], i, (left, top, left + inner, top + height), radius, [])
        if placed is None:
            return None
        bands[i] = placed
    gap = _vertical_gap(bands[upper], bands[1 - upper])
    if gap is None or gap < 1:
        return None
    move = gap - layout.uniform(0.0, 0.6)
    down = layout.uniform(0.0, move)
    above = [replace(o, y=o.y + down) for o in bands[upper]]
    below = [replace(o, y=o.y - (move - down)) for o in bands[1 - upper]]
    if max(o.y for o in above) + _CENTRE_MARGIN > min(o.y for o in below):
        return None
    return above + below if upper == 0 else below + above


_COLUMNS = np.arange(0.5, SIZE, 0.5)


def _vertical_gap(upper: list[SceneObject], lower: list[SceneObject]) -> float | None:
    """Return how far `upper` can be lowered until it meets `lower`, in pixels; None if no column holds both."""
    bottom = np.full(_COLUMNS.size, -np.inf)
    top = np.full(_COLUMNS.size, np.inf)
    for o in upper:
        np.maximum(bottom, o.y + _profile(o, lower_edge=True), out=bottom)
    for o in lower:
        np.minimum(top, o.y + _profile(o, lower_edge=False), out=top)
    gap = float((top - bottom).min())
    return gap if np.isfinite(gap) else None


def _profile(o: SceneObject, *, lower_edge: bool) -> np.ndarray:
    """Return the lower or upper edge of a shape relative to its centre, per column (infinite where it is not)."""
    d = np.abs(_COLUMNS - o.x)
    hx, hy = HALF_EXTENT[o.shape][0] * o.r, HALF_EXTENT[o.shape][1] * o.r
    if o.shape == "circle":
        half = np.sqrt(np.maximum(o.r**2 - d**2, 0.0))
    elif o.shape == "cross":
        half = np.where(d <= CROSS_ARM * o.r, o.r, CROSS_ARM * o.r)
    elif o.shape == "triangle" and not lower_edge:
        half = hy - 2 * hy * d / hx  # the edge falls from the apex to the base
    else:
        half = np.full(d.shape, hy)
    return np.where(d <= hx, half if lower_edge else -half, -np.inf if lower_edge else np.inf)
