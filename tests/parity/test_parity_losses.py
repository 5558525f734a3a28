from __future__ import annotations

import pytest
import torch

from tests.parity.parity_vectors import cases, tensor
from trainer.objective import guard_loss, policy_loss


def prepared(case):
    new = tensor(case, "inputs", "log_prob_new").requires_grad_()
    clip = case["inputs"]["adv_clip_max"]
    return new, tensor(case, "inputs", "log_prob_old"), tensor(case, "inputs", "advantages").clamp(-clip, clip)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ratio", ["image", "position"])
@pytest.mark.parametrize("positions", [1, 7])
@pytest.mark.parametrize("case", cases("losses.json", "grpo_clipped_loss"))
def test_clipped_loss_with_a_uniform_weight(case, ratio, positions):
    new, old, advantage = prepared(case)
    b = len(new)
    wide = {
        "logp_new": new[:, None, None].expand(b, 1, positions),
        "logp_old": old[:, None, None].expand(b, 1, positions),
    }
    loss = policy_loss(
        **wide, weight=advantage[:, None].expand(b, positions), clip_range=case["inputs"]["clip_range"], ratio=ratio
    )
    total = loss.per_image.mean()
    total.backward()
    same(total.detach(), tensor(case, "outputs", "loss"))
    same(new.grad, tensor(case, "outputs", "grad_wrt_log_prob_new"))
    summary = loss.stats.summary()
    assert summary["outside"] == pytest.approx(case["outputs"]["clip_fraction"], abs=1e-7)
    assert summary["approx_kl"] == pytest.approx(case["outputs"]["approx_kl"], abs=1e-10)


@pytest.mark.parametrize("case", cases("losses.json", "grpo_guard_loss"))
def test_guard_loss(case):
    new, old, advantage = prepared(case)
    root = tensor(case, "inputs", "sqrt_minus_dt")
    std = tensor(case, "inputs", "std_dev_t").flatten() * root
    loss = guard_loss(
        new,
        old,
        tensor(case, "inputs", "mean_new"),
        tensor(case, "inputs", "mean_old"),
        std,
        advantage,
        clip_range=case["inputs"]["clip_range"],
        sqrt_minus_dt=root,
    ).mean()
    loss.backward()
    same(loss.detach(), tensor(case, "outputs", "loss"))
    same(new.grad, tensor(case, "outputs", "grad_wrt_log_prob_new"))
