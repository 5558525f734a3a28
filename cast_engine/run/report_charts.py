"""Which charts a report has, and what they are drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cast_engine.run.report_data import Evaluation, RoundFigures, number
from cast_engine.run.report_plots import Chart, Line, short
from cast_engine.run.summary import COUNTERS, DOUBLE, SKILLS
from schemas.job import JobConfig

Rows = Sequence[Mapping[str, Any]]
LABELS = {
    "object": "objects",
    "attribute": "attributes",
    "count": "counts",
    "relation": "relations",
    "action": "actions",
    "atoms": "all atoms",
    "all_right": "every atom right",
    "over_count": "too many",
    "under_count": "too few",
}
"""Skills and atom kinds as people read them."""


def held_out(evaluations: Mapping[str, Evaluation]) -> list[Chart]:
    """Return one chart per skill over rounds, with the base at twice the steps to compare with."""
    timed = sorted((e for e in evaluations.values() if e.round is not None), key=lambda e: e.round or 0)
    rounds = [float(e.round or 0) for e in timed]
    charts = []
    for skill in ("atoms", "all_right", *(s for s in SKILLS if s not in ("atoms", "all_right"))):
        line = Line(LABELS[skill], rounds, _percent(timed, skill, "mean"), _percent(timed, skill, "se"))
        double = evaluations[DOUBLE].skills[skill]["mean"] if DOUBLE in evaluations else math.nan
        levels = [(100 * double, "base at twice the steps")] if math.isfinite(double) else []
        title = LABELS[skill].capitalize()
        charts.append(Chart(f"held-{skill}", title, [line], "rounds trained", "% right", levels))
    wrong = [Line(LABELS[s], rounds, _percent(timed, s, "mean"), _percent(timed, s, "se")) for s in COUNTERS]
    title = "Too many or too few"
    return [*charts, Chart("held-counts", title, wrong, "rounds trained", "% of groups", share=True)]


def _percent(evaluations: Sequence[Evaluation], skill: str, part: str) -> list[float]:
    return [100 * e.skills[skill][part] for e in evaluations]


def rewards(rounds: Sequence[RoundFigures]) -> list[Chart]:
    """Return the mean reward per round, in all and by kind of atom, and the share of atoms that teach nothing."""
    at = [float(r.round) for r in rounds]
    total = Line("mean reward", at, [r.reward for r in rounds], [r.reward_se for r in rounds])
    kinds = [k for k in LABELS if any(k in r.kinds for r in rounds)]
    by_kind = [Line(LABELS[k], at, [r.kinds.get(k, math.nan) for r in rounds]) for k in kinds]
    silent = [
        Line("constant", at, [100 * r.constant / max(r.atoms, 1) for r in rounds]),
        Line("low spread", at, [100 * r.low_std / max(r.atoms, 1) for r in rounds]),
    ]
    prompts = "Each round draws other prompts, so some of the movement is theirs. Band: standard error over prompts."
    constant = "Atoms that every image of a group answers alike get no advantage; low spread: below min_atom_std."
    return [
        Chart("reward", "Mean reward of the training images", [total], y_label="reward", note=prompts, digits=3),
        Chart("reward-kinds", "Mean reward by kind of atom", by_kind, y_label="score", digits=3),
        Chart("silent", "Atoms without a lesson", silent, y_label="% of atoms", note=constant, share=True),
        *_weights(rounds),
    ]


def _weights(rounds: Sequence[RoundFigures]) -> list[Chart]:
    """Return where the signed weights of a round come from and where they lie, before anything is trained on them."""
    at, made = [float(r.round) for r in rounds], [r.credit for r in rounds]
    low = Line("atoms with low spread", at, [100 * c.low_std_share for c in made])
    spread = Line("standard deviation", at, [c.group_std for c in made])
    place = [
        Line("on what is drawn", at, [c.weight_drawn for c in made]),
        Line("on the background", at, [c.weight_background for c in made]),
    ]
    noise = "Share of the sum of |A| over images and atoms; the spread of these atoms may be the judge's noise."
    means = "Of the mean of W over an image, between the images of a group; averaged over groups."
    fill = "Below 0 on the background, training fills it; above 0, training leaves it empty: counts drift that way."
    return [
        Chart("low-std", "What atoms with low spread have to say", [low], y_label="% of |A|", note=noise, share=True),
        Chart("group-std", "Spread of the mean of W", [spread], y_label="standard deviation", note=means, digits=3),
        Chart("weight-place", "Mean of W by place", place, y_label="mean of W", note=fill, digits=4),
    ]


def training(updates: Rows, states: Mapping[int, Mapping[str, Any]], job: JobConfig) -> list[Chart]:
    """Return the dynamics of training: bold the mean of each round, faint the single updates."""
    config = job.train

    def means(name: str, label: str, scale: float = 1.0) -> Line:
        return _by_round(updates, name, label, scale)

    limit = [(config.clip_range, f"clip range {short(config.clip_range)}")] if config.clip_range else []
    ratio = [
        _by_round(updates, name, label, largest=True)
        for name, label in (("log_ratio_max", "of an image"), ("position_log_ratio_max", "of a position"))
    ]
    start = [
        Line(f"of {word} {n}", list(map(float, states)), [_start_ratio(s, n) for s in states.values()])
        for word, n in (("an", "image"), ("a", "position"))
    ]
    clipped = [
        means("clip_share_positive", "where W > 0", 100.0),
        means("clip_share_negative", "where W < 0", 100.0),
    ]
    exact = "Replaying the rollout with the policy that drew it must give the same log-probabilities."
    tolerance = [(config.ratio_tolerance, f"limit {short(config.ratio_tolerance)}")]
    near = any(number(r.get("grad_norm")) > config.grad_clip / 5 for r in updates)
    clip = [(config.grad_clip, f"clipped at {config.grad_clip:g}")] if near else []
    x, largest = "update", "Bold: the largest of a round."
    spread = "Before it meets the loss: mean and standard deviation over images and positions of an update."
    return [
        Chart("log-ratio", "Largest |log-ratio|", ratio, x, levels=limit, log=True, note=largest),
        Chart("start-ratio", "|log-ratio| before the first update", start, levels=tolerance, log=True, note=exact),
        Chart("clipped", "Share of clipped ratios", clipped, x, "% of positions", share=True, digits=2),
        Chart("grad", "Gradient norm", [means("grad_norm", "gradient norm")], x, levels=clip, log=True),
        Chart("adapter", "Adapter norm", [means("adapter_norm", "adapter norm")], x, digits=3),
        Chart("change", "Change of the adapted weights, relative", [means("adapter_ratio", "ratio")], x, log=True),
        Chart("weight-sd", "Standard deviation of W", [means("weight_std", "sd of W")], x, digits=3, note=spread),
        Chart("weight-mean", "Mean of W", [means("weight_mean", "mean of W")], x, digits=4),
    ]


def _start_ratio(state: Mapping[str, Any], name: str) -> float:
    found = state.get("start_ratio")
    return number(found.get(name)) if isinstance(found, dict) else math.nan


def _by_round(updates: Rows, name: str, label: str, scale: float = 1.0, *, largest: bool = False) -> Line:
    """Return a line of one point per round (mean, or largest) with the single updates behind it."""
    rounds: dict[int, list[tuple[float, float]]] = {}
    for i, row in enumerate(updates):
        value = scale * number(row.get(name))
        rounds.setdefault(int(row.get("round") or 0), []).append((number(row.get("update", i + 1)), value))
    x, y = [], []
    for points in rounds.values():
        finite = [v for _, v in points if math.isfinite(v)]
        x.append(sum(u for u, _ in points) / len(points))
        y.append((max(finite) if largest else sum(finite) / len(finite)) if finite else math.nan)
    flat = [p for points in rounds.values() for p in points]
    if len(flat) == len(x):
        return Line(label, x, y)
    return Line(label, x, y, faint=[v for _, v in flat], faint_x=[u for u, _ in flat])
