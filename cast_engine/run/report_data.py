"""The figures of a report, from manifests and metrics of a run that may be unfinished or damaged.

Nothing here raises for a part that is missing: it is left out and a note says so.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cast_engine.errors import DatasetError
from cast_engine.run.credit_figures import COLUMNS, CreditFigures, credit_figures
from cast_engine.run.layout import RunLayout
from cast_engine.run.summary import PromptScores, Scores, aggregate, score_prompts
from cast_engine.store.dataset import Dataset
from schemas.graph import SceneGraph
from schemas.job import JobConfig
from schemas.records import EvaluateMeta, Status, split_key

Notes = list[str]
"""What is missing, in words for the reader of the report."""


@dataclass(frozen=True)
class Evaluation:
    """One held-out evaluation: verdicts by sample key in plan order."""

    name: str
    metas: Mapping[str, EvaluateMeta]
    prompts: Mapping[str, PromptScores]
    skills: Scores
    failed: int
    seal: str

    @property
    def round(self) -> int | None:
        """Rounds of training behind it (``base``: 0); None for the base at twice the steps."""
        if self.name.startswith("round-"):
            return int(self.name.removeprefix("round-"))
        return 0 if self.name == "base" else None


@dataclass(frozen=True)
class RoundFigures:
    """What the judge of the reward said in one round."""

    round: int
    planned: int
    scored: int
    reward: float
    reward_se: float  # over the prompts of the round
    kinds: Mapping[str, float]  # mean score of the atoms of a kind
    atoms: int  # group x atom pairs
    constant: int  # ... with the same score in every image
    low_std: int  # ... with a spread below advantages.min_atom_std, not constant
    credit: CreditFigures  # of the weights that were made from it; nothing is known (NaN) before they are


def open_dataset(path: Path, what: str, notes: Notes) -> Dataset | None:
    """Open a dataset; None if there is none, or (with a note) if it is damaged."""
    if not (path / "plan.json").exists():
        return None
    try:
        return Dataset.open(path)
    except DatasetError as error:
        notes.append(f"{what}: {error}.")
        return None


def sealed(path: Path) -> bool:
    """Whether a dataset was finished; a damaged one is looked at later, with a note."""
    return (path / "sealed.json").exists()


def load_graphs(path: Path, what: str, notes: Notes) -> dict[str, SceneGraph]:
    """Return the scene graphs of a split by prompt id; without them the report shows atom ids instead of questions."""
    dataset = open_dataset(path, what, notes)
    if dataset is None:
        notes.append(f"{what}: not there, so questions are not shown.")
        return {}
    try:
        reader = dataset.reader(allow_unsealed=True)
        return {k: SceneGraph.model_validate_json(reader.read(k)["graph.json"]) for k in reader.keys()}  # noqa: SIM118
    except DatasetError as error:
        notes.append(f"{what}: {error}.")
        return {}


def load_evaluation(layout: RunLayout, name: str, graphs: Mapping[str, SceneGraph], notes: Notes) -> Evaluation | None:
    """Read the verdicts of one evaluation: from its manifest where that says all, else from its records."""
    dataset = open_dataset(layout.evaluate(name), f"Evaluation {name}", notes)
    if dataset is None:
        return None
    try:
        rows = _plain(dataset, ("key", "prompt_id", "seed", "status", "atom_kinds", "atom_scores", "counted"))
        good = [r for r in rows if r["status"] == Status.OK]
        if all(r["counted"] is not None and r["prompt_id"] in graphs for r in good):
            metas = {r["key"]: _meta(r, graphs[r["prompt_id"]]) for r in good}
        else:
            reader = dataset.reader()
            metas = {r["key"]: EvaluateMeta.model_validate(reader.meta(r["key"])) for r in good}
        seal = dataset.seal_sha256
    except DatasetError as error:
        notes.append(f"Evaluation {name}: {error}.")
        return None
    if len(good) < len(rows):
        notes.append(f"Evaluation {name}: {len(rows) - len(good)} of {len(rows)} images failed and are left out.")
    prompts = score_prompts(list(metas.values()))
    return Evaluation(name, metas, prompts, aggregate(prompts), len(rows) - len(good), seal)


def _meta(row: Mapping[str, Any], graph: SceneGraph) -> EvaluateMeta:
    return EvaluateMeta(
        key=row["key"],
        prompt_id=row["prompt_id"],
        prompt=graph.prompt,
        member=split_key(row["key"]).member,
        seed=row["seed"] or 0,
        atom_ids=tuple(a.id for a in graph.atoms),
        kinds=tuple(row["atom_kinds"]),
        scores=tuple(None if s is None or math.isnan(s) else s for s in row["atom_scores"]),
        counted=tuple(row["counted"]),
        expected=tuple(a.expected for a in graph.atoms),
    )


def load_round(layout: RunLayout, job: JobConfig, index: int, notes: Notes) -> RoundFigures | None:
    """Read what the reward's judge said in a round, from the manifest alone."""
    what = f"Round {index}, scores"
    dataset = open_dataset(layout.round(index, "score"), what, notes)
    if dataset is None:
        return None
    try:
        rows = _plain(dataset, ("prompt_id", "status", "error_msg", "atom_kinds", "atom_scores", "reward"))
    except DatasetError as error:
        notes.append(f"{what}: {error}.")
        return None
    planned = sum(len(shard.keys) for shard in dataset.plan)
    good = [r for r in rows if r["status"] == Status.OK]
    if len(good) < planned:
        notes.append(f"{what}: {planned - len(good)} of {planned} images have none ({_reasons(rows, planned)}).")
    credit = _load_credit(layout, index, notes)
    return _round_figures(index, planned, good, job.advantages.min_atom_std, credit) if good else None


def _load_credit(layout: RunLayout, index: int, notes: Notes) -> CreditFigures:
    what = f"Round {index}, advantages"
    dataset = open_dataset(layout.round(index, "advantages"), what, notes)
    try:
        return credit_figures(_plain(dataset, COLUMNS) if dataset else [])
    except DatasetError as error:
        notes.append(f"{what}: {error}.")
        return credit_figures([])


def _reasons(rows: Sequence[Mapping[str, Any]], planned: int) -> str:
    reasons = Counter(f"{r['status']}: {r['error_msg']}" for r in rows if r["status"] != Status.OK)
    if len(rows) < planned:
        reasons["not committed yet"] = planned - len(rows)
    return "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))


def _round_figures(
    index: int, planned: int, rows: Sequence[Mapping[str, Any]], min_std: float, credit: CreditFigures
) -> RoundFigures:
    import torch

    from cast_engine.numerics.advantages import atom_stats

    groups: dict[str, list[Mapping[str, Any]]] = {}
    kinds: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["prompt_id"], []).append(row)
        for kind, score in zip(row["atom_kinds"], row["atom_scores"], strict=True):
            if score is not None and not math.isnan(score):
                kinds.setdefault(kind, []).append(score)
    constant = low = atoms = 0
    for group in groups.values():
        scores = torch.tensor([[math.nan if s is None else s for s in r["atom_scores"]] for r in group])
        stats = atom_stats(scores)
        atoms += scores.shape[1]
        constant += int(stats.constant.sum())
        low += int((~stats.constant & (stats.std < min_std)).sum())
    means = [_mean([r["reward"] for r in group]) for group in groups.values()]
    spread = sum((m - _mean(means)) ** 2 for m in means)
    se = math.sqrt(spread / (len(means) - 1) / len(means)) if len(means) > 1 else math.nan
    return RoundFigures(
        round=index,
        planned=planned,
        scored=len(rows),
        reward=_mean([r["reward"] for r in rows]),
        reward_se=se,
        kinds={k: _mean(v) for k, v in kinds.items()},
        atoms=atoms,
        constant=constant,
        low_std=low,
        credit=credit,
    )


def load_updates(layout: RunLayout, rounds: int) -> list[dict[str, Any]]:
    """Return the metrics of all updates so far, also those of a round that is under way."""
    out: list[dict[str, Any]] = []
    for index in range(rounds):
        folder = layout.round(index, "train")
        partial = sorted(folder.with_name("train.partial").glob("*/metrics.jsonl"))
        for path in [folder / "metrics.jsonl", *partial[-1:]]:
            if path.exists():
                out += _json_lines(path)
                break
    return out


def load_states(layout: RunLayout, rounds: int) -> dict[int, dict[str, Any]]:
    """Return ``state.json`` of every finished round."""
    out = {}
    for index in range(rounds):
        path = layout.round(index, "train") / "state.json"
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(state, dict):
            out[index] = state
    return out


def number(value: Any) -> float:
    """Return a JSON number as a float; NaN for null and for anything that is not a number."""
    return float(value) if isinstance(value, int | float) else math.nan


def _json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _plain(dataset: Dataset, columns: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = dataset.rows().select(list(columns)).to_pylist()
    return rows


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if v is not None and not math.isnan(v)]
    return sum(finite) / len(finite) if finite else math.nan
