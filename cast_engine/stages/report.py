"""Stage `report`: one HTML page about a run that needs no network and nothing beside it.

It shows what is there: an unfinished run, failed samples or damaged datasets make a page that says what is missing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cast_engine.run import report_charts, report_credit, report_data, report_facts, report_gallery
from cast_engine.run.layout import RunLayout
from cast_engine.run.report_charts import LABELS
from cast_engine.run.report_data import Evaluation, Notes, RoundFigures
from cast_engine.run.report_images import scale_colours
from cast_engine.run.report_plots import Chart, Drawn, draw
from cast_engine.run.summary import (
    BEFORE,
    COUNTERS,
    DOUBLE,
    SKILLS,
    Scores,
    count_warning,
    evaluations,
    judge_warning,
    paired,
)
from cast_engine.store.atomic import write_file
from schemas.graph import SceneGraph
from schemas.job import JobConfig

TEMPLATES = Path(__file__).parent / "templates"


@dataclass
class _Run:
    """What was found in the run folder."""

    layout: RunLayout
    job: JobConfig
    evaluations: dict[str, Evaluation]
    graphs: dict[str, SceneGraph]
    rounds: list[RoundFigures]
    updates: list[dict[str, Any]]
    states: dict[int, dict[str, Any]]
    notes: Notes = field(default_factory=list)

    @property
    def before(self) -> Evaluation | None:
        """The untrained model."""
        return self.evaluations.get(BEFORE)

    @property
    def after(self) -> Evaluation | None:
        """The newest evaluation of the trained model."""
        trained = [e for e in self.evaluations.values() if e.round]
        return max(trained, key=lambda e: e.round or 0) if trained else None

    @property
    def finished(self) -> bool:
        """Whether every round is trained and the last one evaluated."""
        return len(self.states) == self.job.rounds and self.after is not None and self.after.round == self.job.rounds


def write(layout: RunLayout, job: JobConfig) -> Path:
    """Write ``report.html`` into the run folder and return its path.

    Args:
        layout: the run folder.
        job: its job.
    """
    page = render(layout, job)
    write_file(layout.report, page.encode())
    return layout.report


def render(layout: RunLayout, job: JobConfig) -> str:
    """Return the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    run = _read(layout, job)
    script, style = ((TEMPLATES / f"report.{kind}").read_text("utf-8") for kind in ("js", "css"))
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"pct": _pct, "pm": _pm, "num": _num, "clock": _clock}
    page = environment.get_template("report.html.j2").render(
        **_context(run),
        style=Markup(style),  # noqa: S704 (ours)
        script=Markup(script),  # noqa: S704 (ours)
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        svg=lambda drawn: Markup(drawn.svg),  # noqa: S704 (matplotlib's, with our labels only)
    )
    return page + "\n"


def _read(layout: RunLayout, job: JobConfig) -> _Run:
    notes: Notes = []
    graphs = report_data.load_graphs(layout.graphs("evaluate"), "Held-out scene graphs", notes)
    loaded = {name: report_data.load_evaluation(layout, name, graphs, notes) for name in evaluations(layout)}
    rounds = [report_data.load_round(layout, job, r, notes) for r in range(job.rounds)]
    run = _Run(
        layout,
        job,
        {name: e for name, e in loaded.items() if e is not None},
        graphs,
        [r for r in rounds if r is not None],
        report_data.load_updates(layout, job.rounds),
        report_data.load_states(layout, job.rounds),
        notes,
    )
    notes[:0] = _missing(run)
    return run


def _missing(run: _Run) -> list[str]:
    """Say which parts of a whole run are not there."""
    job, out = run.job, []
    if len(run.states) < job.rounds:
        out.append(f"The run is not finished: {len(run.states)} of {job.rounds} rounds are trained.")
    if run.before is None:
        out.append("The untrained model was not evaluated, so there is nothing to compare with.")
    if run.after is None:
        out.append("No evaluation of the trained model yet.")
    elif run.after.round != job.rounds:
        out.append(f"The last round was not evaluated; “after” is round {run.after.round}.")
    if DOUBLE not in run.evaluations:
        why = "" if job.evaluate.double_steps else " (evaluate.double_steps is off)"
        out.append(f"The untrained model was not evaluated at twice the steps{why}.")
    if sum(bool(e.round) for e in run.evaluations.values()) == 1 and job.evaluate.every is None:
        out.append("There was no evaluation during training (evaluate.every is not set): curves have two points.")
    if not run.rounds:
        out.append("No training images were scored yet.")
    if not run.updates:
        out.append("No metrics of training yet.")
    return out


def _context(run: _Run) -> dict[str, Any]:
    job, layout = run.job, run.layout
    charts = [
        ("held-out", "Held-out skills", report_charts.held_out(run.evaluations)),
        ("rewards", "Rewards of the training images", report_charts.rewards(run.rounds)),
        ("dynamics", "Training dynamics", report_charts.training(run.updates, run.states, job)),
    ]
    gallery = None
    if run.before and job.report.images:
        gallery = report_gallery.build(layout, run.before, run.after, run.graphs, job.report.images, run.notes)
    credit = report_credit.build(layout, job, run.notes) if job.report.maps else []
    difference = paired(run.before.prompts, run.after.prompts) if run.before and run.after else None
    return {
        "job": job,
        "status": "finished" if run.finished else f"not finished: {len(run.states)} of {job.rounds} rounds",
        "finished": run.finished,
        "headline": _headline(run, difference),
        "warning": count_warning(difference) if difference else None,
        "same_judge": judge_warning(job) is not None,
        "table": _table(run, difference),
        "columns": _columns(run),
        "facts": report_facts.facts(layout, job, run.rounds, run.updates, run.states, run.evaluations),
        "hashes": report_facts.hashes(layout, job, run.states, run.evaluations),
        "seconds": report_facts.seconds(layout),
        "charts": [(key, title, _drawn(found)) for key, title, found in charts],
        "gallery": gallery,
        "gallery_kinds": _kinds(gallery),
        "credit": credit,
        "labels": LABELS,
        "scales": {"map": scale_colours(signed=False), "weight": scale_colours(signed=True)},
        "notes": list(dict.fromkeys(run.notes)),
        "config": json.dumps(job.model_dump(mode="json"), indent=1),
    }


def _drawn(charts: Iterable[Chart]) -> list[Drawn]:
    return [drawn for chart in charts if (drawn := draw(chart)) is not None]


def _kinds(gallery: report_gallery.Gallery | None) -> list[str]:
    kinds = {row.kind for card in gallery.cards for row in card.rows} if gallery else set()
    return [k for k in LABELS if k in kinds]


def _columns(run: _Run) -> list[str]:
    out = ["before"] if run.before else []
    if run.after:
        out.append("after" if run.after.round == run.job.rounds else f"after {run.after.round} rounds")
    return out


def _table(run: _Run, difference: Scores | None) -> list[dict[str, Any]]:
    """Return one row per skill: a cell per evaluation, the paired difference and how to read it."""
    double = run.evaluations.get(DOUBLE)
    shown = [e.skills for e in (run.before, run.after) if e]
    extra = paired(double.prompts, run.after.prompts) if double and run.after else None
    rows = []
    for skill in ("atoms", "all_right", "object", "attribute", "count", "relation", *COUNTERS):
        assert skill in (*SKILLS, *COUNTERS)
        cells = [s[skill] for s in shown]
        if not any(c["n"] for c in cells):
            continue
        lower = skill in COUNTERS
        gain = difference[skill] if difference else None
        rows.append(
            {
                "label": LABELS[skill],
                "counter": lower,
                "cells": cells,
                "prompts": max(c["n"] for c in cells),
                "difference": gain,
                "reading": _reading(gain, lower_is_better=lower) if gain else "",
                "double": double.skills[skill] if double else None,
                "over_double": extra[skill] if extra else None,
            }
        )
    return rows


def _reading(gain: Mapping[str, float | int], *, lower_is_better: bool) -> str:
    """Return "better", "worse" or "within noise" (two standard errors); "" if there is no error to compare with."""
    mean, se = gain["mean"], gain["se"]
    if not gain["n"] or not math.isfinite(se):
        return ""
    if abs(mean) <= 2 * se:
        return "within noise"
    return "better" if (mean > 0) != lower_is_better else "worse"


def _headline(run: _Run, difference: Scores | None) -> list[str]:
    """Say in plain sentences what came out."""
    if not run.before or not run.after or not difference:
        return ["There is no result yet." if run.states else "Nothing is trained yet."]
    gain, prompts = difference["atoms"], difference["atoms"]["n"]
    old, new = run.before.skills["atoms"]["mean"], run.after.skills["atoms"]["mean"]
    trained = sum(r.scored for r in run.rounds if r.round < (run.after.round or 0))
    result = (
        f"After {run.after.round} rounds ({trained:,} images) the model gets {100 * new:.1f}% of the atoms of "
        f"{prompts} held-out prompts right; before, {100 * old:.1f}%. "
        f"Difference: {_pm(gain, signed=True)} points (standard error over prompts, paired)."
    )
    out = [result]
    reading = _reading(gain, lower_is_better=False)
    if reading == "within noise":
        out.append("That is within two standard errors: it may be noise.")
    elif reading:
        out.append(f"That is {reading} by more than two standard errors.")
    if DOUBLE in run.evaluations:
        over = paired(run.evaluations[DOUBLE].prompts, run.after.prompts)["atoms"]
        out.append(
            f"Against the untrained model at twice the denoising steps: {_pm(over, signed=True)} points"
            + (", so more steps alone do not explain it." if _reading(over, lower_is_better=False) == "better" else ".")
        )
    out.append("One run has one seed: how results vary over seeds is not in these errors (cast-engine compare).")
    return out


def _pct(cell: Mapping[str, float | int]) -> str:
    return _pm(cell, signed=False)


def _pm(cell: Mapping[str, float | int], *, signed: bool = True) -> str:
    """Return "64.4 ± 1.2", in percent or points; "–" for a missing number."""
    if not cell["n"] or not math.isfinite(cell["mean"]):
        return "–"
    text = f"{100 * cell['mean']:{'+' if signed else ''}.1f}".replace("-", "−")
    return f"{text} ± {100 * cell['se']:.1f}" if math.isfinite(cell["se"]) else text


def _num(value: float | None, digits: int = 2, *, signed: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text.replace("-", "−")


def _clock(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
