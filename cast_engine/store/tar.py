"""The tar of a shard: written so that equal samples give equal bytes, and walked so that no damage goes unseen."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from cast_engine.errors import DatasetError
from cast_engine.store.atomic import at, crash
from cast_engine.store.shard import KEY, MEMBER_LIMIT, SUFFIX, Member, Sample

KEEP_LIMIT = 1 << 30
"""Largest file that is held in memory, bytes."""
_BLOCK, _CHUNK = tarfile.BLOCKSIZE, 1 << 20


class _HashingFile:
    """A file object that hashes what is written through it."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._sha, self.size = raw, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._raw.write(data)
        self._sha.update(data)
        self.size += len(data)
        return len(data)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def write_tar(path: Path, samples: Sequence[Sample]) -> tuple[int, str, dict[str, list[Member]]]:
    """Write the members of all samples to a new tar, read it back, and fsync it.

    Same samples, same bytes: USTAR, members in order of name, mtime 0, mode 0444, no owner.

    Returns:
        Its size, its sha256, and per key where each member lies.

    Raises:
        OSError: From the file system.
        DatasetError: What was read back is not what was written.
    """
    from webdataset.writer import TarWriter

    with path.open("xb", buffering=_CHUNK) as raw:
        out = _HashingFile(raw)
        writer = TarWriter(out, user="", group="", mode=0o444, encoder=False, mtime=0)
        for sample in samples:
            if sample.members:
                writer.write({"__key__": sample.key, **sample.members})
            crash("tar.sample")
        writer.close()
        raw.flush()
        crash("tar.closed")
        members = _read_back(path, out.size, samples)
        crash("tar.walked")
        os.fsync(raw.fileno())
    crash("tar.synced")
    return out.size, out.hexdigest(), members


def _read_back(path: Path, size: int, samples: Sequence[Sample]) -> dict[str, list[Member]]:
    wanted = [(s.key, f"{s.key}.{x}", s.members[x]) for s in samples for x in sorted(s.members)]
    members: dict[str, list[Member]] = {sample.key: [] for sample in samples}
    with path.open("rb") as tar:
        found = list(walk_tar(tar, size))
        if [(name, n) for name, _, n in found] != [(name, len(data)) for _, name, data in wanted]:
            raise DatasetError("the tar does not hold what was written", where=str(path))
        for (key, name, data), (_, offset, n) in zip(wanted, found, strict=True):
            tar.seek(offset)
            crc = zlib.crc32(tar.read(n))
            if crc != zlib.crc32(data):
                raise DatasetError(f"member {name} was not read back as written", where=str(path))
            members[key].append(Member(name, offset, n, crc))
    return members


def walk_tar(tar: IO[bytes], size: int) -> Iterator[tuple[str, int, int]]:
    """Walk the headers of a tar strictly: regular USTAR members, valid checksums, zero blocks to the end.

    ``tarfile`` ends silently at a damaged header, and follows extensions that can declare anything; this does not.

    Args:
        tar: The file, opened for reading.
        size: Its size in bytes.

    Yields:
        Name, offset of the payload, size of the payload.

    Raises:
        DatasetError: Anything else than such a tar.
    """
    pos = 0
    while True:
        tar.seek(pos)
        block = tar.read(_BLOCK)
        if len(block) != _BLOCK:
            raise DatasetError(f"the tar ends at byte {pos} without its end mark", expected="a whole tar")
        if not any(block):
            break
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as err:
            raise DatasetError(f"a damaged tar header at byte {pos}: {err}") from err
        key, _, suffix = info.name.partition(".")
        if not (info.type == tarfile.REGTYPE and KEY.fullmatch(key) and SUFFIX.fullmatch(suffix)):
            raise DatasetError(f"tar member {info.name!r} of type {info.type!r}", expected="a regular file, key.suffix")
        pos += _BLOCK
        if not 0 <= info.size <= min(MEMBER_LIMIT, size - pos):
            raise DatasetError(f"tar member {info.name} declares {info.size} bytes", expected="bytes that are there")
        yield info.name, pos, info.size
        pos += -(-info.size // _BLOCK) * _BLOCK
    if size - pos < 2 * _BLOCK or size % tarfile.RECORDSIZE or size - pos > tarfile.RECORDSIZE + _BLOCK:
        raise DatasetError(f"the tar has {size - pos} bytes after its last member", expected="an end mark and padding")
    tar.seek(pos)
    if any(tar.read(size - pos)):
        raise DatasetError("bytes after the end mark of the tar")


def read_checked(path: Path, size: int, sha256: str, *, keep: bool = False) -> bytes:
    """Read a whole regular file and check its size and sha256 (hex); return its bytes if ``keep``, else nothing.

    Raises:
        DatasetError: Absent, a link or device, of another size, or with another hash.
    """
    with at(path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb", buffering=0) as f:
            found = os.fstat(fd).st_size
            if found != size or (keep and size > KEEP_LIMIT):
                raise DatasetError(f"{found} bytes", expected=f"{size}")
            h, buffer, parts = hashlib.sha256(), memoryview(bytearray(min(_CHUNK, size + 1))), []
            while n := f.readinto(buffer):
                h.update(buffer[:n])
                if keep:
                    parts.append(bytes(buffer[:n]))
        if h.hexdigest() != sha256:
            raise DatasetError("damaged: its sha256 is not the one that was committed")
    return b"".join(parts)
