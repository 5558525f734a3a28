"""Samples by key, from verified shards."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cast_engine.errors import DatasetError
from cast_engine.store.codec import decode_json, decode_png, decode_tensors
from cast_engine.store.shard import Sample
from cast_engine.store.verify import check_shard_cached
from schemas.records import STAGES, Status

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from cast_engine.store.dataset import Dataset


class Reader:
    """Reads the samples of a dataset whose shards were verified when it was opened.

    Members are found by the manifest's offsets, never by walking a tar, and their crc32 is checked at each read. No
    file stays open, so a reader may be used in forked or spawned workers.
    """

    def __init__(self, ds: Dataset, *, allow_unsealed: bool = False) -> None:
        self.stage, self.path = STAGES[ds.stage], ds.path
        seal = ds.load_seal()
        if seal is None and not allow_unsealed:
            raise DatasetError(
                "not sealed", where=str(ds.path), do="run its stage to the end, or `cast-engine seal` if it is complete"
            )
        sealed = {i: (t, m) for i, t, m in seal["shards"]} if seal else {}
        remedy = f"run `cast-engine verify --quarantine {ds.path}`, then its stage again"
        tables = []
        self._at: dict[str, Path] = {}
        for plan in ds.plan:
            receipt = ds.complete(plan.shard_id)
            if receipt is None and seal is None:
                continue
            if receipt is None or (seal and sealed.get(plan.shard_id) != (receipt.tar_sha256, receipt.manifest_sha256)):
                raise DatasetError(
                    f"shard {plan.shard_id} is not there as it was sealed", where=str(ds.path), do=remedy
                )
            try:
                tables.append(check_shard_cached(ds, plan, receipt))
            except DatasetError as err:
                raise DatasetError(str(err), do=remedy) from err
            self._at |= dict.fromkeys(plan.keys, ds.data_path(receipt.tar))
        self.rows: pa.Table = pa.concat_tables(tables) if tables else ds.empty_rows()
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in self.rows.to_pylist()}
        self._keys = [key for key, row in self._rows.items() if row["status"] == Status.OK]

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._rows and self._rows[str(key)]["status"] == Status.OK

    def __iter__(self) -> Iterator[Sample]:
        for key in self._keys:
            yield Sample(key, self.read(key), self._rows[key])

    def keys(self) -> list[str]:
        """Return the keys of the samples with status ok, in plan order."""
        return list(self._keys)

    def row(self, key: str) -> dict[str, Any]:
        """Return the manifest row of any planned sample, also a failed one (DatasetError if there is none)."""
        if key not in self._rows:
            raise DatasetError(f"no sample {key}", where=str(self.path))
        return self._rows[key]

    def read(self, key: str) -> dict[str, bytes]:
        """Return all members of a sample, suffix -> bytes.

        Raises:
            DatasetError: The sample has no members, or they changed on disk since the reader was opened.
        """
        row = self.row(key)
        if row["status"] != Status.OK:
            raise DatasetError(f"sample {key} is {row['status']}: {row['error_msg']}", where=str(self.path))
        fd = self._open(self._at[key])
        try:
            return {m["name"].partition(".")[2]: self._pread(fd, key, m) for m in row["members"]}
        finally:
            os.close(fd)

    def tensors(self, key: str) -> dict[str, Tensor]:
        """Return the tensors of a sample, checked against the schema of its stage."""
        suffix, fields = self._suffix(".safetensors"), self.stage.tensors
        assert fields is not None
        with _Where(self._at.get(key, self.path), key):
            return decode_tensors(self._member(key, suffix), fields)

    def meta(self, key: str) -> dict[str, Any]:
        """Return the JSON member of a sample."""
        with _Where(self._at.get(key, self.path), key):
            return decode_json(self._member(key, self._suffix(".json")))

    def image(self, key: str) -> Image.Image:
        """Return the image of a sample (RGB); its size must be the manifest's."""
        from PIL import Image

        with _Where(self._at.get(key, self.path), key):
            pixels = decode_png(self._member(key, self._suffix(".png")))
            row = self._rows[key]
            wanted = (row.get("height"), row.get("width"))
            if None not in wanted and wanted != pixels.shape[:2]:
                raise DatasetError(f"an image of {pixels.shape[:2]}", expected=f"{wanted} (height, width)")
        return Image.fromarray(pixels)

    def _suffix(self, ending: str) -> str:
        for name in self.stage.members:
            if name.endswith(ending):
                return name
        raise DatasetError(f"stage {self.stage.name} has no {ending} member", where=str(self.path))

    def _member(self, key: str, suffix: str) -> bytes:
        row = self.row(key)
        if row["status"] != Status.OK:
            raise DatasetError(f"sample {key} is {row['status']}: {row['error_msg']}", where=str(self.path))
        member = row["members"][self.stage.members.index(suffix)]
        fd = self._open(self._at[key])
        try:
            return self._pread(fd, key, member)
        finally:
            os.close(fd)

    def _open(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as err:
            raise DatasetError(f"{err.strerror}", where=str(path)) from err

    def _pread(self, fd: int, key: str, member: dict[str, Any]) -> bytes:
        parts, at, left = [], member["offset"], member["size"]
        while left and (part := os.pread(fd, left, at)):
            parts.append(part)
            at, left = at + len(part), left - len(part)
        data = b"".join(parts)
        if left or zlib.crc32(data) != member["crc32"]:
            raise DatasetError(
                f"member {member['name']} changed since it was verified",
                where=str(self._at[key]),
                do=f"run `cast-engine verify {self.path}`",
            )
        return data


class _Where:
    """Adds file and key to the errors raised inside."""

    def __init__(self, path: Path, key: str) -> None:
        self._where = f"{path}: {key}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: object) -> None:
        if isinstance(err, DatasetError) and not err.where:
            raise DatasetError(err.found, where=self._where, expected=err.expected, do=err.do) from err
