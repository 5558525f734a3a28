"""Workers on several CUDA devices: each has its own, before it imports anything."""

import os

import pytest
import torch

from cast_engine.run.devices import VISIBLE, device_environments
from cast_engine.run.executor import carry_out
from cast_engine.run.pool import WorkerSpec
from cast_engine.store import Dataset
from tests.run.fakes import SeesDevices, prompt_ids


def devices(environments):
    return [e[VISIBLE] for e in environments]


@pytest.fixture
def machine(monkeypatch):
    """Pretend that there are so many devices, and that the environment names them so."""

    def pretend(count, visible=None):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv(VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(VISIBLE, visible)

    return pretend


@pytest.mark.parametrize(
    ("count", "visible", "found"),
    [
        (3, None, ["0", "1", "2"]),
        (2, "5,7", ["5", "7"]),
        (2, "GPU-1a, MIG-2b", ["GPU-1a", "MIG-2b"]),
        (2, "4,6,-1,1", ["4", "6"]),  # what follows an entry that is none is not visible
        (1, "3", []),
        (0, None, []),
        (0, "", []),
        (0, "0,1", []),  # named, but there is no card
    ],
)
def test_devices_of_the_parent_are_shared_out(machine, count, visible, found):
    machine(count, visible)
    assert devices(device_environments(4, "auto")) == found


def test_where_the_devices_are_not_shared_out(machine):
    machine(4)
    assert device_environments(1, "auto") == ()
    assert device_environments(2, "cpu") == ()
    assert device_environments(2, "cpu", "cuda:1") == ()
    assert device_environments(2, "auto", "cuda:0") == ()
    assert len(device_environments(2, "cpu", "cuda")) == 4


@pytest.mark.parametrize("before", [None, "5,7"])
def test_each_worker_sees_its_own_device_from_the_start(tmp_path, machine, before):
    machine(2, before)
    ids = prompt_ids(4)
    data = Dataset.create(tmp_path / "data", stage="prompts", config={}, shards=[[i] for i in ids])
    spec = WorkerSpec(SeesDevices, {"folder": tmp_path}, env=device_environments(2, "auto"))
    carry_out(data, spec, label="test", workers=2)
    seen = {(tmp_path / f"{shard}").read_text() for shard in range(4)}
    assert seen == set((before or "0,1").split(","))
    assert os.environ.get(VISIBLE) == before
