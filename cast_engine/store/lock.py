"""One process at a time: a lock on a file, which the kernel lifts when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cast_engine.store.atomic import at, make_dir


def try_lock(handle: IO[str]) -> bool:
    """Lock an open file until it is closed; return False, at once, if another process on this machine holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold(path: Path) -> Iterator[bool]:
    """Hold a lock file inside a ``with`` block; the block is told whether it does. The file is gone afterwards.

    Args:
        path: The lock file; folders above it are made.

    Raises:
        DatasetError: The file system refused.
    """
    with at(path):
        make_dir(path.parent)
        handle = _open_locked(path)
    if handle is None:
        yield False
        return
    with handle:
        try:
            yield True
        finally:
            with suppress(OSError):
                path.unlink()  # while it is held: whoever opened it meanwhile sees that it is gone


def _open_locked(path: Path) -> IO[str] | None:
    while True:
        handle = path.open("a")
        if not try_lock(handle):
            handle.close()
            return None
        if _is_at(handle, path):
            return handle
        handle.close()  # its holder removed it between our opening and locking it


def _is_at(handle: IO[str], path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False
