"""A lock file: one holder at a time, free again however the holder ends."""

import multiprocessing
import signal
import subprocess
import sys
import time

import pytest

from cast_engine.errors import DatasetError
from cast_engine.store import hold

HOLDER = """
import pathlib, sys, time
from cast_engine.store import hold
with hold(pathlib.Path(sys.argv[1])) as held:
    print(held, flush=True)
    time.sleep(60)
"""


def holder(path):
    """A process that holds the lock until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    return process


def test_one_at_a_time_and_nothing_is_left(tmp_path):
    path = tmp_path / "folder" / ".lock"
    with hold(path) as first:
        with hold(path) as second:
            assert (first, second) == (True, False)
        with hold(path) as third:
            assert not third, "that the second left did not free it"
    assert not path.exists()
    with hold(path) as again:
        assert again


def test_an_error_frees_it(tmp_path):
    with pytest.raises(RuntimeError), hold(tmp_path / ".lock"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_holder_frees_it(tmp_path):
    process = holder(tmp_path / ".lock")
    with hold(tmp_path / ".lock") as held:
        assert not held
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with hold(tmp_path / ".lock") as held:
        assert held
    assert list(tmp_path.iterdir()) == []


def race(path, seconds):
    """Take the lock again and again; somebody else inside would find or remove our mark."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with hold(path / ".lock") as held:
            if held:
                (path / "inside").touch(exist_ok=False)
                (path / "inside").unlink()


def test_removing_the_file_lets_nobody_else_in(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=race, args=(tmp_path, 1.0)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_it_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match=str(tmp_path / "file")), hold(tmp_path / "file" / ".lock"):
        pass
