from __future__ import annotations

import math

import pytest
import torch

from cast_engine.errors import UserError
from cast_engine.numerics import sde

RULES = ["flow_sde", "dance_sde", "cps"]
D = torch.float64


def shifted(n: int, shift: float) -> torch.Tensor:
    t = torch.linspace(1, 1 / n, n, dtype=D)
    return torch.cat([shift / (shift + 1 / t - 1), torch.zeros(1, dtype=D)])


def draw(seed: int, *shape: int, dtype=D) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D).to(dtype)


def plain(rule: str, x, v, sigmas, i, a):
    """The step rules as their papers write them, not as coefficients."""
    s, s1 = sigmas[i], sigmas[i + 1]
    dt = s1 - s
    x0, x1 = x - s * v, x + (1 - s) * v
    if rule == "flow_sde":
        b = a * torch.sqrt(s / (1 - (sigmas[1] if s == 1 else s)))
        mean = x * (1 + b**2 / (2 * s) * dt) + v * (1 + b**2 * (1 - s) / (2 * s)) * dt
        return mean, b * torch.sqrt(-dt)
    if rule == "dance_sde":
        score = -(x - (1 - s) * x0) / s**2
        return x + v * dt - 0.5 * a**2 * score * dt, a * torch.sqrt(-dt)
    std = s1 * math.sin(a * math.pi / 2)
    return (1 - s1) * x0 + torch.sqrt(s1**2 - std**2) * x1, std


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("i", [0, 1, 5])
@pytest.mark.parametrize("a", [0.0, 0.3, 0.7, 1.0])
def test_mean_and_total_std(rule, shift, i, a):
    sigmas, x, v = shifted(8, shift), draw(1, 2, 6, 4), draw(2, 2, 6, 4)
    mean, std = sde.step_mean_std(rule, x, v, sigmas[i], sigmas[i + 1], sigmas[1], a)
    want_mean, want_std = plain(rule, x, v, sigmas, i, a)
    torch.testing.assert_close(mean, want_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(std, torch.as_tensor(want_std, dtype=D), rtol=1e-12, atol=1e-15)
    z = draw(3, 2, 6, 4)
    torch.testing.assert_close(sde.step(rule, x, v, sigmas, i, a, z), want_mean + want_std * z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("i", range(7))
def test_without_noise_every_rule_is_the_ode(rule, i):
    sigmas, x, v = shifted(8, 3.0), draw(1, 2, 6, 4), draw(2, 2, 6, 4)
    got = sde.step(rule, x, v, sigmas, i, 0.0, draw(3, 2, 6, 4))
    torch.testing.assert_close(got, sde.ode_step(x, v, sigmas, i), rtol=1e-13, atol=1e-13)


def test_first_flow_sde_step_kicks_by_a():
    for n, shift in [(8, 1.0), (28, 8.0)]:
        assert sde.step_coefficients("flow_sde", shifted(n, shift), 0, 0.7).std == pytest.approx(0.7, rel=1e-12)


@pytest.mark.parametrize("config", [{"shift": 3.0}, {"use_dynamic_shifting": True, "mu": 1.9}])
def test_ode_step_is_diffusers_bit_for_bit(config):
    diffusers = pytest.importorskip("diffusers")
    mu = config.pop("mu", None)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(12, **({"mu": mu} if mu else {}))
    ours = theirs = draw(5, 1, 64, 16, dtype=torch.float32)
    for i, t in enumerate(scheduler.timesteps):
        v = draw(10 + i, 1, 64, 16, dtype=torch.float32)
        theirs = scheduler.step(v, t, theirs, return_dict=False)[0]
        ours = sde.ode_step(ours, v, scheduler.sigmas, i)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_is_upcast_before_anything_else(rule):
    sigmas = shifted(8, 3.0).float()
    x, v = draw(1, 2, 6, 4, dtype=torch.bfloat16), draw(2, 2, 6, 4, dtype=torch.bfloat16)
    mean, std = sde.apply(sde.step_coefficients(rule, sigmas, 1, 0.7), x, v)
    assert mean.dtype == std.dtype == torch.float32
    want, _ = sde.apply(sde.step_coefficients(rule, sigmas, 1, 0.7), x.float(), v.float())
    assert torch.equal(mean, want)
    assert torch.equal(sde.ode_step(x, v, sigmas, 1), sde.ode_step(x.float(), v.float(), sigmas, 1))
    y = mean.bfloat16()
    assert torch.equal(sde.log_prob(rule, y, mean, std), sde.log_prob(rule, y.float(), mean, std))
    assert sde.log_prob(rule, y, mean, std).dtype == torch.float32


@pytest.mark.parametrize("rule", ["flow_sde", "dance_sde"])
def test_gaussian_log_prob(rule):
    mean, y, std = draw(1, 2, 6, 4), draw(2, 2, 6, 4), torch.tensor(0.37, dtype=D)
    want = torch.distributions.Normal(mean, std).log_prob(y)
    torch.testing.assert_close(sde.log_prob(rule, y, mean, std), want, rtol=1e-13, atol=1e-13)
    per_position = sde.position_log_prob(rule, y, mean, std)
    assert per_position.shape == (2, 6)
    torch.testing.assert_close(per_position, want.mean(-1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(per_position.mean(-1), want.flatten(1).mean(1), rtol=1e-13, atol=1e-13)


def test_cps_log_prob_has_no_variance_and_no_constant():
    mean, y = draw(1, 2, 6, 4), draw(2, 2, 6, 4)
    for s in (0.0, 0.3):
        assert torch.equal(sde.log_prob("cps", y, mean, torch.tensor(s, dtype=D)), -((y - mean) ** 2))


def test_what_was_drawn_carries_no_gradient():
    v = draw(1, 2, 6, 4).requires_grad_()
    mean, std = sde.apply(sde.step_coefficients("flow_sde", shifted(8, 3.0), 1, 0.7), draw(2, 2, 6, 4), v)
    y = mean + std * draw(3, 2, 6, 4)
    sde.log_prob("flow_sde", y, mean, std).sum().backward()
    assert v.grad is not None
    assert v.grad.abs().max() > 0.01  # had y kept its gradient, y - mean would not move


@pytest.mark.parametrize("rule", RULES)
def test_center_is_the_expected_drop_of_the_log_ratio(rule):
    mean_old, d, z, std = draw(1, 3, 6, 4), 0.1 * draw(2, 3, 6, 4), draw(3, 3, 6, 4), torch.tensor(0.4, dtype=D)
    mean = mean_old + d
    total = torch.zeros(3, 6, dtype=D)
    for sign in (1, -1):  # what is odd in z cancels
        y = mean_old + sign * std * z
        total += sde.position_log_prob(rule, y, mean, std) - sde.position_log_prob(rule, y, mean_old, std)
    center = sde.position_center(rule, mean, mean_old, std)
    torch.testing.assert_close(total / 2, -center, rtol=1e-12, atol=1e-14)
    assert center.min() > 0


def test_rounding_variance_is_that_of_the_dtype():
    x = draw(1, 200_000).float() * 3
    for dtype in (torch.bfloat16, torch.float16):
        error = (x.to(dtype).float() - x).square()
        assert float(error.mean()) == pytest.approx(float(sde.rounding_variance(x.to(dtype)).mean()), rel=0.02)
    one = sde.rounding_variance(torch.tensor([1.0, 1.99, 2.0, -0.75, 0.0], dtype=torch.bfloat16)) * 12
    assert one.sqrt().tolist() == [2**-7, 2**-7, 2**-6, 2**-8, pytest.approx(0, abs=2**-7)]
    assert sde.rounding_variance(x).abs().max() == 0
    assert sde.rounding_variance(x.double()).dtype == torch.float32


@pytest.mark.parametrize("rule", RULES)
def test_center_from_a_rounded_latent(rule):
    """N = 65,536, stored in bfloat16: redrawing z gives back the centre to a tenth of a clip range."""
    mean_old, z, s = 1.5 * draw(1, 512, 128).float(), draw(2, 512, 128).float(), torch.tensor(0.2)
    mean = mean_old + 0.02 * s * draw(3, 512, 128).float()
    stored = (mean_old + s * z).bfloat16()
    exact = float(sde.position_center(rule, mean, mean_old, s).mean())
    found = stored.float() - s * z
    unit = 1e-4 if rule != "cps" else 1e-4 * 2 * float(s) ** 2
    assert float(sde.position_center(rule, mean, found, s).mean()) - exact > 0.5 * unit
    corrected = float(sde.position_center(rule, mean, found, s, sde.rounding_variance(stored)).mean())
    assert abs(corrected - exact) < 0.1 * unit


def test_excess_of_the_shifted_flux2_table():
    sigmas = shifted(50, math.exp(2.02335))  # μ of 4,096 positions and 50 steps
    report = sde.step_report("flow_sde", sigmas.float(), 0.7)
    assert len(report) == 49
    assert report[0].step == 0
    assert report[0].sigma == 1.0
    assert [round(r.std, 3) for r in report[:2]] == [0.700, pytest.approx(0.712, abs=0.002)]
    assert report[0].excess == pytest.approx(0.062, abs=1e-3)
    assert report[1].excess == pytest.approx(0.067, abs=1e-3)
    assert report[2].excess == pytest.approx(0.018, abs=1e-3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("i", [0, 2, 6])
def test_excess_is_what_sampling_gives(rule, i):
    sigmas = shifted(8, 3.0)
    s = float(sigmas[i])
    x0, eps, z = (draw(seed, 400_000, 1) for seed in (1, 2, 3))
    x = (1 - s) * x0 + s * eps
    v = x * (2 * s - 1) / ((1 - s) ** 2 + s**2)  # E[eps - x0 | x]
    sampled = sde.step(rule, x, v, sigmas, i, 0.7, z).var() / sde.ode_step(x, v, sigmas, i).var()
    assert sde.step_report(rule, sigmas, 0.7)[i].excess == pytest.approx(float(sampled) - 1, abs=0.006)


def test_fine_tables_keep_the_marginal():
    for rule in RULES[:2]:
        worst = max(abs(r.excess) for r in sde.step_report(rule, shifted(4000, 1.0), 0.7)[40:-40])
        assert worst < 2e-3


def test_window():
    assert sde.window_steps(1, 3, 12) == (1, 2, 3)
    assert sde.window_steps(8, 3, 12) == (8, 9, 10)
    for start, length in [(1, 0), (9, 3), (-1, 2), (0, 12)]:
        with pytest.raises(UserError, match="window"):
            sde.window_steps(start, length, 12)


def test_refusals():
    sigmas = shifted(8, 3.0)
    x = draw(1, 2, 6, 4)
    with pytest.raises(UserError, match="flow_sde or dance_sde or cps"):
        sde.step_coefficients("euler", sigmas, 1, 0.7)
    for level in (-0.1, math.nan, math.inf):
        with pytest.raises(UserError, match="noise_level"):
            sde.step_coefficients("flow_sde", sigmas, 1, level)
    with pytest.raises(UserError, match="0 to 1"):
        sde.step_coefficients("cps", sigmas, 1, 1.2)
    with pytest.raises(UserError, match="sigma table"):
        sde.coefficients("flow_sde", 0.5, 0.6, 0.9, 0.7)
    with pytest.raises(UserError, match="second sigma"):
        sde.coefficients("flow_sde", 1.0, 0.5, 1.0, 0.7)
    for i in (-1, 8):
        with pytest.raises(IndexError):
            sde.ode_step(x, x, sigmas, i)
        with pytest.raises(IndexError):
            sde.step_coefficients("cps", sigmas, i, 0.7)
    with pytest.raises(UserError, match="without noise"):
        sde.log_prob("flow_sde", x, x, torch.tensor(0.0))
    for rule in RULES:
        sde.check_noise([sde.step_coefficients(rule, sigmas, 1, 0.7)])
        with pytest.raises(UserError, match="without noise"):
            sde.check_noise([sde.step_coefficients(rule, sigmas, 1, a) for a in (0.7, 0.0)])
    with pytest.raises(ValueError, match="shape"):
        sde.apply(sde.step_coefficients("cps", sigmas, 1, 0.7), x, x[:1])
    with pytest.raises(ValueError, match="shape"):
        sde.step("cps", x, x, sigmas, 1, 0.7, x[:1])
