"""The plan of a dataset: which keys, in which shards, with which config, from which parents. Fixed before any work."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cast_engine.errors import DatasetError
from cast_engine.store.atomic import at, canonical, digest, load_record
from cast_engine.store.shard import check_key, check_version
from schemas.job import config_hash
from schemas.records import SCHEMA_VERSION, STAGES


@dataclass(frozen=True)
class ShardPlan:
    """A shard's number and the keys it is to hold, in order."""

    shard_id: int
    keys: tuple[str, ...]


@dataclass(frozen=True)
class ParentRef:
    """A sealed dataset that this one is made from; ``path`` is relative to this one where possible."""

    stage: str
    path: str
    seal_sha256: str


@dataclass(frozen=True)
class Plan:
    """What is to be made. ``sha256`` covers all but ``extra`` and the parents' paths."""

    schema_version: int
    stage: str
    config: dict[str, Any]
    parents: tuple[ParentRef, ...]
    shards: tuple[ShardPlan, ...]
    extra: dict[str, Any]
    sha256: str
    config_hash: str

    @classmethod
    def make(
        cls,
        stage: str,
        config: Mapping[str, Any],
        shards: Sequence[Sequence[str]],
        parents: Sequence[ParentRef] = (),
        extra: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> Plan:
        """Check and hash a plan.

        Raises:
            DatasetError: Unknown stage, bad or repeated key, nothing to make.
        """
        if stage not in STAGES:
            raise DatasetError(f"stage {stage!r}", expected=f"one of {sorted(STAGES)}")
        counts = Counter(check_key(key) for keys in shards for key in keys)
        if not counts or not all(shards):
            raise DatasetError(f"a plan of stage {stage} with nothing to make, or with an empty shard")
        if (twice := counts.most_common(1)[0])[1] > 1:
            raise DatasetError(f"key {twice[0]} is planned twice")
        version = SCHEMA_VERSION if version is None else version
        settings, more = (json.loads(canonical(dict(x or {}))) for x in (config, extra))  # tuples become lists
        content = [version, stage, settings, [[p.stage, p.seal_sha256] for p in parents], [list(k) for k in shards]]
        numbered = tuple(ShardPlan(number, tuple(keys)) for number, keys in enumerate(shards))
        return cls(version, stage, settings, tuple(parents), numbered, more, digest(content), config_hash(settings))

    def to_json(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        body: dict[str, Any] = {"schema_version": self.schema_version, "stage": self.stage, "config": self.config}
        body |= {"parents": [asdict(p) for p in self.parents], "shards": [list(s.keys) for s in self.shards]}
        return {**body, "extra": self.extra, "plan_sha256": self.sha256}

    @classmethod
    def load(cls, file: Path) -> Plan:
        """Read plan.json.

        Raises:
            DatasetError: Absent, damaged, or of a version that is not read.
        """
        if not file.exists():
            raise DatasetError("not a dataset", where=str(file.parent), expected="a folder with plan.json")
        with at(file):
            body: Any = load_record(file)
            if body is not None:
                check_version(body.get("schema_version"))
            try:
                version, parents = body["schema_version"], [ParentRef(**p) for p in body["parents"]]
                plan = cls.make(body["stage"], body["config"], body["shards"], parents, body["extra"], version)
            except (TypeError, KeyError, ValueError, AttributeError):
                plan = None
            if plan is None or plan.to_json() != body:
                raise DatasetError("damaged", do="move the folder away and make the dataset again")
        return plan

    def differences(self, asked: Plan) -> list[str]:
        """Say in words where another plan differs from this one."""
        here, there = self._flat(), asked._flat()
        pairs = [(name, here.get(name, "absent"), there.get(name, "absent")) for name in sorted({*here, *there})]
        out = [f"{name} was {old!r}, is now {new!r}" for name, old, new in pairs if old != new]
        for old, new in zip(self.shards, asked.shards, strict=False):
            if old != new:
                out.append(f"shard {old.shard_id} was {_brief(old.keys)}, is now {_brief(new.keys)}")
                break
        return out

    def _flat(self) -> dict[str, Any]:
        flat = {"stage": self.stage, "schema_version": self.schema_version, "shards": len(self.shards)}
        flat |= {f"parents.{n}.{p.stage}": p.seal_sha256[:12] for n, p in enumerate(self.parents)}
        return flat | _flatten(self.config, "")


def _brief(keys: tuple[str, ...]) -> str:
    return f"{len(keys)} keys from {keys[0]} to {keys[-1]}"


def _flatten(value: Any, prefix: str) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, sub in value.items() for k, v in _flatten(sub, f"{prefix}.{name}").items()}
    return {prefix.lstrip("."): value} if prefix else {}
