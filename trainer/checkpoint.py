"""A checkpoint directory: adapter, optimiser moments, state. Safetensors and JSON only, never the base model.

::

    adapter.safetensors    diffusers LoRA format: pipe.load_lora_weights(DIR, weight_name="adapter.safetensors")
    ema.safetensors        the same for the moving average, if train.ema_decay is set
    optimizer.safetensors  exp_avg.<parameter>, exp_avg_sq.<parameter>
    metrics.jsonl          one line per update of the round
    state.json             written last: what it belongs to, sha256 of the other files
    removed.json           only in old rounds: what was removed since, see trainer.retention

It is written beside its place, read again and compared, then renamed. Generators have no state to keep: the order of
images follows from (seed, round, epoch, key), the learning rate from the update counter.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cast_engine.errors import CastError, DatasetError, UserError
from cast_engine.models import lora
from cast_engine.store import atomic
from trainer.metrics import Row, write_rows

ADAPTER, EMA, OPTIMIZER, METRICS, STATE, REMOVED = (
    "adapter.safetensors",
    "ema.safetensors",
    "optimizer.safetensors",
    "metrics.jsonl",
    "state.json",
    "removed.json",
)
MOMENTS = ("exp_avg", "exp_avg_sq")


INPUTS = (
    "round",
    "round_updates",
    "seed",
    "total_updates",
    "config_hash",
    "model_sha256",
    "rollout_seal",
    "advantages_seal",
    "start_sha256",
    "start_adapter_sha256",
)
"""Fields of the state that say what a round was made from."""


class TrainState(BaseModel):
    """``state.json``. It holds neither times nor paths, so equal inputs give equal files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    round: int
    update: int
    """Updates of the whole run in this checkpoint."""
    round_update: int
    """Updates of this round in it."""
    round_updates: int
    """Updates that the round has in all; fewer above means a round that was stopped on its way."""
    seed: int
    total_updates: int
    config: dict[str, Any]
    config_hash: str
    model_sha256: str
    rollout_seal: str
    advantages_seal: str
    start_sha256: str
    """sha256 of the ``state.json`` or adapter that the round started from; empty for a fresh adapter."""
    start_adapter_sha256: str
    adapter_sha256: str
    gradient_norms: tuple[float, ...]
    """Of the run so far (the last 1,000), for the guard on the gradient norm."""
    start_ratio: dict[str, float]
    """Largest |log-ratio| before the first update of the round: ``image`` and ``position``."""
    files: dict[str, str]
    """sha256 of the adapter, EMA and optimiser files."""

    @property
    def complete(self) -> bool:
        """Whether all updates of the round are in."""
        return self.round_update == self.round_updates

    def inputs(self) -> dict[str, Any]:
        """Return what the round was made from: two checkpoints of a round can replace each other if this is equal."""
        return {name: getattr(self, name) for name in INPUTS}


@dataclass(frozen=True)
class Content:
    """What goes into a checkpoint besides its state."""

    transformer: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    shadow: Mapping[str, Tensor] | None
    rows: Sequence[Row]


def sha256(path: Path) -> str:
    """Return the sha256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_state(path: Path) -> TrainState:
    """Read ``state.json`` of a checkpoint directory; UserError when it is none or of another version."""
    file = path / STATE
    try:
        raw = json.loads(file.read_text())
        version = raw["schema_version"]
        if version != 1:
            raise UserError(f"checkpoint version {version}", where=str(file), expected="1")
        return TrainState.model_validate(raw)
    except FileNotFoundError:
        raise UserError(
            "no state.json in it", where=str(path), expected="a checkpoint directory of cast-train"
        ) from None
    except (ValueError, TypeError, KeyError, ValidationError) as error:
        raise DatasetError("damaged", where=str(file), do=again(file.parent)) from error


def removed_files(path: Path) -> frozenset[str]:
    """Return the names of the files that were removed from a checkpoint on purpose; none for a whole one."""
    body = atomic.load_record(path / REMOVED) or {}
    return frozenset(body.get("removed", ()))


def again(path: Path) -> str:
    """Return what to do about a checkpoint that is not whole."""
    return f"delete {path} and run again: the round is trained again"


def verify_files(path: Path, state: TrainState) -> frozenset[str]:
    """Compare the files of a checkpoint with the hashes in its state.

    Returns:
        The names of the files that are missing because they were removed on purpose (``train.keep``).

    Raises:
        DatasetError: Another file is missing, or one is damaged; the message names the first.
    """
    removed = removed_files(path)
    gone = frozenset(name for name in state.files if name in removed and not (path / name).exists())
    for name, expected in state.files.items():
        file = path / name
        if name not in gone and (not file.is_file() or sha256(file) != expected):
            problem = "damaged" if file.is_file() else "missing"
            raise DatasetError(problem, where=str(file), do=again(file.parent))
    return gone


def save(path: Path, state: TrainState, content: Content) -> TrainState:
    """Write a checkpoint directory; it is there whole or not at all.

    Args:
        path: The directory; it must not exist.
        state: With ``adapter_sha256`` and ``files`` still empty.
        content: Weights, moments, log.

    Returns:
        The state as written.

    Raises:
        CastError: What was read back is not what was to be written, or an adapter that never learned.
        NoSpaceError: The disk is full; nothing of this checkpoint is left.
    """
    aside = path.parent / f".{path.name}.tmp"
    if aside.exists():
        shutil.rmtree(aside)
    try:
        with atomic.at(path):
            aside.mkdir(parents=True)
            done = _write(aside, state, content)
            aside.rename(path)
            _sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # on a full disk it would only be in the way
        raise
    atomic.crash("checkpoint.renamed")
    return done


def _write(aside: Path, state: TrainState, content: Content) -> TrainState:
    """Write the files of a checkpoint, the state last, and return it."""
    adapter_sha256 = lora.save_lora(content.transformer, aside / ADAPTER)
    _check_adapter(aside / ADAPTER, content.parameters, learned=any(n > 0 for n in state.gradient_norms))
    if content.shadow is not None:
        lora.save_lora(content.transformer, aside / EMA, content.shadow)
        _check_adapter(aside / EMA, content.shadow, learned=False)
    moments = optimizer_tensors(content.parameters, content.optimizer)
    try:
        save_file(moments, aside / OPTIMIZER)
    except SafetensorError as error:
        raise atomic.os_error(error) from error
    _check_equal(aside / OPTIMIZER, moments)
    write_rows(aside / METRICS, content.rows)
    files = {name: sha256(aside / name) for name in (ADAPTER, EMA, OPTIMIZER) if (aside / name).exists()}
    for name in (OPTIMIZER, METRICS):
        _sync(aside / name)
    done = state.model_copy(update={"files": files, "adapter_sha256": adapter_sha256})
    atomic.write_file(aside / STATE, (done.model_dump_json(indent=1) + "\n").encode(), point="checkpoint")
    return done


def optimizer_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return AdamW's moments by parameter name, on the CPU; empty before the first step."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment].detach().cpu().contiguous()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_optimizer(
    file: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: int
) -> None:
    """Fill AdamW's state from a file.

    Args:
        file: ``optimizer.safetensors``.
        parameters: Adapter parameters by name.
        optimizer: Fresh.
        steps: Updates that AdamW has made.

    Raises:
        UserError: The file belongs to another adapter.
    """
    moments = load_tensors(file)
    if not moments and steps == 0:
        return
    expected = {f"{moment}.{name}": tuple(p.shape) for name, p in parameters.items() for moment in MOMENTS}
    found = {name: tuple(t.shape) for name, t in moments.items()}
    if found != expected:
        odd = min(set(found.items()) ^ set(expected.items()))[0]
        raise UserError(f"{odd} does not fit this adapter", where=str(file), do="keep train.lora as it was in the run")
    for name, parameter in parameters.items():
        state: dict[str, Tensor] = {"step": torch.tensor(float(steps))}
        for moment in MOMENTS:
            state[moment] = moments[f"{moment}.{name}"].to(parameter.device, torch.float32).clone()
        optimizer.state[parameter] = state


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file; DatasetError when it is missing or damaged."""
    try:
        return cast("dict[str, Tensor]", load_file(file))
    except (OSError, SafetensorError) as error:
        raise DatasetError(f"not readable ({error})", where=str(file)) from error


def load_adapter(file: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read an adapter file by parameter name; UserError when it belongs to another adapter."""
    tensors = load_tensors(file)
    keys = {name: lora.file_key(name) for name in parameters}
    for name, parameter in parameters.items():
        if keys[name] not in tensors or tensors[keys[name]].shape != parameter.shape:
            raise UserError(f"{keys[name]} does not fit this adapter", where=str(file), do="keep train.lora as it was")
    return {name: tensors[key] for name, key in keys.items()}


def _check_adapter(file: Path, parameters: Mapping[str, Tensor], *, learned: bool) -> None:
    """Read an adapter back: every trainable tensor and nothing else, equal values, and lora_B no longer zero."""
    found = load_tensors(file)
    expected = {lora.file_key(name): parameter.detach().cpu() for name, parameter in parameters.items()}
    if found.keys() != expected.keys() or not found:
        odd = sorted(found.keys() ^ expected.keys())
        raise CastError(
            f"{file}: the saved adapter has {len(found)} tensors, the model {len(expected)} trainable ones"
            + (f" ({odd[0]})" if odd else "")
        )
    for name, tensor in expected.items():
        if found[name].numel() == 0 or not torch.equal(found[name], tensor):
            raise CastError(f"{file}: {name} reads back different from what was trained")
    if learned and not any(bool(t.any()) for name, t in found.items() if "lora_B" in name):
        raise CastError(f"{file}: every lora_B is zero after updates with a gradient; the adapter did not learn")


def _check_equal(file: Path, expected: Mapping[str, Tensor]) -> None:
    found = load_tensors(file)
    if found.keys() != expected.keys() or not all(torch.equal(found[n], t) for n, t in expected.items()):
        raise CastError(f"{file}: reads back different from what was written")


def _sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
