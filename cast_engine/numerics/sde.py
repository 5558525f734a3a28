"""One sampling step as a Gaussian policy: Flow-SDE, Dance-SDE, CPS, and the ODE step between them.

Notation: sigma falls from 1 to 0, x = (1 - sigma) x0 + sigma eps, the model's output is v = eps - x0, and
dt = sigma_next - sigma is negative. ``noise_level`` is a (Flow-SDE, CPS) or eta (Dance-SDE).
``std`` always means the *total* standard deviation of x_next given x, with any sqrt(-dt) inside.

Every rule has a mean that is linear in x and v. Its coefficients are computed in float64, and applied in float32, or in
float64 if x or v is float64; bfloat16 inputs are upcast first. Latents are packed: [..., P positions, C channels].

Sources: Flow-SDE, Liu et al., "Flow-GRPO" (arXiv 2505.05470); Dance-SDE, Xue et al., "DanceGRPO" (arXiv 2505.07818);
CPS, Wang and Yu, "Coefficients-Preserving Sampling" (arXiv 2509.05952).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from cast_engine.errors import UserError
from schemas.job import Dynamics

DYNAMICS: tuple[str, ...] = get_args(Dynamics)


@dataclass(frozen=True)
class StepCoefficients:
    """One step of a rule: x_next ~ Normal(x_coef * x + v_coef * v, std**2)."""

    x_coef: float
    v_coef: float
    std: float


@dataclass(frozen=True)
class StepReport:
    """What one SDE step does to the noise, for ``rollout --dry-run``."""

    step: int
    sigma: float
    sigma_next: float
    std: float
    excess: float
    """Marginal variance of x_next over that of the ODE step, minus 1 (0.03 = 3% too much noise)."""


def coefficients(
    dynamics: Dynamics, sigma: float, sigma_next: float, sigma_clamp: float, noise_level: float
) -> StepCoefficients:
    """Return mean coefficients and total std of one step.

    ============  ==========================================================================  ==================
    Flow-SDE      x (1 + b² dt / 2σ) + v dt (1 + b² (1-σ) / 2σ), b = a sqrt(σ / (1-σ̃))         b sqrt(-dt)
    Dance-SDE     x + v dt + ½ a² dt (x - (1-σ) x̂0) / σ², x̂0 = x - σ v                         a sqrt(-dt)
    CPS           (1-σ') x̂0 + sqrt(σ'² - s²) x̂1, x̂1 = x + (1-σ) v                              s = σ' sin(aπ/2)
    ============  ==========================================================================  ==================

    Args:
        dynamics: The rule.
        sigma: σ, 0 < σ <= 1.
        sigma_next: σ', 0 <= σ' < σ.
        sigma_clamp: The table's second entry; Flow-SDE takes it as σ̃ where σ is 1 and would divide by 0. Elsewhere σ̃
            is σ.
        noise_level: a >= 0; for CPS at most 1. With 0 every rule is the ODE step.

    Raises:
        UserError: An unknown rule, a noise level out of range, or sigmas that do not fall.
    """
    if not 0.0 <= sigma_next < sigma <= 1.0:
        raise UserError(f"sigma {sigma:g} -> {sigma_next:g}", where="sigma table", expected="1 >= σ > σ' >= 0")
    if not (math.isfinite(noise_level) and noise_level >= 0.0):
        raise UserError(f"noise level {noise_level:g}", where="rollout.noise_level", expected="a number >= 0")
    dt = sigma_next - sigma
    if dynamics == "flow_sde":
        clamped = sigma_clamp if sigma == 1.0 else sigma
        if not 0.0 < clamped < 1.0:
            raise UserError(f"second sigma {clamped:g}", where="sigma table", expected="a value between 0 and 1")
        variance = noise_level**2 * sigma / (1.0 - clamped)
        half = variance / (2.0 * sigma)
        return StepCoefficients(1.0 + half * dt, dt * (1.0 + half * (1.0 - sigma)), math.sqrt(variance * -dt))
    if dynamics == "dance_sde":
        half = noise_level**2 / (2.0 * sigma)
        return StepCoefficients(1.0 + half * dt, dt * (1.0 + half * (1.0 - sigma)), noise_level * math.sqrt(-dt))
    if dynamics == "cps":
        if noise_level > 1.0:
            raise UserError(f"noise level {noise_level:g}", where="rollout.noise_level", expected="0 to 1 for cps")
        std = sigma_next * math.sin(noise_level * math.pi / 2.0)
        keep = sigma_next * math.cos(noise_level * math.pi / 2.0)  # sqrt(σ'² - s²)
        data = 1.0 - sigma_next
        return StepCoefficients(data + keep, keep * (1.0 - sigma) - data * sigma, std)
    raise UserError(f"dynamics {dynamics!r}", where="rollout.dynamics", expected=" or ".join(DYNAMICS))


def step_coefficients(
    dynamics: Dynamics, sigmas: Tensor | Sequence[float], i: int, noise_level: float
) -> StepCoefficients:
    """Return the coefficients of step i of a sigma table.

    Args:
        dynamics: The rule.
        sigmas: The whole table, N+1 falling values, the last one 0. Keep it on the CPU.
        i: Step, 0 <= i < N.
        noise_level: a.

    Raises:
        IndexError: The table has no step i.
        UserError: See ``coefficients``.
    """
    if not 0 <= i < len(sigmas) - 1:
        raise IndexError(f"step {i} of a table with {len(sigmas) - 1} steps")
    return coefficients(dynamics, float(sigmas[i]), float(sigmas[i + 1]), float(sigmas[1]), noise_level)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any of the tensors is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def apply(step: StepCoefficients, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and total std of x_next.

    Args:
        step: The step's coefficients.
        x: Latent [..., P, C], any float dtype.
        v: Velocity of the same shape; gradients flow through it.

    Returns:
        mean like x in float32 (float64 if x or v is), and std as a 0-d tensor of that dtype on x's device.

    Raises:
        ValueError: x and v differ in shape.
    """
    if x.shape != v.shape:
        raise ValueError(f"x {tuple(x.shape)} and v {tuple(v.shape)} differ in shape")
    dtype = compute_dtype(x, v)
    mean = x.to(dtype) * step.x_coef + v.to(dtype) * step.v_coef
    return mean, torch.full((), step.std, dtype=dtype, device=x.device)  # a copy would wait for the device


def step_mean_std(
    dynamics: Dynamics,
    x: Tensor,
    v: Tensor,
    sigma: float,
    sigma_next: float,
    sigma_clamp: float,
    noise_level: float,
) -> tuple[Tensor, Tensor]:
    """Return mean [..., P, C] and total std (0-d) of one step: ``coefficients``, then ``apply``."""
    return apply(coefficients(dynamics, float(sigma), float(sigma_next), float(sigma_clamp), noise_level), x, v)


def step(
    dynamics: Dynamics,
    x: Tensor,
    v: Tensor,
    sigmas: Tensor | Sequence[float],
    i: int,
    noise_level: float,
    z: Tensor,
) -> Tensor:
    """Take one SDE step.

    Args:
        dynamics: The rule.
        x: Latent at step i, [..., P, C].
        v: Velocity at step i, same shape.
        sigmas: The whole sigma table.
        i: Step.
        noise_level: a.
        z: Standard normal noise of x's shape, on x's device.

    Returns:
        x_next in float32 (float64 if x or v is), not yet rounded to a storage dtype.
    """
    mean, std = apply(step_coefficients(dynamics, sigmas, i, noise_level), x, v)
    if z.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)} and z {tuple(z.shape)} differ in shape")
    return mean + std * z.to(mean.dtype)


def ode_step(x: Tensor, v: Tensor, sigmas: Tensor, i: int) -> Tensor:
    """Take one Euler step, x + (sigma_next - sigma) v.

    In float32 this is bit for bit what diffusers' ``FlowMatchEulerDiscreteScheduler.step`` returns: the difference of
    sigmas is a 0-d float32 tensor there, and so it is here.

    Args:
        x: Latent at step i, [..., P, C].
        v: Velocity, same shape.
        sigmas: The whole sigma table, float32 on the CPU.
        i: Step.

    Raises:
        IndexError: The table has no step i.
    """
    if not 0 <= i < len(sigmas) - 1:
        raise IndexError(f"step {i} of a table with {len(sigmas) - 1} steps")
    dtype = compute_dtype(x, v)
    table = sigmas.to(dtype)
    return x.to(dtype) + (table[i + 1] - table[i]) * v.to(dtype)


def check_noise(steps: Iterable[StepCoefficients]) -> None:
    """Refuse steps without noise (UserError): whatever the rule, they have no log-probability to compare."""
    if any(step.std < torch.finfo(torch.float32).tiny for step in steps):
        raise _no_noise()


def _no_noise() -> UserError:
    return UserError(
        "a step without noise has no log-probability",
        where="rollout.noise_level",
        expected="a number > 0",
        do="set rollout.noise_level above 0",
    )


def log_prob(dynamics: Dynamics, x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of each element of x_next.

    Flow-SDE and Dance-SDE: -(y - μ)² / 2s² - ln s - ½ ln 2π. CPS: -(y - μ)², without variance and constants, as every
    implementation of it has it; a clip range for CPS is therefore not comparable with one for the others.

    Args:
        dynamics: The rule.
        x_next: y, what was drawn; treated as data (no gradient).
        mean: μ, same shape.
        std: Total s, broadcastable to it.

    Raises:
        UserError: A Gaussian rule with s = 0 (noise level 0, or a step outside the window). Seen on the CPU only, as
            elsewhere the question would wait for the device: ask :func:`check_noise` first.
    """
    dtype = compute_dtype(x_next, mean)
    square = (x_next.detach().to(dtype) - mean.to(dtype)) ** 2
    if dynamics == "cps":
        return -square
    if std.device.type == "cpu" and not bool((std > 0).all()):
        raise _no_noise()
    s = std.to(dtype)
    return -square / (2.0 * s**2) - torch.log(s) - 0.5 * math.log(2.0 * math.pi)


def position_log_prob(dynamics: Dynamics, x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the mean of ``log_prob`` over the channels of each position, [..., P].

    The mean over positions is the log-probability per image of Flow-GRPO (a mean, not a sum).
    """
    return log_prob(dynamics, x_next, mean, std).mean(dim=-1)


def rounding_variance(x: Tensor) -> Tensor:
    """Return the variance that rounding to x's own dtype gave each element of x, in float32: (spacing)² / 12.

    0 for float32 and float64, whose rounding does not matter here. Rounding error is taken as even over the spacing of
    neighbouring numbers.
    """
    if x.dtype in (torch.float32, torch.float64):
        return torch.zeros_like(x, dtype=torch.float32)
    _, exponent = torch.frexp(x.float())  # |x| is at least 2^(exponent - 1)
    return torch.ldexp(torch.full_like(x, torch.finfo(x.dtype).eps, dtype=torch.float32), exponent - 1) ** 2 / 12.0


def position_center(
    dynamics: Dynamics, mean: Tensor, mean_old: Tensor, std: Tensor, rounding: Tensor | None = None
) -> Tensor:
    """Return by how much the expected log-ratio of each position lies below 0, [..., P].

    A policy whose mean moved by d has E[log-ratio] = -mean(d²) / 2s² whatever the reward; for CPS, whose log-density
    has no variance, -mean(d²). Adding this value back centres the ratio (the centring of GRPO-Guard, arXiv 2510.22319,
    without its factor s).

    Args:
        dynamics: The rule.
        mean: The policy's mean, [..., P, C].
        mean_old: The mean it was sampled from, kept by the caller or found as x_next - std * z.
        std: Total s, broadcastable.
        rounding: Variance of each element's error in ``mean_old``. Needed if it was found from an x_next that was
            rounded to bfloat16: ``rounding_variance(x_next)``, without which the centre is too high by its mean / 2s²,
            about 1e-4 at s = 0.2, as much as a clip range.

    Returns:
        In the units of the log-ratio. With ``rounding`` single positions may lie below 0.
    """
    dtype = compute_dtype(mean, mean_old)
    square = ((mean.to(dtype) - mean_old.to(dtype)) ** 2).mean(dim=-1)
    if rounding is not None:
        square = square - rounding.to(dtype).mean(dim=-1)
    if dynamics == "cps":
        return square
    s = std.to(dtype)
    if s.ndim:
        s = s.squeeze(-1)
    return square / (2.0 * s**2)


def window_steps(start: int, length: int, num_steps: int) -> tuple[int, ...]:
    """Return the steps of a fixed SDE window, start .. start + length - 1.

    The last step of a table is never allowed: CPS has no noise there, and Flow-SDE next to none.

    Raises:
        UserError: The window is empty or does not end before the last step.
    """
    if length < 1:
        raise UserError(f"{length} steps", where="rollout.window.length", expected="at least 1")
    if start < 0 or start + length > num_steps - 1:
        raise UserError(
            f"window {start}..{start + length - 1} of {num_steps} steps",
            where="rollout.window",
            expected=f"steps from 0 to {num_steps - 2} (the last step is left out)",
            do="shorten the window or raise rollout.num_steps",
        )
    return tuple(range(start, start + length))


def step_report(dynamics: Dynamics, sigmas: Tensor | Sequence[float], noise_level: float) -> tuple[StepReport, ...]:
    """Return σ, total std and variance excess of every step but the last.

    The excess is that of one step taken from the exact marginal with the exact velocity of white unit-variance data (as
    latents are whitened): Var = (1-σ)² + σ², E[v | x] = k x with k = (2σ - 1) / Var, against the ODE step's
    Var (1 + k dt)². In the noisy half the data's variance hardly matters. Above about 3% a step leaves visible noise.

    Args:
        dynamics: The rule.
        sigmas: The whole sigma table.
        noise_level: a.

    Raises:
        UserError: See ``coefficients``.
    """
    out = []
    for i in range(len(sigmas) - 2):
        s, s_next = float(sigmas[i]), float(sigmas[i + 1])
        coef = step_coefficients(dynamics, sigmas, i, noise_level)
        variance = (1.0 - s) ** 2 + s**2
        slope = (2.0 * s - 1.0) / variance
        ode = variance * (1.0 + slope * (s_next - s)) ** 2
        sde = variance * (coef.x_coef + slope * coef.v_coef) ** 2 + coef.std**2
        out.append(StepReport(i, s, s_next, coef.std, sde / ode - 1.0))
    return tuple(out)
