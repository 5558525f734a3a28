"""Signed weights W per image and latent position: which atom's verdict reaches which part of the image.

=============  ========================================  ==================
credit         W[i,p]                                    mean over p
=============  ========================================  ==================
``scalar``     A[i] = group norm of Σ_k w_k r[i,k]       A[i]
``per-atom``   c_K Σ_k w_k A[i,k]                        A^Σ[i]
``spatial``    A[i] · mean_k M[i,k,p]                    A[i]
``shuffled``   c_K Σ_k w_k A[i,k] M[i,π_i(k),p]          A^Σ[i]
``cast``       c_K Σ_k w_k A[i,k] M[i,k,p]               A^Σ[i]
=============  ========================================  ==================

A^Σ[i] = c_K Σ_k w_k A[i,k]. Maps have mean one, so the mean over positions never depends on them, and with uniform maps
every rule is Flow-GRPO with A^Σ (or A) as the advantage. K in c_K counts all atoms, constant ones too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from cast_engine.errors import UserError
from cast_engine.numerics import advantages as adv
from cast_engine.numerics.noise import hash_seed
from schemas.job import Credit

Scale = Literal["sum", "rsqrt", "mean", "match"]
MATCH_MAX = 10.0
"""Largest c_K that ``match`` may give: atoms that cancel would otherwise blow W up."""
MEAN_TOLERANCE = 1e-6
"""Largest |mean - 1| of a map that is still taken as mean one."""


@dataclass(frozen=True)
class GroupCredit:
    """Signed weights of one group and what they were made of."""

    weight: Tensor
    """W [G, P] in the dtype that was asked for."""
    advantage: Tensor
    """A [G, K] float64 after the clip; [G, 1] for ``scalar`` and ``spatial``."""
    mean_weight: Tensor
    """A^Σ (or A), [G] float64: the mean of W over positions before ``weight_clip``."""
    scale: float
    """c_K as used; 1 for ``scalar`` and ``spatial``."""
    std: float
    """Population std of ``mean_weight`` in the group."""
    low_std: Tensor
    """[K] bool: atoms whose std is below ``min_atom_std``, but that are not constant."""
    counters: dict[str, int]
    """Of the whole group: ``atoms``; ``constant``, ``low_std`` (below ``min_atom_std`` but not constant) and each of
    them by kind, as ``constant.object``; ``missing`` scores; ``zero_group`` (1 if W is 0 everywhere); ``not_shuffled``
    (images whose single atom has no other map); ``match_limited``; ``above_clip`` (positions with |W| above
    ``weight_clip``, or above ``advantage_clip`` if there is none)."""


def derangement(n: int, seed: int, key: str) -> tuple[int, ...]:
    """Return a permutation of range(n) without fixed points, uniform among them; the identity for n <= 1.

    Args:
        n: Number of atoms.
        seed: Run seed.
        key: Sample key; with the seed it decides the permutation.
    """
    if n <= 1:
        return tuple(range(n))
    generator = torch.Generator().manual_seed(hash_seed("derangement", seed, key))
    places = torch.arange(n)
    while True:  # a random permutation has no fixed point about once in e
        order = torch.randperm(n, generator=generator)
        if not bool((order == places).any()):
            return tuple(int(k) for k in order)


def atom_scale(scale: Scale, advantages: Tensor, weights: Tensor) -> tuple[float, bool]:
    """Return c_K, and whether ``match`` could not be met.

    Args:
        scale: ``sum`` 1, ``rsqrt`` 1/√K, ``mean`` 1/K, ``match`` 1 / std over the group of Σ_k w_k A[i,k].
        advantages: A, [G, K] float64.
        weights: w, [K] float64.

    Raises:
        UserError: An unknown scale.
    """
    k = max(advantages.shape[1], 1)
    if scale == "sum":
        return 1.0, False
    if scale == "rsqrt":
        return 1.0 / math.sqrt(k), False
    if scale == "mean":
        return 1.0 / k, False
    if scale == "match":
        std = float((advantages @ weights).std(correction=0))
        if std < adv.CONSTANT_STD:
            return 1.0 / math.sqrt(k), True
        return min(1.0 / std, MATCH_MAX), 1.0 / std > MATCH_MAX
    raise UserError(f"scale {scale!r}", where="advantages.scale", expected=" or ".join(get_args(Scale)))


def _atom_counters(scores: Tensor, min_atom_std: float, kinds: Sequence[str] | None) -> tuple[Counter[str], Tensor]:
    """Return the counters of a group's atoms, and which of them have little spread, [K] bool."""
    stats = adv.atom_stats(scores)
    low = ~stats.constant & (stats.std < min_atom_std)
    count: Counter[str] = Counter(atoms=scores.shape[1], missing=int((~stats.valid).sum()), constant=0, low_std=0)
    for name, mask in (("constant", stats.constant), ("low_std", low)):
        for k in mask.nonzero().flatten().tolist():
            count[name] += 1
            if kinds is not None:
                count[f"{name}.{kinds[k]}"] += 1
    return count, low


def _check(
    credit: Credit,
    scores: Tensor,
    maps: Tensor | None,
    positions: int,
    kinds: Sequence[str] | None,
    weights: Tensor | None,
) -> tuple[int, int]:
    if credit not in get_args(Credit):
        raise UserError(f"credit {credit!r}", where="advantages.credit", expected=" or ".join(get_args(Credit)))
    if positions < 1 or scores.ndim != 2:
        raise ValueError(f"{positions} positions, scores {tuple(scores.shape)}: expected P >= 1 and [G, K]")
    g, k = scores.shape
    if (kinds is not None and len(kinds) != k) or (weights is not None and weights.shape != (k,)):
        raise ValueError(f"kinds and weights must have one entry for each of the {k} atoms")
    if credit in ("scalar", "per-atom"):
        return g, k
    if maps is None or maps.shape != (g, k, positions):
        found = None if maps is None else tuple(maps.shape)
        raise ValueError(f"maps {found} for credit {credit}, expected {(g, k, positions)}")
    if maps.numel() and not bool(((maps.to(torch.float64).mean(dim=-1) - 1.0).abs() <= MEAN_TOLERANCE).all()):
        raise ValueError("maps must have mean one over positions (maps.prepare gives such maps)")
    return g, k


def signed_weight(
    credit: Credit,
    scores: Tensor,
    maps: Tensor | None,
    *,
    positions: int,
    scale: Scale = "rsqrt",
    min_atom_std: float = 0.02,
    advantage_clip: float = 5.0,
    weight_clip: float | None = None,
    weights: Tensor | None = None,
    kinds: Sequence[str] | None = None,
    seed: int = 0,
    keys: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> GroupCredit:
    """Return the signed weights of one group.

    Args:
        credit: The rule, see the module.
        scores: r, [G, K] in [0, 1] (gated already, if a gate is wanted); NaN = missing.
        maps: M, [G, K, P], mean one over P; may be ``None`` for ``scalar`` and ``per-atom``.
        positions: P.
        scale: c_K, for the rules with a sum over atoms.
        min_atom_std: Floor of an atom's std (not used by ``scalar`` and ``spatial``, which follow Flow-GRPO).
        advantage_clip: Largest |A|, before atoms are combined.
        weight_clip: Largest |W|. It breaks the mean over positions, so it is off by default.
        weights: w, [K]; ``None`` = 1.
        kinds: Kind of each atom, for the counters.
        seed: Run seed, for ``shuffled``.
        keys: Sample key of each image, for ``shuffled``.
        dtype: Of W. In float32 the mean of W over P is ``mean_weight`` to 1e-6 (|A^Σ| < 32), in float64 to rounding.

    Returns:
        W and its parts. G = 1, K = 0 or all atoms constant give W = 0.

    Raises:
        UserError: An unknown rule or scale, or an infinite score.
        ValueError: A wrong shape, maps whose mean is not one, or no keys for ``shuffled``.
    """
    g, k = _check(credit, scores, maps, positions, kinds, weights)
    counters, low_std = _atom_counters(scores, min_atom_std, kinds)
    counters.update({"not_shuffled": g if k == 1 else 0} if credit == "shuffled" else {})
    w = torch.ones(k, dtype=torch.float64) if weights is None else weights.to(torch.float64)
    if credit in ("scalar", "spatial"):
        c, limited = 1.0, False
        a = adv.scalar_advantage(adv.scalar_reward(scores, w), clip=advantage_clip)[:, None]
        mean_weight = a[:, 0]
    else:
        a = adv.atom_advantages(scores, min_atom_std=min_atom_std, clip=advantage_clip)
        c, limited = atom_scale(scale, a, w)
        mean_weight = c * (a @ w)
    weight = _spread(credit, c, a, w, maps, mean_weight, seed, keys).expand(g, positions)
    counters["match_limited"] = int(limited)
    counters["zero_group"] = int(not bool((weight != 0).any()))
    counters["above_clip"] = int((weight.abs() > (weight_clip or advantage_clip)).sum())
    if weight_clip is not None:
        weight = weight.clamp(-weight_clip, weight_clip)
    return GroupCredit(weight.to(dtype).contiguous(), a, mean_weight, c, _std(mean_weight), low_std, dict(counters))


def _std(values: Tensor) -> float:
    return float(values.std(correction=0)) if len(values) else 0.0


def _spread(
    credit: Credit,
    scale: float,
    advantage: Tensor,
    weights: Tensor,
    maps: Tensor | None,
    mean_weight: Tensor,
    seed: int,
    keys: Sequence[str] | None,
) -> Tensor:
    """Return W before the clip: [G, P], or [G, 1] if it is the same at every position."""
    if maps is None or not maps.shape[1] or credit in ("scalar", "per-atom"):
        return mean_weight[:, None]
    m = maps.to(torch.float64)
    if credit == "spatial":
        return advantage * m.mean(dim=1)
    if credit == "shuffled":
        m = _shuffle(m, seed, keys)
    return scale * torch.einsum("gk,gkp->gp", advantage * weights, m)


def _shuffle(maps: Tensor, seed: int, keys: Sequence[str] | None) -> Tensor:
    if keys is None or len(keys) != len(maps):
        raise ValueError(f"shuffled credit needs one key for each of the {len(maps)} images")
    orders = torch.tensor([derangement(maps.shape[1], seed, key) for key in keys])
    return torch.stack([m[order] for m, order in zip(maps, orders, strict=True)])
