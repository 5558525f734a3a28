"""Stage `summarise`: before and after on held-out prompts, with cost and hashes, as ``summary.json``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from cast_engine.errors import DatasetError
from cast_engine.run.console import read_timings
from cast_engine.run.layout import RunLayout
from cast_engine.run.summary import PromptScores, aggregate, count_warning, paired, score_prompts, table
from cast_engine.store.atomic import write_file
from cast_engine.store.dataset import Dataset
from schemas.job import JobConfig, config_hash
from schemas.records import SCHEMA_VERSION, EvaluateMeta

BEFORE, DOUBLE = "base", "base-double-steps"


def final_name(job: JobConfig) -> str:
    """Return the name of the evaluation after the last round."""
    return f"round-{job.rounds:04d}"


def is_current(layout: RunLayout) -> bool:
    """Whether ``summary.json`` and the report are there and speak of the files that are on disk now."""
    if not layout.summary.exists() or not layout.report.exists():
        return False
    summary = read(layout.summary)
    run = json.loads(layout.run_file.read_text())
    if summary["hashes"]["config"] != run["config_hash"]:
        return False
    seals = summary["hashes"]["evaluations"]
    return all(_seal(layout.evaluate(name)) == seal for name, seal in seals.items())


def read(path: Path) -> dict[str, Any]:
    """Read a summary.

    Raises:
        DatasetError: it is damaged.
    """
    try:
        body: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise DatasetError(
            f"cannot be read ({error})", where=str(path), do="delete it and run the job again"
        ) from error
    return body


def evaluations(layout: RunLayout) -> list[str]:
    """Return the names of the sealed evaluations of a run: base first, then by round."""
    folder = layout.root / "evaluate"
    names = sorted(p.name for p in folder.iterdir() if (p / "sealed.json").exists()) if folder.exists() else []
    return [n for n in (BEFORE, DOUBLE) if n in names] + [n for n in names if n.startswith("round-")]


def load_scores(layout: RunLayout, name: str) -> dict[str, PromptScores]:
    """Return the scores per held-out prompt of one evaluation."""
    reader = Dataset.open(layout.evaluate(name)).reader()
    return score_prompts([EvaluateMeta.model_validate(reader.meta(k)) for k in reader.keys()])  # noqa: SIM118


def write(layout: RunLayout, job: JobConfig) -> dict[str, Any]:
    """Write ``summary.json`` and return it."""
    scores = {name: load_scores(layout, name) for name in evaluations(layout)}
    before, after = scores[BEFORE], scores[final_name(job)]
    difference = paired(before, after)
    run = json.loads(layout.run_file.read_text())
    last = json.loads((layout.round(job.rounds - 1, "train") / "state.json").read_text())
    per_round = job.rollout.prompts_per_round * job.rollout.group_size
    summary = {
        "schema_version": SCHEMA_VERSION,
        "name": job.name,
        "seed": job.seed,
        "credit": job.advantages.credit,
        "reward_judge": job.score.judge,
        "evaluation_judge": job.evaluate.judge,
        "before": aggregate(before),
        "after": aggregate(after),
        "difference": difference,
        "base_double_steps": aggregate(scores[DOUBLE]) if DOUBLE in scores else None,
        "after_minus_double_steps": paired(scores[DOUBLE], after) if DOUBLE in scores else None,
        "during": {name: aggregate(s) for name, s in scores.items() if name.startswith("round-")},
        "warning": count_warning(difference),
        "images": job.rounds * per_round,
        "updates": last["updates"],
        "seconds": read_timings(layout.timings),
        "hashes": {
            "config": run["config_hash"],
            "adapter": last["adapter_sha256"],
            "evaluations": {name: _seal(layout.evaluate(name)) for name in scores},
        },
    }
    assert config_hash(job.semantic()) == run["config_hash"]
    write_file(layout.summary, (json.dumps(_finite(summary), indent=1, allow_nan=False) + "\n").encode())
    return summary


def summary_table(summary: dict[str, Any]) -> Any:
    """Return the table that people see at the end of a run."""
    rows = {"before": summary["before"]}
    if summary["base_double_steps"]:
        rows["before, twice the steps"] = summary["base_double_steps"]
    rows |= {"after": summary["after"], "after - before": summary["difference"]}
    return table(rows, difference="after - before")


def _seal(path: Path) -> str:
    return Dataset.open(path).seal_sha256 or ""


def _finite(value: Any) -> Any:
    """Replace NaN by null, which is what JSON has for a missing number."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
