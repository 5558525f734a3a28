"""Stage `summarise`: before and after on held-out prompts, with cost and hashes, as ``summary.json``."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cast_engine.errors import DatasetError, UserError
from cast_engine.run.console import read_timings
from cast_engine.run.credit_figures import COLUMNS, credit_figures
from cast_engine.run.layout import RunLayout
from cast_engine.run.summary import (
    BEFORE,
    DOUBLE,
    SKILLS,
    TITLE,
    PromptScores,
    aggregate,
    count_warning,
    evaluations,
    final_name,
    judge_warning,
    paired,
    score_prompts,
    table,
)
from cast_engine.store import Dataset
from cast_engine.store.atomic import write_file
from schemas.job import JobConfig, config_hash
from schemas.records import SCHEMA_VERSION, EvaluateMeta, Status


def is_current(layout: RunLayout) -> bool:
    """Whether ``summary.json`` and the report are there and speak of the files that are on disk now."""
    if not layout.summary.exists() or not layout.report.exists():
        return False
    summary = read(layout.summary)
    run = json.loads(layout.run_file.read_text())
    if summary["hashes"]["config"] != run["config_hash"]:
        return False
    try:
        return all(_seal(layout.evaluate(name)) == seal for name, seal in summary["hashes"]["evaluations"].items())
    except DatasetError:  # one of them is gone, or was moved aside as damaged: it is to be made again
        return False


def is_finished(layout: RunLayout, job: JobConfig) -> bool:
    """Whether there is all that a summary needs: the untrained model and the last round, both evaluated."""
    trained = layout.round(job.rounds - 1, "train") / "state.json"
    return {BEFORE, final_name(job)} <= set(evaluations(layout)) and trained.exists()


def read(path: Path) -> dict[str, Any]:
    """Read a summary.

    Raises:
        UserError: there is none.
        DatasetError: it is damaged.
    """
    try:
        body: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            "no summary.json", where=str(path.parent), expected="the folder of a finished run", do="finish it first"
        ) from None
    except (OSError, json.JSONDecodeError) as error:
        raise DatasetError(
            f"cannot be read ({error})", where=str(path), do="delete it and run the job again"
        ) from error
    return body


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
    measured = Dataset.open(layout.evaluate(final_name(job))).config["adapter_sha256"]
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
        "judge_warning": judge_warning(job),
        "images": _drawn(layout, job),
        "updates": last["update"],
        "weights": _weights(layout, job),
        "seconds": read_timings(layout.timings),
        "hashes": {
            "config": run["config_hash"],
            "arm": _arm(job),
            "adapter": last["adapter_sha256"],
            "measured_adapter": measured,
            "evaluations": {name: _seal(layout.evaluate(name)) for name in scores},
        },
    }
    write_file(layout.summary, (json.dumps(_finite(summary), indent=1, allow_nan=False) + "\n").encode())
    return summary


COMPARED = (
    ("before", "before", ""),
    ("before, 2x steps", "base_double_steps", ""),
    ("after", "after", ""),
    ("after - before", "difference", "+"),
    ("after - 2x steps", "after_minus_double_steps", "+"),
)
"""Rows of a run in both tables: label, key of the summary, sign of the numbers."""


def summary_table(summary: dict[str, Any], title: str = TITLE) -> Any:
    """Return the table that people see at the end of a run; differences are paired by prompt."""
    rows = {label: summary[key] for label, key, _ in COMPARED if summary.get(key)}
    return table(rows, [label for label, _, sign in COMPARED if sign], title)


def warnings(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """Return what there is to say of some of the runs that are compared, by the run's name."""
    return [f"{name}: {said}" for name, summary in summaries.items() for said in warnings_of(summary)]


def warnings_of(summary: dict[str, Any]) -> list[str]:
    """Return what a reader of a run's figures must know."""
    return [said for key in ("warning", "judge_warning") if (said := summary.get(key))]


def comparison_tables(summaries: dict[str, dict[str, Any]]) -> list[Any]:
    """Return rich tables of runs, with the mean and spread of those that differ by their seed alone.

    Args:
        summaries: content of each run's ``summary.json`` by the run's name, in the order shown.

    Returns:
        Per run and skill the mean in percent ± the standard error over prompts; then, for jobs that were run more than
        once and differ in seed and name alone, the mean over runs ± the sample standard deviation over them.
    """
    from rich.markup import escape

    tables = []
    arms: dict[str, list[dict[str, Any]]] = {}
    for name, summary in summaries.items():
        arms.setdefault(summary["hashes"]["arm"], []).append(summary)
        head = escape(f"{name} ({summary['credit']}, seed {summary['seed']}), % right ± standard error")
        tables.append(summary_table(summary, head))
    for runs in arms.values():
        if len(runs) > 1:
            seeds = ", ".join(str(r["seed"]) for r in runs)
            head = f"mean of {len(runs)} ({runs[0]['credit']}, seeds {seeds}), % right ± standard deviation over runs"
            tables.append(summary_table(_over_runs(runs), head))
    return tables


def _over_runs(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows of several runs as one: means, and in place of errors the sample standard deviations."""
    out: dict[str, Any] = {}
    for _, key, _ in COMPARED:
        scores = [r[key] for r in runs if r.get(key)]
        if len(scores) == len(runs):
            out[key] = {skill: _spread([s[skill]["mean"] for s in scores]) for skill in SKILLS}
    return out


def _spread(means: list[float | None]) -> dict[str, float | None]:
    found = [m for m in means if m is not None]
    return {
        "mean": statistics.mean(found) if found else None,
        "se": statistics.stdev(found) if len(found) > 1 else None,
    }


def _drawn(layout: RunLayout, job: JobConfig) -> int:
    """Return how many training images the sealed rollouts hold; failed samples are none.

    Raises:
        DatasetError: A sealed rollout has lost a shard.
    """
    total = 0
    for path in (layout.round(index, "rollout") for index in range(job.rounds)):
        if (path / "sealed.json").exists():
            status = Dataset.open(path).status()
            if status.shards_done < status.shards_planned:
                lost = status.shards_planned - status.shards_done
                raise DatasetError(
                    f"{lost} of {status.shards_planned} shards of a sealed dataset are gone or damaged",
                    where=str(path),
                    do="cast-engine verify --quarantine on it, then its stage again",
                )
            total += status.samples.get(Status.OK, 0)
    return total


def _weights(layout: RunLayout, job: JobConfig) -> dict[str, float]:
    """Return what the signed weights of all rounds were like, to compare credit rules by."""
    paths = [layout.round(index, "advantages") for index in range(job.rounds)]
    made = [Dataset.open(path) for path in paths if (path / "sealed.json").exists()]
    rows = [row for dataset in made for row in dataset.rows().select(list(COLUMNS)).to_pylist()]
    return asdict(credit_figures(rows))


def _arm(job: JobConfig) -> str:
    """Return the hash of all that decides the numbers but seed and name."""
    return config_hash({k: v for k, v in job.semantic().items() if k not in {"seed", "name"}})


def _seal(path: Path) -> str:
    return Dataset.open(path).seal_sha256


def _finite(value: Any) -> Any:
    """Replace NaN by null, which is what JSON has for a missing number."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
