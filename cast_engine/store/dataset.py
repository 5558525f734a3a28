"""A dataset: the folder of one stage. Its plan is fixed first; shards are then committed whole, in any order.

Layout::

    plan.json                                      what is to be made, from which parents, with which config
    data/<hh>/<stage>-<shard>-<sha12>.tar          members; the name says the content
    data/<hh>/<stage>-<shard>-<sha12>.parquet      one row per planned sample
    done/<shard>.json                              the commit point: names, sizes and hashes of the two
    tmp/  quarantine/                              never read
    sealed.json  index.parquet                     when all shards are there and verified

A shard is complete if and only if its done file holds and both files have its sizes (and, when verified, its
hashes). Everything else on disk is garbage by definition.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cast_engine.errors import DatasetError
from cast_engine.store import atomic, verify
from cast_engine.store.reader import Reader
from cast_engine.store.shard import (
    Receipt,
    Sample,
    check_key,
    check_member,
    hash_file,
    make_rows,
    rows_from_bytes,
    rows_to_bytes,
    write_tar,
)
from schemas.job import config_hash
from schemas.manifest import manifest_schema
from schemas.records import SCHEMA_VERSION, STAGES, Status

LEASE_S = 86400.0
"""Age after which a file that nothing refers to belongs to nobody any more."""


@dataclass(frozen=True)
class ShardPlan:
    """A shard's number and the keys it is to hold, in order."""

    shard_id: int
    keys: tuple[str, ...]


@dataclass(frozen=True)
class ParentRef:
    """A sealed dataset that this one was made from; ``path`` is relative to the dataset where possible."""

    stage: str
    path: str
    seal_sha256: str


@dataclass(frozen=True)
class StatusCounts:
    """How far a dataset is."""

    shards_done: int
    shards_planned: int
    samples: dict[str, int]  # by status, of the committed shards
    bytes: int
    sealed: bool


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, sub in value.items() for k, v in _flatten(sub, f"{prefix}.{name}").items()}
    return {prefix.lstrip("."): value}


def _differences(here: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Say in words what differs between two plans."""
    a, b = (_flatten({"stage": p["stage"], **p["config"]}) for p in (here, asked))
    for flat, plan in ((a, here), (b, asked)):
        flat |= {f"parents.{n}.{r['stage']}": r["seal_sha256"][:12] for n, r in enumerate(plan["parents"])}
        flat |= {"schema_version": plan["schema_version"], "shards": len(plan["shards"])}
    pairs = [(name, a.get(name, "absent"), b.get(name, "absent")) for name in sorted(a.keys() | b.keys())]
    out = [f"{name} is {old!r} there and {new!r} now" for name, old, new in pairs if old != new]
    for number, (old, new) in enumerate(zip(here["shards"], asked["shards"], strict=False)):
        if old != new:
            key = next(((x, y) for x, y in zip(old, new, strict=False) if x != y), (f"{len(old)} keys", f"{len(new)}"))
            out.append(f"shard {number} has {key[0]} there and {key[1]} now")
            break
    return out


class Dataset:
    """See the module's description. Made by :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path, body: dict[str, Any]) -> None:
        self.path = path
        self.stage: str = body["stage"]
        self.config: dict[str, Any] = body["config"]
        self.config_hash = config_hash(self.config)
        self.parents = tuple(ParentRef(**ref) for ref in body["parents"])
        self.plan = tuple(ShardPlan(number, tuple(keys)) for number, keys in enumerate(body["shards"]))
        self.plan_sha256: str = body["plan_sha256"]
        self.extra: dict[str, Any] = body["extra"]
        self.seal_path, self.index_path, self._tmp = path / "sealed.json", path / "index.parquet", path / "tmp"

    @staticmethod
    def create(
        path: str | os.PathLike[str],
        *,
        stage: str,
        config: Mapping[str, Any],
        shards: Sequence[Sequence[str]],
        parents: Sequence[ParentRef] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Fix the plan of a new dataset, or open the one that was made with the same plan.

        Args:
            path: Its folder.
            stage: A name of ``schemas.records.STAGES``.
            config: What decides its content, as JSON values.
            shards: The keys of each shard.
            parents: The sealed datasets it is made from.
            extra: Anything else worth keeping; not compared.

        Raises:
            DatasetError: The folder holds a dataset of another config, plan or parents; or a bad key.
        """
        path = Path(path)
        asked = _plan_body(stage, config, shards, parents, extra or {})
        with atomic.readable_errors(path):
            for name in ("tmp", "data", "done"):
                atomic.make_dir(path / name)
        if not (path / "plan.json").exists():
            atomic.create_once(path / "plan.json", atomic.dump_record(asked), tmp=path / "tmp", point="plan")
        ds = Dataset.open(path)
        if ds.plan_sha256 != asked["plan_sha256"]:
            here: dict[str, Any] = {"stage": ds.stage, "config": ds.config}
            here |= {"parents": [asdict(p) for p in ds.parents]}
            here |= {"schema_version": ds._version, "shards": [list(s.keys) for s in ds.plan]}  # noqa: SLF001
            raise DatasetError(
                "made with other settings: " + ", ".join(_differences(here, asked)[:8]),
                where=str(path),
                do="use another output folder, or the settings it was made with",
            )
        return ds

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Dataset:
        """Open a dataset.

        Raises:
            DatasetError: There is none, its plan is damaged, or its version is not read.
        """
        path = Path(path)
        file = path / "plan.json"
        if not file.exists():
            raise DatasetError("not a dataset", where=str(path), expected="a folder with plan.json")
        body = atomic.load_record(file)
        try:
            if body is None or body["plan_sha256"] != _plan_sha256(body):
                raise DatasetError(
                    "damaged", where=str(file), do="move the folder away and make the dataset again from its parents"
                )
            if body["schema_version"] not in {SCHEMA_VERSION, SCHEMA_VERSION - 1}:
                raise DatasetError(
                    f"format version {body['schema_version']}",
                    where=str(file),
                    expected=f"{SCHEMA_VERSION} or the one before",
                    do="read it with the cast-engine that wrote it, or make it again",
                )
            if body["stage"] not in STAGES:
                raise DatasetError(f"stage {body['stage']!r}", where=str(file), expected=f"one of {sorted(STAGES)}")
            for key in (key for keys in body["shards"] for key in keys):
                check_key(key)
            ds = Dataset(path, body)
            ds._version = body["schema_version"]
        except (KeyError, TypeError, AttributeError) as err:
            raise DatasetError("not a plan", where=str(file)) from err
        return ds

    _version: int = SCHEMA_VERSION

    # ---- where things are, and whether they hold

    def done_path(self, shard_id: int) -> Path:
        """Return the path of a shard's done file."""
        return self.path / "done" / f"{shard_id:06d}.json"

    def data_path(self, name: str) -> Path:
        """Return the path of a data file from its name."""
        return self.path / "data" / f"{int(name.split('-')[1]) % 256:02x}" / name

    def parse_receipt(self, body: dict[str, Any] | None, shard_id: int) -> Receipt | None:
        """Return the receipt in a done file's content if it is of this shard and this plan."""
        try:
            receipt = Receipt.from_json(body or {})
        except (TypeError, ValueError):
            return None
        mine = (shard_id, self.plan_sha256, self.config_hash)
        return receipt if (receipt.shard_id, receipt.plan_sha256, receipt.config_hash) == mine else None

    def receipt(self, shard_id: int) -> Receipt | None:
        """Return what a shard's done file says; None if there is none that holds."""
        return self.parse_receipt(atomic.load_record(self.done_path(shard_id)), shard_id)

    def has_files(self, receipt: Receipt) -> bool:
        """Tell whether both files are there with the receipt's sizes."""
        try:
            sizes = [self.data_path(name).stat().st_size for name in (receipt.tar, receipt.manifest)]
        except OSError:
            return False
        return sizes == [receipt.tar_bytes, receipt.manifest_bytes]

    def complete(self, shard_id: int) -> Receipt | None:
        """Return the receipt of a shard that is complete, else None."""
        receipt = self.receipt(shard_id)
        return receipt if receipt is not None and self.has_files(receipt) else None

    def todo(self) -> list[ShardPlan]:
        """Return the planned shards that are not complete."""
        return [shard for shard in self.plan if self.complete(shard.shard_id) is None]

    # ---- commit

    def commit(self, shard_id: int, samples: Sequence[Sample]) -> Receipt:
        """Commit a shard whole, durably, at most once.

        Args:
            shard_id: Its number in the plan.
            samples: Exactly the planned samples in the plan's order. A sample whose ``row["status"]`` is not "ok" has
                no members.

        Returns:
            The receipt that is on disk; if another process was first, the receipt of its shard.

        Raises:
            DatasetError: The samples are not what plan and schema ask for; or the file system failed.
            NoSpaceError: The disk is full; nothing of this shard is left.
        """
        self._check_samples(shard_id, samples)
        with atomic.readable_errors(self.path):
            receipt = self._write(shard_id, samples)
            data = atomic.dump_record(receipt.to_json())
            for _ in range(4):
                if atomic.create_once(self.done_path(shard_id), data, tmp=self._tmp, point="done"):
                    return receipt
                if (winner := self.complete(shard_id)) is not None:
                    return winner
                verify.move_done(self, shard_id)
        raise DatasetError("cannot be committed", where=str(self.done_path(shard_id)), do="check the file system")

    def _write(self, shard_id: int, samples: Sequence[Sample]) -> Receipt:
        """Put both files of a shard in place; they are garbage until a done file names them."""
        token = secrets.token_hex(8)
        tar, manifest = (self._tmp / f"{shard_id:06d}.{token}.{x}" for x in ("tar", "parquet"))
        stem = f"{self.stage}-{shard_id:06d}"
        try:
            atomic.crash("shard.start")
            size, sha256, members = write_tar(tar, samples)
            tar_name = f"{stem}-{sha256[:12]}.tar"
            data = rows_to_bytes(make_rows(self.stage, self.config_hash, shard_id, tar_name, samples, members))
            manifest_sha256 = hashlib.sha256(data).hexdigest()
            manifest_name = f"{stem}-{manifest_sha256[:12]}.parquet"
            with manifest.open("xb") as f:
                f.write(data)
                f.flush()
                atomic.crash("manifest.written")
                os.fsync(f.fileno())
            atomic.crash("manifest.synced")
            folder = self.data_path(tar_name).parent
            atomic.make_dir(folder)
            tar.replace(folder / tar_name)
            atomic.crash("tar.replaced")
            manifest.replace(folder / manifest_name)
            atomic.crash("manifest.replaced")
            atomic.sync_dir(folder)
            atomic.crash("data.durable")
        except BaseException:
            for path in (tar, manifest):
                with suppress(OSError):
                    path.unlink()
            raise
        counts = Counter(str(sample.row.get("status") or Status.OK) for sample in samples)
        return Receipt(
            shard_id,
            self.plan_sha256,
            self.config_hash,
            tar_name,
            size,
            sha256,
            manifest_name,
            len(data),
            manifest_sha256,
            dict(counts),
            f"{socket.gethostname()}-{os.getpid()}-{token}",
        )

    def _check_samples(self, shard_id: int, samples: Sequence[Sample]) -> None:
        where = f"{self.path}: shard {shard_id}"
        if not 0 <= shard_id < len(self.plan):
            raise DatasetError("not in the plan", where=where, expected=f"0 to {len(self.plan) - 1}")
        if self._version != SCHEMA_VERSION:
            raise DatasetError(f"format version {self._version} is only read", where=where, do="make a new dataset")
        found, planned = tuple(s.key for s in samples), self.plan[shard_id].keys
        if found != planned:
            raise DatasetError(
                f"samples {list(found)[:3]}...", where=where, expected=f"{list(planned)[:3]}... in order"
            )
        for sample in samples:
            status = str(sample.row.get("status") or Status.OK)
            if status not in set(Status):
                raise DatasetError(
                    f"status {status!r}", where=sample.key, expected=f"one of {[str(s) for s in Status]}"
                )
            wanted = sorted(STAGES[self.stage].members) if status == Status.OK else []
            if sorted(sample.members) != wanted:
                raise DatasetError(
                    f"members {sorted(sample.members)} of a sample that is {status}",
                    where=f"{where}, {sample.key}",
                    expected=f"{wanted}",
                )
            for suffix, data in sample.members.items():
                try:
                    check_member(self.stage, suffix, data)
                except DatasetError as err:
                    raise DatasetError(str(err), where=f"{where}, {sample.key}.{suffix}") from err

    # ---- seal, verify, read

    def load_seal(self) -> dict[str, Any] | None:
        """Return the seal, or None if there is none (DatasetError if it is damaged or of another plan)."""
        if not self.seal_path.exists():
            return None
        body = atomic.load_record(self.seal_path)
        if body is None or body.get("seal_sha256") != atomic.digest([self.plan_sha256, body.get("shards")]):
            raise DatasetError(
                "damaged, or of another plan",
                where=str(self.seal_path),
                do=f"run `cast-engine verify --quarantine {self.path}`, then `cast-engine seal {self.path}`",
            )
        return body

    @property
    def sealed(self) -> bool:
        """Whether there is a seal (DatasetError if it is damaged)."""
        return self.load_seal() is not None

    @property
    def seal_sha256(self) -> str:
        """The hash of the sealed content (DatasetError if the dataset is not sealed)."""
        seal = self.load_seal()
        if seal is None:
            raise DatasetError("not sealed", where=str(self.path), do="run its stage to the end")
        return str(seal["seal_sha256"])

    def seal(self) -> str:
        """Verify everything and declare the dataset finished; a second call only returns the hash again.

        Returns:
            ``seal_sha256``: equal plans and equal files give equal seals.

        Raises:
            DatasetError: A shard is missing or damaged.
        """
        if (seal := self.load_seal()) is not None:
            return str(seal["seal_sha256"])
        if todo := self.todo():
            raise DatasetError(
                f"{len(todo)} of {len(self.plan)} shards are missing, the first is {todo[0].shard_id}",
                where=str(self.path),
                do="run its stage again",
            )
        tables, shards, counts, size = [], [], Counter[str](), 0
        for plan in self.plan:
            receipt = self.complete(plan.shard_id)
            assert receipt is not None, "a complete shard stays complete"
            tables.append(verify.check_shard_cached(self, plan, receipt))
            shards.append([plan.shard_id, receipt.tar_sha256, receipt.manifest_sha256])
            counts.update(receipt.counts)
            size += receipt.tar_bytes + receipt.manifest_bytes
        index = rows_to_bytes(pa.concat_tables(tables))
        atomic.write_file(self.index_path, index, tmp=self._tmp, point="index")
        body: dict[str, Any] = {"stage": self.stage, "plan_sha256": self.plan_sha256, "config_hash": self.config_hash}
        body |= {"shards": shards, "counts": dict(counts), "bytes": size}
        body |= {"index_bytes": len(index), "index_sha256": hashlib.sha256(index).hexdigest()}
        body |= {"seal_sha256": atomic.digest([self.plan_sha256, shards])}
        atomic.create_once(self.seal_path, atomic.dump_record(body), tmp=self._tmp, point="seal")
        self.gc()
        return self.seal_sha256

    def verify(self, *, quarantine: bool = False) -> verify.VerifyReport:
        """Check every committed shard in full, and the seal.

        Args:
            quarantine: Move damaged shards (and the seal, which no longer holds) to ``quarantine/``, so that running
                the stage again makes them anew.
        """
        return verify.verify(self, quarantine=quarantine)

    def status(self) -> StatusCounts:
        """Return how far the dataset is, without reading data."""
        done = [r for r in (self.complete(s.shard_id) for s in self.plan) if r is not None]
        counts: Counter[str] = Counter()
        for receipt in done:
            counts.update(receipt.counts)
        size = sum(r.tar_bytes + r.manifest_bytes for r in done)
        return StatusCounts(len(done), len(self.plan), dict(counts), size, self.sealed)

    def empty_rows(self) -> pa.Table:
        """Return a manifest without rows."""
        return manifest_schema(self.stage, self.config_hash).empty_table()

    def rows(self) -> pa.Table:
        """Return the manifest rows of the committed shards in plan order, their hashes checked."""
        if (seal := self.load_seal()) is not None:
            if hash_file(self.index_path, seal["index_bytes"]) != seal["index_sha256"]:
                raise DatasetError(
                    "sha256 differs from the seal's",
                    where=str(self.index_path),
                    do=f"run `cast-engine verify --quarantine {self.path}`, then `cast-engine seal {self.path}`",
                )
            return rows_from_bytes(self.index_path.read_bytes(), self.stage, self.config_hash)
        receipts = [r for r in (self.complete(s.shard_id) for s in self.plan) if r is not None]
        tables = [verify.read_manifest(self, receipt) for receipt in receipts]
        return pa.concat_tables(tables) if tables else self.empty_rows()

    def reader(self, *, allow_unsealed: bool = False) -> Reader:
        """Verify all hashes (once per process while files stay as they are) and return a reader.

        Args:
            allow_unsealed: Read the complete shards of a dataset that is not sealed.

        Raises:
            DatasetError: Not sealed; or a shard is damaged, named with what to run.
        """
        return Reader(self, allow_unsealed=allow_unsealed)

    # ---- relatives, rubbish

    def as_parent(self, child: str | os.PathLike[str]) -> ParentRef:
        """Return the reference that a dataset at ``child`` keeps of this one, which must be sealed."""
        here, there = self.path.resolve(), Path(child).resolve()
        path = os.path.relpath(here, there) if here.anchor == there.anchor else str(here)
        return ParentRef(self.stage, Path(path).as_posix(), self.seal_sha256)

    def parent(self, stage: str) -> Dataset:
        """Open the parent of this stage; its seal must be the one that this dataset was made from."""
        for ref in self.parents:
            if ref.stage == stage:
                parent = Dataset.open(self.path / ref.path)
                if parent.seal_sha256 != ref.seal_sha256:
                    raise DatasetError(
                        f"sealed as {parent.seal_sha256[:12]}",
                        where=str(parent.path),
                        expected=f"{ref.seal_sha256[:12]}, from which {self.path} was made",
                        do="make it again from the new parent",
                    )
                return parent
        raise DatasetError(f"no parent of stage {stage}", where=str(self.path))

    def gc(self, *, older_than_s: float = LEASE_S) -> int:
        """Remove unfinished files, and data files that no done file names, when older than a lease; return how many.

        A commit that is under way in another process is younger than any sensible lease.
        """
        named = {n for s in self.plan if (r := self.receipt(s.shard_id)) is not None for n in (r.tar, r.manifest)}
        before, removed = time.time() - older_than_s, 0
        for path in (*self._tmp.iterdir(), *(self.path / "data").glob("*/*")):
            with suppress(OSError):
                if path.name not in named and path.lstat().st_mtime < before:
                    path.unlink()
                    removed += 1
        return removed


def _plan_sha256(body: Mapping[str, Any]) -> str:
    parents = [[ref["stage"], ref["seal_sha256"]] for ref in body["parents"]]
    return atomic.digest([body["schema_version"], body["stage"], body["config"], parents, body["shards"]])


def _plan_body(
    stage: str,
    config: Mapping[str, Any],
    shards: Sequence[Sequence[str]],
    parents: Sequence[ParentRef],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    if stage not in STAGES:
        raise DatasetError(f"stage {stage!r}", expected=f"one of {sorted(STAGES)}")
    keys = [check_key(key) for shard in shards for key in shard]
    if not keys or not all(shards):
        raise DatasetError("a plan with nothing to make, or an empty shard", where=stage)
    if len(set(keys)) != len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise DatasetError(f"key {twice} is planned twice", where=stage)
    body: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "stage": stage, "config": dict(config)}
    body |= {"parents": [asdict(p) for p in parents], "shards": [list(s) for s in shards], "extra": dict(extra)}
    body = json.loads(atomic.canonical(body))  # what a reader will see: tuples become lists
    return {**body, "plan_sha256": _plan_sha256(body)}
