"""Exponential moving average of the adapter, for export and evaluation; rollouts always use the adapter itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Ema:
    """Shadow copies of named parameters: shadow <- decay * shadow + (1 - decay) * parameter after every update."""

    def __init__(
        self, parameters: Mapping[str, Tensor], decay: float, shadow: Mapping[str, Tensor] | None = None
    ) -> None:
        """Start from the parameters as they are, or from a shadow of the same names and shapes."""
        self.decay = decay
        source = parameters if shadow is None else shadow
        self.shadow = {n: source[n].detach().to(p.device, torch.float32).clone() for n, p in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, Tensor]) -> None:
        """Move every shadow towards its parameter."""
        for name, parameter in parameters.items():
            self.shadow[name].lerp_(parameter.detach().to(torch.float32), 1.0 - self.decay)
