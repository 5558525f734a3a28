"""``run.json``: the job as it was started. A run folder belongs to one job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO

from cast_engine.errors import DatasetError, UserError
from cast_engine.jobfile import differences, read_run
from cast_engine.store.atomic import at, create_once, make_dir
from cast_engine.store.lock import try_lock
from schemas.job import JobConfig, config_hash
from schemas.records import SCHEMA_VERSION

_locks: dict[Path, IO[str]] = {}
HANDED_DOWN = "CAST_RUN_LOCK"
"""Environment variable that names the open file by which a command was handed its parent's hold on a run folder."""


def open_run(path: Path, job: JobConfig) -> None:
    """Write ``run.json`` once, or check that it holds this very job.

    Execution fields (batch sizes, workers, paths of interpreters) may differ between calls: they change no number on
    purpose.

    Raises:
        DatasetError: the folder belongs to another job; the message names the first differing key with both values.
    """
    semantic = job.semantic()
    body = {
        "schema_version": SCHEMA_VERSION,
        "config_hash": config_hash(semantic),
        "config": job.model_dump(mode="json"),
    }
    make_dir(path.parent)
    if create_once(path, (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()):
        return
    stored = read_run(path)
    differing = differences(stored.semantic(), semantic)
    if differing:
        key, (old, new) = next(iter(differing.items()))
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise DatasetError(
            f"{key} is {new!r} now{more}",
            where=str(path),
            expected=f"{old!r}, as this run was started",
            do="give another --out, or the job that the folder was made with",
        )


def lock_run(root: Path) -> None:
    """Hold the run folder until the process ends, so that two commands never train the same round at once.

    Raises:
        UserError: another process on this machine holds it.
    """
    with at(root):
        make_dir(root)
        handle = (root / ".lock").open("a")
    if _is_handed_down(handle):
        return
    if not try_lock(handle):
        raise UserError("another process is working on this run", where=str(root), do="wait for it, or stop it")
    _locks[root] = handle


def hand_down(root: Path) -> tuple[tuple[int, ...], dict[str, str]]:
    """Return what lets a command that this process starts and waits for work on the run folder that it holds.

    The child shares the lock itself: if this process is killed, the folder stays held until the child has ended too.

    Returns:
        Files to pass on, and the environment to start the command with.
    """
    held = _locks.get(root)
    if held is None:
        return (), dict(os.environ)
    return (held.fileno(),), {**os.environ, HANDED_DOWN: str(held.fileno())}


def _is_handed_down(handle: IO[str]) -> bool:
    """Whether the parent's hold on the same lock file came with the environment."""
    number = os.environ.get(HANDED_DOWN, "")
    try:
        return number.isdigit() and os.path.samestat(os.fstat(int(number)), os.fstat(handle.fileno()))
    except OSError:  # no such open file
        return False
