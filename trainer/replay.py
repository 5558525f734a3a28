"""Going over the drawn steps again with the policy as it is now: log-ratios, their centre, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from cast_engine.models.base import Condition, ImageModel
from cast_engine.models.sampling import Transition, replay
from cast_engine.numerics import noise, sde
from schemas.job import Dynamics, TrainConfig
from trainer.data import Batch, RoundData
from trainer.objective import PolicyLoss, default_clip_range, policy_loss

NOISE_LIMIT = 0.25
"""Largest rms of (stored step - mean - s z) / s: rounding gives 1e-6 (float32) to 0.05 (bfloat16), other noise 1.4."""


@dataclass(frozen=True)
class Placed:
    """A batch on the model's device."""

    batch: Batch
    latents: Tensor
    logp_old: Tensor
    weight: Tensor
    guidance: Tensor
    condition: Condition


class Replayer:
    """Replays the window steps of one round's images with a model.

    One forward pass takes one window step of some images: on a CPU more rows per pass are not faster from 8 on, and on
    a GPU the memory stays that of ``batch_size`` images.
    """

    def __init__(self, model: ImageModel, data: RoundData, config: TrainConfig) -> None:
        meta = data.meta
        self.model, self.data, self.config = model, data, config
        self.geometry = model.geometry(meta.height, meta.width)
        self.dynamics = cast("Dynamics", meta.dynamics)
        self.clip_range = config.clip_range or default_clip_range(self.geometry.positions, self.geometry.channels)
        self.exact = model.dtype == torch.float32
        """Whether single positions repeat to rounding. The dtype of stored latents does not matter: the rollout took
        its log-probs from the rounded latents, the same that are replayed (measured: 3e-7 in bfloat16)."""

    def place(self, batch: Batch) -> Placed:
        """Move a batch to the device and build its condition."""
        device = self.model.device
        return Placed(
            batch,
            batch.latents.to(device),
            batch.logp_old.to(device),
            batch.weight.to(device),
            torch.tensor([m.guidance for m in batch.metas], dtype=torch.float32, device=device),
            self.model.condition([dict(e) for e in batch.embeds], self.geometry, device),
        )

    def transition(self, placed: Placed, j: int) -> Transition:
        """Return the policy's distribution at window step j and the log-prob of the step that was drawn."""
        return replay(
            self.model,
            placed.condition,
            placed.latents[:, j],
            placed.latents[:, j + 1],
            torch.full((len(placed.batch),), self.data.steps[j], dtype=torch.int64),
            sigmas=self.data.sigmas,
            guidance=placed.guidance,
            dynamics=self.dynamics,
            noise_level=self.data.meta.noise_level,
        )

    def loss(self, placed: Placed, j: int) -> tuple[PolicyLoss, Tensor]:
        """Return the loss of window step j, and the log-ratio of each position ``[B, P]`` without gradient."""
        now = self.transition(placed, j)
        center = None
        if self.config.ratio_center:
            old = self.old_mean(placed, j, now.std)
            rounding = sde.rounding_variance(placed.latents[:, j + 1])
            center = sde.position_center(self.dynamics, now.mean.detach(), old, now.std, rounding)[:, None]
        loss = policy_loss(
            now.log_prob[:, None],
            placed.logp_old[:, j, None],
            placed.weight,
            clip_range=self.clip_range,
            ratio=self.config.ratio,
            center_term=center,
        )
        return loss, now.log_prob.detach() - placed.logp_old[:, j]

    def old_mean(self, placed: Placed, j: int, std: Tensor) -> Tensor:
        """Return the mean that the step was drawn from, x_next - s z, with z drawn again from its seed."""
        shape = placed.latents.shape[2:]
        z = torch.stack([noise.step_noise(m.seed, self.data.steps[j], shape) for m in placed.batch.metas])
        return placed.latents[:, j + 1].to(std.dtype) - std * z.to(std.device)

    @torch.no_grad()
    def start_figures(self, batch: Batch) -> Tensor:
        """Compare replay and rollout on a batch, all window steps, with the policy that drew it.

        Returns:
            Three figures: the largest |log-ratio| of an image at one step, that of one position, and the rms of what is
            left of a step after its mean and its redrawn noise, in units of its std.
        """
        placed, figures = self.place(batch), []
        for j in range(len(self.data.steps)):
            now = self.transition(placed, j)
            delta = now.log_prob - placed.logp_old[:, j]
            left = (self.old_mean(placed, j, now.std) - now.mean) / now.std
            figures.append(
                torch.stack([delta.mean(dim=-1).abs().amax(), delta.abs().amax(), left.square().mean().sqrt()])
            )
        return torch.stack(figures).amax(dim=0)
