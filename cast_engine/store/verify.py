"""Proof that what is on disk is what was committed, and the way out when it is not."""

from __future__ import annotations

import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cast_engine.errors import DatasetError
from cast_engine.store.atomic import at, load_record, make_dir, sync_dir
from cast_engine.store.plan import ShardPlan
from cast_engine.store.rows import rows_from_bytes
from cast_engine.store.shard import Receipt
from cast_engine.store.tar import read_checked, walk_tar
from schemas.records import STAGES, Status

if TYPE_CHECKING:
    from cast_engine.store.dataset import Dataset

SEEN_BYTES = 1 << 28
"""Memory for rows of verified shards. Beyond it the ones not asked for longest are forgotten, and hashed once more."""


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

    def __str__(self) -> str:
        parts = [f"{self.checked} of {self.checked + len(self.missing)} shards checked"]
        if self.missing:
            parts.append(f"{len(self.missing)} missing, first {self.missing[0]}")
        parts.append(f"{len(self.damaged)} damaged")
        if self.quarantined:
            parts.append(f"{self.quarantined} files moved to quarantine/")
        parts.append("sealed" if self.sealed else "not sealed")
        return ", ".join(parts)


def read_manifest(ds: Dataset, receipt: Receipt) -> pa.Table:
    """Return the rows of a committed shard; size, sha256 and schema are checked."""
    path = ds.data_path(receipt.manifest)
    with at(path):
        data = read_checked(path, receipt.manifest_bytes, receipt.manifest_sha256, keep=True)
        return rows_from_bytes(data, ds.stage, receipt.config_hash)


def check_shard(ds: Dataset, plan: ShardPlan, receipt: Receipt) -> pa.Table:
    """Check a committed shard in full: both hashes, every row, every tar header.

    Returns:
        Its rows.

    Raises:
        DatasetError: Naming the file or key and what is wrong.
    """
    rows = read_manifest(ds, receipt)
    path = ds.data_path(receipt.tar)
    with at(path):
        read_checked(path, receipt.tar_bytes, receipt.tar_sha256)
        members = _check_rows(ds.stage, plan, receipt, rows)
        with path.open("rb") as tar:
            _check_walk(walk_tar(tar, receipt.tar_bytes), members)
    return rows


class SeenShards:
    """Rows of the shards that this process has verified, by what identifies their files; bounded in bytes.

    A process may read the datasets of thousands of rounds, and datasets of more rows than should stay in memory.

    Args:
        limit: bytes of rows to keep; the last shard is kept whatever its size.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._rows: OrderedDict[tuple[Any, ...], pa.Table] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, identity: tuple[Any, ...]) -> pa.Table | None:
        """Return the rows of a verified shard, None for one that is not known (any more)."""
        if identity in self._rows:
            self._rows.move_to_end(identity)
        return self._rows.get(identity)

    def add(self, identity: tuple[Any, ...], rows: pa.Table) -> None:
        """Note that a shard was verified."""
        self._rows[identity] = rows
        self.bytes += rows.nbytes
        while self.bytes > self.limit and len(self._rows) > 1:
            self.bytes -= self._rows.popitem(last=False)[1].nbytes


_seen = SeenShards(SEEN_BYTES)


def check_shard_once(ds: Dataset, plan: ShardPlan, receipt: Receipt) -> pa.Table:
    """As :func:`check_shard`, but once per process while both files keep their inode, size and times.

    See :class:`SeenShards` for how many are remembered.
    """
    identity: list[Any] = [plan, ds.stage, receipt.plan_sha256, receipt.tar_sha256, receipt.manifest_sha256]
    for name in (receipt.tar, receipt.manifest):
        with at(ds.data_path(name)):
            s = ds.data_path(name).lstat()
        identity += [name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]
    rows = _seen.get(tuple(identity))
    if rows is None:
        rows = check_shard(ds, plan, receipt)
        _seen.add(tuple(identity), rows)
    return rows


def _check_rows(stage: str, plan: ShardPlan, receipt: Receipt, rows: pa.Table) -> list[tuple[str, int, int]]:
    """Check a shard's rows against plan and receipt; return name, offset and size of its members in tar order."""
    if rows["key"].to_pylist() != list(plan.keys):
        raise DatasetError("the rows are not those of the plan")
    out: list[tuple[str, int, int]] = []
    counts: Counter[str] = Counter()
    for row in rows.select(["key", "status", "shard_id", "shard_file", "stage", "members"]).to_pylist():
        key, members = row["key"], row["members"] or []
        if (row["shard_id"], row["shard_file"], row["stage"]) != (plan.shard_id, receipt.tar, stage):
            raise DatasetError(f"row {key} belongs to another shard: {row['shard_file']}")
        wanted = [f"{key}.{suffix}" for suffix in STAGES[stage].members] if row["status"] == Status.OK else []
        names = [m["name"] for m in members]
        if names != wanted:
            raise DatasetError(f"sample {key} ({row['status']}) has members {names}", expected=f"{wanted}")
        counts[row["status"]] += 1
        out += [(m["name"], m["offset"], m["size"]) for m in members]
    if dict(counts) != receipt.counts or not set(counts) <= set(Status):
        raise DatasetError(f"samples by status {dict(counts)}", expected=f"{receipt.counts} by the done file")
    return out


def _check_walk(found: Iterator[tuple[str, int, int]], expected: list[tuple[str, int, int]]) -> None:
    for number, (got, wanted) in enumerate(zip_longest(found, expected)):
        if got != wanted:
            raise DatasetError(f"tar member {number} is {got}", expected=f"{wanted} as in the manifest")


def verify(ds: Dataset, *, quarantine: bool = False) -> VerifyReport:
    """See :meth:`Dataset.verify`."""
    missing: list[int] = []
    damaged: list[Damage] = []
    sealed, moved = ds.seal_path.exists(), 0
    seal_problem = _seal_problem(ds) if sealed else None
    for plan in ds.plan:
        if not ds.done_path(plan.shard_id).exists():
            missing.append(plan.shard_id)
            continue
        receipt = ds.receipt(plan.shard_id)
        if problem := _shard_problem(ds, plan, receipt):
            damaged.append(Damage(plan.shard_id, problem))
            moved += move_shard(ds, plan.shard_id, receipt, data=True) if quarantine else 0
    if seal_problem and not damaged and not missing:
        damaged.append(Damage(None, seal_problem))
    if quarantine and sealed and (damaged or missing):
        moved += len(_move(ds, ds.seal_path, ds.index_path))
    return VerifyReport(len(ds.plan) - len(missing), tuple(missing), tuple(damaged), moved, sealed)


def _shard_problem(ds: Dataset, plan: ShardPlan, receipt: Receipt | None) -> str | None:
    if receipt is None:
        return f"{ds.done_path(plan.shard_id)}: damaged, or of another plan"
    try:
        check_shard(ds, plan, receipt)
    except DatasetError as err:
        return str(err)
    return None


def _seal_problem(ds: Dataset) -> str | None:
    try:
        seal = ds.load_seal()
        assert seal is not None
        for shard_id, *hashes in seal["shards"]:
            receipt = ds.receipt(shard_id)
            if receipt is None or [receipt.tar_sha256, receipt.manifest_sha256] != hashes:
                return f"{ds.done_path(shard_id)}: not the shard that was sealed"
        read_checked(ds.index_path, seal["index_bytes"], seal["index_sha256"])
    except DatasetError as err:
        return str(err)
    return None


def _move(ds: Dataset, *paths: Path) -> list[Path]:
    """Move files to ``quarantine/``; return where those that were there are now."""
    folder, token, moved = ds.path / "quarantine", secrets.token_hex(4), []
    with at(folder):
        make_dir(folder)
        for path in paths:
            with suppress(FileNotFoundError):
                moved.append(path.rename(folder / f"{token}.{path.name}"))
                sync_dir(path.parent)
        sync_dir(folder)
    return moved


def move_shard(ds: Dataset, shard_id: int, seen: Receipt | None, *, data: bool) -> int:
    """Move a shard that does not hold to ``quarantine/``, so that it is to be made again.

    Args:
        ds: The dataset.
        shard_id: Its number.
        seen: The receipt that did not hold (None: the done file could not be read). Another process may have put a
            good one in its place since; then that one stays.
        data: Also move its data files.

    Returns:
        How many files were moved.
    """
    done = ds.done_path(shard_id)
    moved = _move(ds, done)  # first: what is left of the shard is garbage from here on
    if moved and ds.parse_receipt(load_record(moved[0]), shard_id) != seen:
        with suppress(FileExistsError):
            os.link(moved[0], done)
        sync_dir(done.parent)
        moved[0].unlink()
        return 0
    if data and seen is not None:
        moved += _move(ds, ds.data_path(seen.tar), ds.data_path(seen.manifest))
    return len(moved)
