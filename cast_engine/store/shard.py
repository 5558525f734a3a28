"""One shard: a tar of members and a Parquet manifest of rows, both named by their content."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cast_engine.errors import DatasetError
from cast_engine.store.atomic import crash
from cast_engine.store.codec import check_tensors, decode_json, png_size
from schemas.manifest import STORE_COLUMNS, VERSION_KEY, manifest_schema
from schemas.records import SCHEMA_VERSION, STAGES, Status

KEY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
SUFFIX = re.compile(r"[a-z0-9]+(\.[a-z0-9]+)*")
FILE = re.compile(r"[a-z]+-(\d{6,})-[0-9a-f]{12}\.(tar|parquet)")
MEMBER_LIMIT = 1 << 30
"""Largest member, bytes."""
MANIFEST_LIMIT = 1 << 30
"""Largest manifest, bytes, also when decompressed."""
_BLOCK, _CHUNK = tarfile.BLOCKSIZE, 1 << 20


@dataclass(frozen=True)
class Sample:
    """A sample: ``members`` maps suffix to bytes (empty unless the status is ok), ``row`` holds manifest columns."""

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """Where a member lies in its tar."""

    name: str
    offset: int
    size: int
    crc32: int


@dataclass(frozen=True)
class Receipt:
    """What a done file says: the two files of a shard and their hashes."""

    shard_id: int
    plan_sha256: str
    config_hash: str
    tar: str
    tar_bytes: int
    tar_sha256: str
    manifest: str
    manifest_bytes: int
    manifest_sha256: str
    counts: dict[str, int]  # samples by status
    attempt: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Receipt:
        """Read the fields again (TypeError or ValueError if they are not those of a receipt)."""
        receipt = cls(**body)
        for name, suffix in ((receipt.tar, "tar"), (receipt.manifest, "parquet")):
            match = FILE.fullmatch(name)
            if match is None or int(match[1]) != receipt.shard_id or match[2] != suffix:
                raise ValueError(f"bad file name {name!r}")
        return receipt


def check_key(key: str) -> str:
    """Return the key, or raise DatasetError if it is not lower-case ASCII without dots and slashes."""
    if not KEY.fullmatch(key):
        raise DatasetError(
            f"key {key!r}",
            expected="1 to 64 of a-z, 0-9 and '-'",
            do="tar readers split names at the first dot: use schemas.records.sample_key",
        )
    return key


def sample_sha256(members: dict[str, bytes]) -> str:
    r"""Return the sha256 over each member in suffix order: ``"<suffix> <size>\n"`` and its bytes."""
    h = hashlib.sha256()
    for suffix in sorted(members):
        h.update(f"{suffix} {len(members[suffix])}\n".encode())
        h.update(members[suffix])
    return h.hexdigest()


def check_member(stage: str, suffix: str, data: bytes) -> None:
    """Raise DatasetError if a member is not what its stage and suffix promise; nothing large is decoded."""
    if len(data) > MEMBER_LIMIT:
        raise DatasetError(f"{suffix} of {len(data)} bytes", expected=f"at most {MEMBER_LIMIT}")
    tensors = STAGES[stage].tensors
    if suffix.endswith(".safetensors") and tensors is not None:
        check_tensors(data, tensors)
    elif suffix.endswith(".png"):
        png_size(data)
    elif suffix.endswith(".json"):
        decode_json(data)
    else:
        raise DatasetError(f"member .{suffix}", expected="a suffix that the stage knows")


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
        found: dict[str, list[Member]] = {sample.key: [] for sample in samples}
        expected = [(s.key, f"{s.key}.{x}", s.members[x]) for s in samples for x in sorted(s.members)]
        with path.open("rb") as back:
            walked = list(walk_tar(back, out.size))
            for (key, name, data), (got, offset, size) in zip(expected, walked, strict=True):
                back.seek(offset)
                crc = zlib.crc32(back.read(size))
                if got != name or size != len(data) or crc != zlib.crc32(data):
                    raise DatasetError(f"member {name} was not read back as written", where=str(path))
                found[key].append(Member(name, offset, size, crc))
        crash("tar.walked")
        os.fsync(raw.fileno())
    crash("tar.synced")
    return out.size, out.hexdigest(), found


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
    at = 0
    while True:
        tar.seek(at)
        block = tar.read(_BLOCK)
        if len(block) != _BLOCK:
            raise DatasetError(f"the tar ends at byte {at} without its end mark", expected="a whole tar")
        if not any(block):
            break
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as err:
            raise DatasetError(f"a damaged tar header at byte {at}: {err}") from err
        key, _, suffix = info.name.partition(".")
        if not (info.type == tarfile.REGTYPE and KEY.fullmatch(key) and SUFFIX.fullmatch(suffix)):
            raise DatasetError(f"tar member {info.name!r} of type {info.type!r}", expected="a regular file, key.suffix")
        at += _BLOCK
        if not 0 <= info.size <= min(MEMBER_LIMIT, size - at):
            raise DatasetError(f"tar member {info.name} declares {info.size} bytes", expected="bytes that are there")
        yield info.name, at, info.size
        at += -(-info.size // _BLOCK) * _BLOCK
    if size - at < 2 * _BLOCK or size % tarfile.RECORDSIZE or size - at > tarfile.RECORDSIZE + _BLOCK:
        raise DatasetError(f"the tar has {size - at} bytes after its last member", expected="an end mark and padding")
    tar.seek(at)
    if any(tar.read(size - at)):
        raise DatasetError("bytes after the end mark of the tar")


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def make_rows(
    stage: str,
    config_hash: str,
    shard_id: int,
    shard_file: str,
    samples: Sequence[Sample],
    members: dict[str, list[Member]],
) -> pa.Table:
    """Return the manifest of a shard: one row per sample, in order.

    Raises:
        DatasetError: A column that the stage does not have, or a value of another type.
    """
    schema = manifest_schema(stage, config_hash)
    allowed = set(schema.names) - STORE_COLUMNS
    rows = []
    for sample in samples:
        if extra := set(sample.row) - allowed:
            raise DatasetError(f"columns {sorted(extra)}", where=sample.key, expected=f"some of {sorted(allowed)}")
        row = {name: _plain(value) for name, value in sample.row.items()}
        row["status"] = str(Status(row.get("status") or Status.OK))
        if row.get("error_msg"):
            row["error_msg"] = str(row["error_msg"])[:2000]
        row |= {"schema_version": SCHEMA_VERSION, "stage": stage, "shard_id": shard_id, "shard_file": shard_file}
        row |= {"key": sample.key, "members": [asdict(m) for m in members[sample.key]]}
        row["bytes"] = sum(m.size for m in members[sample.key])
        row["sample_sha256"] = sample_sha256(sample.members) if sample.members else None
        rows.append(row)
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as err:
        raise DatasetError(f"a manifest value of the wrong type: {err}", where=f"shard {shard_id}") from err


def rows_to_bytes(rows: pa.Table) -> bytes:
    """Return a manifest as Parquet (zstd)."""
    out = pa.BufferOutputStream()
    pq.write_table(rows, out, compression="zstd")
    data: bytes = out.getvalue().to_pybytes()
    return data


def rows_from_bytes(data: bytes, stage: str, config_hash: str) -> pa.Table:
    """Read a manifest; columns that a former version lacks are null.

    Raises:
        DatasetError: Not such a manifest, of another stage or config, of a version that is not read, or too large.
    """
    schema = manifest_schema(stage, config_hash)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        meta, found = file.metadata, file.schema_arrow
        version = int((found.metadata or {}).get(VERSION_KEY, b"0"))
        if version not in {SCHEMA_VERSION, SCHEMA_VERSION - 1} or version < 1:
            raise DatasetError(
                f"manifest version {version}",
                expected=f"{SCHEMA_VERSION} or the one before",
                do="read it with the cast-engine that wrote it, or make the dataset again",
            )
        if {k: v for k, v in found.metadata.items() if k != VERSION_KEY and k in schema.metadata} != {
            k: v for k, v in schema.metadata.items() if k != VERSION_KEY
        }:
            raise DatasetError("a manifest of another stage or config")
        size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        if size > MANIFEST_LIMIT or meta.num_columns > 4 * len(schema):
            raise DatasetError(f"a manifest of {size} bytes and {meta.num_columns} columns", expected="a smaller one")
        table = file.read()
    except (pa.ArrowException, OSError, ValueError) as err:
        raise DatasetError(f"not a manifest: {err}") from err
    for name, column in zip(schema.names, schema, strict=True):
        if name not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table), column.type))
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as err:
        raise DatasetError(f"a manifest with columns of other types: {err}") from err


def hash_file(path: Path, size: int) -> str:
    """Return the sha256 (hex) of a regular file of exactly ``size`` bytes.

    Raises:
        DatasetError: Absent, a link or device, or of another size.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as err:
        raise DatasetError(f"{err.strerror}", where=str(path)) from err
    with open(fd, "rb", buffering=0) as f:  # noqa: PTH123
        found = os.fstat(fd).st_size
        if found != size:
            raise DatasetError(f"{found} bytes", where=str(path), expected=f"{size}")
        h, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        while n := f.readinto(buffer):
            h.update(buffer[:n])
    return h.hexdigest()
