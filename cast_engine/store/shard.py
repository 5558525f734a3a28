"""What a shard is made of, and the rules for names and members."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cast_engine.errors import DatasetError
from cast_engine.store.codec import check_tensors, decode_json, png_size
from schemas.records import SCHEMA_VERSION, STAGES, Status

KEY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
SUFFIX = re.compile(r"[a-z0-9]+(\.[a-z0-9]+)*")
FILE = re.compile(r"[a-z]+-(\d{6,})-[0-9a-f]{12}\.(tar|parquet)")
MEMBER_LIMIT = 1 << 30
"""Largest member, bytes."""


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

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Receipt:
        """Read the fields again (TypeError or ValueError if they are not those of a receipt)."""
        receipt = cls(**body)
        for name, suffix in ((receipt.tar, "tar"), (receipt.manifest, "parquet")):
            match = FILE.fullmatch(name)
            if match is None or int(match[1]) != receipt.shard_id or match[2] != suffix:
                raise ValueError(f"bad file name {name!r}")
        return receipt


def check_version(version: Any) -> None:
    """Raise DatasetError unless this is the current format version or the one before."""
    if version not in {SCHEMA_VERSION, SCHEMA_VERSION - 1} or version < 1:
        raise DatasetError(
            f"format version {version}",
            expected=f"{SCHEMA_VERSION} or the one before",
            do="read it with the cast-engine that wrote it, or make the dataset again",
        )


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


def _check_member(stage: str, suffix: str, data: bytes) -> None:
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


def check_samples(stage: str, planned: Sequence[str], samples: Sequence[Sample]) -> dict[str, int]:
    """Check the samples of a shard before anything is written.

    Returns:
        How many there are of each status.

    Raises:
        DatasetError: Other keys or another order than planned; an unknown status; members that are not those of the
            stage, or members of a sample that is not ok.
    """
    if [s.key for s in samples] != list(planned):
        raise DatasetError(f"samples {[s.key for s in samples][:3]}...", expected=f"{list(planned)[:3]}... in order")
    counts: Counter[str] = Counter()
    for sample in samples:
        status = str(sample.row.get("status") or Status.OK)
        if status not in set(Status):
            raise DatasetError(f"{sample.key} has status {status!r}", expected=f"one of {[str(s) for s in Status]}")
        wanted = sorted(STAGES[stage].members) if status == Status.OK else []
        if sorted(sample.members) != wanted:
            raise DatasetError(f"{sample.key} ({status}) has members {sorted(sample.members)}", expected=f"{wanted}")
        for suffix, data in sample.members.items():
            try:
                _check_member(stage, suffix, data)
            except DatasetError as err:
                raise DatasetError(f"{sample.key}.{suffix}: {err}") from err
        counts[status] += 1
    return dict(counts)
