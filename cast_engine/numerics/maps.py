"""From raw attention to mean-one maps over latent positions. float64 throughout.

Maps are [..., rows, columns]; every function treats the leading axes one by one. A map is a density over the image,
so a cell's value does not depend on how many cells there are, and grids are related by relative coordinates: the
image's height and width are 1 on both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

TINY = 1e-12
"""A map whose cells sum to no more than this holds nothing."""
NEUTRAL_EPS = 0.05
"""ε of the division by a neutral map, in units of its mean: no cell is raised more than twentyfold."""


@dataclass(frozen=True)
class Prepared:
    """Maps of one image, ready to be weighed."""

    maps: Tensor
    """[K, P] float64, each with mean one over its positions."""
    uniform: Tensor
    """[K] bool: there was nothing to normalise, the map is 1 everywhere."""
    counters: dict[str, int] = field(default_factory=dict)
    """``maps``; ``uniform_maps``; ``repaired_cells`` (NaN, infinite or negative, taken as 0); ``neutral_unusable``."""


def clean(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps in float64 with NaN, infinite and negative cells set to 0, and where they were (bool)."""
    m = maps.to(torch.float64)
    bad = ~torch.isfinite(m) | (m < 0)
    return torch.where(bad, 0.0, m), bad


def _overlap(size_in: int, size_out: int) -> Tensor:
    """Return [out, in]: the share of each output cell that each input cell covers (rows sum to 1)."""
    i = torch.arange(size_in, dtype=torch.int64)
    o = torch.arange(size_out, dtype=torch.int64)[:, None]
    low = torch.maximum(o * size_in, i * size_out)  # in units of 1 / (size_in * size_out): integers, so no rounding
    high = torch.minimum((o + 1) * size_in, (i + 1) * size_out)
    return (high - low).clamp(min=0).to(torch.float64) / size_in


def resample(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """Bring maps to another grid by area: an output cell is the mean of the density over its own area.

    The mean over the image is kept exactly, upsampling by a whole factor repeats each cell, downsampling by a whole
    factor averages blocks, and any other pair of sizes (37 x 37 to 64 x 64) weighs cells by their overlap.

    Args:
        maps: [..., gh, gw], finite.
        grid: (h, w) of the result, each at least 1.

    Returns:
        [..., h, w] float64.

    Raises:
        ValueError: An empty grid.
    """
    if min(grid) < 1 or min(maps.shape[-2:]) < 1:
        raise ValueError(f"cannot resample a grid of {tuple(maps.shape[-2:])} to {grid}")
    rows = _overlap(maps.shape[-2], grid[0]).to(maps.device)
    columns = _overlap(maps.shape[-1], grid[1]).to(maps.device)
    return rows @ maps.to(torch.float64) @ columns.T


def blur(maps: Tensor) -> Tensor:
    """Blur lightly: 3x3 binomial kernel (1 2 1)ᵀ(1 2 1) / 16, a Gaussian of 0.7 cells. Edges repeat, totals are kept.

    Args:
        maps: [..., gh, gw], finite.
    """
    m = maps.to(torch.float64)
    flat = m.reshape(1, -1, *m.shape[-2:])
    p = F.pad(flat, (1, 1, 1, 1), mode="replicate")
    p = (p[..., :-2, :] + 2.0 * p[..., 1:-1, :] + p[..., 2:, :]) / 4.0
    p = (p[..., :-2] + 2.0 * p[..., 1:-1] + p[..., 2:]) / 4.0
    return p.reshape(m.shape)


def remove_sinks(maps: Tensor, neutral: Tensor, eps: float = NEUTRAL_EPS) -> Tensor:
    """Divide by the map of a neutral question, which has the attention sinks and little else.

    Args:
        maps: [..., gh, gw], finite and >= 0.
        neutral: [gh, gw] of the same image, finite and >= 0; brought to mean one here.
        eps: Added to the mean-one neutral map.

    Returns:
        maps / (neutral + eps), float64; the maps unchanged if the neutral map holds nothing.
    """
    n, uniform = normalise(neutral.reshape(1, -1))
    if bool(uniform):
        return maps.to(torch.float64)
    return maps.to(torch.float64) / (n.reshape(neutral.shape) + eps)


def blame_found(maps: Tensor, found: Tensor) -> Tensor:
    """Replace the maps of absent things by the mean map of those that are there.

    Args:
        maps: [K, gh, gw] of one image, each with mean one; cells that are no weight (NaN, infinite, negative) count as
            0, in the maps of absent things not at all.
        found: [K] bool: what the atom is about is in the image.

    Returns:
        [K, gh, gw] float64; uniform maps for the absent ones if nothing is there.
    """
    m = maps.to(torch.float64)
    there = clean(m[found])[0].mean(dim=0) if bool(found.any()) else torch.ones_like(m[0])
    return torch.where(found[:, None, None], m, there)


def cap_percentile(maps: Tensor, percentile: float) -> Tensor:
    """Cut each map at its own percentile (linear interpolation between cells).

    A map with so few cells above 0 that its percentile is 0 is left as it is: the cut would wipe it out.

    Args:
        maps: [..., gh, gw], finite and >= 0.
        percentile: 0 < percentile <= 100.
    """
    m = maps.to(torch.float64)
    limit = torch.quantile(m.flatten(-2), percentile / 100.0, dim=-1)
    return torch.minimum(m, torch.where(limit > 0, limit, torch.inf)[..., None, None])


def normalise(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Scale maps to mean one over positions: M = P a / Σ a.

    Args:
        maps: [..., P], finite and >= 0.

    Returns:
        M [..., P] float64, and [...] bool: the map held nothing (Σ a <= ``TINY``), so M is 1 everywhere.
    """
    m = maps.to(torch.float64)
    total = m.sum(dim=-1, keepdim=True)
    empty = total <= TINY
    scaled = m * (m.shape[-1] / torch.where(empty, 1.0, total))
    return torch.where(empty, 1.0, scaled), empty.squeeze(-1)


def cap_max(maps: Tensor, map_max: float) -> Tensor:
    """Limit mean-one maps to a largest value and keep their mean at one.

    What is cut off raises the other cells by a common factor, which is found exactly: the result is min(t M, map_max)
    with mean one. If the cells above 0 cannot hold the whole mass under the cap, the rest goes evenly to the zeros.

    Args:
        maps: [..., P], mean one.
        map_max: Above 1.

    Raises:
        ValueError: ``map_max`` <= 1.
    """
    if not map_max > 1.0:
        raise ValueError(f"map_max {map_max}, expected above 1")
    m = maps.to(torch.float64)
    p = m.shape[-1]
    ordered = m.sort(dim=-1, descending=True).values
    tail = ordered.flip(-1).cumsum(-1).flip(-1)  # mass of the cells from j on
    capped_cells = torch.arange(p, dtype=torch.float64, device=m.device)
    room = p - map_max * capped_cells  # what is left for the others if j cells are at the cap
    factor = torch.where(tail > TINY, room / tail.clamp(min=TINY), torch.inf)
    # The first j for which the largest of the others stays below the cap.
    fits = (factor * ordered <= map_max) & (factor > 0) & torch.isfinite(factor)
    j = fits.to(torch.int8).argmax(dim=-1, keepdim=True)
    solved = fits.any(dim=-1, keepdim=True)
    capped = (m * factor.gather(-1, j)).clamp(max=map_max)
    nonzero = m > TINY
    count = nonzero.sum(dim=-1, keepdim=True).to(torch.float64)
    rest = ((p - map_max * count) / (p - count).clamp(min=1.0)).clamp(min=0.0)
    full = torch.full_like(m, map_max)  # a bare number in `where` would pass through float32
    return torch.where(solved, capped, torch.where(nonzero, full, rest))


def blend(maps: Tensor, share: float) -> Tensor:
    """Mix mean-one maps with the uniform map: (1 - λ) + λ M. The mean stays one.

    Args:
        maps: Mean-one maps.
        share: λ in [0, 1]; 0 = uniform, exactly.

    Raises:
        ValueError: λ outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"map blend {share}, expected 0 to 1")
    return (1.0 - share) + share * maps.to(torch.float64)


def prepare(
    maps: Tensor,
    grid: tuple[int, int],
    *,
    neutral: Tensor | None = None,
    blurred: bool = True,
    percentile_cap: float | None = 99.5,
    map_max: float | None = None,
    share: float = 0.5,
) -> Prepared:
    """Turn the raw maps of one image into mean-one maps over latent positions.

    In order: repair, divide by the neutral map, blur, cut at a percentile, resample to the latent grid, normalise to
    mean one, blend with the uniform map, cap. (Resample first, then normalise: never the reverse.)

    Args:
        maps: [K, gh, gw], raw, any float dtype, any cells.
        grid: (h, w) of the latent positions; position = row * w + column.
        neutral: [gh, gw] raw map of the neutral question, or ``None`` to skip the division.
        blurred: Blur 3x3.
        percentile_cap: In percent; ``None`` = no cut.
        map_max: Largest value of the blended map; ``None`` = no cap.
        share: λ of the blend.

    Returns:
        Maps with mean one for every input.

    Raises:
        ValueError: A wrong shape, or an option out of range.
    """
    if maps.ndim != 3 or (neutral is not None and neutral.shape != maps.shape[-2:]):
        raise ValueError(f"maps {tuple(maps.shape)} and neutral {None if neutral is None else tuple(neutral.shape)}")
    if not len(maps):
        return Prepared(torch.zeros(0, grid[0] * grid[1], dtype=torch.float64), torch.zeros(0, dtype=torch.bool))
    m, bad = clean(maps)
    counters = {"maps": len(m), "repaired_cells": int(bad.sum()), "neutral_unusable": 0}
    if neutral is not None:
        n, bad_neutral = clean(neutral)
        counters["repaired_cells"] += int(bad_neutral.sum())
        counters["neutral_unusable"] = int(float(n.sum()) <= TINY)
        m = remove_sinks(m, n)
    if blurred:
        m = blur(m)
    if percentile_cap is not None:
        m = cap_percentile(m, percentile_cap)
    normal, uniform = normalise(resample(m, grid).flatten(-2))
    out = blend(normal, share)
    if map_max is not None:
        out = cap_max(out, map_max)
    return Prepared(out, uniform, {**counters, "uniform_maps": int(uniform.sum())})
