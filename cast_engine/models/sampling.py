"""Drawing images, and going over drawn steps again: one transition function for rollout, evaluation and training.

How exactly :func:`replay` gives the ``logp_old`` of :func:`sample` again: with float32 weights the log-prob of a
position is off by about (rounding of x and v) / std, whatever the batch. Measured on random weights of the tiny world's
size with an adapter, batch sizes 1 and 4 against 16: 4e-7 at a std of 0.4, 3e-6 at 0.06, 1e-5 at 0.01; the mean over an
image's positions is ten to twenty times closer. With bfloat16 weights the velocity itself moves with the size of the
batch: replay in the rollout's batch size, or allow more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cast_engine.errors import UserError
from cast_engine.models.lora import merged
from cast_engine.numerics import noise, sde

if TYPE_CHECKING:
    from cast_engine.models.base import Condition, Geometry, ImageModel, PromptEmbeds
    from schemas.job import Dynamics


@dataclass(frozen=True)
class Trajectory:
    """What is kept of a batch of drawn images, on the CPU.

    Attributes:
        latents: ``[B, w + 1, P, C]``, x before each window step and after the last, in the storage dtype.
        final: ``[B, P, C]``, x_0 in the storage dtype.
        logp_old: float32 ``[B, w, P]``, mean over channels, of the latents as stored.
        steps: int64 ``[w]``, index of each window step in the sigma table.
        sigmas: float32 ``[N + 1]``, the table.
        guidance: float32 ``[B]``, as given to the model.
    """

    latents: Tensor
    final: Tensor
    logp_old: Tensor
    steps: Tensor
    sigmas: Tensor
    guidance: Tensor


@dataclass(frozen=True)
class Transition:
    """The distribution of the next latent, and the log-prob of the one that was drawn.

    Attributes:
        log_prob: float32 ``[B, P]``, mean over channels.
        mean: float32 ``[B, P, C]``.
        std: float32 ``[B, 1, 1]``, total standard deviation.
    """

    log_prob: Tensor
    mean: Tensor
    std: Tensor


@torch.no_grad()
def sample(
    model: ImageModel,
    embeds: Sequence[PromptEmbeds],
    seeds: Sequence[int],
    *,
    initial_seeds: Sequence[int] | None = None,
    sigmas: Tensor,
    geometry: Geometry,
    guidance: float | Sequence[float],
    window: Sequence[int] = (),
    dynamics: Dynamics = "flow_sde",
    noise_level: float = 0.0,
    latent_dtype: torch.dtype = torch.float32,
) -> Trajectory:
    """Draw one image per (embed, seed): SDE steps inside the window, ODE steps outside.

    An image follows from its embed, its seed and the settings; its neighbours in the batch change float rounding only.
    Latents are float32. In the window they are rounded through ``latent_dtype`` before the walk goes on and before the
    log-prob is taken: training sees the very numbers that were used.

    Args:
        model: With the denoiser loaded.
        embeds: One per image.
        seeds: One per image, see :func:`cast_engine.numerics.noise.member_seed`; step noise follows from them.
        initial_seeds: Of the initial noise, one per image; ``None``: the same seeds.
        sigmas: From :meth:`ImageModel.sigmas`.
        geometry: From :meth:`ImageModel.geometry`.
        guidance: One for all, or one per image.
        window: Contiguous step indices as :func:`sde.window_steps` gives them; empty for evaluation.
        dynamics: The SDE inside the window.
        noise_level: Its ``a``; at 0 every step is an ODE step, as in the stock pipeline. The window's latents are kept
            all the same, and ``logp_old`` is 0: a step without noise has no log-prob, and training refuses it.
        latent_dtype: Storage dtype.

    Raises:
        UserError: The window is not contiguous or not inside ``0 .. N - 2``: the last step has no noise left.
    """
    _check_window(window, len(sigmas) - 1)
    condition = model.condition(embeds, geometry)
    scale = _per_image(guidance, len(seeds)).to(model.device)
    x = torch.stack([model.initial_noise(seed, geometry) for seed in initial_seeds or seeds]).to(model.device)
    kept = _Kept(latent_dtype)
    with merged(model.transformer):
        for i in range(len(sigmas) - 1):
            if window and i == window[0]:
                x = kept.latent(x)
            if i in window and noise_level:
                mean, std = _step(model, condition, x, [i] * len(seeds), sigmas, dynamics, noise_level, scale)
                x = kept.latent(mean + std * _step_noise(seeds, i, geometry, model.device))
                kept.log_probs.append(sde.position_log_prob(dynamics, x, mean, std))
                continue
            x = sde.ode_step(x, model.velocity(x, _sigma(sigmas, i, x), condition, scale), sigmas, i)
            if i in window:
                x = kept.latent(x)
                kept.log_probs.append(torch.zeros(x.shape[:2], device=x.device))
    return kept.trajectory(x, window, sigmas, scale)


@dataclass
class _Kept:
    """What the walk leaves behind, on the model's device to the end: every move to the CPU waits for the device."""

    dtype: torch.dtype
    latents: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    def latent(self, x: Tensor) -> Tensor:
        """Round a latent to the storage dtype, keep it, and return the rounded value in float32 to go on from."""
        stored = x.to(self.dtype)
        self.latents.append(stored)
        return stored.float()

    def trajectory(self, final: Tensor, window: Sequence[int], sigmas: Tensor, guidance: Tensor) -> Trajectory:
        """Return all of it on the CPU; ``final`` is x_0."""
        batch, positions, channels = final.shape
        latents, log_probs = final.new_empty(batch, 0, positions, channels), final.new_empty(batch, 0, positions)
        return Trajectory(
            latents=(torch.stack(self.latents, dim=1) if self.latents else latents).cpu(),
            final=final.to(self.dtype).cpu(),
            logp_old=(torch.stack(self.log_probs, dim=1) if self.log_probs else log_probs).cpu(),
            steps=torch.tensor(list(window), dtype=torch.int64),
            sigmas=sigmas,
            guidance=guidance.cpu(),
        )


def _sigma(sigmas: Tensor, i: int, x: Tensor) -> Tensor:
    """Return step i's sigma for every image of x, ``[B]``; filled in on x's device, as a copy would wait for it."""
    return torch.full((len(x),), float(sigmas[i]), dtype=sigmas.dtype, device=x.device)


def _step_noise(seeds: Sequence[int], i: int, geometry: Geometry, device: torch.device) -> Tensor:
    """Return the noise of step i, ``[B, P, C]``; drawn on the CPU, and sent from where a GPU can fetch it by itself."""
    z = torch.stack([noise.step_noise(seed, i, (geometry.positions, geometry.channels)) for seed in seeds])
    return z.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else z.to(device)


def replay(
    model: ImageModel,
    condition: Condition,
    latents: Tensor,
    latents_next: Tensor,
    steps: Tensor,
    *,
    sigmas: Tensor,
    guidance: Tensor,
    dynamics: Dynamics,
    noise_level: float,
) -> Transition:
    """Go over drawn steps again, with gradients if they are enabled.

    Entries of the batch may be different steps, so several window steps of an image can share one forward pass.

    Args:
        model: With the denoiser loaded.
        condition: Of size B.
        latents: ``[B, P, C]``, x before each step, as stored.
        latents_next: ``[B, P, C]``, x after it, as stored.
        steps: int64 ``[B]``, indices into ``sigmas``.
        sigmas: ``[N + 1]``, the table of the rollout.
        guidance: ``[B]``, as recorded.
        dynamics: The SDE of the rollout.
        noise_level: Its ``a``.

    Raises:
        UserError: Steps without noise, which have no log-prob.
    """
    mean, std = _step(model, condition, latents, steps.tolist(), sigmas, dynamics, noise_level, guidance)
    log_prob = sde.position_log_prob(dynamics, latents_next.to(mean.device).float(), mean, std)
    return Transition(log_prob, mean, std)


def _check_window(window: Sequence[int], num_steps: int) -> None:
    if window and tuple(window) != sde.window_steps(window[0], len(window), num_steps):
        raise UserError(f"window of steps {list(window)}", where="rollout.window", expected="contiguous steps")


def _step(
    model: ImageModel,
    condition: Condition,
    x: Tensor,
    steps: Sequence[int],
    sigmas: Tensor,
    dynamics: Dynamics,
    noise_level: float,
    guidance: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return mean ``[B, P, C]`` and total std ``[B, 1, 1]`` of the next latents."""
    x = x.to(model.device, torch.float32)
    rules = {i: sde.step_coefficients(dynamics, sigmas, i, noise_level) for i in set(steps)}
    sde.check_noise(rules.values())
    sigma = _sigma(sigmas, steps[0], x) if len(rules) == 1 else sigmas[list(steps)].to(x.device)
    v = model.velocity(x, sigma, condition, guidance)
    if len(rules) == 1:
        mean, std = sde.apply(rules[steps[0]], x, v)
        return mean, std.expand(len(steps), 1, 1)
    means, stds = zip(*(sde.apply(rules[i], x[b], v[b]) for b, i in enumerate(steps)), strict=True)
    return torch.stack(means), torch.stack(stds).view(-1, 1, 1)


def _per_image(value: float | Sequence[float], count: int) -> Tensor:
    values = [float(value)] * count if isinstance(value, (int, float)) else [float(v) for v in value]
    if len(values) != count:
        raise ValueError(f"{len(values)} guidance values for {count} images")
    return torch.tensor(values, dtype=torch.float32)
