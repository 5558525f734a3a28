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
from cast_engine.store import atomic
from cast_engine.store.atomic import at, crash
from cast_engine.store.plan import ParentRef, Plan, ShardPlan
from cast_engine.store.reader import Reader
from cast_engine.store.rows import make_rows, rows_from_bytes, rows_to_bytes
from cast_engine.store.shard import Receipt, Sample, check_samples
from cast_engine.store.tar import read_checked, write_tar
from cast_engine.store.verify import VerifyReport, check_shard_once, move_shard, read_manifest, verify
from schemas.manifest import manifest_schema
from schemas.records import SCHEMA_VERSION

__all__ = ["Dataset", "ParentRef", "ShardPlan", "StatusCounts"]

LEASE_S = 86400.0
"""Age after which a file that nothing refers to belongs to nobody any more."""


@dataclass(frozen=True)
class StatusCounts:
    """How far a dataset is."""

    shards_done: int
    shards_planned: int
    samples: dict[str, int]  # by status, of the committed shards
    bytes: int
    sealed: bool

    def __str__(self) -> str:
        samples = ", ".join(f"{count} {status}" for status, count in sorted(self.samples.items())) or "none"
        seal = "sealed" if self.sealed else "not sealed"
        return f"{self.shards_done} of {self.shards_planned} shards, samples: {samples}, {self.bytes:,} bytes, {seal}"


class Dataset:
    """See the module's description. Made by :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.stage, self.config, self.config_hash = path, plan.stage, plan.config, plan.config_hash
        self.plan, self.plan_sha256, self.parents, self.extra = plan.shards, plan.sha256, plan.parents, plan.extra
        self._version = plan.schema_version
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
            DatasetError: The folder holds a dataset of another config, plan or parents; or the plan is not one.
        """
        path = Path(path)
        with at(path):
            asked = Plan.make(stage, config, shards, parents, extra)
            atomic.make_dir(path)
            for name in ("tmp", "data", "done"):
                (path / name).mkdir(exist_ok=True)
            crash("plan.folders")
            if (path / "plan.json").exists():
                atomic.sync_dir(path)
            else:
                data = atomic.dump_record(asked.to_json())
                atomic.create_once(path / "plan.json", data, tmp=path / "tmp", point="plan")
        plan = Plan.load(path / "plan.json")
        if plan.sha256 != asked.sha256:
            raise DatasetError(
                "made with other settings: " + ", ".join(plan.differences(asked)[:8]),
                where=str(path),
                do="use another output folder, or the settings it was made with",
            )
        return Dataset(path, plan)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Dataset:
        """Open a dataset.

        Raises:
            DatasetError: There is none, its plan is damaged, or its version is not read.
        """
        return Dataset(Path(path), Plan.load(Path(path) / "plan.json"))

    # Where things are, and whether they hold.

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

    def complete(self, shard_id: int) -> Receipt | None:
        """Return the receipt of a shard whose two files are there with its sizes, else None."""
        if (receipt := self.receipt(shard_id)) is None:
            return None
        try:
            sizes = [self.data_path(name).lstat().st_size for name in (receipt.tar, receipt.manifest)]
        except OSError:
            return None
        return receipt if sizes == [receipt.tar_bytes, receipt.manifest_bytes] else None

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the complete shards in plan order."""
        return [r for r in (self.complete(shard.shard_id) for shard in self.plan) if r is not None]

    def todo(self) -> list[ShardPlan]:
        """Return the planned shards that are not complete."""
        return [shard for shard in self.plan if self.complete(shard.shard_id) is None]

    # Commit.

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
        where = f"{self.path}: shard {shard_id}"
        with at(where):
            if not 0 <= shard_id < len(self.plan):
                raise DatasetError("not in the plan", expected=f"0 to {len(self.plan) - 1}")
            if self._version != SCHEMA_VERSION:
                raise DatasetError(f"format version {self._version} is only read", do="make a new dataset")
            counts = check_samples(self.stage, self.plan[shard_id].keys, samples)
            receipt = self._write(shard_id, samples, counts)
            data = atomic.dump_record(asdict(receipt))
            for _ in range(4):
                if atomic.create_once(self.done_path(shard_id), data, tmp=self._tmp, point="done"):
                    return receipt
                if (winner := self.complete(shard_id)) is not None:
                    return winner
                move_shard(self, shard_id, self.receipt(shard_id), data=False)  # ours may carry the same names
            raise DatasetError("the done file cannot be replaced", do="run the same command again")

    def _write(self, shard_id: int, samples: Sequence[Sample], counts: dict[str, int]) -> Receipt:
        """Put both files of a shard in place; they are garbage until a done file names them."""
        token, stem = secrets.token_hex(8), f"{self.stage}-{shard_id:06d}"
        tar, manifest = self._tmp / f"{stem}.{token}.tar", self._tmp / f"{stem}.{token}.parquet"
        try:
            crash("shard.start")
            size, sha256, members = write_tar(tar, samples)
            tar_name = f"{stem}-{sha256[:12]}.tar"
            data = rows_to_bytes(make_rows(self.stage, self.config_hash, shard_id, tar_name, samples, members))
            atomic.write_new(manifest, data, "manifest")
            manifest_sha256 = hashlib.sha256(data).hexdigest()
            manifest_name = f"{stem}-{manifest_sha256[:12]}.parquet"
            folder = self.data_path(tar_name).parent
            folder.mkdir(exist_ok=True)
            crash("data.folder")
            tar.replace(folder / tar_name)
            crash("tar.replaced")
            manifest.replace(folder / manifest_name)
            crash("manifest.replaced")
            atomic.sync_dir(folder)
            atomic.sync_dir(folder.parent)
            crash("data.durable")
        finally:
            for path in (tar, manifest):
                with suppress(OSError):
                    path.unlink()
        return Receipt(
            shard_id=shard_id,
            plan_sha256=self.plan_sha256,
            config_hash=self.config_hash,
            tar=tar_name,
            tar_bytes=size,
            tar_sha256=sha256,
            manifest=manifest_name,
            manifest_bytes=len(data),
            manifest_sha256=manifest_sha256,
            counts=counts,
            attempt=f"{socket.gethostname()}-{os.getpid()}-{token}",
        )

    # Seal, verify, read.

    def load_seal(self) -> dict[str, Any] | None:
        """Return the seal, or None if there is none (DatasetError if it is damaged or of another plan)."""
        if not self.seal_path.exists():
            return None
        body = atomic.load_record(self.seal_path)
        if body is None or body.get("seal_sha256") != atomic.digest([self.plan_sha256, body.get("shards")]):
            raise DatasetError("damaged, or of another plan", where=str(self.seal_path), do=self._remedy)
        return body

    @property
    def _remedy(self) -> str:
        return f"run `cast-engine verify --quarantine {self.path}`, then `cast-engine seal {self.path}`"

    @property
    def sealed(self) -> bool:
        """Whether there is a seal (DatasetError if it is damaged)."""
        return self.load_seal() is not None

    @property
    def seal_sha256(self) -> str:
        """The hash of the sealed content (DatasetError if the dataset is not sealed)."""
        if (seal := self.load_seal()) is None:
            raise DatasetError("not sealed", where=str(self.path), do="run its stage to the end")
        return str(seal["seal_sha256"])

    def seal(self) -> str:
        """Verify everything and declare the dataset finished; a second call only returns the hash again.

        Returns:
            ``seal_sha256``: equal plans and equal files give equal seals.

        Raises:
            DatasetError: A shard is missing or damaged.
        """
        if self.sealed:
            return self.seal_sha256
        receipts = self.receipts()
        if len(receipts) < len(self.plan):
            missing = self.todo()
            raise DatasetError(
                f"{len(missing)} of {len(self.plan)} shards are missing, the first is {missing[0].shard_id}",
                where=str(self.path),
                do="run its stage again",
            )
        tables = [check_shard_once(self, shard, r) for shard, r in zip(self.plan, receipts, strict=True)]
        index = rows_to_bytes(pa.concat_tables(tables))
        shards = [[r.shard_id, r.tar_sha256, r.manifest_sha256] for r in receipts]
        body: dict[str, Any] = {"stage": self.stage, "plan_sha256": self.plan_sha256, "config_hash": self.config_hash}
        body |= {"shards": shards, "seal_sha256": atomic.digest([self.plan_sha256, shards])}
        body |= {"index_bytes": len(index), "index_sha256": hashlib.sha256(index).hexdigest()}
        atomic.write_file(self.index_path, index, tmp=self._tmp, point="index")
        atomic.create_once(self.seal_path, atomic.dump_record(body), tmp=self._tmp, point="seal")
        self.gc()
        return self.seal_sha256

    def verify(self, *, quarantine: bool = False) -> VerifyReport:
        """Check every committed shard in full, and the seal.

        Args:
            quarantine: Move damaged shards (and the seal, which no longer holds) to ``quarantine/``, so that running
                the stage again makes them anew.
        """
        return verify(self, quarantine=quarantine)

    def status(self) -> StatusCounts:
        """Return how far the dataset is, without reading data."""
        done, counts = self.receipts(), Counter[str]()
        for receipt in done:
            counts.update(receipt.counts)
        size = sum(r.tar_bytes + r.manifest_bytes for r in done)
        return StatusCounts(len(done), len(self.plan), dict(counts), size, self.sealed)

    def empty_rows(self) -> pa.Table:
        """Return a manifest without rows."""
        return manifest_schema(self.stage, self.config_hash).empty_table()

    def rows(self) -> pa.Table:
        """Return the manifest rows of the complete shards in plan order; the manifests' hashes are checked."""
        if (seal := self.load_seal()) is not None:
            try:
                data = read_checked(self.index_path, seal["index_bytes"], seal["index_sha256"], keep=True)
            except DatasetError as err:
                raise DatasetError(err.found, where=err.where, expected=err.expected, do=self._remedy) from err
            return rows_from_bytes(data, self.stage, self.config_hash)
        return pa.concat_tables([self.empty_rows(), *(read_manifest(self, receipt) for receipt in self.receipts())])

    def reader(self, *, allow_unsealed: bool = False) -> Reader:
        """Verify all hashes (once per process while files stay as they are) and return a reader.

        Args:
            allow_unsealed: Read the complete shards of a dataset that is not sealed.

        Raises:
            DatasetError: Not sealed; or a shard is damaged, named with what to run.
        """
        return Reader(self, allow_unsealed=allow_unsealed)

    # Relatives, rubbish.

    def as_parent(self, child: str | os.PathLike[str]) -> ParentRef:
        """Return the reference that a dataset at ``child`` keeps of this one, which must be sealed."""
        path = os.path.relpath(self.path.resolve(), Path(child).resolve())
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
                        do="make the younger one again",
                    )
                return parent
        raise DatasetError(f"no parent of stage {stage}", where=str(self.path))

    def gc(self, *, older_than_s: float = LEASE_S) -> int:
        """Remove unfinished files, and data files that no done file names, when older than a lease; return how many.

        A commit that is under way in another process is younger than any sensible lease.
        """
        named = {n for s in self.plan if (r := self.receipt(s.shard_id)) is not None for n in (r.tar, r.manifest)}
        before, removed = time.time() - older_than_s, 0
        for path in (*self._tmp.glob("*"), *(self.path / "data").glob("*/*")):
            with suppress(OSError):
                if path.name not in named and path.lstat().st_mtime < before:
                    path.unlink()
                    removed += 1
        return removed
