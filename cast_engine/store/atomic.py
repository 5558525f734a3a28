"""Files that are whole or absent, whatever kills the process.

A file is written aside, fsynced, and only then given its name; the folder is fsynced after it. ``replace`` is for
names that several writers may give (the last one wins), ``link`` for names that exactly one of them may.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
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
    if name == point:
        left = int(count or 1) - 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os.environ["CAST_CRASH_AT"] = f"{name}:{left}"


@contextmanager
def at(where: Path | str) -> Iterator[None]:
    """Place the errors raised inside: a bare DatasetError is told where; OSError becomes that, or NoSpaceError."""
    try:
        yield
    except DatasetError as err:
        if err.where:
            raise
        raise DatasetError(err.found, where=str(where), expected=err.expected, do=err.do) from err
    except OSError as err:
        if err.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise NoSpaceError(
                f"{where}: no space left ({err.strerror}); everything committed is intact: make room and run the "
                "same command again"
            ) from err
        path = os.fsdecode(err.filename) if isinstance(err.filename, str | bytes) else str(where)
        raise DatasetError(
            str(err.strerror or err), where=path, do="check the file system and run the same command again"
        ) from err


def os_error(error: Exception) -> OSError:
    """Return the error of the file system behind one of a library that only tells it in words (safetensors does)."""
    found = re.search(r"os error (\d+)", str(error))
    return OSError(int(found[1]) if found else errno.EIO, str(error))


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


def write_new(path: Path, data: bytes, point: str) -> None:
    """Create a file that nobody else knows of yet and fsync it, not its folder; on an error it is removed."""
    crash(f"{point}.open")
    try:
        with path.open("xb") as f:
            f.write(data)
            f.flush()
            crash(f"{point}.written")
            os.fsync(f.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    crash(f"{point}.synced")


def _aside(path: Path, tmp: Path | None) -> Path:
    return (tmp or path.parent) / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}"


def write_file(path: Path, data: bytes, *, tmp: Path | None = None, point: str = "write") -> None:
    """Write a file whole, replacing what is there; durable on return.

    Args:
        path: Final name; its folder exists.
        data: The content.
        tmp: Folder on the same file system for the unfinished file; default: beside it, hidden.
        point: Prefix of the crash points passed on the way.

    Raises:
        NoSpaceError: The disk is full.
        DatasetError: Any other error of the file system.
    """
    part = _aside(path, tmp)
    with at(path):
        write_new(part, data, point)
        try:
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        crash(f"{point}.replaced")
        sync_dir(path.parent)
    crash(f"{point}.durable")


def create_once(path: Path, data: bytes, *, tmp: Path | None = None, point: str = "create") -> bool:
    """Write a file whole unless it exists; durable on return. Arguments and errors as for :func:`write_file`.

    Returns:
        True if this call created the file, False if it was there. (NFS may answer "exists" after a lost reply: a
        caller that must know compares the content.)
    """
    part = _aside(path, tmp)
    with at(path):
        write_new(part, data, point)
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


def canonical(value: Any) -> bytes:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII; NaN is refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """Return the sha256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()


def dump_record(body: dict[str, Any]) -> bytes:
    """Return a JSON file that carries the sha256 of its own content."""
    return (json.dumps({**body, "sha256": digest(body)}, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def load_record(path: Path) -> dict[str, Any] | None:
    """Read a file made by :func:`dump_record`; None if it is absent, torn or altered by as much as one bit."""
    with at(path):
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
