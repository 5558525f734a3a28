"""The same command again does nothing; the same seed elsewhere gives the same bytes."""

import json
import time

from tests.loop.commands import KILLED, assert_equal_runs, lasting, snapshot, spawn, summary


def figures(out: str) -> list[str]:
    """The table's rows."""
    return [line for line in out.splitlines() if line.startswith(("before", "after"))]


def test_a_finished_run_is_left_alone(job, first):
    root, result = first
    before, started = snapshot(root), time.monotonic()
    again = spawn("cast-engine", "run", job, "--out", root)
    seconds = time.monotonic() - started
    assert again.code == 0, again.err
    assert "nothing to do" in again.err
    assert snapshot(root) == before
    assert figures(again.out) == figures(result.out)
    assert len(figures(again.out)) == 5
    assert seconds < 10


def test_the_same_seed_gives_the_same_bytes(job, finished, nursery, tmp_path):
    assert nursery.engine("run", job, "--out", tmp_path / "again").code == 0
    assert_equal_runs(tmp_path / "again", finished)


def test_old_moments_go_and_the_run_is_the_same(job, finished, nursery, tmp_path):
    """train.keep=1, killed while the moments of round 0 are removed."""
    root = tmp_path / "run"
    command = ("run", job, "--out", root, "--set", "train.keep=1")
    result = nursery.engine(*command, CAST_CRASH_AT="removed.durable")
    assert result.code == KILLED, result.err
    old, new = root / "rounds/0000/train", root / "rounds/0001/train"
    assert (old / "optimizer.safetensors").exists(), "killed before"
    assert (new / "state.json").exists()
    assert nursery.engine(*command).code == 0
    assert not (old / "optimizer.safetensors").exists()
    assert (new / "optimizer.safetensors").exists()
    for name in ("rounds/0000/train/adapter.safetensors", "rounds/0001/train/ema.safetensors"):
        assert (root / name).read_bytes() == (finished / name).read_bytes()
    assert summary(root)["after"] == summary(finished)["after"]
    before = lasting(root)
    (root / "summary.json").unlink()
    result = nursery.engine(*command)
    assert result.code == 0, result.err
    assert lasting(root) == before, "every round was looked at again, and none was made again"


def test_another_seed_gives_another_adapter_on_the_same_held_out_prompts(job, finished, nursery, tmp_path):
    result = nursery.engine("run", job, "--out", tmp_path / "other", "--set", "seed=4", "--set", "rounds=1")
    assert result.code == 0, result.err
    one, other = (json.loads((p / "summary.json").read_text()) for p in (finished, tmp_path / "other"))
    assert one["before"] == other["before"]
    for name in ("adapter.safetensors", "ema.safetensors"):
        part = f"rounds/0000/train/{name}"
        assert (finished / part).read_bytes() != (tmp_path / "other" / part).read_bytes()


def test_the_reference_run_trained(finished):
    """The other tests compare with it: it must have something in it."""
    state = json.loads((finished / "rounds/0001/train/state.json").read_text())
    told = summary(finished)
    assert state["update"] == told["updates"] == 4
    assert told["images"] == 24
    assert all(norm > 0 for norm in state["gradient_norms"])
    assert max(state["start_ratio"].values()) < 1e-5
    assert json.loads((finished / "summary.json").read_text())["seconds"].keys() == {
        *("prompts", "csg", "embed", "rollout", "score", "advantages", "train", "evaluate"),
    }
    adapters = {(finished / f"rounds/{r:04d}/train/adapter.safetensors").read_bytes() for r in (0, 1)}
    assert len(adapters) == 2
    assert list(told["during"]) == ["round-0001", "round-0002"]
