"""What came out: skills before and after, with their spread over prompts, as JSON and as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cast_engine.graphs.words import count_of
from cast_engine.judges.load import same_judge
from cast_engine.run.layout import RunLayout
from schemas.job import JobConfig
from schemas.records import EvaluateMeta

BEFORE, DOUBLE = "base", "base-double-steps"
"""Names of the evaluations of the untrained model."""
SKILLS = ("object", "attribute", "count", "relation", "atoms", "all_right")
COUNTERS = ("over_count", "under_count")


Scores = Mapping[str, Mapping[str, float | int]]
"""Mean, standard error (``se``) and number of prompts (``n``) by skill."""


def final_name(job: JobConfig) -> str:
    """Return the name of the evaluation after the last round."""
    return f"round-{job.rounds:04d}"


def evaluations(layout: RunLayout) -> list[str]:
    """Return the names of the sealed evaluations of a run: base first, then by round.

    What was evaluated at another number of steps (``round-0004-20-steps``) is not among them.
    """
    folder = layout.root / "evaluate"
    names = sorted(p.name for p in folder.iterdir() if (p / "sealed.json").exists()) if folder.exists() else []
    return [n for n in (BEFORE, DOUBLE) if n in names] + [n for n in names if re.fullmatch(r"round-\d+", n)]


@dataclass(frozen=True)
class PromptScores:
    """Skills of one prompt, averaged over its images; NaN where the prompt has no such atom."""

    values: Mapping[str, float]


def score_prompts(metas: Sequence[EvaluateMeta]) -> dict[str, PromptScores]:
    """Average the verdicts of an evaluation per prompt.

    Args:
        metas: one record per held-out image.

    Returns:
        Per prompt id the share of right atoms of each kind, of all atoms (``atoms``), of images with every atom right
        (``all_right``), and of counted groups with too many (``over_count``) and too few (``under_count``). Atoms
        without a verdict are left out.
    """
    images: dict[str, list[dict[str, float]]] = {}
    for meta in metas:
        images.setdefault(meta.prompt_id, []).append(_image_scores(meta))
    out = {}
    for prompt_id, rows in images.items():
        out[prompt_id] = PromptScores({k: _mean([r[k] for r in rows]) for k in (*SKILLS, *COUNTERS)})
    return out


def _image_scores(meta: EvaluateMeta) -> dict[str, float]:
    known = [(kind, score) for kind, score in zip(meta.kinds, meta.scores, strict=True) if score is not None]
    out = {skill: _mean([s for kind, s in known if kind == skill]) for skill in SKILLS[:4]}
    out["atoms"] = _mean([s for _, s in known])
    out["all_right"] = float(all(s >= 0.5 for _, s in known)) if known else math.nan
    asked = [
        (counted, wanted)
        for counted, word in zip(meta.counted, meta.expected, strict=False)
        if counted is not None and (wanted := count_of(word)) is not None
    ]
    out["over_count"] = _mean([float(c > n) for c, n in asked])
    out["under_count"] = _mean([float(c < n) for c, n in asked])
    return out


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if not math.isnan(v)]
    return sum(finite) / len(finite) if finite else math.nan


def aggregate(prompts: Mapping[str, PromptScores]) -> dict[str, dict[str, float | int]]:
    """Return mean, standard error over prompts and number of prompts for every skill."""
    out = {}
    for skill in (*SKILLS, *COUNTERS):
        values = np.array([p.values[skill] for p in prompts.values()], dtype=np.float64)
        out[skill] = _mean_and_error(values)
    return out


def paired(before: Mapping[str, PromptScores], after: Mapping[str, PromptScores]) -> dict[str, dict[str, float | int]]:
    """Return mean, standard error and count of the per-prompt differences ``after - before`` for every skill."""
    shared = [k for k in before if k in after]
    out = {}
    for skill in (*SKILLS, *COUNTERS):
        diff = np.array([after[k].values[skill] - before[k].values[skill] for k in shared], dtype=np.float64)
        out[skill] = _mean_and_error(diff)
    return out


def _mean_and_error(values: np.ndarray) -> dict[str, float | int]:
    finite = values[~np.isnan(values)]
    n = int(finite.size)
    if n == 0:
        return {"mean": math.nan, "se": math.nan, "n": 0}
    error = float(finite.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return {"mean": float(finite.mean()), "se": error, "n": n}


TITLE = "held-out prompts, % right ± standard error over prompts"


def table(rows: Mapping[str, Scores], differences: Collection[str] = (), title: str = TITLE) -> Any:
    """Return a rich table: one line per evaluation, one column per skill, "mean ± standard error" in percent.

    Args:
        rows: aggregates by name, in the order shown; a missing figure (None) is shown as a dash.
        differences: names of the rows that hold paired differences (shown with a sign).
        title: what stands above.
    """
    from rich import box
    from rich.table import Table

    out = Table(
        title=title, title_justify="left", box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1)
    )
    out.add_column("", no_wrap=True)
    for skill in SKILLS:
        out.add_column(skill.replace("_", " "), justify="right", no_wrap=True)
    for name, scores in rows.items():
        sign = "+" if name in differences else ""
        cells = (percent(scores[k]["mean"], scores[k]["se"], sign) for k in SKILLS)
        out.add_row(name, *cells)
    return out


def percent(mean: float | None, spread: float | None, sign: str = "") -> str:
    """Return a share and its spread in percent, as in "+4.1±0.9"; "–" for a missing mean, no spread if that is missing.

    Args:
        mean: share, 0 to 1, or a difference of two.
        spread: of the same unit.
        sign: "+" to show the sign of what is not negative.
    """
    if mean is None or math.isnan(mean):
        return "–"
    shown = f"{100 * mean:{sign}.1f}"
    return shown if spread is None or math.isnan(spread) else f"{shown}±{100 * spread:.1f}"


def judge_warning(job: JobConfig) -> str | None:
    """Say so when the judge that gave the reward marks its own work."""
    if same_judge(job.score, job.evaluate):
        return "the judge that gave the reward also reports the gain"
    return None


def count_warning(difference: Mapping[str, Mapping[str, float | int]]) -> str | None:
    """Say so when counting fell by more than two standard errors."""
    count = difference["count"]
    if count["n"] and count["mean"] < -2 * count["se"]:
        lost, error = -100 * count["mean"], 100 * count["se"]
        return f"count fell by {lost:.1f} points (± {error:.1f}): more than two standard errors"
    return None
