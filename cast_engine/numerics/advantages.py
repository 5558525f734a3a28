"""Group-relative advantages, in float64: per atom (CAST), per image (Flow-GRPO), and the peers' other kinds.

A score is missing when it is NaN. A missing score is left out of its group's mean and std and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cast_engine.errors import UserError

EPS = 1e-4
"""Added to every std (Flow-GRPO)."""
CONSTANT_STD = 1e-6
"""A group whose std is below this is constant: its advantage is exactly 0."""


@dataclass(frozen=True)
class AtomStats:
    """Moments of each atom over the valid images of its group."""

    mean: Tensor
    """[K] float64; 0 where no image is valid."""
    std: Tensor
    """[K] float64, population."""
    valid: Tensor
    """[G, K] bool: the score is not missing."""
    constant: Tensor
    """[K] bool: std below ``CONSTANT_STD``, as it always is with fewer than two valid images."""


def atom_stats(scores: Tensor) -> AtomStats:
    """Return mean, population std and validity per atom of one group.

    Args:
        scores: [G, K], probabilities of the expected answers; NaN = missing.

    Raises:
        ValueError: Not a matrix.
        UserError: An infinite score.
    """
    if scores.ndim != 2:
        raise ValueError(f"scores of shape {tuple(scores.shape)}, expected [G, K]")
    r = scores.to(torch.float64)
    if bool(torch.isinf(r).any()):
        raise UserError("an infinite score", where="scores", expected="finite numbers, or NaN for missing")
    valid = ~torch.isnan(r)
    n = valid.sum(dim=0)
    filled = torch.where(valid, r, 0.0)
    mean = filled.sum(dim=0) / n.clamp(min=1)
    deviation = torch.where(valid, r - mean, 0.0)
    std = ((deviation**2).sum(dim=0) / n.clamp(min=1)).sqrt()
    return AtomStats(mean, std, valid, std < CONSTANT_STD)


def atom_advantages(
    scores: Tensor, *, min_atom_std: float = 0.02, clip: float | None = 5.0, eps: float = EPS
) -> Tensor:
    """Return A[i,k] = (r[i,k] - mean_i r) / max(std_i r + eps, min_atom_std), clipped.

    Args:
        scores: [G, K] of one group; NaN = missing.
        min_atom_std: Floor of the divisor, in units of a score. It keeps an atom that is nearly always right from
            turning the judge's noise into full-size advantages. 0 = the plain group norm.
        clip: Largest |A|; ``None`` = no clip.
        eps: Added to the std.

    Returns:
        [G, K] float64, finite. Exactly 0 for constant atoms, for missing scores and for G = 1.

    Raises:
        ValueError: Not a matrix.
        UserError: An infinite score.
    """
    stats = atom_stats(scores)
    deviation = scores.to(torch.float64) - stats.mean
    advantage = deviation / (stats.std + eps).clamp(min=min_atom_std)
    advantage = torch.where(stats.valid & ~stats.constant, advantage, 0.0)
    return advantage if clip is None else advantage.clamp(-clip, clip)


def scalar_reward(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return Σ_k w_k r[i,k] per image, [G] float64.

    A missing score counts as its atom's mean over the group, that is as no deviation, which is how the per-atom rules
    treat it too; an atom missing in every image counts as 0.

    Args:
        scores: [G, K]; NaN = missing.
        weights: w, [K]; ``None`` = 1.
    """
    stats = atom_stats(scores)
    filled = torch.where(stats.valid, scores.to(torch.float64), stats.mean)
    return filled.sum(dim=1) if weights is None else filled @ weights.to(torch.float64)


def scalar_advantage(rewards: Tensor, *, clip: float | None = 5.0, eps: float = EPS) -> Tensor:
    """Return the group norm of one reward per image, [G] float64 (Flow-GRPO's rule: population std + eps, no floor).

    Args:
        rewards: [G] of one group; NaN = missing.
        clip: Largest |A|; ``None`` = no clip.
        eps: Added to the std.
    """
    return atom_advantages(rewards[:, None], min_atom_std=0.0, clip=clip, eps=eps)[:, 0]


def gate(scores: Tensor, parents: Sequence[Sequence[int]]) -> Tensor:
    """Return scores in which an atom counts only as far as its parents do: r ← r · min over parents of r.

    The soft form of DSG's dependency rule (Cho et al., arXiv 2310.18235). Parents are gated before their children, so a
    zero passes down a chain. A missing parent makes the child missing. For rewards only, never for a metric.

    Args:
        scores: [G, K] in [0, 1].
        parents: For each atom, the places of its parents, in any order without cycles.

    Raises:
        ValueError: A wrong number of atoms, an unknown parent or a cycle.
    """
    count = scores.shape[1]
    if len(parents) != count or any(not 0 <= p < count for above in parents for p in above):
        raise ValueError(f"{len(parents)} atoms with parents {list(parents)}, {count} atoms with scores")
    gated = scores.to(torch.float64).clone()
    done: set[int] = set()
    while len(done) < count:
        ready = [k for k in range(count) if k not in done and done.issuperset(parents[k])]
        if not ready:
            raise ValueError(f"the parents form a cycle: {list(parents)}")
        for k in ready:
            if parents[k]:
                gated[:, k] *= gated[:, list(parents[k])].amin(dim=1)
        done.update(ready)
    return gated


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    global_std: bool = False,
    eps: float = EPS,
    min_std: float = 0.0,
    ddof: int = 0,
) -> Tensor:
    """Return (r - group mean) / max(std + eps, min_std) for a whole batch of groups.

    The peers' kinds: Flow-GRPO has the defaults, with or without ``global_std``; verl-omni ``ddof=1``; DanceGRPO
    ``ddof=1, eps=1e-8``; Flow-Factory ``eps=0, min_std=1e-6``.

    Args:
        rewards: [N] or [N, R] (each column by itself), finite.
        group_ids: [N], any order.
        global_std: Take the std over the whole batch instead of the group.
        eps: Added to the std.
        min_std: Floor of the divisor.
        ddof: 0 population, 1 sample std.

    Returns:
        Like rewards, float64. A constant group gets exactly 0, and so does a group of one.
    """
    r = rewards.to(torch.float64)
    out = torch.zeros_like(r)
    for group in sorted(set(group_ids.tolist())):
        members = group_ids == group
        own = r[members]
        mean = own.mean(dim=0)
        spread = ((own - mean) ** 2).mean(dim=0).sqrt()
        population = r if global_std else own
        if len(own) < 2 or len(population) <= ddof:
            continue
        std = population.std(dim=0, correction=ddof)
        advantage = (own - mean) / (std + eps).clamp(min=min_std)
        out[members] = torch.where(spread < CONSTANT_STD, 0.0, advantage)
    return out


def multi_reward_sum_advantage(
    rewards: Tensor, group_ids: Tensor, weights: Tensor, *, global_std: bool = False
) -> Tensor:
    """Return Flow-Factory's "sum" advantage: the weighted sum of rewards, group mean off, over max(std, 1e-6).

    Args:
        rewards: [N, R].
        group_ids: [N].
        weights: [R].
        global_std: Take the std over the whole batch.
    """
    total = rewards.to(torch.float64) @ weights.to(torch.float64)
    return group_advantage(total, group_ids, global_std=global_std, eps=0.0, min_std=1e-6)


def gdpo_advantage(rewards: Tensor, group_ids: Tensor, weights: Tensor) -> Tensor:
    """Return Flow-Factory's "gdpo" advantage: each reward group-normalised, then their sum batch-normalised.

    Args:
        rewards: [N, R].
        group_ids: [N].
        weights: [R].
    """
    total = group_advantage(rewards, group_ids, eps=0.0, min_std=1e-6) @ weights.to(torch.float64)
    return group_advantage(total, torch.zeros_like(group_ids), eps=0.0, min_std=1e-6)
