from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_engine.errors import UserError
from cast_engine.numerics import advantages as adv
from cast_engine.numerics import credit, maps

D = torch.float64
RULES = ["cast", "scalar", "per-atom", "spatial", "shuffled"]
NAN = float("nan")


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def group(seed: int, g: int, k: int, p: int, sharp: float = 6.0):
    m, _ = maps.normalise(draw(seed + 1, g, k, p) ** sharp)
    return draw(seed, g, k), m, [f"{i:012x}-0000-0000" for i in range(g)]


def weigh(rule: str, r, m, keys=None, dtype=D, **options) -> credit.GroupCredit:
    return credit.signed_weight(rule, r, m, positions=m.shape[-1], keys=keys, dtype=dtype, **options)


def by_hand(rule: str, r, m, keys, c: float, w) -> torch.Tensor:
    """W[i,p] element by element, straight from the table of rules."""
    g, k, p = m.shape
    a = adv.atom_advantages(r)
    scalar = adv.scalar_advantage((r * w).sum(1))
    out = torch.zeros(g, p, dtype=D)
    for i in range(g):
        order = credit.derangement(k, 0, keys[i])
        for q in range(p):
            if rule == "scalar":
                out[i, q] = scalar[i]
            elif rule == "spatial":
                out[i, q] = scalar[i] * sum(m[i, n, q] for n in range(k)) / k
            elif rule == "per-atom":
                out[i, q] = c * sum(w[n] * a[i, n] for n in range(k))
            elif rule == "cast":
                out[i, q] = c * sum(w[n] * a[i, n] * m[i, n, q] for n in range(k))
            else:
                out[i, q] = c * sum(w[n] * a[i, n] * m[i, order[n], q] for n in range(k))
    return out


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("scale", "c"), [("sum", 1.0), ("rsqrt", 1 / math.sqrt(5)), ("mean", 1 / 5)])
def test_every_rule_is_its_formula(rule, scale, c):
    r, m, keys = group(1, 4, 5, 9)
    w = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.5], dtype=D)
    got = weigh(rule, r, m, keys, scale=scale, weights=w)
    torch.testing.assert_close(got.weight, by_hand(rule, r, m, keys, c, w), rtol=1e-12, atol=1e-12)
    assert got.scale == (1.0 if rule in ("scalar", "spatial") else c)
    assert got.advantage.shape == ((4, 1) if rule in ("scalar", "spatial") else (4, 5))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    g=st.integers(1, 6),
    k=st.integers(1, 8),
    p=st.integers(1, 40),
    rule=st.sampled_from(RULES),
    scale=st.sampled_from(["sum", "rsqrt", "mean", "match"]),
    missing=st.booleans(),
)
def test_the_mean_over_positions_never_depends_on_the_maps(seed, g, k, p, rule, scale, missing):
    r, m, keys = group(seed, g, k, p)
    if missing:
        r[0, 0] = NAN
    got = weigh(rule, r, m, keys, scale=scale)
    single = adv.scalar_advantage(adv.scalar_reward(r))
    want = single if rule in ("scalar", "spatial") else got.scale * adv.atom_advantages(r).sum(1)
    torch.testing.assert_close(got.mean_weight, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.weight.mean(1), want, rtol=1e-11, atol=1e-12)
    stored = weigh(rule, r, m, keys, scale=scale, dtype=torch.float32).weight
    assert stored.dtype == torch.float32
    assert stored.is_contiguous()
    assert (stored.double().mean(1) - want).abs().max() < 1e-6
    flat = weigh(rule, r, torch.ones_like(m), keys, scale=scale)
    torch.testing.assert_close(flat.weight, want[:, None].expand(g, p), rtol=1e-12, atol=1e-12)


def test_float32_mean_at_full_size():
    r, m, keys = group(3, 16, 11, 4096, sharp=40.0)
    for rule in RULES:
        got = weigh(rule, r, m, keys, dtype=torch.float32)
        assert (got.weight.double().mean(1) - got.mean_weight).abs().max() < 1e-6


def test_blend_zero_is_the_per_atom_rule_and_rules_differ_otherwise():
    r, m, keys = group(4, 6, 4, 16)
    per_atom = weigh("per-atom", r, m).weight
    torch.testing.assert_close(weigh("cast", r, maps.blend(m, 0.0)).weight, per_atom, rtol=1e-12, atol=1e-12)
    assert torch.equal(credit.signed_weight("per-atom", r, None, positions=16, dtype=D).weight, per_atom)
    all_weights = [weigh(rule, r, m, keys).weight for rule in RULES]
    for i, a in enumerate(all_weights):
        for b in all_weights[i + 1 :]:
            assert (a - b).abs().max() > 0.05


def test_signs_follow_the_atom_that_is_at_fault():
    # two images, two atoms on opposite halves; each image has one right and one wrong
    r = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    m = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]] * 2)
    got = weigh("cast", r, m).weight
    assert (got.sign() == torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=D)).all()
    assert weigh("scalar", r, m).weight.abs().max() == 0  # the sum sees nothing
    crossed = weigh("shuffled", r, m, ["a", "b"]).weight
    torch.testing.assert_close(crossed, -got)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_derangements_have_no_fixed_point_and_are_all_possible(n):
    seen = set()
    for image in range(300):
        order = credit.derangement(n, 0, f"key-{image}")
        assert sorted(order) == list(range(n))
        assert all(order[i] != i for i in range(n))
        seen.add(order)
    count = round(math.factorial(n) / math.e)
    assert len(seen) == count if n < 5 else len(seen) > 100
    assert credit.derangement(n, 0, "a") == credit.derangement(n, 0, "a")


def test_derangements_depend_on_seed_and_key_only():
    orders = {credit.derangement(8, s, key) for s in range(4) for key in ("a", "b")}
    assert len(orders) == 8
    r, m, keys = group(5, 4, 6, 9)
    whole = weigh("shuffled", r, m, keys, seed=3).weight
    back = weigh("shuffled", r.flip(0), m.flip(0), keys[::-1], seed=3).weight.flip(0)
    torch.testing.assert_close(whole, back, rtol=1e-13, atol=1e-13)
    assert (whole - weigh("shuffled", r, m, keys, seed=4).weight).abs().max() > 0.05


def test_match_gives_unit_spread_and_knows_its_limits():
    r, m, _ = group(6, 8, 5, 4)
    got = weigh("cast", r, m, scale="match")
    assert float(got.weight.mean(1).std(correction=0)) == pytest.approx(1.0, abs=1e-12)
    assert got.std == pytest.approx(1.0, abs=1e-12)
    assert got.counters["match_limited"] == 0
    opposite = torch.stack([r[:, 0], 1 - r[:, 0]], dim=1)  # the two atoms cancel in every image
    limited = weigh("cast", opposite, m[:, :2], scale="match")
    assert limited.scale == pytest.approx(1 / math.sqrt(2))
    assert limited.counters["match_limited"] == 1
    almost = opposite.clone()
    almost[:, 1] += 1e-3 * draw(9, 8)
    assert weigh("cast", almost, m[:, :2], scale="match").scale == credit.MATCH_MAX


def test_counters_by_kind():
    r, m, keys = group(7, 4, 5, 4)
    r[:, 0], r[:, 1] = 0.3, 1.0
    r[:, 2] = torch.tensor([0.99, 0.991, 0.99, 0.989])
    r[1, 3] = NAN
    kinds = ["object", "count", "object", "attribute", "relation"]
    counters = weigh("cast", r, m, kinds=kinds).counters
    assert counters == {
        "atoms": 5,
        "constant": 2,
        "constant.object": 1,
        "constant.count": 1,
        "low_std": 1,
        "low_std.object": 1,
        "missing": 1,
        "match_limited": 0,
        "zero_group": 0,
        "above_clip": 0,
    }
    assert weigh("shuffled", r[:, :1], m[:, :1], keys).counters["not_shuffled"] == 4
    assert weigh("shuffled", r, m, keys).counters["not_shuffled"] == 0


def test_weight_clip_is_off_by_default_and_counted():
    r = torch.zeros(4, 1, dtype=D)
    r[0] = 1.0
    m = torch.zeros(4, 1, 64, dtype=D)
    m[..., 0] = 64.0
    free = weigh("cast", r, m)
    assert free.weight.max() > 100
    assert free.counters["above_clip"] == 4
    cut = weigh("cast", r, m, weight_clip=50.0)
    assert cut.weight.max() == 50.0
    assert cut.counters["above_clip"] == 1
    assert torch.equal(cut.mean_weight, free.mean_weight)


def test_advantages_are_clipped_before_they_are_combined():
    r = torch.zeros(50, 2, dtype=D)
    r[0, 0] = 1.0
    got = weigh("per-atom", r, torch.ones(50, 2, 1), scale="sum", advantage_clip=2.0)
    assert got.weight[0, 0] == 2.0
    assert weigh("scalar", r, torch.ones(50, 2, 1), advantage_clip=2.0).weight.max() == 2.0


def test_refusals():
    r, m, keys = group(8, 3, 2, 4)
    with pytest.raises(UserError, match="per-atom or spatial"):
        weigh("atoms", r, m)
    with pytest.raises(UserError, match="rsqrt"):
        weigh("cast", r, m, scale="sqrt")
    with pytest.raises(ValueError, match="key"):
        weigh("shuffled", r, m)
    with pytest.raises(ValueError, match="key"):
        weigh("shuffled", r, m, keys[:2])
    with pytest.raises(ValueError, match="mean one"):
        weigh("cast", r, 2 * m)
    for wrong in (None, m[:2], m[:, :1], m[..., :3]):
        with pytest.raises(ValueError, match="expected"):
            credit.signed_weight("cast", r, wrong, positions=4)
    with pytest.raises(ValueError, match="kinds"):
        weigh("cast", r, m, kinds=["object"])
    with pytest.raises(ValueError, match="kinds"):
        weigh("cast", r, m, weights=torch.ones(3))
    with pytest.raises(ValueError, match="positions"):
        credit.signed_weight("scalar", r, None, positions=0)
