from __future__ import annotations

import math

import pytest
import torch

from cast_engine.numerics import credit, maps, sde
from trainer.objective import default_clip_range, guard_loss, policy_loss

D = torch.float64
SIGMAS = torch.tensor([1.0, 0.95, 0.88, 0.78, 0.6, 0.35, 0.0], dtype=D)
RULES = ["flow_sde", "dance_sde", "cps"]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def flow_grpo(logp_new, logp_old, advantage, eps, center=None):
    """Flow-GRPO's loss as published: one log-probability per image and step, one advantage per image."""
    ratio = torch.exp(logp_new - logp_old + (0.0 if center is None else center))
    unclipped = -advantage[:, None] * ratio
    clipped = -advantage[:, None] * torch.clamp(ratio, 1.0 - eps, 1.0 + eps)
    return torch.mean(torch.maximum(unclipped, clipped))


class Rollout:
    """Three stored steps of six images, and a policy whose velocity differs from the one that drew them by `moved`."""

    def __init__(self, rule: str, moved: float, b: int = 6, p: int = 12, c: int = 5) -> None:
        self.b, self.p, self.c, self.rule = b, p, c, rule
        self.old_v, self.x, z = draw(1, b, 3, p, c), draw(2, b, 3, p, c), draw(3, b, 3, p, c)
        self.v = (self.old_v + moved * draw(4, b, 3, p, c)).requires_grad_()
        self.y = torch.stack(
            [sde.step(rule, self.x[:, j], self.old_v[:, j], SIGMAS, 1 + j, 0.7, z[:, j]) for j in range(3)]
        )
        self.logp_old, self.mean_old = self.log_prob(self.old_v)[:2]

    def log_prob(self, v):
        logp, means, centers = [], [], []
        for j in range(3):
            mean, std = sde.apply(sde.step_coefficients(self.rule, SIGMAS, 1 + j, 0.7), self.x[:, j], v[:, j])
            logp.append(sde.position_log_prob(self.rule, self.y[j], mean, std))
            means.append(mean)
            old = self.mean_old[:, j] if hasattr(self, "mean_old") else mean
            centers.append(sde.position_center(self.rule, mean, old, std))
        return torch.stack(logp, 1), torch.stack(means, 1), torch.stack(centers, 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("moved", "eps"), [(0.0, 1e-4), (1e-3, 1e-4), (1e-2, 1e-3), (0.1, 1e-3), (0.1, 10.0)])
def test_uniform_maps_give_flow_grpo_in_value_and_gradient(rule, centred, moved, eps):
    roll = Rollout(rule, moved)
    scores = torch.rand(6, 4, generator=torch.Generator().manual_seed(5), dtype=D)
    uniform = maps.normalise(torch.full((6, 4, 12), 3.0))[0]
    result = credit.signed_weight("cast", scores, uniform, positions=12, dtype=D)

    logp, _, center = roll.log_prob(roll.v)
    kappa = center.detach() if centred else None
    ours = policy_loss(logp, roll.logp_old, result.weight, clip_range=eps, center_term=kappa)
    ours.per_image.mean().backward()
    gradient, roll.v.grad = roll.v.grad, None

    logp, _, center = roll.log_prob(roll.v)
    kappa = center.detach().mean(-1) if centred else None
    theirs = flow_grpo(logp.mean(-1), roll.logp_old.mean(-1), result.mean_weight, eps, kappa)
    theirs.backward()
    torch.testing.assert_close(ours.per_image.mean().detach(), theirs.detach(), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(gradient, roll.v.grad, rtol=1e-10, atol=1e-14)

    stopped = (gradient.flatten(2).abs().amax(-1) == 0).double().mean()
    if moved == 0.1 and eps < 1:
        assert 0 < stopped < 1  # the comparison went through the clip, on some images only
    if eps > 1 or moved == 0.0:
        assert stopped == 0


@pytest.mark.parametrize(("moved", "same"), [(0.0, True), (0.1, False)])
def test_position_ratio_equals_flow_grpo_on_policy_only(moved, same):
    roll, advantage = Rollout("flow_sde", moved), draw(5, 6)
    weight = advantage[:, None].expand(6, 12)
    logp = roll.log_prob(roll.v)[0]
    policy_loss(logp, roll.logp_old, weight, clip_range=1.0, ratio="position").per_image.mean().backward()
    ours, roll.v.grad = roll.v.grad, None
    logp = roll.log_prob(roll.v)[0]
    flow_grpo(logp.mean(-1), roll.logp_old.mean(-1), advantage, 1.0).backward()
    assert bool((ours - roll.v.grad).norm() < 1e-12 * ours.norm()) == same


@pytest.mark.parametrize("moved", [0.0, 0.02])
def test_gradient_of_a_signed_map(moved):
    """With W of both signs: -W ρ̄ at each position's own log-probability, 0 where that sign is clipped."""
    b, w, p, eps = 5, 2, 7, 2e-3
    old = draw(1, b, w, p)
    new = (old + moved * draw(2, b, w, 1) + moved * draw(3, b, w, p)).requires_grad_()
    weight, kappa = draw(4, b, p), 1e-3 * draw(5, b, w)
    out = policy_loss(new, old, weight, clip_range=eps, center_term=kappa)
    out.per_image.sum().backward()
    rho = ((new - old).mean(-1) + kappa).exp().detach()[..., None].expand(b, w, p)
    wide = weight[:, None].expand(b, w, p)
    stopped = ((wide > 0) & (rho > 1 + eps)) | ((wide < 0) & (rho < 1 - eps))
    value = torch.where(stopped, -wide * rho.clamp(1 - eps, 1 + eps), -wide * rho)
    torch.testing.assert_close(out.per_image.detach(), value.mean((1, 2)), rtol=1e-12, atol=1e-14)
    want = torch.where(stopped, torch.zeros((), dtype=D), -wide * rho) / (w * p)
    torch.testing.assert_close(new.grad, want, rtol=1e-12, atol=1e-14)
    stats = out.stats.summary()
    assert stats["clip_positive"] == pytest.approx(float((stopped & (wide > 0)).sum() / (wide > 0).sum()))
    assert stats["clip_negative"] == pytest.approx(float((stopped & (wide < 0)).sum() / (wide < 0).sum()))
    assert stats["outside"] == pytest.approx(float(((rho - 1).abs() > eps).double().mean()))
    assert stats["ratio"] == pytest.approx(float(rho.mean()))
    assert stats["log_ratio"] == pytest.approx(float((new - old).detach().mean()))
    assert stats["log_ratio_max"] == pytest.approx(float((new - old).detach().mean(-1).abs().max()))
    assert stats["center"] == pytest.approx(float(kappa.mean()))
    if moved:
        assert 0 < stats["clip_positive"] < 1
        assert 0 < stats["clip_negative"] < 1


def test_position_ratio_and_its_own_center():
    b, w, p, eps = 4, 2, 6, 5e-3
    old, weight, kappa = draw(1, b, w, p), draw(4, b, p), 1e-3 * draw(5, b, w, p)
    new = (old + 0.01 * draw(2, b, w, p)).requires_grad_()
    out = policy_loss(new, old, weight, clip_range=eps, ratio="position", center_term=kappa)
    out.per_image.sum().backward()
    rho, wide = (new - old + kappa).exp().detach(), weight[:, None].expand(b, w, p)
    stopped = ((wide > 0) & (rho > 1 + eps)) | ((wide < 0) & (rho < 1 - eps))
    want = torch.where(stopped, torch.zeros((), dtype=D), -wide * rho) / (w * p)
    torch.testing.assert_close(new.grad, want, rtol=1e-12, atol=1e-14)
    # for the image ratio the same centre counts by its mean over positions
    per_position = policy_loss(new, old, weight, clip_range=eps, center_term=kappa).per_image
    per_image = policy_loss(new, old, weight, clip_range=eps, center_term=kappa.mean(-1)).per_image
    torch.testing.assert_close(per_position, per_image, rtol=1e-13, atol=1e-14)


def test_center_and_weight_carry_no_gradient():
    new, weight, kappa = (draw(i, *s).requires_grad_() for i, s in enumerate([(2, 1, 3), (2, 3), (2, 1)]))
    policy_loss(new, draw(9, 2, 1, 3), weight, clip_range=10.0, center_term=kappa).per_image.sum().backward()
    assert new.grad is not None
    assert weight.grad is None
    assert kappa.grad is None


def clip_shares(centred: bool) -> tuple[float, float]:
    """N = 65,536 elements; the mean moved by 2% of s, independently of the noise; W of random sign."""
    p, c, images, std = 512, 128, 384, torch.tensor(0.5)
    generator = torch.Generator().manual_seed(11)
    total = None
    for _ in range(images // 32):
        z, d, w = (torch.randn(*s, generator=generator) for s in [(32, p, c), (32, p, c), (32, p)])
        mean_old = torch.zeros(32, p, c)
        mean, y = mean_old + 0.02 * std * d, mean_old + std * z
        old, new = (sde.position_log_prob("flow_sde", y, m, std)[:, None] for m in (mean_old, mean))
        kappa = sde.position_center("flow_sde", mean, mean_old, std)[:, None] if centred else None
        stats = policy_loss(new, old, w, clip_range=default_clip_range(p, c), center_term=kappa).stats
        total = stats if total is None else total + stats
    assert float(total.ratios) == images
    summary = total.summary()
    return summary["clip_positive"], summary["clip_negative"]


def test_the_centred_ratio_clips_both_signs_alike():
    positive, negative = clip_shares(centred=True)
    assert abs(positive - negative) < 0.05
    assert 0.02 < positive < 0.3


def test_without_centring_all_negative_weights_stop():
    positive, negative = clip_shares(centred=False)
    assert positive < 0.01
    assert negative > 0.8


def test_default_clip_range():
    assert default_clip_range(1024, 64) == pytest.approx(1e-4)
    assert default_clip_range(4096, 128) == pytest.approx(3.5e-5, rel=0.02)
    assert default_clip_range(64, 32) == pytest.approx(5.7e-4, rel=0.01)
    with pytest.raises(ValueError, match="0 positions"):
        default_clip_range(0, 64)


def test_micro_batches_add_up():
    old, new, weight = draw(1, 8, 3, 5), draw(1, 8, 3, 5) + 0.01 * draw(2, 8, 3, 5), draw(3, 8, 5)
    whole = policy_loss(new, old, weight, clip_range=1e-3)
    parts = [policy_loss(new[i : i + 2], old[i : i + 2], weight[i : i + 2], clip_range=1e-3) for i in range(0, 8, 2)]
    torch.testing.assert_close(torch.cat([q.per_image for q in parts]), whole.per_image, rtol=1e-13, atol=0)
    stats = parts[0].stats + parts[1].stats + parts[2].stats + parts[3].stats
    for name, value in whole.stats.summary().items():
        assert stats.summary()[name] == pytest.approx(value, rel=1e-12), name
    steps = [policy_loss(new[:, [j]], old[:, [j]], weight, clip_range=1e-3).per_image for j in range(3)]
    torch.testing.assert_close(torch.stack(steps).mean(0), whole.per_image, rtol=1e-13, atol=0)


def test_float32_on_policy_is_exact():
    old = draw(1, 4, 2, 64).float()
    new = old.clone().requires_grad_()
    weight = draw(2, 4, 64).float()
    out = policy_loss(new, old, weight, clip_range=1e-4)
    out.per_image.sum().backward()
    assert torch.equal(new.grad, (-weight / 128)[:, None].expand(4, 2, 64))
    assert out.stats.summary()["log_ratio_max"] == 0


def test_guard_exponent_and_its_gradient():
    old, std, advantage = draw(1, 4), torch.full((4,), 0.5, dtype=D), draw(2, 4)
    new, mean_old = (old + 0.01 * draw(3, 4)).requires_grad_(), draw(4, 4, 6, 2)
    mean = (mean_old + 0.1 * draw(5, 4, 6, 2)).requires_grad_()
    loss = guard_loss(new, old, mean, mean_old, std, advantage, clip_range=10.0)
    rho = (0.5 * (new - old + ((mean - mean_old) ** 2).mean((1, 2)) / 0.5)).exp()
    torch.testing.assert_close(loss, -advantage * rho, rtol=1e-13, atol=0)
    loss.sum().backward()
    torch.testing.assert_close(new.grad, (-advantage * rho * 0.5).detach(), rtol=1e-12, atol=0)
    assert mean.grad.abs().min() > 0
    divided = guard_loss(new, old, mean, mean_old, std, advantage, clip_range=10.0, sqrt_minus_dt=torch.full((4,), 0.2))
    torch.testing.assert_close(divided, loss / 0.04, rtol=1e-6, atol=0)


def test_refusals():
    lp, w = torch.zeros(2, 3, 4), torch.zeros(2, 4)
    for bad in (torch.zeros(2, 3, 5), torch.zeros(2, 12)):
        with pytest.raises(ValueError, match="logp_new"):
            policy_loss(lp, bad, w, clip_range=1e-4)
    with pytest.raises(ValueError, match="weight"):
        policy_loss(lp, lp, torch.zeros(2, 3), clip_range=1e-4)
    with pytest.raises(ValueError, match="center_term"):
        policy_loss(lp, lp, w, clip_range=1e-4, center_term=torch.zeros(2))
    for eps in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="clip range"):
            policy_loss(lp, lp, w, clip_range=eps)
    with pytest.raises(ValueError, match="ratio"):
        policy_loss(lp, lp, w, clip_range=1e-4, ratio="token")
