"""Workers may die, raise or fail: every shard is done once, or the stage says which one is not."""

import os
import signal
import threading

import pytest
import torch

from cast_engine.errors import FailuresError, Interrupted, UserError
from cast_engine.run.executor import carry_out, stoppable
from cast_engine.run.pool import WorkerSpec
from cast_engine.store import Dataset
from tests.run.fakes import FailingSamples, FakeWorker, prompt_ids


@pytest.fixture
def dataset(tmp_path):
    ids = prompt_ids(12)
    shards = [ids[i : i + 3] for i in range(0, 12, 3)]
    return Dataset.create(tmp_path / "data", stage="prompts", config={}, shards=shards)


def spec(tmp_path, **kwargs):
    folder = tmp_path / "attempts"
    folder.mkdir(exist_ok=True)
    return WorkerSpec(FakeWorker, {"folder": folder, **kwargs})


def attempts(tmp_path):
    return {p.name: int(p.read_text() or 0) for p in (tmp_path / "attempts").iterdir()}


@pytest.mark.parametrize("workers", [1, 3])
def test_every_shard_is_done_once_and_sealed(dataset, tmp_path, workers):
    outcome = carry_out(dataset, spec(tmp_path), label="test", workers=workers)
    assert outcome.samples == 12
    assert dataset.sealed
    assert attempts(tmp_path) == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert carry_out(dataset, spec(tmp_path), label="test", workers=workers).samples == 0


def test_workers_and_process_give_the_same_seal(tmp_path):
    ids = prompt_ids(6)
    seals = set()
    for workers in (1, 2):
        data = Dataset.create(tmp_path / f"w{workers}", stage="prompts", config={}, shards=[ids[:3], ids[3:]])
        carry_out(data, spec(tmp_path), label="test", workers=workers)
        seals.add(data.seal_sha256)
    assert len(seals) == 1


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_worker_that_dies_costs_one_attempt(dataset, tmp_path, fault):
    carry_out(dataset, spec(tmp_path, fault=fault), label="test", workers=2)
    assert dataset.sealed
    assert attempts(tmp_path)["1"] == 2
    assert sum(attempts(tmp_path).values()) == 5


@pytest.mark.parametrize(("fault", "said"), [("kill", "exit code -9"), ("raise", "cosmic ray")])
def test_a_shard_that_never_works_is_named_after_all_others_are_done(dataset, tmp_path, fault, said):
    with pytest.raises(FailuresError, match=rf"failed 3 times, first shard 1.*(?s:.*){said}"):
        carry_out(dataset, spec(tmp_path, fault=fault, times=99), label="test", workers=2)
    assert [s.shard_id for s in dataset.todo()] == [1]
    assert attempts(tmp_path)["1"] == 3


def test_what_the_user_must_mend_is_not_tried_again(dataset, tmp_path):
    with pytest.raises(UserError, match=r"model\.path: no such model"):
        carry_out(dataset, spec(tmp_path, fault="user", times=99), label="test", workers=2)
    assert attempts(tmp_path)["1"] == 1


def test_failed_samples_above_the_share_end_the_stage_but_stay_committed(dataset):
    with pytest.raises(FailuresError, match=r"4 of 12 samples failed.*unreadable"):
        carry_out(dataset, WorkerSpec(FailingSamples), label="test", max_bad_frac=0.01)
    assert dataset.todo() == []
    carry_out(dataset, WorkerSpec(FailingSamples), label="test", max_bad_frac=0.5)
    assert dataset.sealed


def test_threads_of_a_stage_are_not_those_of_the_next(dataset, tmp_path):
    before = torch.get_num_threads()
    made = spec(tmp_path)
    carry_out(dataset, WorkerSpec(made.factory, made.kwargs, threads=before + 1), label="test")
    assert torch.get_num_threads() == before


def test_sigterm_becomes_interrupted(dataset, tmp_path):
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Interrupted), stoppable():
        carry_out(dataset, spec(tmp_path, fault="slow"), label="test")
    assert [s.shard_id for s in dataset.todo()] == [1, 2, 3]
