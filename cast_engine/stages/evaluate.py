"""Stage `evaluate`: draw held-out prompts without exploration and judge them with a judge that never gave a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cast_engine.graphs.words import count_of
from cast_engine.judges.ask import ask
from cast_engine.judges.base import AtomScores, Judge
from cast_engine.judges.load import load_judge
from cast_engine.models.session import DrawRequest, ImageSession, SessionSpec
from cast_engine.numerics.noise import member_seed
from cast_engine.run.devices import device_environments
from cast_engine.run.pool import WorkerSpec
from cast_engine.store import Dataset, Sample, ShardPlan, encode_json, encode_png
from schemas.graph import SceneGraph
from schemas.job import EvaluateConfig, JobConfig, ScoreConfig
from schemas.records import EvaluateMeta, Status, sample_key, split_key


@dataclass
class EvaluateWorker:
    """Draws held-out prompts, always from the same noise, and judges the images."""

    session_spec: SessionSpec
    config: EvaluateConfig
    graphs: dict[str, SceneGraph]
    adapter: Path | None
    num_steps: int
    session: ImageSession | None = field(default=None, repr=False)
    _ready: ImageSession | None = field(default=None, init=False, repr=False)
    judge: Judge | None = field(default=None, repr=False)

    def run(self, shard: ShardPlan) -> list[Sample]:
        """Draw and judge the shard's prompts."""
        if self._ready is None:  # the adapter is hashed and read once, not for every shard
            self._ready = self.session or ImageSession(self.session_spec)
            self._ready.use_adapter(self.adapter)
        judge = self.judge = self.judge or load_judge(judge_config(self.config), "evaluate")
        samples: list[Sample] = []
        for start in range(0, len(shard.keys), self.config.batch_size):
            samples += self._batch(self._ready, judge, shard.keys[start : start + self.config.batch_size])
        return samples

    def _batch(self, session: ImageSession, judge: Judge, keys: Sequence[str]) -> list[Sample]:
        parts = [split_key(k) for k in keys]
        graphs = [self.graphs[p.prompt_id] for p in parts]
        seeds = [member_seed(self.config.seed, 0, p.prompt_id, p.member) for p in parts]
        request = DrawRequest(
            prompt_ids=[g.prompt_id for g in graphs],
            seeds=seeds,
            num_steps=self.num_steps,
        )
        images = session.draw(request).images
        scored = ask(judge, list(images), graphs)
        drawn = {
            "round": 0,
            "guidance": session.guidance,
            "width": session.geometry.width,
            "height": session.geometry.height,
            "num_steps": self.num_steps,
            "adapter_sha256": session.adapter_sha256,
            "model_sha256": session.model.info.sha256,
            "judge": judge.name,
        }
        rows = zip(keys, graphs, seeds, images, scored, strict=True)
        return [_sample(key, graph, seed, image, scores, drawn) for key, graph, seed, image, scores in rows]


def judge_config(config: EvaluateConfig) -> ScoreConfig:
    """Return the evaluation judge's section in the form that judges are loaded from."""
    return ScoreConfig(
        judge=config.judge,
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        batch_size=config.batch_size,
    )


def _sample(
    key: str, graph: SceneGraph, seed: int, image: Any, scores: AtomScores | str, drawn: dict[str, Any]
) -> Sample:
    kinds = tuple(a.kind for a in graph.atoms)
    if isinstance(scores, str):
        row = {**drawn, "prompt_id": graph.prompt_id, "member": split_key(key).member, "seed": seed}
        return Sample(key, {}, row | {"status": Status.FAILED, "error_msg": scores})
    values = np.where(np.isfinite(scores.scores), scores.scores, np.nan)
    meta = EvaluateMeta(
        key=key,
        prompt_id=graph.prompt_id,
        prompt=graph.prompt,
        member=split_key(key).member,
        seed=seed,
        atom_ids=tuple(a.id for a in graph.atoms),
        kinds=kinds,
        scores=tuple(None if np.isnan(s) else float(s) for s in values),
        counted=tuple(
            count_of(answer) if kind == "count" else None for kind, answer in zip(kinds, scores.answers, strict=True)
        ),
        expected=tuple(a.expected for a in graph.atoms),
    )
    row = {
        **drawn,
        "prompt_id": graph.prompt_id,
        "member": meta.member,
        "seed": seed,
        "atom_kinds": list(kinds),
        "counted": list(meta.counted),
    }
    if np.isnan(values).all():
        return Sample(key, {}, row | {"status": Status.NONFINITE, "error_msg": "the judge gave no finite answer"})
    row |= {"atom_scores": [float(s) for s in values], "reward": float(np.nanmean(values))}
    members = {"image.png": encode_png(image), "meta.json": encode_json(meta.model_dump())}
    return Sample(key, members, row)


def plan(
    path: Path,
    job: JobConfig,
    graphs: Dataset,
    scene_graphs: dict[str, SceneGraph],
    session: ImageSession,
    judge: Judge,
    *,
    num_steps: int,
    adapter: Path | None,
) -> tuple[Dataset, WorkerSpec, EvaluateWorker]:
    """Plan one evaluation.

    Args:
        path: the dataset's folder.
        job: the whole job.
        graphs: sealed dataset of the held-out scene graphs.
        scene_graphs: its content.
        session: an image model whose embeds are encoded already.
        judge: the loaded judge.
        num_steps: denoising steps.
        adapter: adapter that draws, None for the bare model.
    """
    config = job.evaluate
    prompts, members = list(scene_graphs), range(config.images_per_prompt)
    pieces = [prompts[i : i + config.shard_prompts] for i in range(0, len(prompts), config.shard_prompts)]
    shards = [[sample_key(p, 0, member) for p in piece for member in members] for piece in pieces]
    session.use_adapter(adapter)
    semantic = {
        "evaluate": {"seed": config.seed, "judge": config.judge, "images_per_prompt": config.images_per_prompt},
        "num_steps": num_steps,
        "judge_sha256": judge.model_sha256,
        **session.identity(),
    }
    parents = [graphs.as_parent(path)]
    dataset = Dataset.create(path, stage="evaluate", config=semantic, shards=shards, parents=parents)
    kwargs: dict[str, Any] = {
        "session_spec": session.spec,
        "config": config,
        "graphs": scene_graphs,
        "adapter": adapter,
        "num_steps": num_steps,
    }
    env = device_environments(config.workers, job.model.device, config.device)
    spec = WorkerSpec(EvaluateWorker, kwargs, threads=config.threads, env=env)
    return dataset, spec, EvaluateWorker(**kwargs, session=session, judge=judge)


def load(dataset: Dataset) -> list[EvaluateMeta]:
    """Read the verdicts of a sealed evaluation, in plan order."""
    reader = dataset.reader()
    return [EvaluateMeta.model_validate(reader.meta(key)) for key in reader.keys()]  # noqa: SIM118
