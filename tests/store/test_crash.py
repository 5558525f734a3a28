"""Killed anywhere, run again: the exact set, nothing lost, nothing twice."""

import os
import random
import signal
import time

import pytest

from cast_engine.errors import DatasetError
from cast_engine.store import Dataset, atomic, dataset, tar
from tests.store.store_fakes import KILLED, commit, create, ended_by, expected, fork, found, keys, make, rollout_sample

PLAN = keys(2, 2)


@pytest.fixture(scope="module")
def points(ram_root) -> list[str]:
    """Every named crash point, in the order they are passed."""
    passed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (atomic, dataset, tar):
            patch.setattr(module, "crash", passed.append)
        make(ram_root / "ds", PLAN)
    return list(dict.fromkeys(passed))


def test_the_points_cover_the_protocol(points):
    assert len(points) > 30
    assert {p.partition(".")[0] for p in points} == {
        *("plan", "shard", "tar", "manifest", "data", "done", "index", "seal")
    }


def check_invariant(path) -> None:
    """Whatever the moment: each done file names files that hold, and a seal covers everything."""
    if not (path / "plan.json").exists():
        assert not list(path.glob("done/*"))
        return
    ds = Dataset.open(path)
    report = ds.verify()
    assert not report.damaged
    assert report.ok
    assert found(ds) == expected([list(s.keys) for s in ds.plan if ds.complete(s.shard_id)])


def test_killed_at_every_point_then_run_again(points, ram_path):
    for number, point in enumerate(points):
        once = point.partition(".")[0] in {"plan", "index", "seal"}
        for count in (1,) if once else (1, 2):
            path = ram_path / f"{number}-{count}"
            assert ended_by(fork(lambda path=path: make(path, PLAN), CAST_CRASH_AT=f"{point}:{count}")) == KILLED, point
            check_invariant(path)
            committed = {p.name: p.stat().st_ino for p in path.glob("done/*")}
            ds = make(path, PLAN)
            assert committed.items() <= {p.name: p.stat().st_ino for p in path.glob("done/*")}.items(), point
            assert found(ds) == expected(PLAN), point
            assert ds.sealed


def test_killed_again_and_again(points, ram_path):
    """A run that dies at each point once, one after the other, in one folder."""
    plan = keys(20, 1)
    for point in points[::2]:
        fork_code = ended_by(fork(lambda: make(ram_path / "ds", plan), CAST_CRASH_AT=point))
        assert fork_code in {KILLED, 0}
        check_invariant(ram_path / "ds")
    assert found(make(ram_path / "ds", plan)) == expected(plan)


def work_through(path, salt: int, seed: int) -> None:
    ds, order = Dataset.open(path), random.Random(seed)
    while todo := ds.todo():
        commit(ds, order.choice(todo).shard_id, salt)


@pytest.mark.parametrize("salts", [(0, 0), (0, 1)], ids=["same bytes", "different bytes"])
def test_two_racing_workers_killed_at_random(ram_path, salts):
    """SIGKILL at random moments; the two meet on the same shards all the time."""
    order, plan, path = random.Random(7), keys(60, 2), ram_path / "ds"
    ds, kills = create(path, plan), 0
    pids = {n: fork(lambda n=n: work_through(path, salts[n], n)) for n in (0, 1)}
    deadline = time.monotonic() + 60
    while kills < 40 and time.monotonic() < deadline:
        time.sleep(order.uniform(0.002, 0.03))
        n = order.choice((0, 1))
        os.kill(pids[n], signal.SIGKILL)
        kills += ended_by(pids[n]) == KILLED
        if not ds.todo():  # no work left to be killed in: take some away, as if it had never been done
            for shard_id in order.sample(range(len(plan)), 30):
                ds.done_path(shard_id).unlink()
        pids[n] = fork(lambda n=n, k=kills: work_through(path, salts[n], 1000 * n + k))
    assert [ended_by(pid) for pid in pids.values()] == [0, 0]
    assert kills == 40
    ds.seal()
    assert ds.verify().ok
    assert len(list(path.glob("done/*"))) == len(plan)
    got, wanted = found(ds), [expected(plan, salt) for salt in salts]
    assert list(got) == [key for shard in plan for key in shard]
    for shard in plan:  # each shard wholly from one worker
        assert any(all(got[key] == w[key] for key in shard) for w in wanted)
    assert ds.gc(older_than_s=0) >= 0
    assert len(list(path.glob("data/*/*"))) == 2 * len(plan)
    assert not list(path.glob("tmp/*"))
    assert found(Dataset.open(path)) == got


def test_two_writers_with_different_bytes(ram_path):
    ds = create(ram_path / "ds", PLAN)
    first, second = commit(ds, 0, salt=1), commit(Dataset.open(ds.path), 0, salt=2)
    assert second == first  # the winner's receipt
    assert found(ds) == expected(PLAN[:1], salt=1)
    assert len(list(ds.path.glob("data/*/*.tar"))) == 2  # the loser's file is garbage
    assert ds.gc() == 0  # not yet: it might be somebody's at work
    assert ds.gc(older_than_s=-1) == 2
    assert found(ds) == expected(PLAN[:1], salt=1)


def test_many_processes_one_done_file_a_shard(ram_path):
    ds = create(ram_path / "ds", PLAN)
    pids = [fork(lambda n=n: [commit(ds, shard_id, n) for shard_id in range(2)]) for n in range(4)]
    assert [ended_by(pid) for pid in pids] == [0] * 4
    got, wanted = found(ds), [expected(PLAN, n) for n in range(4)]
    for shard in PLAN:
        assert any(all(got[key] == w[key] for key in shard) for w in wanted)


def test_a_lost_file_is_made_again(ram_path):
    ds = make(ram_path / "ds", PLAN, seal=False)
    receipt = ds.complete(1)
    ds.data_path(receipt.tar).unlink()
    assert [s.shard_id for s in ds.todo()] == [1]
    again = commit(ds, 1)  # same bytes: the old done file holds again
    assert again == receipt
    ds.data_path(receipt.manifest).unlink()
    other = commit(ds, 1, salt=5)
    assert other.tar != receipt.tar
    assert found(ds) == expected([PLAN[0]]) | expected([PLAN[1]], 5)
    assert len(list(ds.path.glob("quarantine/*.json"))) == 1


def test_a_torn_done_file_counts_as_absent(ram_path):
    ds = make(ram_path / "ds", PLAN, seal=False)
    done = ds.done_path(1)
    done.write_bytes(done.read_bytes()[:100])
    assert [s.shard_id for s in ds.todo()] == [1]
    with pytest.raises(DatasetError, match="1 of 2 shards are missing"):
        ds.seal()
    commit(ds, 1)
    ds.seal()
    assert found(ds) == expected(PLAN)


def test_a_done_file_of_another_plan_counts_as_absent(ram_path):
    a, b = make(ram_path / "a", PLAN), create(ram_path / "b", PLAN, noise=0.9)
    (b.path / "data").rmdir()
    (a.path / "data").rename(b.path / "data")
    (b.path / "done").rmdir()
    (a.path / "done").rename(b.path / "done")
    assert len(b.todo()) == 2
    assert len(b.verify().damaged) == 2
    b.commit(0, [rollout_sample(key) for key in PLAN[0]])
    assert found(b) == expected(PLAN[:1])
