"""A fake sampler: bytes follow from the key, so any process can tell what must be on disk."""

import hashlib
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cast_engine.store import Dataset, Sample, encode_json, encode_png, encode_tensors, sample_sha256
from schemas.records import sample_key

P, C, W, N, SIDE = 4, 2, 2, 4, 8


def keys(shards: int, size: int) -> list[list[str]]:
    ids = [hashlib.sha256(str(i).encode()).hexdigest()[:12] for i in range(shards)]
    return [[sample_key(i, 0, n) for n in range(size)] for i in ids]


def rollout_members(key: str, salt: int = 0) -> dict[str, bytes]:
    seed = int(hashlib.sha256(f"{key}/{salt}".encode()).hexdigest()[:8], 16)
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))

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


def commit(ds: Dataset, shard_id: int, salt: int = 0):
    return ds.commit(shard_id, [rollout_sample(key, salt) for key in ds.plan[shard_id].keys])


def create(path: Path, plan: list[list[str]], **config) -> Dataset:
    return Dataset.create(path, stage="rollout", config=config or {"noise": 0.7}, shards=plan)


def make(path: Path, plan: list[list[str]], *, seal: bool = True, salt: int = 0) -> Dataset:
    """Run the stage from wherever it is to its end."""
    ds = create(path, plan)
    for shard in ds.todo():
        commit(ds, shard.shard_id, salt)
    if seal:
        ds.seal()
    return ds


def expected(plan: list[list[str]], salt: int = 0) -> dict[str, str]:
    """What must be delivered, computed without the store."""
    return {key: sample_sha256(rollout_members(key, salt)) for shard in plan for key in shard}


def found(ds: Dataset) -> dict[str, str]:
    """What is delivered, every member read and checked."""
    out: dict[str, str] = {}
    for sample in ds.reader(allow_unsealed=True):
        assert sample.key not in out
        out[sample.key] = sample_sha256(sample.members)
        assert out[sample.key] == sample.row["sample_sha256"]
    return out


def fork(work: Callable[[], object], **env: str) -> int:
    """Start ``work`` in a child process; return its pid. It exits with 0, or 1 after an exception."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ.update(env)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended_by(pid: int) -> int:
    """Wait for a child; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


KILLED = -signal.SIGKILL
