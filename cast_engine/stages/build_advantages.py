"""Stage `build-advantages`: from atom scores and attention maps to one signed weight per latent position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cast_engine.numerics.advantages import gate
from cast_engine.numerics.credit import GroupCredit, signed_weight
from cast_engine.numerics.credit_stats import atom_mass, mean_by_place
from cast_engine.numerics.maps import Prepared, resample
from cast_engine.run.credit_maps import credit_maps
from cast_engine.run.pool import WorkerSpec
from cast_engine.store import Dataset, Reader, Sample, ShardPlan, decode_png, encode_json, encode_tensors
from cast_engine.tinyworld.verify import drawn_pixels
from schemas.graph import Atom, SceneGraph
from schemas.job import AdvantageConfig, JobConfig
from schemas.records import AdvantageMeta, Status, split_key


@dataclass
class AdvantageWorker:
    """Weighs the images of whole groups; needs no model."""

    pictures: Path | None  # the rollouts, if what is drawn in their images can be told from pixels
    score: Path
    graphs: dict[str, SceneGraph]
    config: AdvantageConfig
    seed: int
    grid: tuple[int, int]
    _reader: Reader | None = field(default=None, repr=False)
    _images: Reader | None = field(default=None, repr=False)

    def run(self, shard: ShardPlan) -> list[Sample]:
        """Return the signed weights of the shard's groups; images without scores are `skipped_parent`."""
        reader = self._reader = self._reader or Dataset.open(self.score).reader()
        scored = set(reader.keys())
        out: dict[str, Sample] = {}
        for prompt_id in dict.fromkeys(split_key(k).prompt_id for k in shard.keys):
            keys = [k for k in shard.keys if k.startswith(prompt_id) and k in scored]
            out |= self._group(self.graphs[prompt_id], keys, reader)
        return [out.get(key) or _skipped(key) for key in shard.keys]

    def _group(self, graph: SceneGraph, keys: Sequence[str], reader: Reader) -> dict[str, Sample]:
        if not keys:
            return {}
        tensors = [reader.tensors(k) for k in keys]
        scores = torch.stack([t["scores"] for t in tensors]).double()
        if self.config.dependency == "gate":
            scores = _gated(scores, graph)
        prepared = [credit_maps(t, graph, self.grid, self.config) for t in tensors]
        weights = torch.tensor([self._weight(a) for a in graph.atoms], dtype=torch.float64)
        credit = signed_weight(
            self.config.credit,
            scores,
            torch.stack([p.maps for p in prepared]),
            positions=self.grid[0] * self.grid[1],
            scale=self.config.scale,
            min_atom_std=self.config.min_atom_std,
            advantage_clip=self.config.advantage_clip,
            weight_clip=self.config.weight_clip,
            weights=weights,
            kinds=[a.kind for a in graph.atoms],
            seed=self.seed,
            keys=keys,
        )
        figures = self._figures(keys, credit, weights)
        rows = enumerate(zip(keys, scores, prepared, figures, strict=True))
        return {k: self._sample(graph, k, row, maps, credit, i, logged) for i, (k, row, maps, logged) in rows}

    def _weight(self, atom: Atom) -> float:
        return atom.weight * self.config.kind_weights.get(atom.kind, 1.0)

    def _figures(self, keys: Sequence[str], credit: GroupCredit, weights: Tensor) -> list[dict[str, float]]:
        """Return what the manifest says of each image beside W itself."""
        group = {"group_std": credit.std, "above_clip_share": credit.counters["above_clip"] / credit.weight.numel()}
        out = [dict(group) for _ in keys]
        if self.config.credit not in ("scalar", "spatial"):  # these have one A per image
            mass = atom_mass(credit.advantage, credit.low_std, weights)
            for i, row in enumerate(out):
                row |= {"mass": float(mass.all[i]), "low_std_mass": float(mass.low_std[i])}
        if self.pictures is not None:
            images = self._images = self._images or Dataset.open(self.pictures).reader()
            drawn = torch.from_numpy(drawn_pixels([decode_png(images.read(k)["image.png"]) for k in keys]))
            for row, weight, cover in zip(out, credit.weight, resample(drawn, self.grid), strict=True):
                place = mean_by_place(weight, cover.flatten())
                row |= {"weight_drawn": place.drawn, "weight_background": place.background}
                row |= {"drawn_share": place.share}
        return out

    def _sample(
        self,
        graph: SceneGraph,
        key: str,
        scores: Tensor,
        maps: Prepared,
        credit: GroupCredit,
        i: int,
        figures: dict[str, float],
    ) -> Sample:
        meta = AdvantageMeta(
            key=key,
            prompt_id=graph.prompt_id,
            credit=self.config.credit,
            atom_ids=tuple(a.id for a in graph.atoms),
            scale=credit.scale,
            counters={**credit.counters, **maps.counters},
        )
        weight = credit.weight[i]
        row = {
            "prompt_id": graph.prompt_id,
            "round": split_key(key).round,
            "parent_key": key,
            "credit": self.config.credit,
            "reward": float(scores.nanmean()),
            "weight_mean": float(weight.double().mean()),
            "weight_std": float(weight.double().std(correction=0)),
            "advantage": [float(a) for a in credit.advantage[i]],
            **figures,
        }
        data = encode_tensors({"weight": weight, "advantage": credit.advantage[i].float()})
        return Sample(key, {"advantage.safetensors": data, "meta.json": encode_json(meta.model_dump())}, row)


def _gated(scores: Tensor, graph: SceneGraph) -> Tensor:
    place = {a.id: i for i, a in enumerate(graph.atoms)}
    return gate(scores, [[place[p] for p in a.parents] for a in graph.atoms])


def _skipped(key: str) -> Sample:
    row = {"prompt_id": split_key(key).prompt_id, "round": split_key(key).round, "parent_key": key}
    return Sample(key, {}, row | {"status": Status.SKIPPED_PARENT, "error_msg": "the image has no scores"})


def _is_tiny_world(job: JobConfig) -> bool:
    return job.model.path.startswith("tinyworld:") or job.score.judge == "exact"


def plan(
    path: Path, job: JobConfig, rollout: Dataset, score: Dataset, graphs: dict[str, SceneGraph], grid: tuple[int, int]
) -> tuple[Dataset, WorkerSpec, AdvantageWorker]:
    """Plan the weights of a rollout, shard for shard.

    Args:
        path: the dataset's folder.
        job: the whole job.
        rollout: sealed rollouts, whose latent positions are weighed.
        score: sealed scores of them.
        graphs: scene graphs by prompt id.
        grid: rows and columns of latent positions.
    """
    config = job.advantages
    dataset = Dataset.create(
        path,
        stage="advantages",
        config={"advantages": config.semantic(), "seed": job.seed, "grid": list(grid)},
        shards=[s.keys for s in score.plan],
        parents=[score.as_parent(path), rollout.as_parent(path)],
    )
    needed = sorted({split_key(k).prompt_id for s in score.plan for k in s.keys})
    kwargs: dict[str, Any] = {
        "pictures": rollout.path if _is_tiny_world(job) else None,
        "score": score.path,
        "graphs": {p: graphs[p] for p in needed},
        "config": config,
        "seed": job.seed,
        "grid": grid,
    }
    return dataset, WorkerSpec(AdvantageWorker, kwargs), AdvantageWorker(**kwargs)
