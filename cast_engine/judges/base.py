"""What every judge answers: per atom a score, the likeliest answer, and where it looked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from schemas.graph import SceneGraph


@dataclass(frozen=True)
class AtomScores:
    """One image's answers, per atom in the graph's order.

    Attributes:
        scores: float32 [K], probability of the expected answer; NaN = missing.
        answers: the likeliest answer per atom, for reports.
        maps: float16 [K, gh, gw], where the judge looked, mean one over the grid.
        mass: float32 [K], share of the attention row that lies on the image.
        neutral: float16 [gh, gw], the map of a question that asks for nothing in particular, mean one.
    """

    scores: npt.NDArray[np.float32]
    answers: tuple[str, ...]
    maps: npt.NDArray[np.float16]
    mass: npt.NDArray[np.float32]
    neutral: npt.NDArray[np.float16]


class Judge(Protocol):
    """Scores images against the scene graphs of their prompts."""

    @property
    def name(self) -> str:
        """Return the name that records carry."""
        ...

    @property
    def model_sha256(self) -> str:
        """Return the identity of whatever decides the scores; equal means equal scores."""
        ...

    def score(self, images: Sequence[npt.NDArray[np.uint8]], graphs: Sequence[SceneGraph]) -> list[AtomScores]:
        """Answer every atom of `graphs[i]` for `images[i]` (uint8 [H, W, 3])."""
        ...
