"""A fake sampler: bytes follow from the key, so any process can tell what must be on disk."""

import hashlib

import numpy as np
import torch

from cast_engine.store import Dataset, Sample, encode_json, encode_png, encode_tensors, sample_sha256
from schemas.records import sample_key

P, C, W, N, SIDE = 4, 2, 2, 4, 8


def keys(shards: int, size: int) -> list[list[str]]:
    ids = [hashlib.sha256(str(i).encode()).hexdigest()[:12] for i in range(shards)]
    return [[sample_key(i, 0, n) for n in range(size)] for i in ids]


def rollout_members(key: str, salt: int = 0) -> dict[str, bytes]:
    """Members that follow from the key alone, so that any process can tell what must be on disk."""
    seed = int(hashlib.sha256(f"{key}/{salt}".encode()).hexdigest()[:8], 16)
    rng = np.random.default_rng(seed)
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))  # noqa: E731
    tensors = {
        "latents": draw(W + 1, P, C).bfloat16(),
        "final_latent": draw(P, C),
        "steps": torch.arange(1, W + 1),
        "sigmas": torch.linspace(1, 0, N + 1),
        "logp_old": draw(W, P),
    }
    return {
        "rollout.safetensors": encode_tensors(tensors),
        "image.png": encode_png(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)),
        "meta.json": encode_json({"key": key, "seed": seed}),
    }


def rollout_sample(key: str, salt: int = 0) -> Sample:
    row = {"prompt_id": key[:12], "round": 0, "member": int(key[-4:]), "seed": 2**62, "height": SIDE, "width": SIDE}
    return Sample(key, rollout_members(key, salt), row)


def expected(plan: list[list[str]], salt: int = 0) -> dict[str, str]:
    return {key: sample_sha256(rollout_members(key, salt)) for shard in plan for key in shard}


def found(ds: Dataset) -> dict[str, str]:
    """What the reader really delivers; each member read and checked."""
    out: dict[str, str] = {}
    for sample in ds.reader(allow_unsealed=True):
        assert sample.key not in out
        out[sample.key] = sample_sha256(sample.members)
        assert out[sample.key] == sample.row["sample_sha256"]
    return out


def make(path, plan, *, seal=True, salt=0, config=None) -> Dataset:
    ds = Dataset.create(path, stage="rollout", config=config or {"noise": 0.7}, shards=plan)
    for shard in ds.todo():
        ds.commit(shard.shard_id, [rollout_sample(key, salt) for key in shard.keys])
    if seal:
        ds.seal()
    return ds
