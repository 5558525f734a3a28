"""Asking a judge, whoever wrote it: what it gets wrong is an image that failed, never a job that ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cast_engine.errors import CastError, interrupt_in
from cast_engine.judges.base import AtomScores, Judge
from schemas.graph import SceneGraph

Image = npt.NDArray[np.uint8]
ROUNDING = 1e-3


def ask(judge: Judge, images: Sequence[Image], graphs: Sequence[SceneGraph]) -> list[AtomScores | str]:
    """Score images; one that the judge fails on gives the reason instead.

    When a whole batch fails, its images are asked about one by one, so that one bad image costs no other.

    Raises:
        CastError: As the judge raised it, such as for a full disk.
    """
    try:
        found = judge.score(list(images), list(graphs)) if images else []
        if isinstance(found, list) and len(found) == len(images):
            return [_problem(scores, graph) or scores for scores, graph in zip(found, graphs, strict=True)]
        reason = f"the judge returned {_size(found)} for {len(images)} images"
    except (CastError, MemoryError):
        raise
    except Exception as error:
        if stopped := interrupt_in(error):
            raise stopped from error
        reason = f"the judge raised {type(error).__name__}: {error}"
    if len(images) == 1:
        return [reason]
    return [answer for image, graph in zip(images, graphs, strict=True) for answer in ask(judge, [image], [graph])]


def _size(found: object) -> str:
    return f"{len(found)} results" if isinstance(found, list) else f"a {type(found).__name__}"


def _problem(scores: object, graph: SceneGraph) -> str | None:
    """Return what is wrong with one image's scores; a missing answer (NaN) is not."""
    atoms = len(graph.atoms)
    if not isinstance(scores, AtomScores):
        return f"the judge returned a {type(scores).__name__}, not AtomScores"
    values, maps, neutral = (np.asarray(v) for v in (scores.scores, scores.maps, scores.neutral))
    if values.shape != (atoms,) or np.shape(scores.mass) != (atoms,):
        return f"scores {values.shape} and mass {np.shape(scores.mass)}, expected {(atoms,)} each"
    given = values[np.isfinite(values)]
    if len(given) and (given.min() < -ROUNDING or given.max() > 1 + ROUNDING):
        return f"a score of {given[np.abs(given - 0.5).argmax()]:g} is no probability"
    if len(scores.answers) != atoms or not all(isinstance(a, str) for a in scores.answers):
        return f"{len(scores.answers)} answers, expected {atoms} texts"
    if neutral.ndim != 2 or maps.shape != (atoms, *neutral.shape):
        return f"maps {maps.shape} and neutral {neutral.shape}, expected [{atoms}, h, w] and [h, w]"
    if not np.isfinite(maps[np.isfinite(values)]).all() or not np.isfinite(neutral).all():
        return "a map that is not finite beside an answer that is"
    return None
