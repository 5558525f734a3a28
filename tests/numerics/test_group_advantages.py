from __future__ import annotations

import statistics

import pytest
import torch

from cast_engine.errors import UserError
from cast_engine.numerics import advantages as adv

NAN = float("nan")
D = torch.float64


def scores(*columns: list[float]) -> torch.Tensor:
    return torch.tensor(columns, dtype=D).T


def test_formula_with_population_std():
    r = [0.1, 0.4, 0.35, 0.9]
    mean, std = statistics.fmean(r), statistics.pstdev(r)
    want = [(x - mean) / (std + 1e-4) for x in r]
    got = adv.atom_advantages(scores(r, r[::-1]))
    assert got[:, 0].tolist() == pytest.approx(want, rel=1e-13)
    assert got[:, 1].tolist() == pytest.approx(want[::-1], rel=1e-13)


def test_min_atom_std_is_a_floor_on_the_whole_divisor():
    r = [0.999, 0.9985, 0.9995, 0.999]  # an atom that is nearly always right
    mean, std = statistics.fmean(r), statistics.pstdev(r)
    assert std < 0.02
    assert adv.atom_advantages(scores(r))[:, 0].tolist() == pytest.approx([(x - mean) / 0.02 for x in r], rel=1e-10)
    free = adv.atom_advantages(scores(r), min_atom_std=0.0)
    assert free[:, 0].tolist() == pytest.approx([(x - mean) / (std + 1e-4) for x in r], rel=1e-10)
    wide = [0.0, 1.0, 0.0, 1.0]
    assert torch.equal(adv.atom_advantages(scores(wide)), adv.atom_advantages(scores(wide), min_atom_std=0.0))


def test_g20_constant_single_and_tiny_variance_groups_give_zero():
    assert torch.equal(adv.atom_advantages(scores([0.1] * 7)), torch.zeros(7, 1, dtype=D))
    assert torch.equal(adv.atom_advantages(scores([0.7], [0.2])), torch.zeros(1, 2, dtype=D))
    tiny = [0.3, 0.3 + 1e-7, 0.3, 0.3 - 1e-7]
    for floor in (0.0, 0.02):
        assert torch.equal(adv.atom_advantages(scores(tiny), min_atom_std=floor), torch.zeros(4, 1, dtype=D))
    small = adv.atom_advantages(scores([0.3, 0.3 + 1e-5, 0.3, 0.3 - 1e-5]), min_atom_std=0.0)
    assert small.abs().max() < 0.2  # the eps in the divisor: never a jump to full size
    assert torch.equal(adv.scalar_advantage(torch.full((5,), 0.1)), torch.zeros(5, dtype=D))


def test_g21_an_easy_atom_does_not_drown_a_hard_one():
    easy, hard = [0.0, 1.0, 0.0, 1.0], [0.01, 0.0, 0.01, 0.0]  # scales 1 and 0.01, opposite orders
    r = scores(easy, hard)
    per_atom = adv.atom_advantages(r, min_atom_std=0.0)
    assert per_atom.std(dim=0, correction=0).tolist() == pytest.approx([1, 1], abs=0.03)
    assert (per_atom[:, 0] * per_atom[:, 1] < 0).all()
    scalar = adv.scalar_advantage(adv.scalar_reward(r))
    assert (scalar * per_atom[:, 0] > 0.9).all()  # the sum follows the easy atom alone
    assert (scalar * per_atom[:, 1] < 0).all()


def test_missing_scores_are_left_out_of_mean_and_std():
    r = scores([0.2, NAN, 0.6, 1.0], [NAN, 0.5, NAN, NAN], [NAN] * 4)
    got = adv.atom_advantages(r, min_atom_std=0.0)
    alone = adv.atom_advantages(scores([0.2, 0.6, 1.0]), min_atom_std=0.0)[:, 0]
    assert got[[0, 2, 3], 0].tolist() == pytest.approx(alone.tolist(), rel=1e-13)
    assert got[1, 0] == 0
    assert torch.equal(got[:, 1:], torch.zeros(4, 2, dtype=D))  # one valid image, none at all
    stats = adv.atom_stats(r)
    assert stats.constant.tolist() == [False, True, True]
    assert stats.valid.sum() == 4
    with pytest.raises(UserError, match="infinite"):
        adv.atom_advantages(scores([0.1, float("inf")]))
    with pytest.raises(ValueError, match="G, K"):
        adv.atom_advantages(torch.zeros(3))


def test_clip():
    r = torch.zeros(64, 1, dtype=D)
    r[0] = 1.0
    free = adv.atom_advantages(r, clip=None)
    assert free.max() > 7
    assert adv.atom_advantages(r).max() == 5.0
    assert adv.atom_advantages(1 - r, clip=2.0).min() == -2.0
    assert adv.scalar_advantage(r[:, 0]).max() == 5.0


def test_scalar_reward_takes_a_missing_score_as_no_deviation():
    r = scores([0.2, NAN, 0.6], [0.5, 0.1, 0.3], [NAN, NAN, NAN])
    want = [0.7, 0.5, 0.9]
    assert adv.scalar_reward(r).tolist() == pytest.approx(want, rel=1e-13)
    weighted = adv.scalar_reward(r, torch.tensor([2.0, 1.0, 9.0]))
    assert weighted.tolist() == pytest.approx([0.9, 0.9, 1.5], rel=1e-13)


def test_gate():
    r = scores([0.5, 1.0], [0.8, 0.5], [0.9, 1.0], [0.5, 0.5])
    # 0 is a child of 1 and 2; 3 is a child of 0: parents may come after their children
    got = adv.gate(r, [[1, 2], [], [], [0]])
    assert got[:, 0].tolist() == pytest.approx([0.5 * 0.8, 0.5])
    assert got[:, 3].tolist() == pytest.approx([0.5 * 0.4, 0.25])
    assert torch.equal(got[:, 1:3], r[:, 1:3])
    assert r[0, 0] == 0.5  # the input is not changed
    missing = adv.gate(scores([NAN, 0.0], [0.8, 0.5]), [[], [0]])
    assert missing[0].isnan().all()
    assert missing[1].tolist() == [0, 0]
    for parents in ([[1], [0]], [[0], []], [[2], []], [[]]):
        with pytest.raises(ValueError, match="parents"):
            adv.gate(r[:, :2], parents)


def test_sample_std_and_batch_std():
    r = torch.tensor([0.1, 0.4, 0.9, 0.2, 0.3, 0.8], dtype=D)
    ids = torch.tensor([5, 2, 5, 2, 5, 2])
    own = [0.1, 0.9, 0.3]
    got = adv.group_advantage(r, ids, eps=1e-8, ddof=1)[ids == 5]
    assert got.tolist() == pytest.approx([(x - statistics.fmean(own)) / (statistics.stdev(own) + 1e-8) for x in own])
    got = adv.group_advantage(r, ids, global_std=True)[ids == 5]
    std = statistics.pstdev(r.tolist())
    assert got.tolist() == pytest.approx([(x - statistics.fmean(own)) / (std + 1e-4) for x in own])
    alone = adv.group_advantage(r, torch.arange(6), ddof=1)
    assert torch.equal(alone, torch.zeros(6, dtype=D))
