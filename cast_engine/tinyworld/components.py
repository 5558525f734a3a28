"""Connected components of many small class maps at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Components:
    """All components of a batch, ordered by image, then by their first pixel in reading order.

    Attributes:
        labels: int64 [B, H, W]; component index per pixel, or -1 (background and what was too small).
        image: int64 [N], the image each component lies in.
        kind: int64 [N], its class.
        area: int64 [N], pixels.
        left, top, right, bottom: int64 [N], bounding box in pixels, right and bottom exclusive.
    """

    labels: Ints
    image: Ints
    kind: Ints
    area: Ints
    left: Ints
    top: Ints
    right: Ints
    bottom: Ints


def components(classes: npt.NDArray[np.uint8], min_area: int = 1) -> Components:
    """Join neighbouring pixels (4 neighbours) of equal, non-zero class.

    Args:
        classes: uint8 [B, H, W]; 0 is background.
        min_area: components of fewer pixels are dropped.
    """
    _, height, width = classes.shape
    start = np.ones(classes.shape, bool)
    np.not_equal(classes[:, :, 1:], classes[:, :, :-1], out=start[:, :, 1:])
    run = (np.cumsum(start.reshape(-1)) - 1).reshape(classes.shape)
    first = np.flatnonzero(start)  # flat index of each run's first pixel
    length = np.diff(first, append=classes.size)
    kind = classes.reshape(-1)[first].astype(np.int64)

    # One link per pair of touching runs: where either of the two begins, their overlap begins.
    meet = (classes[:, 1:] == classes[:, :-1]) & (classes[:, 1:] > 0) & (start[:, 1:] | start[:, :-1])
    root = _roots(len(first), run[:, :-1][meet], run[:, 1:][meet])

    area = np.bincount(root, weights=length, minlength=len(first)).astype(np.int64)
    kept = np.flatnonzero((np.arange(len(first)) == root) & (kind > 0) & (area >= min_area))
    index = np.full(len(first), -1)
    index[kept] = np.arange(len(kept))
    of_run = index[root]
    inside = of_run >= 0
    owner, x, y = of_run[inside], first[inside] % width, first[inside] // width % height
    left, top = np.full(len(kept), width), np.full(len(kept), height)
    right, bottom = np.zeros(len(kept), np.int64), np.zeros(len(kept), np.int64)
    np.minimum.at(left, owner, x)
    np.minimum.at(top, owner, y)
    np.maximum.at(right, owner, x + length[inside])
    np.maximum.at(bottom, owner, y + 1)
    return Components(of_run[run], first[kept] // (height * width), kind[kept], area[kept], left, top, right, bottom)


def _roots(n: int, a: Ints, b: Ints) -> Ints:
    """Return the smallest node connected to each of n nodes, given links a[i]-b[i]."""
    parent = np.arange(n)
    while a.size:
        pa, pb = parent[a], parent[b]
        apart = pa != pb
        if not apart.any():
            break
        a, b, pa, pb = a[apart], b[apart], pa[apart], pb[apart]
        np.minimum.at(parent, np.maximum(pa, pb), np.minimum(pa, pb))
        while True:
            jumped = parent[parent]
            if np.array_equal(jumped, parent):
                break
            parent = jumped
    return parent
