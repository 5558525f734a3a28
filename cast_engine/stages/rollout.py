"""Stage `rollout`: draw a group of images per prompt, exploring (SDE) only inside the window."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cast_engine.errors import UserError
from cast_engine.models.session import DrawRequest, ImageSession, SessionSpec
from cast_engine.numerics.noise import member_seed
from cast_engine.numerics.sde import step_report, window_steps
from cast_engine.run.devices import device_environments
from cast_engine.run.pool import WorkerSpec
from cast_engine.store import Dataset, Sample, ShardPlan, encode_json, encode_png, encode_tensors
from schemas.graph import SceneGraph
from schemas.job import JobConfig, RolloutConfig
from schemas.records import RolloutMeta, Status, sample_key, split_key


def round_prompts(prompt_ids: Sequence[str], *, seed: int, round_: int, count: int) -> list[str]:
    """Choose the prompts of a round: consecutive pieces of one seeded permutation per pass over the prompts.

    Args:
        prompt_ids: all training prompts.
        seed: the run's seed.
        round_: index of the round.
        count: prompts per round.

    Returns:
        ``count`` distinct prompt ids; a round never straddles two passes, so no prompt is drawn twice in it.

    Raises:
        UserError: fewer prompts than a round needs.
    """
    rounds_per_pass = len(prompt_ids) // count
    if rounds_per_pass == 0:
        raise UserError(
            f"{len(prompt_ids)} training prompts",
            where="prompts.train",
            expected=f"at least prompts_per_round = {count}",
        )
    epoch, piece = divmod(round_, rounds_per_pass)

    def rank(prompt_id: str) -> bytes:
        return hashlib.sha256(f"order|{seed}|{epoch}|{prompt_id}".encode()).digest()

    return sorted(prompt_ids, key=rank)[piece * count : (piece + 1) * count]


@dataclass
class RolloutWorker:
    """Draws the images of one round with one adapter."""

    session_spec: SessionSpec
    config: RolloutConfig
    prompts: dict[str, str]  # text by prompt id
    round_: int
    seed: int
    adapter: Path | None
    num_steps: int
    session: ImageSession | None = field(default=None, repr=False)
    _ready: ImageSession | None = field(default=None, init=False, repr=False)

    def run(self, shard: ShardPlan) -> list[Sample]:
        """Draw the shard's images in batches of ``batch_size``."""
        if self._ready is None:  # the adapter is hashed and read once, not for every shard
            self._ready = self.session or ImageSession(self.session_spec)
            self._ready.use_adapter(self.adapter)
        samples: list[Sample] = []
        for start in range(0, len(shard.keys), self.config.batch_size):
            samples += self._draw(self._ready, shard.keys[start : start + self.config.batch_size])
        return samples

    def _draw(self, session: ImageSession, keys: Sequence[str]) -> list[Sample]:
        metas = [self._meta(session, key) for key in keys]
        request = DrawRequest(
            prompt_ids=[m.prompt_id for m in metas],
            seeds=[m.seed for m in metas],
            initial_seeds=[m.initial_seed for m in metas],
            num_steps=self.num_steps,
            window=window_steps(self.config.window.start, self.config.window.length, self.num_steps),
            dynamics=self.config.dynamics,
            noise_level=self.config.noise_level,
            latent_dtype=self.config.latent_dtype,
        )
        drawn = session.draw(request)
        out = []
        for i, meta in enumerate(metas):
            tensors = {
                "latents": drawn.latents[i],
                "final_latent": drawn.final[i],
                "steps": drawn.steps,
                "sigmas": drawn.sigmas,
                "logp_old": drawn.logp_old[i],
            }
            out.append(_sample(meta, tensors, drawn.images[i]))
        return out

    def _meta(self, session: ImageSession, key: str) -> RolloutMeta:
        prompt_id, _, member = split_key(key)
        first = 0 if self.config.initial_noise == "shared" else member
        geometry = session.geometry
        return RolloutMeta(
            key=key,
            prompt_id=prompt_id,
            prompt=self.prompts[prompt_id],
            round=self.round_,
            member=member,
            seed=member_seed(self.seed, self.round_, prompt_id, member),
            initial_seed=member_seed(self.seed, self.round_, prompt_id, first),
            guidance=session.guidance,
            height=geometry.height,
            width=geometry.width,
            num_steps=self.num_steps,
            dynamics=self.config.dynamics,
            noise_level=self.config.noise_level,
            window_start=self.config.window.start,
            window_length=self.config.window.length,
            adapter_sha256=session.adapter_sha256,
            model_sha256=session.model.info.sha256,
            embed_sha256=session.embed_sha256(prompt_id),
        )


def _sample(meta: RolloutMeta, tensors: dict[str, Any], image: Any) -> Sample:
    fields = ("prompt_id", "round", "member", "seed", "guidance", "height", "width", "num_steps", "window_start")
    row = {f: getattr(meta, f) for f in (*fields, "window_length", "adapter_sha256", "model_sha256", "embed_sha256")}
    if not all(bool(t.isfinite().all()) for t in tensors.values()):
        return Sample(meta.key, {}, row | {"status": Status.NONFINITE, "error_msg": "latents or log-probs not finite"})
    members = {
        "rollout.safetensors": encode_tensors(tensors),
        "image.png": encode_png(image),
        "meta.json": encode_json(meta.model_dump()),
    }
    return Sample(meta.key, members, row | {"logp_old_sum": float(tensors["logp_old"].sum())})


def plan(
    path: Path,
    job: JobConfig,
    graphs: Dataset,
    scene_graphs: dict[str, SceneGraph],
    session: ImageSession,
    *,
    round_: int,
    adapter: Path | None,
) -> tuple[Dataset, WorkerSpec, RolloutWorker]:
    """Plan one round of rollouts: whole groups per shard.

    Args:
        path: the dataset's folder.
        job: the whole job.
        graphs: sealed dataset of scene graphs.
        scene_graphs: its content.
        session: an image model whose embeds are encoded already.
        round_: index of the round.
        adapter: adapter that draws, None for the bare model.

    Returns:
        The dataset, how another process makes a worker, and a worker on the session at hand.
    """
    config, num_steps = job.rollout, job.rollout.num_steps or session.model.info.defaults.num_steps
    window_steps(config.window.start, config.window.length, num_steps)
    chosen = round_prompts(list(scene_graphs), seed=job.seed, round_=round_, count=config.prompts_per_round)
    groups = [[sample_key(p, round_, member) for member in range(config.group_size)] for p in chosen]
    step = config.shard_groups
    shards = [[key for group in groups[i : i + step] for key in group] for i in range(0, len(groups), step)]
    session.use_adapter(adapter)
    semantic = {
        "rollout": config.semantic(),
        "seed": job.seed,
        "round": round_,
        "num_steps": num_steps,
        **session.identity(),
    }
    dataset = Dataset.create(path, stage="rollout", config=semantic, shards=shards, parents=[graphs.as_parent(path)])
    kwargs: dict[str, Any] = {
        "session_spec": session.spec,
        "config": config,
        "round_": round_,
        "seed": job.seed,
        "adapter": adapter,
        "prompts": {p: scene_graphs[p].prompt for p in chosen},
        "num_steps": num_steps,
    }
    env = device_environments(config.workers, job.model.device)
    spec = WorkerSpec(RolloutWorker, kwargs, threads=config.threads, env=env)
    return dataset, spec, RolloutWorker(**kwargs, session=session)


def check(job: JobConfig, session: ImageSession, prompt_count: int) -> None:
    """Refuse a window that does not fit the steps, a round of more prompts than there are, or rollouts without noise.

    Raises:
        UserError: One of them.
    """
    config = job.rollout
    if config.noise_level == 0:
        raise UserError("no noise, so nothing to learn from", where="rollout.noise_level = 0", expected="above 0")
    window_steps(config.window.start, config.window.length, config.num_steps or session.model.info.defaults.num_steps)
    round_prompts([str(i) for i in range(prompt_count)], seed=job.seed, round_=0, count=config.prompts_per_round)


def describe(job: JobConfig, session: ImageSession, prompt_count: int) -> str:
    """Return what `--dry-run` prints: the plan's size, and for every step its noise and what the SDE adds."""
    config, num_steps = job.rollout, job.rollout.num_steps or session.model.info.defaults.num_steps
    window = window_steps(config.window.start, config.window.length, num_steps)
    geometry = session.geometry
    images = config.prompts_per_round * config.group_size
    shards = -(-config.prompts_per_round // config.shard_groups)
    latents = (len(window) + 2) * geometry.elements * (4 if config.latent_dtype == "float32" else 2)
    lines = [
        (
            f"{images} images a round ({config.prompts_per_round} prompts x {config.group_size}) in {shards} shards, "
            f"{job.rounds} rounds, {prompt_count} training prompts"
        ),
        (
            f"{geometry.width}x{geometry.height}, {geometry.positions} positions x {geometry.channels} channels, "
            f"{num_steps} steps, guidance {session.guidance:g}, about {latents / 1e6:.2f} MB of latents an image"
        ),
        "step  sigma  total std  variance excess",
    ]
    for row in step_report(config.dynamics, session.model.sigmas(num_steps, geometry), config.noise_level):
        mark = "  <- window" if row.step in window else ""
        lines.append(f"{row.step:4d}  {row.sigma:.3f}  {row.std:9.3f}  {100 * row.excess:14.1f}%{mark}")
    return "\n".join(lines)
