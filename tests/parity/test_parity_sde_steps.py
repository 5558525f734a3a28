from __future__ import annotations

import pytest
import torch

from cast_engine.numerics import sde
from tests.parity.parity_vectors import cases, tensor

RULES = {"flow_sde_step": "flow_sde", "dance_sde_step": "dance_sde", "cps_step": "cps"}


def close(got: torch.Tensor, want: torch.Tensor, tolerance: tuple[float, float]) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.parametrize("case", cases("sde_steps.json", *RULES))
def test_step_and_log_prob_and_gradient(case):
    rule = RULES[case["formula"]]
    exact = case["dtype"] == "float64" and case["peer"]["repo"] != "XueZeyue/DanceGRPO"
    loose, tight = ((1e-10, 1e-10), (1e-10, 1e-10)) if exact else ((1e-4, 1e-5), (1e-5, 1e-6))
    i, a = case["inputs"]["step_index"], case["inputs"]["noise_level"]
    sigmas, x, noise = (tensor(case, "inputs", n) for n in ("sigmas", "latents", "noise"))
    old = tensor(case, "inputs", "model_output_old")
    new = tensor(case, "inputs", "model_output_new").requires_grad_()
    out = {name: tensor(case, "outputs", name) for name in case["outputs"]}
    y = out["next_latents"]

    coef = sde.step_coefficients(rule, sigmas, i, a)
    mean_old, std = sde.apply(coef, x, old)
    mean_new, _ = sde.apply(coef, x, new)
    close(sde.step(rule, x, old, sigmas, i, a, noise), y, tight)
    if "mean_old" in out:
        close(mean_old, out["mean_old"], tight)
        close(mean_new.detach(), out["mean_new"], tight)
    close(sde.position_log_prob(rule, y, mean_old, std).flatten(1).mean(1), out["log_prob_old"], loose)
    logp = sde.position_log_prob(rule, y, mean_new, std).flatten(1).mean(1)
    close(logp.detach(), out["log_prob_new"], loose)
    logp.sum().backward()
    close(new.grad, out["grad_of_sum_log_prob_new_wrt_model_output_new"], tight)

    total = out["std_dev_t"]
    returned_total = rule == "cps" or case["peer"]["repo"] == "Tencent-Hunyuan/MixGRPO" or "vo_dance_sde" in case["id"]
    if not returned_total:
        total = total * (-out["dt"]).sqrt()
    close(std.reshape(1), total, tight)
