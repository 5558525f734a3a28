"""A diffusers folder on disk: what it claims to hold, its configs, its defaults and its fingerprint."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cast_engine.errors import UserError
from cast_engine.models.base import ModelDefaults

FULL_HASH_BYTES = 256 * 2**20
"""Weight files up to this size are hashed whole."""
TENSOR_END_BYTES = 64 * 2**10
"""Of a larger file, this much at both ends of every tensor is hashed."""

_TEXT_FILES = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class Component:
    """One entry of ``model_index.json``: a subfolder and the class that reads it."""

    name: str
    folder: Path
    library: str
    class_name: str


@dataclass(frozen=True)
class Checkpoint:
    """A diffusers folder whose ``model_index.json`` has been read and whose components are all there."""

    path: Path
    pipeline: str
    components: dict[str, Component]

    def config(self, component: str) -> dict[str, Any]:
        """Return the ``config.json`` (for schedulers ``scheduler_config.json``) of a component."""
        folder = self.components[component].folder
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return read_json(folder / name)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; UserError when the file is missing, not JSON or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise UserError("no such file", where=str(path), do="give a complete diffusers folder") from exc
    except (OSError, ValueError) as exc:
        raise UserError(f"not readable as JSON ({exc})", where=str(path)) from exc
    if not isinstance(value, dict):
        raise UserError(f"a JSON {type(value).__name__}", where=str(path), expected="an object")
    return value


def pipeline_class(path: Path) -> str:
    """Return the pipeline class that a diffusers folder names; UserError when it is no such folder."""
    if not path.is_dir():
        raise UserError("no such folder", where=str(path), expected="a diffusers folder", do="check model.path")
    if not (path / "model_index.json").is_file():
        raise UserError(
            "no model_index.json in it", where=str(path), expected="a diffusers folder", do="check model.path"
        )
    return str(read_json(path / "model_index.json").get("_class_name", "none"))


def open_checkpoint(path: Path, expected: dict[str, tuple[str, ...]]) -> Checkpoint:
    """Read a diffusers folder.

    Args:
        path: The folder.
        expected: Component name -> class names that are accepted, empty for any.

    Raises:
        UserError: The folder, a component or its weights are missing, or a component has another class.
    """
    pipeline = pipeline_class(path)
    index = read_json(path / "model_index.json")
    components: dict[str, Component] = {}
    for name, classes in expected.items():
        entry = index.get(name)
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(e, str) for e in entry)):
            raise UserError(f"no component {name!r}", where=str(path / "model_index.json"), expected=f"a {pipeline}")
        component = Component(name, path / name, *entry)
        if not component.folder.is_dir():
            raise UserError(f"component {name!r} is missing", where=str(path), expected=f"the folder {name}/")
        found = _class_on_disk(component)
        if classes and found not in classes:
            raise UserError(f"class {found}", where=str(component.folder), expected=" or ".join(classes))
        components[name] = component
    return Checkpoint(path, pipeline, components)


def _class_on_disk(component: Component) -> str:
    """Return the class that the component's own config names, else the one in the index."""
    config = component.folder / "config.json"
    if component.library == "diffusers" and config.is_file():
        return str(read_json(config).get("_class_name", component.class_name))
    return component.class_name


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that ``from_pretrained`` reads from a folder; UserError if any is missing."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        if index.name in {"model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"}:
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
            missing = [n for n in names if not (folder / n).is_file()]
            if missing:
                raise UserError(f"weight file {missing[0]} is missing", where=str(folder), do="complete the download")
            return [folder / n for n in names]
    for name in ("diffusion_pytorch_model.safetensors", "model.safetensors"):
        if (folder / name).is_file():
            return [folder / name]
    raise UserError("no weights in it", where=str(folder), expected="safetensors files")


def defaults(path: Path, stock: ModelDefaults) -> ModelDefaults:
    """Return the stock defaults, changed by what ``cast_model.json`` beside ``model_index.json`` says."""
    file = path / "cast_model.json"
    if not file.is_file():
        return stock
    changes: dict[str, Any] = {}
    for key, value in read_json(file).items():
        if key not in _DEFAULT_KEYS:
            raise UserError(f"unknown key {key!r}", where=str(file), expected=", ".join(_DEFAULT_KEYS))
        name, kind = _DEFAULT_KEYS[key]
        try:
            changes[name] = kind(value)
        except (TypeError, ValueError) as exc:
            raise UserError(f"{key} = {value!r}", where=str(file), expected=str(exc)) from exc
    return replace(stock, **changes)


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError("a whole number of at least 1")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("a number")
    return float(value)


def _layers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(v) is int and v >= 0 for v in value):
        raise TypeError("a list of layer numbers")
    return tuple(value)


_DEFAULT_KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "num_inference_steps": ("num_steps", _positive),
    "height": ("height", _positive),
    "width": ("width", _positive),
    "guidance_scale": ("guidance", _number),
    "max_sequence_length": ("max_sequence_length", _positive),
    "text_encoder_out_layers": ("text_encoder_out_layers", _layers),
}
"""Keys of ``cast_model.json``, which are the arguments of the stock call."""


def fingerprint(folders: Sequence[Path], extra: Iterable[str] = ()) -> str:
    """Return a sha256 that names the contents of component folders, wherever they lie.

    Configs and tokenizer files enter whole, but without the keys that only say which library version wrote them. Weight
    files of up to :data:`FULL_HASH_BYTES` enter whole too. A larger one enters by its size, its safetensors header and
    :data:`TENSOR_END_BYTES` at both ends of every tensor: naming a 64 GB model then costs a fraction of a second and no
    cache file beside the user's weights. Checkpoints that differ in the ends of any tensor differ; damage in the middle
    of a tensor is for a checksum tool to find. Results are kept per process by (path, size, mtime).

    Args:
        folders: Component folders, the order counts and their names too; of a single folder the name does not.
        extra: Further strings that decide the result.
    """
    digest = hashlib.sha256()
    for folder in folders:
        label = folder.name if len(folders) > 1 else ""
        for path in _hashed_files(folder):
            stat = path.stat()
            part = _file_digest(path, stat.st_size, stat.st_mtime_ns)
            digest.update(f"{label}/{path.name}\0{part}\0".encode())
    for text in extra:
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()


def _hashed_files(folder: Path) -> Iterator[Path]:
    yield from sorted(p for p in folder.iterdir() if p.suffix in _TEXT_FILES and not p.name.endswith(".index.json"))
    if folder.name not in {"scheduler", "tokenizer"}:
        yield from weight_files(folder)


@lru_cache(maxsize=4096)
def _file_digest(path: Path, size: int, mtime_ns: int) -> str:
    del mtime_ns  # part of the cache key only
    if path.suffix == ".json":
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            value = None
        if isinstance(value, dict):
            kept = {k: v for k, v in value.items() if k not in _PROVENANCE}
            return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    if size <= FULL_HASH_BYTES or path.suffix != ".safetensors":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return _sampled_digest(path, size)


_PROVENANCE = frozenset({"_diffusers_version", "_name_or_path", "transformers_version", "name_or_path"})


def _sampled_digest(path: Path, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise UserError("damaged safetensors header", where=str(path), do="fetch the file again")
        header = file.read(length)
        digest.update(header)
        start = 8 + length
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            first, last = (start + offset for offset in entry["data_offsets"])
            for begin in (first, max(first, last - TENSOR_END_BYTES)):
                file.seek(begin)
                digest.update(file.read(min(TENSOR_END_BYTES, last - begin)))
    return digest.hexdigest()
