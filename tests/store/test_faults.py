"""A file system that fails, a disk that is full, and what a power cut would leave."""

import errno
import os
import resource
import subprocess

import pytest

from cast_engine.errors import CastError, DatasetError, NoSpaceError
from cast_engine.store import Dataset, create_once, write_file
from tests.store.store_fakes import commit, create, ended_by, expected, fork, found, keys, make

PLAN = keys(2, 2)
CALLS = [(os, "fsync"), (os, "link"), (os, "replace"), (os, "open"), (os, "mkdir"), ("io", "open")]


def fail_at(patch, number, code):
    """Let the ``number``-th call to the file system fail; return the count of calls as a one-element list."""
    seen = [0]

    def failing(real):
        def call(*args, **kwargs):
            seen[0] += 1
            if seen[0] == number:
                raise OSError(code, os.strerror(code), str(args[0]))
            return real(*args, **kwargs)

        return call

    for module, name in CALLS:
        target = f"{module}.{name}" if isinstance(module, str) else f"{module.__name__}.{name}"
        patch.setattr(target, failing(getattr(__import__(target.partition(".")[0]), name)))
    return seen


@pytest.mark.parametrize("codes", [[errno.ENOSPC], [errno.EIO, errno.ESTALE]], ids=["no space", "broken"])
def test_each_call_fails_once(ram_path, codes):
    number = 0
    while True:
        number += 1
        path, failed, code = ram_path / str(number), None, codes[number % len(codes)]
        with pytest.MonkeyPatch.context() as patch:
            seen = fail_at(patch, number, code)
            try:
                make(path, PLAN)
            except CastError as err:
                failed = err
        if seen[0] < number:
            assert failed is None
            break
        if failed is not None:
            assert isinstance(failed, NoSpaceError) == (code == errno.ENOSPC)
            assert "\n" not in str(failed)
            assert not list(path.glob("tmp/*"))
        if (path / "plan.json").exists():
            assert not Dataset.open(path).verify().damaged
        assert found(make(path, PLAN)) == expected(PLAN)
    assert number > 40


def test_a_file_size_limit_stands_for_a_full_disk(ram_path):
    ds = create(ram_path / "ds", PLAN)
    commit(ds, 0)

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
        with pytest.raises(NoSpaceError, match="make room and run the same command again"):
            commit(ds, 1)

    assert ended_by(fork(work)) == 0
    assert not list(ds.path.glob("tmp/*"))
    assert ds.verify().ok
    assert found(make(ds.path, PLAN)) == expected(PLAN)


def test_a_full_disk(ram_path):
    plan = keys(60, 2)
    mount = ram_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        with pytest.raises(NoSpaceError):
            make(mount / "ds", plan)
        ds = Dataset.open(mount / "ds")
        done = 60 - len(ds.todo())
        assert 0 < done < 60
        assert not ds.verify().damaged
        assert not list(ds.path.glob("tmp/*"))
        subprocess.run(["mount", "-o", "remount,size=16m", mount], check=True)
        assert found(make(mount / "ds", plan)) == expected(plan)
    finally:
        subprocess.run(["umount", mount], check=True)


class PowerCut:
    """What would be on disk after a power cut: file contents and folder entries, each as of its last fsync."""

    def __init__(self, patch, skip=None):
        self.files, self.folders, self.count, self.skip, self.faults = {}, {}, 0, skip, []
        self._fsync, self._link = os.fsync, os.link
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "link", self.link)

    def fsync(self, fd):
        self.count += 1
        if self.count == self.skip:
            return
        self._fsync(fd)
        stat = os.fstat(fd)
        if os.path.isdir(f"/proc/self/fd/{fd}"):  # noqa: PTH112
            self.folders[stat.st_ino] = {(e.name, e.inode()) for e in os.scandir(fd)}
        else:
            self.files[stat.st_ino] = (stat.st_size, stat.st_mtime_ns)

    def link(self, src, dst):
        if dst.parent.name == "done":
            self.check_data(dst.parent.parent)
        if dst.name == "sealed.json":
            self.check(dst.parent / "index.parquet")
        self.check_content(src)
        self._link(src, dst)

    def check_content(self, path):
        stat = path.stat()
        if self.files.get(stat.st_ino) != (stat.st_size, stat.st_mtime_ns):
            self.faults.append(f"content of {path.name}")

    def check_entry(self, path):
        if (path.name, path.stat().st_ino) not in self.folders.get(path.parent.stat().st_ino, ()):
            self.faults.append(f"entry {path.name}")

    def check(self, path):
        self.check_content(path)
        self.check_entry(path)

    def check_data(self, root):
        newest = max(root.glob("data/*"), key=lambda p: p.stat().st_mtime_ns)
        for path in newest.iterdir():
            self.check(path)
        for path in (newest, root / "data", root / "done", root / "plan.json"):
            self.check_entry(path)


def run_until_power_cut(path, skip=None):
    path.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        cut = PowerCut(patch, skip)
        ds = create(path / "ds", PLAN)
        cut.check_entry(ds.path)
        for shard_id in (0, 1):
            commit(ds, shard_id)
            cut.check(ds.done_path(shard_id))  # reported as committed, so it must survive
        ds.seal()
        cut.check(ds.seal_path)
    return cut


def test_what_is_named_is_durable_and_every_fsync_is_needed(ram_path):
    cut = run_until_power_cut(ram_path / "all")
    assert cut.faults == []
    assert cut.count == 3 + 2 * 6 + 4
    for skip in range(1, cut.count + 1):
        assert run_until_power_cut(ram_path / str(skip), skip).faults, f"fsync {skip} could be left out unseen"


def test_write_file_and_create_once(ram_path):
    path = ram_path / "a"
    write_file(path, b"one")
    write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert not create_once(path, b"three")
    assert create_once(ram_path / "b", b"three")
    assert sorted(p.name for p in ram_path.iterdir()) == ["a", "b"]
    with pytest.raises(DatasetError, match="No such file"):
        write_file(ram_path / "none" / "a", b"")
    with pytest.raises(DatasetError, match="No such file"):
        create_once(ram_path / "none" / "a", b"")
