"""What was run: model, rule, judges, budget, time and hashes, as pairs of words for the head of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cast_engine.errors import DatasetError
from cast_engine.run.console import read_timings
from cast_engine.run.layout import RunLayout
from cast_engine.run.report_data import Evaluation, RoundFigures
from cast_engine.store.dataset import Dataset
from schemas.job import EvaluateConfig, JobConfig, ScoreConfig

Pairs = list[tuple[str, str]]
RULES = {
    "cast": "each atom's own advantage, spread by its own map",
    "scalar": "one advantage per image, the same everywhere (Flow-GRPO)",
    "per-atom": "each atom's own advantage, the same everywhere",
    "spatial": "one advantage per image, spread by the mean of the maps",
    "shuffled": "each atom's own advantage, spread by another atom's map (a control)",
}


def facts(
    layout: RunLayout,
    job: JobConfig,
    rounds: Sequence[RoundFigures],
    updates: Sequence[Mapping[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    evaluations: Mapping[str, Evaluation],
) -> list[tuple[str, Pairs]]:
    """Return titled groups of (name, value)."""
    rollout = _first_config(layout, job, "rollout")
    return [
        ("Model and rule", _model(job)),
        ("Budget", _budget(job, rounds, updates, states, evaluations, rollout)),
    ]


def _model(job: JobConfig) -> Pairs:
    credit = job.advantages
    rule = f"{credit.credit}: {RULES[credit.credit]}"
    maps = f"λ = {credit.map_blend:g}, c_K {credit.scale}" if credit.credit != "scalar" else "no maps"
    return [
        ("Model", f"{job.model.path}, {job.model.dtype}"),
        ("Trained", f"LoRA, rank {job.train.lora.rank}, alpha {job.train.lora.alpha:g}"),
        ("Credit rule", rule),
        ("Maps", maps + (", child atoms gated by their parents" if credit.dependency == "gate" else "")),
        ("Judge of the reward", _judge(job.score)),
        ("Judge of the evaluation", _judge(job.evaluate)),
    ]


def _judge(config: ScoreConfig | EvaluateConfig) -> str:
    return config.judge if config.judge == "exact" else f"{config.judge} ({config.model})"


def _budget(
    job: JobConfig,
    rounds: Sequence[RoundFigures],
    updates: Sequence[Mapping[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    evaluations: Mapping[str, Evaluation],
    rollout: Mapping[str, Any],
) -> Pairs:
    draw = job.rollout
    steps = rollout.get("num_steps") or draw.num_steps or "the model’s default"
    last = draw.window.start + draw.window.length - 1
    noise = f"{draw.dynamics}, noise {draw.noise_level:g}, at steps {draw.window.start} to {last}"
    planned = f"{draw.prompts_per_round} prompts × {draw.group_size} images"
    held_out = max((len(e.metas) + e.failed for e in evaluations.values()), default=0)
    train = job.train
    return [
        ("Rounds", f"{len(states)} of {job.rounds}, each {planned}"),
        ("Images", f"{sum(r.planned for r in rounds):,} drawn, {sum(r.scored for r in rounds):,} scored"),
        ("Updates", f"{len(updates):,}, {train.updates_per_round * train.epochs_per_round} a round"),
        ("Learning rate", f"{train.learning_rate:g}, {train.schedule}"),
        ("Sampling", f"{steps} steps; {noise}"),
        ("Held-out", f"{held_out} images, {job.evaluate.images_per_prompt} a prompt, the same noise every time"),
        ("Seed", f"{job.seed} (evaluation: {job.evaluate.seed})"),
    ]


def hashes(
    layout: RunLayout, job: JobConfig, states: Mapping[int, Mapping[str, Any]], evaluations: Mapping[str, Evaluation]
) -> Pairs:
    """Return (name, sha256) of config, models, adapter and evaluations, as far as they are known."""
    out = [("Config", _config_hash(layout))]
    for name, stage in (("Image model", "rollout"), ("Judge of the reward", "score")):
        out.append((name, str(_first_config(layout, job, stage).get("model_sha256", ""))))
    if states:
        out.append((f"Adapter, {max(states) + 1} rounds", str(states[max(states)].get("adapter_sha256", ""))))
    out += [(f"Evaluation {name}", e.seal) for name, e in evaluations.items()]
    return [(name, value) for name, value in out if value]


def _config_hash(layout: RunLayout) -> str:
    try:
        return str(json.loads(layout.run_file.read_text())["config_hash"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _first_config(layout: RunLayout, job: JobConfig, stage: str) -> dict[str, Any]:
    return next((c for c in (_config(layout, r, stage) for r in range(job.rounds)) if c), {})


def _config(layout: RunLayout, index: int, stage: str) -> dict[str, Any]:
    path = layout.round(index, stage)
    try:
        return Dataset.open(path).config if (path / "plan.json").exists() else {}
    except DatasetError:
        return {}


def seconds(layout: RunLayout) -> list[tuple[str, float, int, float]]:
    """Return (stage, seconds, samples, share of all seconds in percent), longest first."""
    found = read_timings(layout.timings)
    total = sum(t["seconds"] for t in found.values())
    rows = [(s, t["seconds"], int(t["samples"]), 100 * t["seconds"] / max(total, 1e-9)) for s, t in found.items()]
    return sorted(rows, key=lambda r: -r[1])
