"""Old rounds lose their moments and nothing else; killed on the way, the same command finishes."""

import json
import multiprocessing
import os
import shutil
import signal
from types import SimpleNamespace

import pytest

from cast_engine.errors import DatasetError, UserError
from tests.trainer.rounds import draw, job
from tests.trainer.test_resume import content
from trainer.checkpoint import read_state, verify_files
from trainer.cli import describe
from trainer.retention import remove_old_moments

MOMENTS, REMOVED = "optimizer.safetensors", "removed.json"
ROUNDS = 4


def config(keep):
    return job(rounds=ROUNDS, keep=keep, updates_per_round=1, ema_decay=0.5)


@pytest.fixture(scope="module")
def drawn(world, tmp_path_factory):
    """A run that keeps all, and the datasets of its rounds; its rounds but the last are what the tests start from."""
    root, made = tmp_path_factory.mktemp("run"), []
    for i in range(ROUNDS):
        start = folder(root, i - 1) if i else None
        made.append(draw(world, root / f"data-{i}", round_=i, adapter=start / "adapter.safetensors" if i else None))
        made[i].train(world.model(), folder(root, i), config(ROUNDS), start=start)
    return SimpleNamespace(root=root, made=made, world=world)


def folder(root, i):
    return root / f"rounds/{i:04d}/train"


def train(drawn, root, rounds, keep, **kwargs):
    out = []
    for i in rounds:
        start = folder(root, i - 1) if i else None
        out.append(drawn.made[i].train(drawn.world.model(), folder(root, i), config(keep), start=start, **kwargs))
    return out


def whole(root):
    return [i for i in range(ROUNDS) if (folder(root, i) / MOMENTS).exists()]


def files(root):
    return {p.relative_to(root): (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def kept_one(drawn, tmp_path_factory):
    """The same run keeping one round."""
    root, left = tmp_path_factory.mktemp("kept"), []
    for i in range(ROUNDS):
        train(drawn, root, [i], keep=1)
        left.append(whole(root))
    return SimpleNamespace(root=root, left=left)


def test_only_the_moments_of_old_rounds_go(drawn, kept_one, tmp_path):
    assert kept_one.left == [[0], [1], [2], [3]]
    for i in range(ROUNDS):
        full, thin = content(folder(drawn.root, i)), content(folder(kept_one.root, i))
        assert full.keys() - thin.keys() == ({MOMENTS} if i < ROUNDS - 1 else set())
        assert thin.keys() - full.keys() == ({REMOVED} if i < ROUNDS - 1 else set())
        for name in thin.keys() - {REMOVED}:
            assert thin[name] == full[name], name
    assert json.loads((folder(kept_one.root, 0) / REMOVED).read_text())["removed"] == [MOMENTS]
    train(drawn, tmp_path, range(ROUNDS), keep=2)
    assert whole(tmp_path) == [2, 3]


def test_a_thin_round_holds_and_says_so(drawn, kept_one):
    before = files(kept_one.root)
    summaries = train(drawn, kept_one.root, range(ROUNDS), keep=1)
    assert [sorted(s.removed) for s in summaries] == [[MOMENTS]] * 3 + [[]]
    assert [s.resumed_at for s in summaries] == [1] * ROUNDS, "no work was done"
    assert files(kept_one.root) == before
    assert describe(summaries[0]).endswith("nothing to do; optimizer.safetensors was removed (train.keep)")
    assert describe(summaries[3]).endswith("nothing to do")


def test_a_thin_round_is_no_start(drawn, kept_one, tmp_path):
    made, start = drawn.made[2], folder(kept_one.root, 1)
    with pytest.raises(UserError, match=rf"{start}: its {MOMENTS} was removed .*train\.keep.*one of the newest"):
        made.train(drawn.world.model(), tmp_path / "out", config(1), start=start)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "problem"), [("adapter.safetensors", "damaged"), ("ema.safetensors", "missing"), (REMOVED, "missing")]
)
def test_other_damage_to_a_thin_round_is_found(kept_one, tmp_path, name, problem):
    copy = shutil.copytree(folder(kept_one.root, 0), tmp_path / "copy")
    if problem == "damaged":
        (copy / name).write_bytes((copy / name).read_bytes()[:-1])
    else:
        (copy / name).unlink()
    with pytest.raises(DatasetError, match=problem):
        verify_files(copy, read_state(copy))


POINTS = ["removed.open", "removed.written", "removed.replaced", "removed.durable", "moments.removed"]


@pytest.mark.skipif(os.environ.get("CAST_TEST_DEVICE", "cpu") != "cpu", reason="CUDA does not survive a fork")
@pytest.mark.parametrize("point", [*POINTS, "removed.durable:2", "moments.removed:2"])
def test_killed_while_moments_are_removed(drawn, kept_one, tmp_path, point):
    """Three rounds are to lose their moments after the last one: the most that can be half done."""
    for i in range(ROUNDS):
        shutil.copytree(folder(drawn.root, i), folder(tmp_path, i))

    def until_killed():
        os.environ["CAST_CRASH_AT"] = point
        remove_old_moments(folder(tmp_path, ROUNDS - 1), 1)

    process = multiprocessing.get_context("fork").Process(target=until_killed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for i in range(ROUNDS):
        verify_files(folder(tmp_path, i), read_state(folder(tmp_path, i)))
    assert whole(tmp_path)[-1] == ROUNDS - 1
    remove_old_moments(folder(tmp_path, ROUNDS - 1), 1)
    assert whole(tmp_path) == [ROUNDS - 1]
    for i in range(ROUNDS):
        verify_files(folder(tmp_path, i), read_state(folder(tmp_path, i)))
        hidden = [p for p in folder(tmp_path, i).iterdir() if not p.name.startswith(".")]
        assert {p.name for p in hidden} == {p.name for p in folder(kept_one.root, i).iterdir()}
    assert remove_old_moments(folder(tmp_path, ROUNDS - 1), 1) == []


def test_a_killed_round_is_finished_by_the_command_that_began_it(drawn, kept_one, tmp_path):
    """Killed between the checkpoint and the removal: the round is done, and the same command removes."""
    root = tmp_path / "run"
    for i in range(ROUNDS):
        shutil.copytree(folder(kept_one.root, i), folder(root, i))
    for i, other in ((2, 2), (1, 1)):  # as if nothing had been removed yet after the last round
        shutil.copy(folder(drawn.root, other) / MOMENTS, folder(root, i))
        (folder(root, i) / REMOVED).unlink()
    assert whole(root) == [1, 2, 3]
    (summary,) = train(drawn, root, [ROUNDS - 1], keep=1)
    assert summary.resumed_at == 1
    assert whole(root) == [3]


def test_only_rounds_it_was_made_from_are_touched(drawn, tmp_path):
    for i in range(ROUNDS):
        shutil.copytree(folder(drawn.root, i), folder(tmp_path, i))
    state = folder(tmp_path, 1) / "state.json"
    state.write_text(state.read_text() + "\n")  # a round 1 that round 2 was not made from
    assert remove_old_moments(folder(tmp_path, 3), 1) == [folder(tmp_path, 2)]
    assert whole(tmp_path) == [0, 1, 3]
    flat = shutil.copytree(folder(drawn.root, 3), tmp_path / "flat")
    assert remove_old_moments(flat, 1) == []
