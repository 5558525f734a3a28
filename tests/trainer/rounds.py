"""Makes the datasets that a round trains on, with the real sampler and the real store."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cast_engine.models import lora
from cast_engine.models.embeds import EmbedCache
from cast_engine.models.sampling import sample
from cast_engine.numerics import noise
from cast_engine.store import Dataset, ParentRef, Sample, encode_json, encode_png, encode_tensors
from schemas.job import JobConfig
from schemas.records import AdvantageMeta, RolloutMeta, sample_key
from trainer.loop import train_round

PROMPT_IDS = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")


def job(rounds=2, seed=0, members=4, **train) -> JobConfig:
    train = {"updates_per_round": 2, "learning_rate": 1e-3, "lora": {"rank": 2, "alpha": 4}} | train
    rollout = {"prompts_per_round": 2, "group_size": members}
    return JobConfig.model_validate({"rounds": rounds, "seed": seed, "rollout": rollout, "train": train})


@dataclass(frozen=True)
class Round:
    rollout: Path
    advantages: Path
    embeds: Path
    round_: int = 0

    def train(self, model, out, config=None, **kwargs):
        kwargs = {"log": lambda _: None} | kwargs
        return train_round(
            config or job(),
            model=model,
            rollout=self.rollout,
            advantages=self.advantages,
            embeds=self.embeds,
            out=out,
            round_=self.round_,
            **kwargs,
        )


def draw(
    world,
    path,
    *,
    round_=0,
    adapter=None,
    members=4,
    batch_size=8,
    steps=6,
    window=range(1, 3),
    dynamics="flow_sde",
    latent_dtype=torch.float32,
    dtype="float32",
    weight=None,
    change=None,
) -> Round:
    """Draw a round with the given adapter file and weigh it.

    Args:
        weight: key -> W [P]; random by default.
        change: dict of meta -> dict of meta, for images that lie.
    """
    model = world.model(dtype)
    sha256 = lora.set_adapter(model.transformer, adapter)
    geometry = model.geometry()
    cache = EmbedCache(world.embeds, model.info.encoder_sha256)
    ids = [(p, m) for p in PROMPT_IDS for m in range(members)]
    seeds = {(p, m): noise.member_seed(0, round_, p, m) for p, m in ids}
    samples = []
    for at in range(0, len(ids), batch_size):
        part = ids[at : at + batch_size]
        drawn = sample(
            model,
            [cache.get(p) for p, _ in part],
            [seeds[i] for i in part],
            sigmas=model.sigmas(steps, geometry),
            geometry=geometry,
            guidance=3.0,
            window=window,
            dynamics=dynamics,
            noise_level=0.7,
            latent_dtype=latent_dtype,
        )
        drawing = {
            "num_steps": steps,
            "dynamics": dynamics,
            "window_start": window.start,
            "window_length": len(window),
            "adapter_sha256": sha256,
        }
        for i, (prompt_id, member) in enumerate(part):
            embed = cache.sha256(prompt_id)
            meta = _meta(model, geometry, prompt_id, round_, member, seeds[prompt_id, member], embed, drawing)
            samples.append(_sample(meta if change is None else change(meta), drawn, i))
    rollout = _dataset(path / "rollout", "rollout", samples)
    return weigh(rollout, path / "advantages", world.embeds, weight=weight)


def _meta(model, geometry, prompt_id, round_, member, seed, embed_sha256, drawing) -> dict:
    return RolloutMeta(
        key=sample_key(prompt_id, round_, member),
        prompt_id=prompt_id,
        prompt="",
        round=round_,
        member=member,
        seed=seed,
        initial_seed=seed,
        guidance=3.0,
        height=geometry.height,
        width=geometry.width,
        noise_level=0.7,
        model_sha256=model.info.sha256,
        embed_sha256=embed_sha256,
        **drawing,
    ).model_dump()


def weigh(rollout: Dataset, path, embeds, *, weight=None, seal=None) -> Round:
    """Write an advantages dataset for a rollout."""
    reader, samples = rollout.reader(), []
    for n, key in enumerate(reader.keys()):
        positions = reader.tensors(key)["logp_old"].shape[-1]
        generator = torch.Generator().manual_seed(n)
        w = torch.randn(positions, generator=generator) if weight is None else weight(key, positions)
        meta = AdvantageMeta(key=key, prompt_id=key[:12], credit="cast", atom_ids=("a",), scale=1.0)
        members = {
            "advantage.safetensors": encode_tensors({"weight": w.float(), "advantage": torch.zeros(1)}),
            "meta.json": encode_json(meta.model_dump()),
        }
        samples.append(Sample(key, members, {"prompt_id": key[:12]}))
    parent = ParentRef("rollout", "../rollout", seal or rollout.seal_sha256)
    _dataset(path, "advantages", samples, [parent])
    return Round(Path(rollout.path), path, embeds, int(reader.keys()[0].split("-")[1]))


def _sample(meta, drawn, i) -> Sample:
    tensors = {
        "latents": drawn.latents[i],
        "final_latent": drawn.final[i],
        "steps": drawn.steps,
        "sigmas": drawn.sigmas,
        "logp_old": drawn.logp_old[i],
    }
    members = {
        "rollout.safetensors": encode_tensors({k: v.contiguous() for k, v in tensors.items()}),
        "image.png": encode_png(np.zeros((meta["height"], meta["width"], 3), np.uint8)),
        "meta.json": encode_json(meta),
    }
    columns = ("prompt_id", "round", "member", "seed", "guidance", "height", "width", "num_steps")
    columns += ("window_start", "window_length", "adapter_sha256", "model_sha256", "embed_sha256")
    return Sample(meta["key"], members, {c: meta[c] for c in columns})


def _dataset(path, stage, samples, parents=()) -> Dataset:
    shards = [samples[i : i + 4] for i in range(0, len(samples), 4)]
    dataset = Dataset.create(
        path, stage=stage, config={}, shards=[[s.key for s in part] for part in shards], parents=parents
    )
    for number, part in enumerate(shards):
        dataset.commit(number, part)
    dataset.seal()
    return Dataset.open(path)
