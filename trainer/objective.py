"""The policy loss: a signed weight per latent position, one importance ratio per image and step.

Shapes: B images, w window steps, P positions. Log-probabilities are means over a position's channels, so their mean
over P is Flow-GRPO's log-probability of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Ratio = Literal["image", "position"]


def default_clip_range(positions: int, channels: int) -> float:
    """Return ε = 1e-4 · sqrt(65536 / N) for latents of N = positions x channels elements.

    The log-ratio is a mean over N elements, so its spread over samples falls as 1/√N; 1e-4 is Flow-GRPO's value for
    FLUX.1 at 512 x 512, where N = 65,536.

    Raises:
        ValueError: No elements.
    """
    if positions < 1 or channels < 1:
        raise ValueError(f"{positions} positions x {channels} channels")
    return 1e-4 * math.sqrt(65536.0 / (positions * channels))


@dataclass(frozen=True)
class LossStats:
    """Sums over (image, step) or (image, step, position), to be added up over micro-batches; 0-d, without gradient."""

    ratios: Tensor
    """Number of (image, step) pairs."""
    log_ratio_sum: Tensor
    """Σ of the log-ratio per image and step, mean over P, before centring."""
    log_ratio_max: Tensor
    """Largest |log-ratio| per image and step, before centring."""
    center_sum: Tensor
    ratio_sum: Tensor
    """Σ over (image, step) of the ratio that the loss used (mean over P)."""
    outside: Tensor
    """Share of positions whose ratio is outside 1 ± ε, summed over (image, step): the peers' clip fraction."""
    positive: Tensor
    """Positions with W > 0."""
    positive_clipped: Tensor
    """... of which ratio > 1 + ε: they give no gradient."""
    negative: Tensor
    """Positions with W < 0."""
    negative_clipped: Tensor
    """... of which ratio < 1 - ε."""

    def __add__(self, other: LossStats) -> LossStats:
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        sums["log_ratio_max"] = torch.maximum(self.log_ratio_max, other.log_ratio_max)
        return LossStats(**sums)

    def summary(self) -> dict[str, float]:
        """Return shares and means as floats (waits for the device). Empty sums give 0."""

        def share(part: Tensor, whole: Tensor) -> float:
            return float(part) / max(float(whole), 1.0)

        return {
            "log_ratio": share(self.log_ratio_sum, self.ratios),
            "log_ratio_max": float(self.log_ratio_max),
            "approx_kl": -share(self.log_ratio_sum, self.ratios),
            "center": share(self.center_sum, self.ratios),
            "ratio": share(self.ratio_sum, self.ratios),
            "outside": share(self.outside, self.ratios),
            "clip_positive": share(self.positive_clipped, self.positive),
            "clip_negative": share(self.negative_clipped, self.negative),
        }


@dataclass(frozen=True)
class PolicyLoss:
    """A loss per image and what to log of it."""

    per_image: Tensor
    """[B], mean over steps and positions; an update's loss is its mean over *all* images of the update."""
    stats: LossStats


def policy_loss(
    logp_new: Tensor,
    logp_old: Tensor,
    weight: Tensor,
    *,
    clip_range: float,
    ratio: Ratio = "image",
    center_term: Tensor | None = None,
) -> PolicyLoss:
    """Return the clipped policy loss, mean over (t, p) of max(-W ρ, -W clip(ρ, 1-ε, 1+ε)).

    With Δ[p] = logp_new - logp_old and centre κ:

    - ``image``: every position's ρ has the value exp(mean_p Δ + κ) and the gradient ρ · ∇Δ[p]. A weight that is the
      same at all positions then gives Flow-GRPO's loss and gradient exactly, on- and off-policy, clipped or not.
    - ``position``: ρ[p] = exp(Δ[p] + κ[p]).

    κ enters the value only. Without it a policy that moved has log-ratios below 0 on every image (see
    ``sde.position_center``), so that once it has moved far all negative weights are clipped and no positive ones.

    Args:
        logp_new: [B, w, P], with gradient.
        logp_old: [B, w, P].
        weight: W, [B, P].
        clip_range: ε > 0.
        ratio: Where the ratio's value is taken.
        center_term: κ, [B, w] or [B, w, P] (then averaged over P for ``image``); ``None`` = not centred.

    Returns:
        Loss per image; images whose W is 0 have loss and gradient 0 and still count as images.

    Raises:
        ValueError: Shapes that do not fit, no steps or positions, or a clip range that is not above 0.
    """
    _check(logp_new, logp_old, weight, center_term, clip_range)
    delta = logp_new - logp_old.detach()
    w = weight.detach()[:, None, :].to(delta.dtype)
    kappa = _center(center_term, delta, ratio)
    if ratio == "image":
        value = (delta.detach().mean(dim=-1, keepdim=True) + kappa).exp()
        rho = value * (delta - delta.detach()).exp()
    elif ratio == "position":
        rho = (delta + kappa).exp()
    else:
        raise ValueError(f"ratio {ratio!r}, expected image or position")
    loss = torch.maximum(-w * rho, -w * rho.clamp(1.0 - clip_range, 1.0 + clip_range))
    return PolicyLoss(loss.mean(dim=(1, 2)), _stats(delta, kappa, rho, w, clip_range))


def guard_loss(
    logp_new: Tensor,
    logp_old: Tensor,
    mean_new: Tensor,
    mean_old: Tensor,
    std: Tensor,
    advantages: Tensor,
    *,
    clip_range: float,
    sqrt_minus_dt: Tensor | None = None,
) -> Tensor:
    """Return GRPO-Guard's loss per image (arXiv 2510.22319), for comparison: ρ = exp(s (Δ + mean((μ - μ_old)²) / 2s²)).

    Here the centre carries gradient and the exponent is multiplied by s, as in the reference implementations.

    Args:
        logp_new: [B], mean over all elements, with gradient.
        logp_old: [B].
        mean_new: μ, [B, ...].
        mean_old: [B, ...].
        std: Total s, [B].
        advantages: [B], clipped by the caller.
        clip_range: ε > 0.
        sqrt_minus_dt: [B]; if given, the loss is divided by its square (verl-omni does, others do not).
    """
    square = ((mean_new - mean_old.detach()) ** 2).flatten(1).mean(dim=1)
    rho = (std * (logp_new - logp_old.detach() + square / (2.0 * std**2))).exp()
    loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(1.0 - clip_range, 1.0 + clip_range))
    return loss if sqrt_minus_dt is None else loss / sqrt_minus_dt**2


def _center(center_term: Tensor | None, delta: Tensor, ratio: Ratio) -> Tensor:
    """Return κ broadcastable to [B, w, P], without gradient."""
    if center_term is None:
        return delta.new_zeros(*delta.shape[:2], 1)
    kappa = center_term.detach().to(delta.dtype)
    if kappa.ndim == 2:
        return kappa[..., None]
    return kappa.mean(dim=-1, keepdim=True) if ratio == "image" else kappa


def _check(logp_new: Tensor, logp_old: Tensor, weight: Tensor, center: Tensor | None, clip_range: float) -> None:
    shape = tuple(logp_new.shape)
    if len(shape) != 3 or 0 in shape[1:] or tuple(logp_old.shape) != shape:
        raise ValueError(f"logp_new {shape}, logp_old {tuple(logp_old.shape)}: expected the same [B, w >= 1, P >= 1]")
    if tuple(weight.shape) != (shape[0], shape[2]):
        raise ValueError(f"weight {tuple(weight.shape)}, expected {(shape[0], shape[2])}")
    if center is not None and tuple(center.shape) not in (shape, shape[:2]):
        raise ValueError(f"center_term {tuple(center.shape)}, expected {shape[:2]} or {shape}")
    if not clip_range > 0:
        raise ValueError(f"clip range {clip_range}, expected above 0")


@torch.no_grad()
def _stats(delta: Tensor, kappa: Tensor, rho: Tensor, w: Tensor, clip_range: float) -> LossStats:
    image = delta.mean(dim=-1)
    over, under = rho > 1.0 + clip_range, rho < 1.0 - clip_range
    positive, negative = (w > 0).expand_as(rho), (w < 0).expand_as(rho)
    return LossStats(
        ratios=torch.tensor(image.numel(), device=image.device),
        log_ratio_sum=image.sum(),
        log_ratio_max=image.abs().amax() if image.numel() else image.new_zeros(()),
        center_sum=kappa.mean(dim=-1).sum(),
        ratio_sum=rho.mean(dim=-1).sum(),
        outside=(over | under).to(rho.dtype).mean(dim=-1).sum(),
        positive=positive.sum(),
        positive_clipped=(positive & over).sum(),
        negative=negative.sum(),
        negative_clipped=(negative & under).sum(),
    )
