"""Proof that what is on disk is what was committed, and the way out when it is not."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cast_engine.errors import DatasetError
from cast_engine.store.atomic import load_record, make_dir, sync_dir
from cast_engine.store.shard import Receipt, hash_file, rows_from_bytes, walk_tar
from schemas.records import STAGES, Status

if TYPE_CHECKING:
    from cast_engine.store.dataset import Dataset, ShardPlan


@dataclass(frozen=True)
class Damage:
    """One damaged shard (``shard_id`` None: the seal or the index) and what is wrong with it."""

    shard_id: int | None
    problem: str


@dataclass(frozen=True)
class VerifyReport:
    """What :meth:`Dataset.verify` found."""

    checked: int
    missing: tuple[int, ...]  # planned, not committed
    damaged: tuple[Damage, ...]
    quarantined: int  # files moved away
    sealed: bool

    @property
    def ok(self) -> bool:
        """Nothing is damaged, and nothing is missing from a sealed dataset."""
        return not self.damaged and not (self.sealed and self.missing)


def _identity(path: Path) -> tuple[int, ...]:
    try:
        s = path.lstat()
    except OSError as err:
        raise DatasetError(f"{err.strerror}", where=str(path)) from err
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def read_manifest(ds: Dataset, receipt: Receipt) -> pa.Table:
    """Return the rows of a committed shard; size, sha256 and schema are checked."""
    path = ds.data_path(receipt.manifest)
    if hash_file(path, receipt.manifest_bytes) != receipt.manifest_sha256:
        raise DatasetError("sha256 differs from the done file's", where=str(path))
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != receipt.manifest_sha256:
        raise DatasetError("changed while it was read", where=str(path))
    try:
        return rows_from_bytes(data, ds.stage, receipt.config_hash)
    except DatasetError as err:
        raise DatasetError(str(err), where=str(path)) from err


def check_shard(ds: Dataset, plan: ShardPlan, receipt: Receipt) -> pa.Table:
    """Check a committed shard in full: both hashes, every row, every tar header.

    Returns:
        Its rows.

    Raises:
        DatasetError: Naming the file or key and what is wrong.
    """
    path = ds.data_path(receipt.tar)
    if hash_file(path, receipt.tar_bytes) != receipt.tar_sha256:
        raise DatasetError("sha256 differs from the done file's", where=str(path))
    rows = read_manifest(ds, receipt)
    try:
        members = _check_rows(ds.stage, plan, receipt, rows)
        with path.open("rb") as tar:
            _check_walk(walk_tar(tar, receipt.tar_bytes), members)
    except DatasetError as err:
        raise DatasetError(str(err), where=str(path)) from err
    return rows


def _check_walk(found: Iterator[tuple[str, int, int]], expected: list[tuple[str, int, int]]) -> None:
    for number, (got, wanted) in enumerate(zip_longest(found, expected)):
        if got != wanted:
            raise DatasetError(f"tar member {number} is {got}", expected=f"{wanted} as in the manifest")


def check_shard_cached(ds: Dataset, plan: ShardPlan, receipt: Receipt) -> pa.Table:
    """As :func:`check_shard`, once per process as long as both files keep their inode, size and times."""
    seen = (*_identity(ds.data_path(receipt.tar)), *_identity(ds.data_path(receipt.manifest)))
    return _cached(_Args(ds, plan, receipt, (str(ds.path), seen, tuple(sorted(receipt.to_json()["counts"].items())))))


class _Args:
    """Arguments of a cached check, compared by what is on disk."""

    def __init__(self, ds: Dataset, plan: ShardPlan, receipt: Receipt, seen: Any) -> None:
        self.ds, self.plan, self.receipt = ds, plan, receipt
        self._id = (seen, plan, receipt.tar_sha256, receipt.manifest_sha256, receipt.plan_sha256)

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Args) and self._id == other._id


@lru_cache(maxsize=4096)
def _cached(args: _Args) -> pa.Table:
    return check_shard(args.ds, args.plan, args.receipt)


def _check_rows(stage: str, plan: ShardPlan, receipt: Receipt, rows: pa.Table) -> list[tuple[str, int, int]]:
    """Check a shard's rows against plan and receipt; return name, offset and size of its members in tar order."""
    if rows["key"].to_pylist() != list(plan.keys):
        raise DatasetError("the rows are not those of the plan")
    out = []
    counts: Counter[str] = Counter()
    wanted = STAGES[stage].members
    for row in rows.select(["key", "status", "shard_id", "shard_file", "stage", "members"]).to_pylist():
        key = row["key"]
        if (row["shard_id"], row["shard_file"], row["stage"]) != (plan.shard_id, receipt.tar, stage):
            raise DatasetError(f"row {key} belongs to another shard: {row['shard_file']}")
        names = [m["name"] for m in row["members"] or ()]
        if names != ([f"{key}.{suffix}" for suffix in wanted] if row["status"] == Status.OK else []):
            raise DatasetError(f"sample {key} ({row['status']}) has members {names}", expected=f"{list(wanted)}")
        counts[row["status"]] += 1
        out += [(m["name"], m["offset"], m["size"]) for m in row["members"] or ()]
    if dict(counts) != receipt.counts or not set(counts) <= set(Status):
        raise DatasetError(f"samples by status {dict(counts)}", expected=f"{receipt.counts} by the done file")
    return out


def verify(ds: Dataset, *, quarantine: bool = False) -> VerifyReport:
    """See :meth:`Dataset.verify`."""
    missing, damaged, moved, checked = [], [], 0, 0
    seal_problem = _seal_problem(ds)
    for plan in ds.plan:
        if not ds.done_path(plan.shard_id).exists():
            missing.append(plan.shard_id)
            continue
        receipt, checked = ds.receipt(plan.shard_id), checked + 1
        problem = _shard_problem(ds, plan, receipt)
        if problem:
            damaged.append(Damage(plan.shard_id, problem))
            moved += move_shard(ds, plan.shard_id, receipt) if quarantine else 0
    was_sealed = ds.seal_path.exists()
    if seal_problem and not damaged and not missing:
        damaged.append(Damage(None, seal_problem))
    if quarantine and was_sealed and (damaged or missing):
        moved += _move(ds, [ds.seal_path, ds.index_path])
    return VerifyReport(checked, tuple(missing), tuple(damaged), moved, was_sealed)


def _shard_problem(ds: Dataset, plan: ShardPlan, receipt: Receipt | None) -> str | None:
    if receipt is None:
        return f"{ds.done_path(plan.shard_id)}: damaged, or of another plan"
    try:
        check_shard(ds, plan, receipt)
    except DatasetError as err:
        return str(err)
    return None


def _seal_problem(ds: Dataset) -> str | None:
    """Return what is wrong with the seal or the index, if there is a seal."""
    if not ds.seal_path.exists():
        return None
    try:
        seal = ds.load_seal()
        if seal is None:
            return f"{ds.seal_path}: absent"
        for shard_id, tar_sha256, manifest_sha256 in seal["shards"]:
            receipt = ds.receipt(shard_id)
            if receipt is None or (receipt.tar_sha256, receipt.manifest_sha256) != (tar_sha256, manifest_sha256):
                return f"{ds.done_path(shard_id)}: not the shard that was sealed"
        if hash_file(ds.index_path, seal["index_bytes"]) != seal["index_sha256"]:
            return f"{ds.index_path}: sha256 differs from the seal's"
    except DatasetError as err:
        return str(err)
    return None


def _move(ds: Dataset, paths: list[Path]) -> int:
    """Move files to ``quarantine/``; return how many there were."""
    folder, token, moved = ds.path / "quarantine", secrets.token_hex(4), 0
    make_dir(folder)
    for path in paths:
        with suppress(FileNotFoundError):
            path.rename(folder / f"{token}.{path.name}")
            sync_dir(path.parent)
            moved += 1
    sync_dir(folder)
    return moved


def move_done(ds: Dataset, shard_id: int) -> int:
    """Move a done file that does not hold to ``quarantine/``; return 1 if it was moved.

    Another process may have replaced it by a good one since it was looked at: what was moved is read again, and
    linked back if it holds.
    """
    folder = ds.path / "quarantine"
    make_dir(folder)
    done, aside = ds.done_path(shard_id), folder / f"{secrets.token_hex(4)}.{shard_id:06d}.json"
    try:
        done.rename(aside)
    except FileNotFoundError:
        return 0
    receipt = ds.parse_receipt(load_record(aside), shard_id)
    if receipt is not None and ds.has_files(receipt):
        with suppress(FileExistsError):
            os.link(aside, done)
        aside.unlink()
        return 0
    sync_dir(done.parent)
    sync_dir(folder)
    return 1


def move_shard(ds: Dataset, shard_id: int, receipt: Receipt | None) -> int:
    """Move a damaged shard to ``quarantine/`` (the done file first), so that it is to be made again."""
    moved = _move(ds, [ds.done_path(shard_id)])
    if receipt is not None:
        moved += _move(ds, [ds.data_path(receipt.tar), ds.data_path(receipt.manifest)])
    return moved
