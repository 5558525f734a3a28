"""Figures of signed weights: small cases by hand, and what must hold whatever the numbers."""

import math

import pytest
import torch

from cast_engine.numerics.credit import signed_weight
from cast_engine.numerics.credit_stats import atom_mass, mean_by_place
from cast_engine.numerics.maps import normalise, resample

D = torch.float64


def test_the_mass_of_atoms_with_low_spread_by_hand():
    advantage = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 2.0, -0.5]], dtype=D)
    mass = atom_mass(advantage, torch.tensor([False, True, True]))
    assert mass.all.tolist() == [3.5, 3.5]
    assert mass.low_std.tolist() == [2.5, 2.5]
    weighed = atom_mass(advantage, torch.tensor([False, True, True]), torch.tensor([1.0, 0.0, 4.0], dtype=D))
    assert (weighed.all.tolist(), weighed.low_std.tolist()) == ([3.0, 3.0], [2.0, 2.0])
    assert atom_mass(torch.zeros(2, 0), torch.zeros(0, dtype=torch.bool)).all.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"expected \[G, K\]"):
        atom_mass(advantage, torch.tensor([True]))


def test_a_group_says_which_atoms_have_little_spread():
    """std 0 is constant, 0.01 is low, 0.3 is neither; the floor of the divisor bounds what a low one has to say."""
    scores = torch.tensor([[0.5, 0.49, 0.2], [0.5, 0.51, 0.8]], dtype=D)
    made = signed_weight("per-atom", scores, None, positions=4, min_atom_std=0.02, kinds=["object", "count", "count"])
    assert made.low_std.tolist() == [False, True, False]
    assert (made.counters["low_std"], made.counters["low_std.count"], made.counters["constant.object"]) == (1, 1, 1)
    mass = atom_mass(made.advantage, made.low_std)
    assert mass.low_std.tolist() == pytest.approx([0.5, 0.5])  # 0.01 / 0.02
    assert (mass.low_std / mass.all).tolist() == pytest.approx([1 / 3, 1 / 3], rel=1e-3)
    assert made.std == pytest.approx(float(made.mean_weight.std(correction=0)))
    without_floor = signed_weight("per-atom", scores, None, positions=4, min_atom_std=0.0)
    assert not without_floor.low_std.any()


def test_mean_weight_by_place_by_hand():
    place = mean_by_place(torch.tensor([4.0, -2.0, 1.0, 1.0]), torch.tensor([1.0, 0.5, 0.0, 0.0]))
    assert place.drawn == pytest.approx((4 - 1) / 1.5)
    assert place.background == pytest.approx((-1 + 1 + 1) / 2.5)
    assert place.share == 0.375
    with pytest.raises(ValueError, match="expected the same"):
        mean_by_place(torch.zeros(3), torch.zeros(4))


def test_places_add_up_to_the_mean_and_may_be_missing():
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0))
    cover = torch.rand(64, generator=torch.Generator().manual_seed(1))
    place = mean_by_place(weight, cover)
    together = place.drawn * place.share + place.background * (1 - place.share)
    assert together == pytest.approx(float(weight.double().mean()))
    empty, full = mean_by_place(weight, torch.zeros(64)), mean_by_place(weight, torch.ones(64))
    assert math.isnan(empty.drawn)
    assert math.isnan(full.background)
    assert empty.background == full.drawn == pytest.approx(float(weight.double().mean()))


def test_blame_for_what_is_absent_lies_where_its_map_does():
    """Uniform maps of absent things blame the background; maps on what is drawn do not."""
    mask = torch.zeros(16, 16)
    mask[4:8, 4:12] = 1.0
    cover = resample(mask, (4, 4)).flatten()
    on_drawn = normalise(cover[None])[0]
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=D)  # the first image lacks what its second atom asks for
    for absent, background in ((torch.ones(1, 16, dtype=D), -math.sqrt(0.5)), (on_drawn, 0.0)):
        maps = torch.stack([torch.cat([on_drawn, absent])] * 2)
        weight = signed_weight("cast", scores, maps, positions=16).weight[0]
        place = mean_by_place(weight, cover)
        assert place.background == pytest.approx(background, rel=1e-3, abs=1e-6)
        assert place.drawn * place.share + place.background * (1 - place.share) == pytest.approx(0.0, abs=1e-6)
