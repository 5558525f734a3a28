"""The manifest: one Parquet row per planned sample, also for those that failed.

Readers accept ``SCHEMA_VERSION`` and the one before. Within a version, columns may only be added.
"""

from __future__ import annotations

import pyarrow as pa

from schemas.records import SCHEMA_VERSION

VERSION_KEY, STAGE_KEY, CONFIG_KEY = b"cast.schema_version", b"cast.stage", b"cast.config_hash"
"""Key-value metadata of every manifest file."""

MEMBER = pa.struct(
    [
        ("name", pa.string()),  # file name inside the tar: "<key>.<suffix>"
        ("offset", pa.int64()),  # of the first payload byte
        ("size", pa.int64()),
        ("crc32", pa.uint32()),
    ]
)

COMMON = (
    ("schema_version", pa.int32()),
    ("stage", pa.string()),
    ("shard_id", pa.int32()),
    ("shard_file", pa.string()),  # name of the tar
    ("key", pa.string()),
    ("prompt_id", pa.string()),
    ("round", pa.int32()),
    ("status", pa.string()),  # schemas.records.Status
    ("error_class", pa.string()),
    ("error_msg", pa.string()),
    ("parent_key", pa.string()),
    ("sample_sha256", pa.string()),  # see cast_engine.store.shard.sample_sha256
    ("bytes", pa.int64()),  # sum of the member sizes
    ("members", pa.list_(MEMBER)),
)
STORE_COLUMNS = frozenset(
    {"schema_version", "stage", "shard_id", "shard_file", "key", "sample_sha256", "bytes", "members"}
)
"""Filled in by the store; a stage gives the others."""

_ATOMS = (
    ("atom_kinds", pa.list_(pa.string())),
    ("atom_scores", pa.list_(pa.float32())),  # NaN = missing
    ("reward", pa.float64()),  # mean of the scores that are not missing
)

STAGE_COLUMNS = {
    "prompts": (("prompt", pa.string()),),
    "csg": (("source", pa.string()), ("atom_kinds", pa.list_(pa.string()))),
    "rollout": (
        ("member", pa.int32()),
        ("seed", pa.int64()),
        ("guidance", pa.float64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("num_steps", pa.int32()),
        ("window_start", pa.int32()),
        ("window_length", pa.int32()),
        ("adapter_sha256", pa.string()),
        ("model_sha256", pa.string()),
        ("embed_sha256", pa.string()),
        ("logp_old_sum", pa.float64()),  # over window steps and positions
    ),
    "score": (("judge", pa.string()), ("model_sha256", pa.string()), *_ATOMS),
    "advantages": (
        ("credit", pa.string()),
        ("reward", pa.float64()),
        ("weight_mean", pa.float64()),
        ("weight_std", pa.float64()),
        ("advantage", pa.list_(pa.float32())),  # per atom
        ("mass", pa.float64()),  # sum over atoms of w|A|; null for rules without A per atom
        ("low_std_mass", pa.float64()),  # ... of atoms with a std below min_atom_std
        ("group_std", pa.float64()),  # std in the group of the mean of W, before a weight clip
        ("above_clip_share", pa.float64()),  # positions of the group that weight_clip (else advantage_clip) would touch
        ("weight_drawn", pa.float64()),  # mean of W on what is drawn; null where no mask is known
        ("weight_background", pa.float64()),
        ("drawn_share", pa.float64()),
    ),
    "evaluate": (
        ("member", pa.int32()),
        ("seed", pa.int64()),
        ("guidance", pa.float64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("num_steps", pa.int32()),
        ("adapter_sha256", pa.string()),
        ("model_sha256", pa.string()),
        ("judge", pa.string()),
        *_ATOMS,
        ("counted", pa.list_(pa.int32())),  # null for atoms that are not counts
    ),
}


def manifest_schema(stage: str, config_hash: str = "") -> pa.Schema:
    """Return the manifest schema of a stage (KeyError for an unknown one), with its key-value metadata."""
    metadata = {VERSION_KEY: str(SCHEMA_VERSION), STAGE_KEY: stage, CONFIG_KEY: config_hash}
    return pa.schema([pa.field(n, t) for n, t in (*COMMON, *STAGE_COLUMNS[stage])], metadata=metadata)
