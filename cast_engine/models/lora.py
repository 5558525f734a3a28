"""LoRA adapters on a denoiser: placed block by block with a census, always float32, in diffusers' own file format.

The file is what ``save_lora_weights`` of the pipeline writes: keys ``transformer.<module>.lora_A.weight``, rank and
alpha in the metadata, so that ``pipe.load_lora_weights(FILE)`` applies it with the right scale.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cast_engine.errors import UserError
from cast_engine.models.patterns import alternatives
from cast_engine.numerics import noise
from cast_engine.store import atomic
from schemas.job import LoraConfig

NAME = "default"
"""PEFT's name of the only adapter."""
PREFIX = "transformer."
PIPELINES = {"Flux2Transformer2DModel": "Flux2Pipeline"}
"""Denoiser class -> pipeline class that knows its adapter format."""


@dataclass(frozen=True)
class AdapterReport:
    """Where an adapter sits.

    Attributes:
        targets: Target pattern -> number of linear layers it matched.
        blocks: Block -> number of adapted layers in it.
        parameters: Number of trainable values.
    """

    targets: Mapping[str, int]
    blocks: Mapping[str, int]
    parameters: int

    def summary(self) -> str:
        """Return one line: adapted blocks of each kind, layers, parameters."""
        kinds: Counter[str] = Counter(name.rpartition(".")[0] for name in self.blocks)
        parts = " and ".join(f"{count} of {count} {kind}" for kind, count in kinds.items())
        return f"adapters on {parts}: {sum(self.blocks.values())} layers, {self.parameters / 1e6:.2f} M parameters"


def add_lora(
    transformer: nn.Module, config: LoraConfig, targets: str, *, blocks: Sequence[str], seed: int = 0
) -> AdapterReport:
    """Put a fresh adapter on a denoiser; B is zero, so that the model's output is unchanged.

    Args:
        transformer: Without an adapter.
        config: Rank, alpha, init; its ``targets``, if given, replaces ``targets``.
        targets: The model's own target expression, :attr:`ImageModel.lora_targets`.
        blocks: Names of the blocks that must all carry an adapter.
        seed: Decides A, together with each layer's name; the global random state is neither read nor moved.

    Returns:
        The census.

    Raises:
        UserError: A target matches nothing, or something that is no linear layer, or a block is left without adapter.
    """
    matched, per_block = census(transformer, config.targets or targets, blocks)
    layers = sorted({name for names in matched.values() for name in names})
    _inject(transformer, layers, config.rank, config.alpha)
    _initialise(transformer, config, seed)
    size = sum(p.numel() for p in lora_parameters(transformer).values())
    return AdapterReport({pattern: len(names) for pattern, names in matched.items()}, per_block, size)


def census(transformer: nn.Module, targets: str, blocks: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the layers that each target matches, and how many of them each block has.

    Raises:
        UserError: As :func:`add_lora`.
    """
    matched = _match(transformer, targets)
    layers = {name for names in matched.values() for name in names}
    per_block = {block: sum(name.startswith(f"{block}.") for name in layers) for block in blocks}
    bare = [block for block, count in per_block.items() if not count]
    if bare:
        raise UserError(
            f"{len(bare)} of {len(blocks)} blocks get no adapter, first {bare[0]}",
            where="train.lora.targets",
            expected="targets in every block",
            do="leave train.lora.targets out for the model's own list",
        )
    return matched, per_block


def _match(transformer: nn.Module, expression: str) -> dict[str, list[str]]:
    """Return target -> names of the linear layers it matches whole; UserError unless every target matches some."""
    try:
        patterns = {text: re.compile(text) for text in alternatives(expression)}
    except re.error as exc:
        raise UserError(f"{expression!r} is no regular expression ({exc})", where="train.lora.targets") from exc
    out: dict[str, list[str]] = {text: [] for text in patterns}
    for name, module in transformer.named_modules():
        for text, pattern in patterns.items():
            if not pattern.fullmatch(name):
                continue
            if not isinstance(module, nn.Linear):
                kind = type(module).__name__
                raise UserError(
                    f"target {text!r} matches {name}, a {kind}", where="train.lora.targets", expected="linear layers"
                )
            out[text].append(name)
    empty = [text for text, names in out.items() if not names]
    if empty:
        raise UserError(
            f"target {empty[0]!r} matches no module of the model",
            where="train.lora.targets",
            expected="a pattern for whole module names",
            do="check the names with dict(model.named_modules())",
        )
    return out


def _inject(transformer: nn.Module, layers: Sequence[str], rank: int, alpha: float) -> None:
    """Wrap the layers; the new parameters are float32 whatever the base is, uninitialised, on the base's device."""
    from peft import LoraConfig as PeftConfig

    if has_lora(transformer):
        raise RuntimeError("the denoiser has an adapter already")
    whole = int(alpha) if float(alpha).is_integer() else alpha
    config = PeftConfig(r=rank, lora_alpha=whole, target_modules=list(layers), lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[]):  # PEFT fills the layers with random numbers that are then replaced
        cast("Any", transformer).add_adapter(config, NAME)
    wrapped = {name.partition(".lora_A.")[0] for name in lora_parameters(transformer) if ".lora_A." in name}
    if wrapped != set(layers):
        raise RuntimeError(f"PEFT adapted {len(wrapped)} layers instead of {len(layers)}")
    for parameter in lora_parameters(transformer).values():
        parameter.data = parameter.data.float()


@torch.no_grad()
def _initialise(transformer: nn.Module, config: LoraConfig, seed: int) -> None:
    """Set B to 0 and draw A: normal with std 1/rank ("gaussian"), or PEFT's default, uniform in ±1/sqrt(inputs)."""
    for name, parameter in lora_parameters(transformer).items():
        if ".lora_B." in name:
            parameter.zero_()
            continue
        z = noise.draw(noise.hash_seed("lora", seed, name), parameter.shape)
        if config.init == "gaussian":
            parameter.copy_(z / config.rank)
        else:
            parameter.copy_(torch.erf(z / math.sqrt(2.0)) / math.sqrt(parameter.shape[-1]))


def has_lora(transformer: nn.Module) -> bool:
    """Return whether the denoiser carries an adapter."""
    return NAME in getattr(transformer, "peft_config", {})


def lora_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by module name, sorted."""
    found = {n: p for n, p in transformer.named_parameters() if ".lora_A." in n or ".lora_B." in n}
    return dict(sorted(found.items()))


def file_key(name: str) -> str:
    """Return the key in an adapter file of a parameter of :func:`lora_parameters`."""
    return PREFIX + name.replace(f".{NAME}.weight", ".weight")


def remove_lora(transformer: nn.Module) -> None:
    """Take the adapter off; what is left is the base model, bit for bit."""
    if has_lora(transformer):
        cast("Any", transformer).unload_lora()


def _active_layers(transformer: nn.Module) -> list[Any]:
    """Return the layers that add an adapter's output at the moment."""
    layers = [m for m in transformer.modules() if NAME in getattr(m, "lora_A", {})]
    return [layer for layer in layers if not cast("Any", layer).disable_adapters]


@contextmanager
def lora_disabled(transformer: nn.Module) -> Iterator[None]:
    """Run the base model for the length of a ``with`` block."""
    if not _active_layers(transformer):
        yield
        return
    model = cast("Any", transformer)
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@contextmanager
def merged(transformer: nn.Module | None) -> Iterator[None]:
    """Add the adapter to float32 weights for the length of a ``with`` block, without gradients.

    A small model on a CPU is a third faster without the adapter's own matrix products, and the change is one more
    float32 rounding. Weights of another dtype could not hold the sum, so they are left as they are. Afterwards the
    weights are the old tensors again, not a difference.
    """
    layers = [] if transformer is None else _active_layers(transformer)
    plain = [layer.base_layer.weight for layer in layers]
    if transformer is None or not plain or any(w.dtype != torch.float32 for w in plain):
        yield
        return
    before = [w.data for w in plain]
    with torch.no_grad(), lora_disabled(transformer):
        try:
            for layer, weight in zip(layers, plain, strict=True):
                weight.data = weight.data + layer.get_delta_weight(NAME)
            yield
        finally:
            for weight, data in zip(plain, before, strict=True):
                weight.data = data


def save_lora(transformer: nn.Module, file: Path, values: Mapping[str, Tensor] | None = None) -> str:
    """Write the adapter whole or not at all, in diffusers' format; equal adapters give equal bytes.

    Args:
        transformer: With an adapter.
        file: Where to; ``pipe.load_lora_weights(file)`` reads it.
        values: Values to write instead of the parameters' own (moving averages, gathered shards), by parameter name.

    Returns:
        The file's sha256.
    """
    import diffusers
    from safetensors import SafetensorError

    names = lora_parameters(transformer)
    if not names:
        raise RuntimeError("the denoiser has no adapter")
    values = names if values is None else values
    if values.keys() != names.keys():
        raise ValueError(f"{len(values)} values for {len(names)} adapter parameters")
    tensors = {
        file_key(name).removeprefix(PREFIX): value.detach().to("cpu", torch.float32).contiguous()
        for name, value in values.items()
    }
    config = cast("Any", transformer).peft_config[NAME]
    layers = sorted({key.partition(".lora_")[0] for key in tensors})
    metadata = {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": layers}
    pipeline = getattr(diffusers, PIPELINES[type(transformer).__name__])
    with atomic.at(file):
        part = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            pipeline.save_lora_weights(
                str(file.parent),
                transformer_lora_layers=tensors,
                weight_name=part.name,
                transformer_lora_adapter_metadata=metadata,
            )
            digest = _settle(part)
            part.replace(file)
        except SafetensorError as exc:  # how the library reports a full disk
            raise atomic.os_error(exc) from exc
        finally:
            part.unlink(missing_ok=True)
        atomic.sync_dir(file.parent)
    return digest


def _settle(file: Path) -> str:
    """Put a safetensors file's header keys in one order (the library's varies), fsync, return the sha256."""
    with file.open("r+b") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise RuntimeError(f"{file}: header of {len(text)} bytes does not fit into {length}")
        f.seek(8)
        f.write(text.ljust(length))
        f.flush()
        os.fsync(f.fileno())
        f.seek(0)
        file.chmod(0o644)
        return hashlib.file_digest(f, "sha256").hexdigest()


def load_lora(transformer: nn.Module, file: Path) -> None:
    """Put a file's values on the denoiser, bit for bit, for drawing or for training on.

    A denoiser that carries an adapter keeps its parameter objects (optimisers hold them) and must have the file's rank,
    alpha and layers.

    Raises:
        UserError: The file is missing, damaged, no adapter of this model, or differs from the adapter in place.
    """
    tensors, rank, alpha = _read(file)
    layers = sorted({name.partition(".lora_")[0] for name in tensors})
    if has_lora(transformer):
        config = cast("Any", transformer).peft_config[NAME]
        if (config.r, float(config.lora_alpha)) != (rank, alpha):
            raise UserError(
                f"rank {rank}, alpha {alpha:g}",
                where=str(file),
                expected=f"rank {config.r}, alpha {config.lora_alpha:g}",
            )
    else:
        known = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
        foreign = [name for name in layers if name not in known]
        if foreign:
            raise UserError(f"adapter for {foreign[0]}, which the model does not have", where=str(file))
        _inject(transformer, layers, rank, alpha)
    parameters = {file_key(n).removeprefix(PREFIX): p for n, p in lora_parameters(transformer).items()}
    odd = sorted(parameters.keys() ^ tensors.keys())
    odd = odd or [n for n, t in tensors.items() if t.shape != parameters[n].shape]
    if odd:
        raise UserError(f"{odd[0]} does not fit the model", where=str(file), expected=f"{len(parameters)} tensors")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _read(file: Path) -> tuple[dict[str, Tensor], int, float]:
    """Return tensors by name without the prefix, rank and alpha; files without metadata have alpha = rank."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            metadata = json.loads((handle.metadata() or {}).get("lora_adapter_metadata", "{}"))
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, ValueError) as exc:
        raise UserError(f"no readable adapter ({exc})", where=str(file), expected="a LoRA .safetensors file") from exc
    odd = [k for k in tensors if not re.fullmatch(r"transformer\..+\.lora_[AB]\.weight", k)]
    ranks = {t.shape[0 if ".lora_A." in k else 1] for k, t in tensors.items() if t.ndim == 2}
    if odd or len(ranks) != 1:
        found = f"key {odd[0]!r}" if odd else f"ranks {sorted(ranks)}"
        raise UserError(found, where=str(file), expected="LoRA weights of one rank in diffusers' format")
    rank = ranks.pop()
    alpha = float(metadata.get(f"{PREFIX}lora_alpha", rank))
    return {k.removeprefix(PREFIX): t for k, t in tensors.items()}, rank, alpha


def set_adapter(transformer: nn.Module, file: Path | None) -> str:
    """Make the denoiser the policy of a file, or the base model for ``None``; return :func:`adapter_sha256`."""
    remove_lora(transformer)
    if file is not None:
        load_lora(transformer, file)
    return adapter_sha256(file)


def adapter_sha256(file: Path | None) -> str:
    """Return the sha256 of an adapter file; "" stands for the base model."""
    if file is None:
        return ""
    try:
        with file.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as exc:
        raise UserError("no such adapter file", where=str(file)) from exc
