"""What signed weights are made of and where they lie: figures that tell a run's course before it is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AtomMass:
    """How much each image's atoms have to say: Σ_k w_k |A[i,k]|, [G] float64."""

    all: Tensor
    low_std: Tensor
    """... of atoms whose std is below ``min_atom_std``: what the judge's noise may have to say."""


@dataclass(frozen=True)
class ByPlace:
    """Mean of W on what is drawn and on the background; NaN where there is none of it."""

    drawn: float
    background: float
    share: float
    """Share of the image that is drawn on."""


def atom_mass(advantage: Tensor, low_std: Tensor, weights: Tensor | None = None) -> AtomMass:
    """Return Σ w|A| per image, over all atoms and over those with little spread.

    Args:
        advantage: A, [G, K].
        low_std: [K] bool.
        weights: w, [K]; ``None`` = 1.

    Raises:
        ValueError: Shapes that do not fit.
    """
    k = advantage.shape[-1]
    if advantage.ndim != 2 or low_std.shape != (k,) or (weights is not None and weights.shape != (k,)):
        raise ValueError(f"advantage {tuple(advantage.shape)}, low_std {tuple(low_std.shape)}: expected [G, K] and [K]")
    mass = advantage.to(torch.float64).abs()
    if weights is not None:
        mass = mass * weights.to(torch.float64)
    return AtomMass(mass.sum(dim=1), mass[:, low_std].sum(dim=1))


def mean_by_place(weight: Tensor, cover: Tensor) -> ByPlace:
    """Return the mean of W over the area that is drawn on and over the rest.

    Mean W on the background told the sign of the drift in counts before training: below 0 the policy learns to fill the
    background, above 0 to leave it empty.

    Args:
        weight: W, [P].
        cover: Share of each position's area that is drawn on, [P] in [0, 1].

    Raises:
        ValueError: Shapes that do not fit.
    """
    if weight.ndim != 1 or weight.shape != cover.shape or not len(weight):
        raise ValueError(f"weight {tuple(weight.shape)}, cover {tuple(cover.shape)}: expected the same [P >= 1]")
    w, c = weight.to(torch.float64), cover.to(torch.float64)

    def mean(area: Tensor) -> float:
        return float((w * area).sum() / area.sum())  # 0 / 0 is NaN, which is what it means

    return ByPlace(mean(c), mean(1.0 - c), float(c.mean()))
