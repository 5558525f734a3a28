"""What is damaged in a run folder is found, and a command started without its job does no harm."""

import shutil

import pytest

from tests.loop.commands import copy_run
from tests.loop.test_bad_input import assert_refused


@pytest.mark.parametrize("name", ["ema.safetensors", "adapter.safetensors", "state.json"])
def test_verify_finds_a_damaged_checkpoint(name, finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run")
    assert nursery.engine("verify", root).code == 0
    file = root / "rounds/0000/train" / name
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(bytes(body))
    result = nursery.engine("verify", root)
    assert_refused(result, "1 checkpoints are damaged", code=3)
    assert name in result.out


def test_a_summary_is_not_made_from_a_rollout_that_lost_a_shard(finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run")
    summary = (root / "summary.json").read_bytes()
    next(root.glob("rounds/0000/rollout/data/*/*.parquet")).unlink()
    assert_refused(nursery.engine("report", root), "rounds/0000/rollout", "verify --quarantine")
    assert (root / "summary.json").read_bytes() == summary


def test_a_lost_log_of_updates_is_said_in_one_line(job, finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run", "summary.json", "rounds/0001/train")
    (root / "rounds/0000/train/metrics.jsonl").unlink()
    result = nursery.engine("run", job, "--out", root)
    assert_refused(result, "metrics.jsonl: missing or damaged", "run again")
    shutil.rmtree(root / "rounds/0000/train")
    assert nursery.engine("run", job, "--out", root).code == 0


def test_a_stage_without_its_job_writes_nothing(nursery, tmp_path):
    assert_refused(nursery.engine("embed"), "no job given; expected --config FILE or --run FOLDER")
    assert_refused(nursery.engine("rollout", "--dry-run", "--run", tmp_path / "x"), "no run.json", "--config")
    assert not (tmp_path / "x").exists()


def test_training_inside_a_run_folder_follows_its_own_job(finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run", "rounds/0001", "summary.json")
    shutil.move(root / "rounds/0000/train", tmp_path / "before")
    inputs = ("cast-train", root / "rounds/0000/rollout", root / "rounds/0000/advantages")
    out = root / "rounds/0000/train"
    other = nursery.run(*inputs, "--set", "train.learning_rate=1e-5", "--out", out)
    assert_refused(other, "train.learning_rate is 1e-05", "as the run was started")
    assert nursery.run(*inputs, "--out", out).code == 0
    assert (out / "adapter.safetensors").read_bytes() == (tmp_path / "before/adapter.safetensors").read_bytes()
