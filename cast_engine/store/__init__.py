"""Datasets on disk: planned first, committed shard by shard, sealed when whole, verified before they are read."""

from cast_engine.store.atomic import create_once, write_file
from cast_engine.store.codec import (
    decode_json,
    decode_png,
    decode_tensors,
    encode_json,
    encode_png,
    encode_tensors,
)
from cast_engine.store.dataset import Dataset, StatusCounts
from cast_engine.store.lock import hold, try_lock
from cast_engine.store.plan import ParentRef, ShardPlan
from cast_engine.store.reader import Reader
from cast_engine.store.shard import Receipt, Sample, sample_sha256
from cast_engine.store.verify import Damage, VerifyReport

__all__ = [
    "Damage",
    "Dataset",
    "ParentRef",
    "Reader",
    "Receipt",
    "Sample",
    "ShardPlan",
    "StatusCounts",
    "VerifyReport",
    "create_once",
    "decode_json",
    "decode_png",
    "decode_tensors",
    "encode_json",
    "encode_png",
    "encode_tensors",
    "hold",
    "sample_sha256",
    "try_lock",
    "write_file",
]
