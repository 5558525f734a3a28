"""Draws scenes: antialiased shapes, a whole batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cast_engine.tinyworld.scenes import BACKGROUND, CROSS_ARM, HALF_EXTENT, RGB, SHAPES, SIZE, Scene

_PATCH = 20  # px; holds the largest shape with its soft edge
_PAD = _PATCH // 2  # a centre inside the picture keeps its patch on the canvas
_CHUNK = 64  # pictures worked on at once: more only overflows the cache


def render(scene: Scene) -> npt.NDArray[np.uint8]:
    """Draw one scene.

    Returns:
        uint8 RGB picture [64, 64, 3].
    """
    image: npt.NDArray[np.uint8] = render_batch([scene])[0]
    return image


def render_batch(scenes: Sequence[Scene]) -> npt.NDArray[np.uint8]:
    """Draw many scenes at once; picture i does not depend on the others.

    Args:
        scenes: every object's centre must lie inside the picture.

    Returns:
        uint8 RGB pictures [B, 64, 64, 3].
    """
    result = np.empty((len(scenes), SIZE, SIZE, 3), np.uint8)
    for start in range(0, len(scenes), _CHUNK):
        result[start : start + _CHUNK] = _render_chunk(scenes[start : start + _CHUNK])
    return result


def _render_chunk(scenes: Sequence[Scene]) -> npt.NDArray[np.uint8]:
    canvas = np.empty((len(scenes), SIZE + 2 * _PAD, SIZE + 2 * _PAD, 3), np.float32)
    canvas[:] = BACKGROUND
    for slot in range(max((len(s.objects) for s in scenes), default=0)):
        rows = [(i, s.objects[slot]) for i, s in enumerate(scenes) if slot < len(s.objects)]
        image = np.array([i for i, _ in rows])
        shape = np.array([SHAPES.index(o.shape) for _, o in rows])
        colour = np.array([RGB[o.colour] for _, o in rows], np.float32)
        geometry = np.array([(o.x, o.y, o.r) for _, o in rows], np.float32)
        corner = np.floor(geometry[:, :2]).astype(np.int64) - _PATCH // 2
        cover = _coverage(shape, geometry, corner)[..., None]
        y = (corner[:, 1, None] + np.arange(_PATCH) + _PAD)[:, :, None]
        x = (corner[:, 0, None] + np.arange(_PATCH) + _PAD)[:, None, :]
        at = (image[:, None, None], y, x)
        canvas[at] = canvas[at] * (1 - cover) + colour[:, None, None, :] * cover
    inner = canvas[:, _PAD:-_PAD, _PAD:-_PAD]
    return np.rint(inner).astype(np.uint8)


def _coverage(
    shape: npt.NDArray[np.int64], geometry: npt.NDArray[np.float32], corner: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return how much of each pixel a shape covers, from its signed distance: [N, patch, patch] in [0, 1]."""
    centres = np.arange(_PATCH, dtype=np.float32) + 0.5
    dx = (corner[:, 0, None] + centres - geometry[:, 0, None]).astype(np.float32)[:, None, :]
    dy = (corner[:, 1, None] + centres - geometry[:, 1, None]).astype(np.float32)[:, :, None]
    distance = np.empty((len(shape), _PATCH, _PATCH), np.float32)
    for kind, name in enumerate(SHAPES):
        chosen = shape == kind
        if chosen.any():
            distance[chosen] = _distance(name, dx[chosen], dy[chosen], geometry[chosen, 2][:, None, None])
    cover: npt.NDArray[np.float32] = np.clip(0.5 - distance, 0.0, 1.0)
    return cover


def _distance(
    name: str, dx: npt.NDArray[np.float32], dy: npt.NDArray[np.float32], r: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return the signed distance in pixels to a shape's edge, negative inside."""
    across = np.abs(dx)
    hx, hy = (np.float32(e) * r for e in HALF_EXTENT[name])
    result: npt.NDArray[np.float32]
    if name == "circle":
        result = np.sqrt(dx * dx + dy * dy) - r
    elif name == "square":
        result = np.maximum(across - hx, np.abs(dy) - hy)
    elif name == "triangle":
        slope = np.sqrt(hx * hx + 4 * hy * hy)
        side = (2 * hy * across - hx * (dy + hy)) / slope
        result = np.maximum(dy - hy, side)
    else:
        arm, down = np.float32(CROSS_ARM) * r, np.abs(dy)
        result = np.minimum(np.maximum(across - hx, down - arm), np.maximum(across - arm, down - hy))
    return result
