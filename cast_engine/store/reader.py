"""Samples by key, from verified shards."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cast_engine.errors import DatasetError
from cast_engine.store.atomic import at
from cast_engine.store.codec import decode_json, decode_png, decode_tensors
from cast_engine.store.shard import Sample
from cast_engine.store.verify import check_shard_once
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

    rows: pa.Table
    """The manifest rows of all planned samples (of the complete shards, if the dataset is not sealed)."""

    def __init__(self, ds: Dataset, *, allow_unsealed: bool = False) -> None:
        self.stage, self.path = STAGES[ds.stage], ds.path
        seal = ds.load_seal()
        if seal is None and not allow_unsealed:
            raise DatasetError("not sealed", where=str(ds.path), do="run its stage to the end")
        sealed = {shard_id: hashes for shard_id, *hashes in seal["shards"]} if seal else {}
        remedy = f"run `cast-engine verify --quarantine {ds.path}`, then its stage again"
        tables = [ds.empty_rows()]
        self._tar: dict[str, Path] = {}
        for plan in ds.plan:
            receipt = ds.complete(plan.shard_id)
            if receipt is None and seal is None:
                continue
            if receipt is None or (seal and sealed.get(plan.shard_id) != [receipt.tar_sha256, receipt.manifest_sha256]):
                raise DatasetError(
                    f"shard {plan.shard_id} is not there as it was sealed", where=str(ds.path), do=remedy
                )
            try:
                tables.append(check_shard_once(ds, plan, receipt))
            except DatasetError as err:
                raise DatasetError(str(err), do=remedy) from err
            self._tar |= dict.fromkeys(plan.keys, ds.data_path(receipt.tar))
        self.rows = pa.concat_tables(tables)
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in self.rows.to_pylist()}
        self._keys = [key for key, row in self._rows.items() if row["status"] == Status.OK]

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return self._rows.get(str(key), {}).get("status") == Status.OK

    def __iter__(self) -> Iterator[Sample]:
        for key in self._keys:
            yield Sample(key, self.read(key), self._rows[key])

    def keys(self) -> list[str]:
        """Return the keys of the samples with status ok, in plan order."""
        return list(self._keys)

    def row(self, key: str) -> dict[str, Any]:
        """Return the manifest row of any planned sample, also of a failed one (DatasetError if there is none)."""
        if key not in self._rows:
            raise DatasetError(f"no sample {key}", where=str(self.path))
        return self._rows[key]

    def read(self, key: str) -> dict[str, bytes]:
        """Return all members of a sample, suffix -> bytes.

        Raises:
            DatasetError: The sample has no members, or they changed on disk since the reader was opened.
        """
        return dict(zip(self.stage.members, self._read(key, self.stage.members), strict=True))

    def tensors(self, key: str) -> dict[str, Tensor]:
        """Return the tensors of a sample, checked against the schema of its stage."""
        data, fields = self._one(key, ".safetensors"), self.stage.tensors
        assert fields is not None, "a stage with a safetensors member has a schema for it"
        with at(self._where(key)):
            return decode_tensors(data, fields)

    def meta(self, key: str) -> dict[str, Any]:
        """Return the JSON member of a sample."""
        data = self._one(key, ".json")
        with at(self._where(key)):
            return decode_json(data)

    def image(self, key: str) -> Image.Image:
        """Return the image of a sample (RGB); it must have the manifest's height and width."""
        from PIL import Image

        data, row = self._one(key, ".png"), self.row(key)
        with at(self._where(key)):
            return Image.fromarray(decode_png(data, row["height"], row["width"]))

    def _where(self, key: str) -> str:
        return f"{self._tar.get(key, self.path)}: {key}"

    def _one(self, key: str, ending: str) -> bytes:
        for suffix in self.stage.members:
            if suffix.endswith(ending):
                return self._read(key, [suffix])[0]
        raise DatasetError(f"stage {self.stage.name} has no {ending} member", where=str(self.path))

    def _read(self, key: str, suffixes: Sequence[str]) -> list[bytes]:
        row = self.row(key)
        if row["status"] != Status.OK:
            raise DatasetError(f"the sample is {row['status']}: {row['error_msg']}", where=self._where(key))
        places = {m["name"]: m for m in row["members"]}
        with at(self._where(key)):
            fd = os.open(self._tar[key], os.O_RDONLY | os.O_NOFOLLOW)
            try:
                return [_pread(fd, places[f"{key}.{suffix}"]) for suffix in suffixes]
            finally:
                os.close(fd)


def _pread(fd: int, member: dict[str, Any]) -> bytes:
    parts, offset, left = [], member["offset"], member["size"]
    while left and (part := os.pread(fd, left, offset)):
        parts.append(part)
        offset, left = offset + len(part), left - len(part)
    data = b"".join(parts)
    if left or zlib.crc32(data) != member["crc32"]:
        raise DatasetError(f"{member['name']} changed since it was verified", do="run `cast-engine verify`")
    return data
