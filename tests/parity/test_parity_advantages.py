from __future__ import annotations

import pytest
import torch

from cast_engine.numerics import advantages as adv
from tests.parity.parity_vectors import cases, tensor


def group_norm(case):
    i = case["inputs"]
    rewards, ids = tensor(case, "inputs", "rewards"), torch.tensor(i["group_ids"])
    if case["formula"] in ("scalar_advantage", "scalar_advantage_unbiased"):
        return adv.group_advantage(rewards, ids, global_std=i["global_std"], eps=i["eps"], ddof=i["ddof"])
    weights = tensor(case, "inputs", "weights")
    if case["formula"] == "multi_reward_sum_advantage":
        return adv.multi_reward_sum_advantage(rewards, ids, weights, global_std=i["global_std"])
    return adv.gdpo_advantage(rewards, ids, weights)


@pytest.mark.parametrize(
    "case",
    cases(
        "advantages.json",
        "scalar_advantage",
        "scalar_advantage_unbiased",
        "multi_reward_sum_advantage",
        "per_reward_group_normalised_then_batch_normalised",
    ),
)
def test_batch_advantages(case):
    # Flow-Factory's rows were computed from float32 rewards: exact to float32 only.
    exact = case["peer"]["repo"] == "yifan123/flow_grpo"
    tolerance = (1e-10, 1e-10) if exact else (1e-5, 1e-6)
    want = tensor(case, "outputs", "advantages")
    torch.testing.assert_close(group_norm(case), want, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.parametrize("case", cases("advantages.json", "scalar_advantage", global_std=False))
def test_group_scalar_is_the_one_group_function(case):
    rewards, ids = tensor(case, "inputs", "rewards"), torch.tensor(case["inputs"]["group_ids"])
    want = tensor(case, "outputs", "advantages")
    for group in ids.unique():
        got = adv.scalar_advantage(rewards[ids == group], clip=None)
        torch.testing.assert_close(got, want[ids == group], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", cases("advantages.json", "per_atom_group_advantage"))
def test_per_atom(case):
    rewards, ids = tensor(case, "inputs", "rewards"), torch.tensor(case["inputs"]["group_ids"])
    want = tensor(case, "outputs", "advantages")
    for group in ids.unique():
        got = adv.atom_advantages(rewards[ids == group], min_atom_std=0.0, clip=None)
        torch.testing.assert_close(got, want[ids == group], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(adv.group_advantage(rewards, ids), want, rtol=1e-10, atol=1e-10)
