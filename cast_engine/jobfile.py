"""Read a job: YAML plus ``--set key=value``, or a run folder's own, checked with the dotted key named."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from cast_engine.errors import DatasetError, UserError
from schemas.job import JobConfig
from schemas.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from omegaconf import DictConfig

REMEDY = "restore it, or start another run"


def load_job(path: Path | None, overrides: Sequence[str] = (), *, base: JobConfig | None = None) -> JobConfig:
    """Read a job.

    Args:
        path: The YAML file, or ``None`` for the defaults of the schema.
        overrides: ``key.path=value`` items; the value is read as YAML, later ones win.
        base: What to start from instead of a file.

    Returns:
        The checked job.

    Raises:
        UserError: The file cannot be read, a key is unknown, or a value is not allowed. The message names the file or
            the override, the dotted key, and for an unknown key the nearest one that exists.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        start = _read_yaml(path) if base is None else OmegaConf.create(base.model_dump(mode="json"))
        merged = OmegaConf.merge(start, *(_override(item) for item in overrides))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(str(error).splitlines()[0], where=_name(path)) from error
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        raise _explain(error, path, overrides) from error


def read_run(path: Path) -> JobConfig:
    """Read the job of a run folder.

    Raises:
        UserError: no run folder, or one of another schema version.
    """
    try:
        body = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            "no run.json", where=str(path.parent), expected="a run folder", do="start it with a job file (--config)"
        ) from None
    except json.JSONDecodeError as error:
        raise DatasetError(f"not JSON ({error.msg})", where=str(path), do=REMEDY) from error
    if not isinstance(body, dict):
        raise DatasetError("not a JSON object", where=str(path), do=REMEDY)
    if body.get("schema_version") not in {SCHEMA_VERSION, SCHEMA_VERSION - 1}:
        raise DatasetError(
            f"schema version {body.get('schema_version')}",
            where=str(path),
            expected=f"{SCHEMA_VERSION}",
            do="use the release that wrote it",
        )
    try:
        return JobConfig.model_validate(body.get("config"))
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(str(part) for part in found["loc"]) or "config"
        raise DatasetError(f"{key}: {found['msg']}", where=str(path), do=REMEDY) from error


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two configs differ, with both values."""
    out: dict[str, tuple[Any, Any]] = {}
    # what only one side has goes last: it depends on a field that both have, such as a judge without a model
    for key in sorted(old.keys() | new.keys(), key=lambda k: (k not in old or k not in new, k)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            out[prefix + key] = (a, b)
    return out


def overrides_between(base: JobConfig, job: JobConfig) -> list[str]:
    """Return the ``key.path=value`` items that make one job of the other, for a command that starts from the base."""
    old, new = (dict(_leaves(j.model_dump(mode="json"))) for j in (base, job))
    return [f"{key}={json.dumps(new[key])}" for key in new if new[key] != old.get(key)]


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def valid_keys(model: type[BaseModel] = JobConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from valid_keys(section, f"{prefix}{name}.")


def _name(path: Path | None) -> str:
    return "job" if path is None else str(path)


def _read_yaml(path: Path | None) -> DictConfig:
    import yaml
    from omegaconf import DictConfig, OmegaConf

    if path is None:
        return OmegaConf.create({})
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), do="give the path of a job file (see jobs/)") from None
    except OSError as error:
        raise UserError(error.strerror or type(error).__name__, where=str(path)) from error
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} is not UTF-8", where=str(path), expected="a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(getattr(error, "problem", None) or "not YAML", where=where, expected="a YAML file") from error
    if not isinstance(loaded, DictConfig):
        raise UserError("the file holds a list", where=str(path), expected="sections such as `train:`")
    return loaded


def _override(item: str) -> DictConfig:
    import yaml
    from omegaconf import OmegaConf

    key, equals, value = item.partition("=")
    if not equals or not key.strip() or any(not part for part in key.strip().split(".")):
        raise UserError(f"{item!r}", where="--set", expected="key.path=value, such as train.learning_rate=1e-4")
    try:
        return OmegaConf.from_dotlist([f"{key.strip()}={value}"])
    except yaml.YAMLError as error:
        raise UserError(f"{value!r} is not YAML", where=f"--set {key}", do="quote the value") from error


def _explain(error: ValidationError, path: Path | None, overrides: Sequence[str]) -> UserError:
    """Turn the first validation error into one line (unknown keys first: they explain the rest)."""
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    key = ".".join(str(part) for part in first["loc"])
    source = next(
        (f"--set {o}" for o in reversed(overrides) if _touches(o.partition("=")[0].strip(), key)), _name(path)
    )
    if first["type"] == "extra_forbidden":
        return UserError(f"unknown key {key}", where=source, expected=_nearest(key))
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not key:
        return UserError(message, where=source)
    found = first["input"]
    shown = "" if isinstance(found, dict) else f" = {found!r}"
    return UserError(f"{key}{shown}: {message}", where=source)


def _touches(override: str, key: str) -> bool:
    """Whether an override's key is the one in question, or above or below it."""
    return bool(key) and (override == key or override.startswith(f"{key}.") or key.startswith(f"{override}."))


def _nearest(key: str) -> str:
    keys = list(valid_keys())
    section, _, last = key.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == section]
    same_name = [k for k in keys if k.rpartition(".")[2] == last]
    names = [k.rpartition(".")[2] for k in siblings]
    close = [siblings[names.index(name)] for name in difflib.get_close_matches(last, names, n=1, cutoff=0.6)]
    close = close or same_name
    if not close and not siblings:
        close = difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    if close:
        return close[0]
    return "one of " + ", ".join(siblings) if siblings else "one of " + ", ".join(k for k in keys if "." not in k)
