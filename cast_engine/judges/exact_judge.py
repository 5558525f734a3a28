"""The tiny world's judge: verdicts and maps read from the pixels by rules, without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cast_engine.errors import UserError
from cast_engine.graphs.words import count_word
from cast_engine.judges.base import AtomScores
from cast_engine.tinyworld.scenes import SIZE
from cast_engine.tinyworld.verify import Detection, Verdict, detect_batch, union, verify_detections
from schemas.graph import Atom, AtomKind, SceneGraph

VERSION = "tinyworld-exact-1"
"""Changes whenever a score or a map of the same picture could."""


class ExactJudge:
    """Scores 1 or 0 by `cast_engine.tinyworld.verify`; maps are the pixels of the objects an atom is about.

    Count and attribute atoms look at the noun's objects, relations at both nouns'. An absent object is looked for
    among everything that was drawn, and everywhere if nothing was: so a verdict of "no" gets as much of its map on
    drawn cells as a "yes", and the empty background is not what is blamed for absence.
    """

    name = "exact"

    def __init__(self, grid: int = 8) -> None:
        if grid < 1 or SIZE % grid:
            raise UserError(f"a map grid of {grid}", where="exact judge", expected=f"a divisor of {SIZE}")
        self.grid = grid
        self.model_sha256 = hashlib.sha256(f"{VERSION} grid {grid}".encode()).hexdigest()

    def score(self, images: Sequence[npt.NDArray[np.uint8]], graphs: Sequence[SceneGraph]) -> list[AtomScores]:
        """Judge each picture (uint8 [64, 64, 3]) by its graph.

        Raises:
            UserError: a picture or graph is not of the tiny world.
        """
        return [self._score(found, graph) for found, graph in zip(detect_batch(images), graphs, strict=True)]

    def _score(self, found: Sequence[Detection], graph: SceneGraph) -> AtomScores:
        shapes = [d for d in found if d.shape]
        verdicts = verify_detections(shapes, graph)
        present = {n.id for n in graph.nodes if any(d.shape == n.noun for d in shapes)}
        drawn = union(found)
        masks = [v.mask if present.issuperset(a.nodes) else drawn for a, v in zip(graph.atoms, verdicts, strict=True)]
        ones = np.ones((self.grid, self.grid), np.float16)
        return AtomScores(
            scores=np.array([v.ok for v in verdicts], np.float32),
            answers=tuple(_answer(a, v) for a, v in zip(graph.atoms, verdicts, strict=True)),
            maps=np.stack([self._map(m) for m in masks]),
            mass=np.ones(len(masks), np.float32),
            neutral=ones,
        )

    def _map(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float16]:
        """Return the share of each cell that a mask covers, scaled to mean one (all ones for an empty mask)."""
        side = SIZE // self.grid
        cells = mask.reshape(self.grid, side, self.grid, side).mean((1, 3))
        share: npt.NDArray[np.float16] = (cells / cells.mean() if mask.any() else np.ones_like(cells)).astype(
            np.float16
        )
        return share


def _answer(atom: Atom, verdict: Verdict) -> str:
    if atom.kind is AtomKind.COUNT:
        return count_word(verdict.counted or 0)
    return "Yes" if verdict.ok else "No"
