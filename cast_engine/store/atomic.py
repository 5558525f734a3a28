"""Files that are whole or absent, whatever kills the process.

A file is written aside, fsynced, and only then given its name; the folder is fsynced after it. ``os.replace`` is
for files whose name says their content, ``os.link`` for files that exactly one process may create.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cast_engine.errors import DatasetError, NoSpaceError

RECORD_LIMIT = 1 << 30
"""Largest JSON record that is read, bytes."""


def crash(point: str) -> None:
    """Kill this process here if ``CAST_CRASH_AT`` says ``point`` or ``point:n`` (the n-th time). For tests."""
    wanted = os.environ.get("CAST_CRASH_AT")
    if not wanted:
        return
    name, _, count = wanted.partition(":")
    if name != point:
        return
    left = int(count or 1) - 1
    if left:
        os.environ["CAST_CRASH_AT"] = f"{name}:{left}"
    else:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def readable_errors(where: Path) -> Iterator[None]:
    """Turn the operating system's errors into one line: a full disk into NoSpaceError, others into DatasetError."""
    try:
        yield
    except OSError as err:
        path = Path(os.fsdecode(err.filename)) if isinstance(err.filename, str | bytes) else where
        if err.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise NoSpaceError(
                f"{where}: no space left ({err.strerror}); everything committed is intact; "
                "make room and run the same command again"
            ) from err
        raise DatasetError(
            str(err.strerror or err), where=str(path), do="check the file system and run the same command again"
        ) from err


def sync_dir(path: Path) -> None:
    """Make the entries of a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dir(path: Path) -> None:
    """Create a folder and its parents durably; nothing happens if it is there."""
    if not path.is_dir():
        make_dir(path.parent)
        path.mkdir(exist_ok=True)
        sync_dir(path.parent)


def aside(path: Path, tmp: Path | None = None) -> Path:
    """Return a fresh name for a file that is to become ``path``: in ``tmp``, else hidden beside it."""
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    return tmp / f"{path.name}.{token}" if tmp else path.with_name(f".{path.name}.{token}.tmp")


def _write_aside(path: Path, data: bytes, tmp: Path | None, point: str) -> Path:
    part = aside(path, tmp)
    crash(f"{point}.open")
    try:
        with part.open("xb") as f:
            f.write(data)
            f.flush()
            crash(f"{point}.written")
            os.fsync(f.fileno())
    except OSError:
        part.unlink(missing_ok=True)
        raise
    crash(f"{point}.synced")
    return part


def write_file(path: Path, data: bytes, *, tmp: Path | None = None, point: str = "write") -> None:
    """Write a file whole, replacing what is there; durable on return.

    Args:
        path: Final name; its folder exists.
        data: The content.
        tmp: Folder of the same file system for the unfinished file; default: the folder of ``path``.
        point: Prefix of the crash points passed on the way.

    Raises:
        NoSpaceError: The disk is full.
        DatasetError: Any other error of the file system.
    """
    with readable_errors(path):
        part = _write_aside(path, data, tmp, point)
        try:
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        crash(f"{point}.replaced")
        sync_dir(path.parent)
        crash(f"{point}.durable")


def create_once(path: Path, data: bytes, *, tmp: Path | None = None, point: str = "create") -> bool:
    """Write a file whole unless it exists; durable on return.

    Args:
        path: Final name; its folder exists.
        data: The content.
        tmp: Folder of the same file system for the unfinished file; default: the folder of ``path``.
        point: Prefix of the crash points passed on the way.

    Returns:
        True if this call created the file, False if it was there. (NFS may answer "exists" after a lost reply:
        a caller that must know compares the content.)

    Raises:
        NoSpaceError: The disk is full.
        DatasetError: Any other error of the file system.
    """
    with readable_errors(path):
        part = _write_aside(path, data, tmp, point)
        try:
            os.link(part, path)
            created = True
        except FileExistsError:
            created = False
        finally:
            crash(f"{point}.linked")
            with suppress(OSError):
                part.unlink()
        crash(f"{point}.unlinked")
        sync_dir(path.parent)
        crash(f"{point}.durable")
    return created


def canonical(obj: Any) -> bytes:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII; NaN is refused (ValueError)."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(obj: Any) -> str:
    """Return the sha256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical(obj)).hexdigest()


def dump_record(body: dict[str, Any]) -> bytes:
    """Return a JSON file that carries the sha256 of its own content."""
    return (json.dumps({**body, "sha256": digest(body)}, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def load_record(path: Path) -> dict[str, Any] | None:
    """Read a file made by :func:`dump_record`; None if it is absent, torn or altered by as much as one bit."""
    try:
        if path.stat().st_size > RECORD_LIMIT:
            return None
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            return None
        body.pop("sha256", None)
        return body if dump_record(body) == data else None
    except (ValueError, RecursionError):
        return None
