"""The ten edge cases of credit: what becomes of atoms, groups and maps that hold nothing, or not what was expected."""

from __future__ import annotations

import math

import pytest
import torch

from cast_engine.errors import UserError
from cast_engine.numerics import advantages as adv
from cast_engine.numerics import credit, maps, noise, sde
from trainer.objective import policy_loss

D = torch.float64
NAN, INF = float("nan"), float("inf")
RULES = ["cast", "scalar", "per-atom", "spatial", "shuffled"]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def weigh(rule, r, m, **options):
    keys = [str(i) for i in range(len(r))]
    return credit.signed_weight(rule, r, m, positions=m.shape[-1], keys=keys, dtype=D, **options)


def mean_one(seed: int, *shape: int) -> torch.Tensor:
    return maps.normalise(draw(seed, *shape) ** 4)[0]


def test_1_a_constant_atom_adds_nothing_and_still_counts_in_the_scale():
    r, m = draw(1, 6, 3), mean_one(2, 6, 4, 10)
    with_constant = torch.cat([r, torch.full((6, 1), 0.4, dtype=D)], dim=1)
    got = weigh("cast", with_constant, m)
    assert torch.equal(got.advantage[:, 3], torch.zeros(6, dtype=D))
    assert got.scale == 1 / math.sqrt(4)
    without = weigh("cast", r, m[:, :3]).weight
    torch.testing.assert_close(got.weight, without * math.sqrt(3) / math.sqrt(4), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_2_a_group_of_constant_atoms_has_no_gradient_and_stays_in_the_denominator(rule):
    r = torch.tensor([[0.1, 1.0, 0.3]] * 4, dtype=D)
    got = weigh(rule, r, mean_one(2, 4, 3, 8))
    assert torch.equal(got.weight, torch.zeros(4, 8, dtype=D))
    assert got.counters["zero_group"] == 1
    new = draw(3, 5, 2, 8).requires_grad_()
    weight = torch.cat([got.weight, torch.ones(1, 8, dtype=D)])
    loss = policy_loss(new, new.detach() + 1e-5, weight, clip_range=1e-4).per_image
    assert loss.shape == (5,)
    loss.mean().backward()
    assert torch.equal(new.grad[:4], torch.zeros(4, 2, 8, dtype=D))
    assert float(new.grad[4].sum()) == pytest.approx(-1 / 5, rel=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_3_no_atoms(rule):
    got = weigh(rule, torch.zeros(4, 0), torch.zeros(4, 0, 8))
    assert torch.equal(got.weight, torch.zeros(4, 8, dtype=D))
    assert got.counters["atoms"] == 0
    assert got.counters["zero_group"] == 1


def test_4_an_empty_map_is_uniform():
    raw = torch.zeros(3, 4, 4)
    raw[1] = 1e-14
    raw[2, 1, 1] = 1.0
    got = maps.prepare(raw, (8, 8), share=1.0)
    assert torch.equal(got.maps[:2], torch.ones(2, 64, dtype=D))
    assert got.uniform.tolist() == [True, True, False]
    assert got.counters["uniform_maps"] == 2
    assert got.maps[2].max() > 1


def test_5_bad_cells_count_as_zero_before_normalising():
    raw = torch.tensor([[[NAN, INF], [-3.0, 2.0]], [[NAN, -INF], [-1.0, NAN]], [[0.0, 0.0], [0.0, 2.0]]])
    got = maps.prepare(raw, (2, 2), blurred=False, percentile_cap=None, share=1.0)
    assert got.maps.tolist() == [[0, 0, 0, 4], [1, 1, 1, 1], [0, 0, 0, 4]]
    assert got.counters["repaired_cells"] == 7
    assert got.counters["uniform_maps"] == 1
    bad_neutral = maps.prepare(raw, (2, 2), neutral=torch.full((2, 2), NAN), blurred=False, share=1.0)
    assert bad_neutral.counters["neutral_unusable"] == 1
    assert torch.isfinite(bad_neutral.maps).all()


@pytest.mark.parametrize("rule", RULES)
def test_6_missing_scores(rule):
    r, m = draw(1, 5, 3), mean_one(2, 5, 3, 8)
    r[2, 1] = NAN
    r[1:, 2] = NAN  # one valid image: the whole atom is left out
    got = weigh(rule, r, m)
    assert torch.isfinite(got.weight).all()
    assert got.counters["missing"] == 5
    if rule == "cast":
        assert got.advantage[2, 1] == 0
        assert torch.equal(got.advantage[:, 2], torch.zeros(5, dtype=D))
        others = [0, 1, 3, 4]
        want = adv.atom_advantages(r[others, 1:2])[:, 0]
        torch.testing.assert_close(got.advantage[others, 1], want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rule", RULES)
def test_7_a_group_of_one(rule):
    got = weigh(rule, draw(1, 1, 3), mean_one(2, 1, 3, 8))
    assert torch.equal(got.weight, torch.zeros(1, 8, dtype=D))


def test_8_a_prompt_that_is_drawn_twice_is_two_groups():
    ids = [("0123456789ab", 0)] * 3 + [("0123456789ab", 1)] * 3  # same prompt, two rounds
    groups = torch.tensor([hash(i) % 2**31 for i in ids])
    r = torch.tensor([0.0, 0.1, 0.2, 0.8, 0.9, 1.0], dtype=D)
    got = adv.group_advantage(r, groups)
    torch.testing.assert_close(got[:3], got[3:], rtol=1e-9, atol=1e-12)
    assert len({noise.member_seed(0, round_, text, 0) for text, round_ in ids}) == 2


@pytest.mark.parametrize("grid", [(16, 16), (13, 11), (5, 3)])
def test_9_maps_are_resampled_before_they_are_normalised(grid):
    raw = draw(3, 2, 8, 8) ** 3
    got = maps.prepare(raw, grid, blurred=False, percentile_cap=None, share=1.0)
    assert got.maps.shape == (2, grid[0] * grid[1])
    assert (got.maps.mean(1) - 1).abs().max() < 1e-12
    resampled = maps.resample(raw, grid).flatten(1)
    torch.testing.assert_close(got.maps, resampled / resampled.mean(1, keepdim=True), rtol=1e-12, atol=0)
    if grid == (16, 16):  # judge token (3, 5) covers latent rows 6-7, columns 10-11
        cells = got.maps[0].reshape(16, 16)[6:8, 10:12]
        assert torch.equal(cells, cells[:1, :1].expand(2, 2))
        assert float(cells[0, 0]) == pytest.approx(float(raw[0, 3, 5] / raw[0].mean()))
    w = weigh("cast", draw(4, 3, 2), torch.stack([got.maps] * 3))
    torch.testing.assert_close(w.weight.mean(1), w.mean_weight, rtol=1e-12, atol=1e-12)


def test_10_an_empty_window():
    with pytest.raises(UserError, match=r"rollout\.window\.length"):
        sde.window_steps(1, 0, 12)
    with pytest.raises(ValueError, match="w >= 1"):
        policy_loss(torch.zeros(2, 0, 4), torch.zeros(2, 0, 4), torch.zeros(2, 4), clip_range=1e-4)
