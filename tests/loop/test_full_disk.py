"""A full disk ends a run with exit code 5 and one line; with room made, the same command goes on."""

import os
import subprocess

import pytest

from tests.loop.commands import assert_equal_runs, datasets

SIZES_KB = (100, 500, 1100, 1700, 2400, 3100, 3700)
"""Of a file system on which a run of about 5 MB is made, one after the other."""


def assert_out_of_room(result):
    assert result.code == 5, result.err
    assert "no space left" in result.error
    assert "intact" in result.error or "stays valid" in result.error


@pytest.fixture
def small_disk(tmp_path):
    """A folder of limited size, and how to change it."""
    mount = tmp_path / "disk"
    mount.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", mount]
    if os.geteuid() or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    yield mount, lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", mount], check=True)
    subprocess.run(["umount", "-l", mount], check=True)


def test_a_disk_that_fills_up_again_and_again(job, finished, nursery, small_disk):
    mount, resize = small_disk
    root, failures = mount / "run", []
    for size in SIZES_KB:
        resize(f"{size}k")
        result = nursery.engine("run", job, "--out", root)
        if result.code == 0:
            break
        assert_out_of_room(result)
        failures.append(result.error)
        for name, dataset in datasets(root).items():
            assert not dataset.verify().damaged, name
    assert len(failures) >= 5
    assert len({line.partition("no space")[0] for line in failures}) >= 4, "other moments"
    resize("64m")
    result = nursery.engine("run", job, "--out", root)
    assert result.code == 0, result.err
    assert_equal_runs(root, finished)


@pytest.mark.parametrize("limit", [3_000, 20_000, 100_000, 300_000])
def test_a_file_that_may_not_grow(limit, job, finished, nursery, tmp_path):
    """A limit on the size of files stands for a full disk where nothing can be mounted."""
    command = ("run", job, "--out", tmp_path / "run")
    assert_out_of_room(nursery.engine(*command, file_limit=limit))
    if limit == 100_000:
        assert nursery.engine(*command).code == 0
        assert_equal_runs(tmp_path / "run", finished)
