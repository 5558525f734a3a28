"""One finished run of a small job on the shipped models, and quick commands."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.loop.commands")

from tests.loop.commands import Nursery, spawn  # noqa: E402

JOB = """
name: loop
seed: 3
rounds: 2
prompts: {train: "tinyworld:train", train_count: 12, evaluate: "tinyworld:validation", evaluate_count: 12}
rollout: {prompts_per_round: 3, group_size: 4, shard_groups: 1}
train: {updates_per_round: 2, lora: {rank: 4, alpha: 8}, ema_decay: 0.5, checkpoint_seconds: 0}
evaluate: {every: 1}
model: {device: cpu}
score: {device: cpu}
report: {images: 2, maps: 1}
"""
"""Two rounds of 3 x 4 images, a checkpoint after every update, the moving average evaluated after every round."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def job(tmp_path_factory) -> Path:
    """The job file."""
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    """Starts commands quickly."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def first(job, tmp_path_factory):
    """The run folder of the job, made by an interpreter of its own as from a shell, and how that command ended."""
    root = tmp_path_factory.mktemp("runs") / "finished"
    result = spawn("cast-engine", "run", job, "--out", root)
    assert result.code == 0, result.err
    return root, result


@pytest.fixture(scope="session")
def finished(first) -> Path:
    """A finished run folder; tests must not change it."""
    return first[0]
