"""The adapter that is trained: put in place, set to where training starts, and how much it changes the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from cast_engine.errors import UserError
from cast_engine.models import lora
from cast_engine.models.base import ImageModel
from schemas.job import LoraConfig


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter on a denoiser.

    Attributes:
        transformer: The denoiser that carries it.
        parameters: Its parameters by name, sorted, all float32.
        report: Where it sits, as one line.
        scale: alpha / rank.
        weight_norm: l2 norm of all weights that carry an adapter, without it.
    """

    transformer: nn.Module
    parameters: Mapping[str, nn.Parameter]
    report: str
    scale: float
    weight_norm: float

    @torch.no_grad()
    def change(self) -> float:
        """Return ‖scale · B A‖ / ‖W‖ over all adapted layers together."""
        total = []
        for name, a in self.parameters.items():
            if ".lora_A." in name:
                b = self.parameters[name.replace(".lora_A.", ".lora_B.")]
                # ‖BA‖² = <BᵀB, AAᵀ>, which never forms the full matrix
                total.append(((b.T @ b).double() * (a @ a.T).double()).sum())
        square = float(torch.stack(total).sum())
        return self.scale * math.sqrt(max(0.0, square)) / self.weight_norm if math.isfinite(square) else math.nan


def prepare(model: ImageModel, config: LoraConfig, *, seed: int, file: Path | None) -> Adapter:
    """Replace whatever adapter the model has by the one to train.

    Args:
        model: Its denoiser is loaded if it is not yet.
        config: Rank, targets, initialisation.
        seed: The run's seed; a fresh adapter follows from it and the names of its layers alone.
        file: Adapter to continue from, or ``None`` for a fresh one.

    Raises:
        UserError: The file is of another rank, alpha or other targets than the config.
    """
    model.load_denoiser()
    transformer = model.transformer
    assert transformer is not None, "load_denoiser was called"
    lora.remove_lora(transformer)
    report = lora.add_lora(transformer, config, model.lora_targets, blocks=model.lora_blocks(), seed=seed)
    if file is not None:
        lora.load_lora(transformer, file)
    transformer.requires_grad_(False)
    parameters = lora.lora_parameters(transformer)
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(f"{name} is not finite", where=str(file), do="start from an earlier checkpoint")
        parameter.requires_grad_(True)
    norm = _weight_norm(transformer, parameters)
    return Adapter(transformer.eval(), parameters, report.summary(), config.alpha / config.rank, norm)


@torch.no_grad()
def _weight_norm(transformer: nn.Module, parameters: Mapping[str, Tensor]) -> float:
    squares = []
    for name in parameters:
        if ".lora_A." in name:
            layer = transformer.get_submodule(name.partition(".lora_A.")[0])
            weight = cast("Tensor", cast("nn.Module", layer.base_layer).weight)
            squares.append(torch.linalg.vector_norm(weight, dtype=torch.float32).double().square())
    return math.sqrt(float(torch.stack(squares).sum()))
