"""The manifest of a shard: rows to Parquet and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cast_engine.errors import DatasetError
from cast_engine.store.shard import Member, Sample, check_version, sample_sha256
from schemas.manifest import CONFIG_KEY, STAGE_KEY, STORE_COLUMNS, VERSION_KEY, manifest_schema
from schemas.records import SCHEMA_VERSION, Status

MANIFEST_LIMIT = 1 << 30
"""Largest manifest, bytes, also when decompressed."""


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _first_line(err: Exception) -> str:
    return (str(err).splitlines() or [type(err).__name__])[0]


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
        raise DatasetError(
            f"a manifest value of the wrong type: {_first_line(err)}", where=f"shard {shard_id}"
        ) from err


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
        tags = found.metadata or {}
        check_version(int(tags.get(VERSION_KEY, b"0")))
        if any(tags.get(name) != schema.metadata[name] for name in (STAGE_KEY, CONFIG_KEY)):
            raise DatasetError("a manifest of another stage or config")
        size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        if size > MANIFEST_LIMIT or meta.num_columns > 4 * len(schema):
            raise DatasetError(f"a manifest of {size} bytes and {meta.num_columns} columns", expected="a smaller one")
        table = file.read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as err:
        raise DatasetError(f"not a manifest: {_first_line(err)}") from err
    for name, column in zip(schema.names, schema, strict=True):
        if name not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table), column.type))
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as err:
        raise DatasetError(f"a manifest with columns of other types: {_first_line(err)}") from err
