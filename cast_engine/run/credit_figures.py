"""What the signed weights of one round, or of several, were like: from their manifests alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.records import Status

COLUMNS = (
    "prompt_id",
    "round",
    "status",
    "mass",
    "low_std_mass",
    "group_std",
    "above_clip_share",
    "weight_drawn",
    "weight_background",
    "drawn_share",
)
"""Columns of an advantages manifest that are read."""


@dataclass(frozen=True)
class CreditFigures:
    """Figures to compare credit rules and rounds by; NaN for what is not known."""

    low_std_share: float
    """Share of Σ w|A| that comes from atoms with a std below ``min_atom_std``; NaN for rules without A per atom."""
    group_std: float
    """Std in a group of the mean of W, averaged over groups (``advantages.scale=match`` brings it to 1)."""
    above_clip_share: float
    """Share of positions that ``weight_clip`` touched, or ``advantage_clip`` would touch if there is none."""
    weight_drawn: float
    """Mean of W over all that is drawn; NaN where no mask is known (images that are not of the tiny world)."""
    weight_background: float
    """Mean of W over the rest: below 0 the policy learns to fill the background, above 0 to leave it empty."""


def credit_figures(rows: Iterable[Mapping[str, Any]]) -> CreditFigures:
    """Return the figures of advantages rows; samples that are not ok, and columns that are null, are left out."""
    good = [r for r in rows if r["status"] == Status.OK]
    groups = {(r["prompt_id"], r["round"]): r for r in good}.values()  # these figures are the same in all of a group
    return CreditFigures(
        low_std_share=_ratio([(r["low_std_mass"], r["mass"]) for r in good]),
        group_std=_ratio([(r["group_std"], 1.0) for r in groups]),
        above_clip_share=_ratio([(r["above_clip_share"], 1.0) for r in groups]),
        weight_drawn=_by_area([(r["weight_drawn"], r["drawn_share"]) for r in good]),
        weight_background=_by_area(
            [(r["weight_background"], None if r["drawn_share"] is None else 1.0 - r["drawn_share"]) for r in good]
        ),
    )


def _ratio(pairs: Iterable[tuple[float | None, float | None]]) -> float:
    """Return Σ part / Σ whole over the pairs that are known."""
    known = [(part, whole) for part, whole in pairs if part is not None and whole is not None]
    total = sum(whole for _, whole in known)
    return sum(part for part, _ in known) / total if total > 0 else math.nan


def _by_area(pairs: Iterable[tuple[float | None, float | None]]) -> float:
    """Return the mean of values weighted by their areas; an image without such an area has no say."""
    return _ratio([(v * area, area) for v, area in pairs if v is not None and area is not None and not math.isnan(v)])
