"""The same command again does nothing; the same seed elsewhere gives the same bytes."""

import json
import time

from tests.loop.commands import assert_equal_runs, snapshot, spawn


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
    summary = json.loads((finished / "summary.json").read_text())
    assert state["update"] == summary["updates"] == 4
    assert summary["images"] == 24
    assert all(norm > 0 for norm in state["gradient_norms"])
    assert max(state["start_ratio"].values()) < 1e-5
    assert summary["seconds"].keys() == {
        *("prompts", "csg", "embed", "rollout", "score", "advantages", "train", "evaluate"),
    }
    adapters = {(finished / f"rounds/{r:04d}/train/adapter.safetensors").read_bytes() for r in (0, 1)}
    assert len(adapters) == 2
    assert list(summary["during"]) == ["round-0001", "round-0002"]
