"""Stage `score`: a frozen judge answers every atom's question about every image, and shows where it looked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cast_engine.judges.ask import ask
from cast_engine.judges.base import AtomScores, Judge
from cast_engine.judges.load import load_judge
from cast_engine.run.devices import device_environments
from cast_engine.run.pool import WorkerSpec
from cast_engine.store import Dataset, Reader, Sample, ShardPlan, decode_png, encode_json, encode_tensors
from schemas.graph import SceneGraph
from schemas.job import ScoreConfig
from schemas.records import ScoreMeta, Status, split_key


@dataclass
class ScoreWorker:
    """Scores rollouts with one loaded judge."""

    rollout: Path
    graphs: dict[str, SceneGraph]
    config: ScoreConfig
    judge: Judge | None = field(default=None, repr=False)
    _reader: Reader | None = field(default=None, repr=False)

    def run(self, shard: ShardPlan) -> list[Sample]:
        """Score the shard's images; an image that was never drawn is `skipped_parent`."""
        judge = self.judge = self.judge or load_judge(self.config)
        reader = self._reader = self._reader or Dataset.open(self.rollout).reader()
        drawn = set(reader.keys())
        keys = [k for k in shard.keys if k in drawn]
        images = [decode_png(reader.read(k)["image.png"]) for k in keys]
        graphs = [self.graphs[split_key(k).prompt_id] for k in keys]
        scored = dict(zip(keys, ask(judge, images, graphs), strict=True))
        return [self._sample(judge, key, scored.get(key)) for key in shard.keys]

    def _sample(self, judge: Judge, key: str, scores: AtomScores | str | None) -> Sample:
        graph = self.graphs[split_key(key).prompt_id]
        row: dict[str, Any] = {"prompt_id": graph.prompt_id, "round": split_key(key).round, "parent_key": key}
        row |= {"judge": judge.name, "model_sha256": judge.model_sha256}
        if scores is None:
            return Sample(key, {}, row | {"status": Status.SKIPPED_PARENT, "error_msg": "the image was not drawn"})
        if isinstance(scores, str):
            return Sample(key, {}, row | {"status": Status.FAILED, "error_msg": scores})
        values = np.where(np.isfinite(scores.scores), scores.scores, np.nan).astype(np.float32)
        if np.isnan(values).all():
            return Sample(key, {}, row | {"status": Status.NONFINITE, "error_msg": "the judge gave no finite answer"})
        meta = ScoreMeta(
            key=key,
            prompt_id=graph.prompt_id,
            judge=judge.name,
            model_sha256=judge.model_sha256,
            mode=self.config.mode,
            atom_ids=tuple(a.id for a in graph.atoms),
            kinds=tuple(a.kind for a in graph.atoms),
            questions=tuple(a.question for a in graph.atoms),
            expected=tuple(a.expected for a in graph.atoms),
            answers=scores.answers,
        )
        tensors = {
            "scores": torch.from_numpy(values),
            "maps": torch.from_numpy(np.ascontiguousarray(scores.maps, dtype=np.float16)),
            "mass": torch.from_numpy(np.ascontiguousarray(scores.mass, dtype=np.float32)),
            "neutral": torch.from_numpy(np.ascontiguousarray(scores.neutral, dtype=np.float16)),
        }
        row |= {
            "atom_kinds": list(meta.kinds),
            "atom_scores": [float(s) for s in values],
            "reward": float(np.nanmean(values)),
        }
        members = {"score.safetensors": encode_tensors(tensors), "meta.json": encode_json(meta.model_dump())}
        return Sample(key, members, row)


def plan(
    path: Path, config: ScoreConfig, rollout: Dataset, graphs: dict[str, SceneGraph], judge: Judge
) -> tuple[Dataset, WorkerSpec, ScoreWorker]:
    """Plan the scores of a rollout, shard for shard.

    Args:
        path: the dataset's folder.
        config: the section of the job.
        rollout: sealed rollouts.
        graphs: scene graphs by prompt id.
        judge: a loaded judge, for this process and for its fingerprint.
    """
    semantic = {"score": config.semantic(), "judge": judge.name, "model_sha256": judge.model_sha256}
    dataset = Dataset.create(
        path,
        stage="score",
        config=semantic,
        shards=[s.keys for s in rollout.plan],
        parents=[rollout.as_parent(path)],
    )
    needed = {split_key(k).prompt_id for s in rollout.plan for k in s.keys}
    kwargs: dict[str, Any] = {
        "rollout": rollout.path,
        "graphs": {p: graphs[p] for p in sorted(needed)},
        "config": config,
    }
    env = device_environments(config.workers, config.device)
    spec = WorkerSpec(ScoreWorker, kwargs, threads=config.threads, env=env)
    return dataset, spec, ScoreWorker(**kwargs, judge=judge)
