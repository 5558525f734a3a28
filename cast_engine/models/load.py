"""From a path in a job file to an image model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cast_engine.errors import UserError

if TYPE_CHECKING:
    import torch

    from cast_engine.models.base import ImageModel

PIPELINES = ("Flux2Pipeline",)
"""Pipeline classes that can be used, as ``model_index.json`` names them."""


def load_image_model(
    path: str | Path, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "auto"
) -> ImageModel:
    """Open a diffusers folder as an image model; weights are loaded later, phase by phase.

    Args:
        path: A diffusers folder, or ``tinyworld:flux2`` for the one that ships with the package.
        dtype: Of the weights: ``float32`` or ``bfloat16``. Adapters, latents and log-probs are float32 in any case.
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: No such folder, a missing component, or a class that is not supported.
    """
    from cast_engine.models.checkpoint import pipeline_class

    folder = _resolve(path)
    found = pipeline_class(folder)
    if found not in PIPELINES:
        raise UserError(f"pipeline {found}", where=str(folder), expected=" or ".join(PIPELINES))

    from cast_engine.models.flux2 import Flux2Model

    return Flux2Model(folder, dtype=torch_dtype(dtype), device=torch_device(device))


def _resolve(path: str | Path) -> Path:
    if isinstance(path, str) and path.startswith("tinyworld:"):
        from cast_engine.tinyworld.bundle import resolve

        return Path(resolve(path))
    return Path(path).expanduser()


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype that a job file's name stands for."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise UserError(f"dtype {dtype!r}", expected=" or ".join(known))
    return known[dtype]


def torch_device(device: str | torch.device) -> torch.device:
    """Return the torch device; ``auto`` is CUDA if there is one. UserError when there is no such device."""
    import torch

    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as exc:
        raise UserError(f"device {device!r}", expected="auto, cpu, cuda or cuda:N") from exc
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {device!r}, but {torch.cuda.device_count()} CUDA devices", do="use device: auto or cpu"
        )
    return chosen
