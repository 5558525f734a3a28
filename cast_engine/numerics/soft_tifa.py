"""Soft-TIFA: the probability of an answer in the judge's next-token logits, and GenEval 2's averages of such scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Mode = Literal["dedup", "geneval2"]


def answer_probability(
    logits: Tensor, first_ids: Sequence[Sequence[int]], mode: Mode, position: Tensor | None = None
) -> Tensor:
    """Return the probability that the next token begins one of an answer's spellings.

    The softmax runs over the whole vocabulary in float32, whatever dtype the logits have.

    Args:
        logits: ``[Q, V]``, the next-token logits at each of Q answer positions.
        first_ids: for each of A answers, the first token id of every spelling.
        mode: ``geneval2`` adds a token once per spelling that begins with it, so the sum may exceed one;
            ``dedup`` adds each distinct token once and stays in [0, 1].
        position: ``[A]`` long, the row of ``logits`` that each answer is looked up in; None: one answer per row.

    Returns:
        ``[A]`` float32; NaN where the logits hold a NaN or +inf, or where an answer has no spelling at all.
    """
    device = logits.device
    groups = [sorted(set(ids)) if mode == "dedup" else list(ids) for ids in first_ids]
    # Padded and summed along a row rather than scattered, so that CUDA always adds in the same order.
    width = max(map(len, groups), default=0)
    token = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in groups], dtype=torch.long, device=device)
    count = torch.tensor([len(ids) for ids in groups], dtype=torch.long, device=device)
    row = torch.arange(len(groups), device=device) if position is None else position
    total = logits.float().logsumexp(dim=-1)[row]
    each = (logits[row[:, None], token].float() - total[:, None]).exp()
    out = each.masked_fill(torch.arange(width, device=device) >= count[:, None], 0.0).sum(dim=1)
    if mode == "dedup":
        out = out.clamp(max=1.0)
    return out.masked_fill(~total.isfinite() | (count == 0), float("nan"))


def arithmetic_mean(scores: Sequence[float]) -> float:
    """Return the mean of one prompt's atom scores, missing (NaN) ones left out; NaN when none is left."""
    valid = [s for s in scores if not np.isnan(s)]
    return float(np.mean(valid)) if valid else float("nan")


def geometric_mean(scores: Sequence[float]) -> float:
    """Return the geometric mean of one prompt's atom scores: 0 if any is 0, missing ones left out; NaN if none."""
    valid = np.array([s for s in scores if not np.isnan(s)], dtype=np.float64)
    if valid.size == 0:
        return float("nan")
    return float(np.exp(np.mean(np.log(valid)))) if valid.min() > 0 else 0.0


def aggregate(
    scores: Sequence[Sequence[float]], skills: Sequence[Sequence[str]], atom_counts: Sequence[int]
) -> dict[str, Any]:
    """Return GenEval 2's averages, in percent.

    Args:
        scores: atom scores of each prompt.
        skills: the skill of each atom, same lengths as ``scores``.
        atom_counts: GenEval 2's number of atoms of each prompt (questions about "a" are asked but not counted).

    Returns:
        ``total_am`` and ``total_gm`` (means over prompts), ``pooled_am`` (mean over all atoms), ``per_skill`` (all
        atoms of a skill pooled) and ``per_atomicity`` (mean geometric mean by number of atoms). A mean over nothing
        is None.
    """
    pooled: dict[str, list[float]] = {}
    for row, names in zip(scores, skills, strict=True):
        for score, skill in zip(row, names, strict=True):
            pooled.setdefault(skill, []).append(score)
    by_count: dict[int, list[float]] = {}
    for row, count in zip(scores, atom_counts, strict=True):
        by_count.setdefault(count, []).append(geometric_mean(row))
    return {
        "total_am": _percent([arithmetic_mean(row) for row in scores]),
        "total_gm": _percent([geometric_mean(row) for row in scores]),
        "pooled_am": _percent([s for row in scores for s in row]),
        "per_skill": {skill: _percent(values) for skill, values in sorted(pooled.items())},
        "per_atomicity": {count: _percent(values) for count, values in sorted(by_count.items())},
    }


def _percent(values: Sequence[float]) -> float | None:
    mean = arithmetic_mean(values)
    return None if np.isnan(mean) else 100.0 * mean
