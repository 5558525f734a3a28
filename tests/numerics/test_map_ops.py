from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_engine.numerics import maps

D = torch.float64
NAN, INF = float("nan"), float("inf")


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def by_common_grid(m: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Area resampling the slow way: repeat cells up to the least common multiple, then average blocks."""
    h, w = math.lcm(m.shape[-2], grid[0]), math.lcm(m.shape[-1], grid[1])
    fine = m.repeat_interleave(h // m.shape[-2], -2).repeat_interleave(w // m.shape[-1], -1)
    blocks = fine.unflatten(-1, (grid[1], -1)).mean(-1).unflatten(-2, (grid[0], -1))
    return blocks.mean(-2)


def test_doubling_repeats_each_value_exactly():
    m = draw(1, 3, 4, 5)
    want = m.repeat_interleave(2, -2).repeat_interleave(2, -1)
    assert torch.equal(maps.resample(m, (8, 10)), want)
    assert torch.equal(maps.resample(m, (4, 5)), m)
    triple = m.repeat_interleave(3, -2).repeat_interleave(3, -1)
    assert torch.equal(maps.resample(m, (12, 15)), triple)


@pytest.mark.parametrize(("size", "grid"), [((37, 37), (64, 64)), ((8, 8), (4, 2)), ((5, 7), (8, 3)), ((1, 1), (4, 4))])
def test_any_other_ratio_weighs_by_overlap_and_keeps_the_total(size, grid):
    m = draw(2, 2, *size)
    got = maps.resample(m, grid)
    assert got.shape == (2, *grid)
    torch.testing.assert_close(got, by_common_grid(m, grid), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(got.mean((-2, -1)), m.mean((-2, -1)), rtol=1e-13, atol=0)
    ones = maps.resample(torch.ones(1, *size), grid)
    torch.testing.assert_close(ones, torch.ones(1, *grid, dtype=D), rtol=1e-14, atol=0)


def test_resampling_keeps_places():
    m = torch.zeros(1, 5, 5)
    m[0, 1, 3] = 1.0
    got = maps.resample(m, (8, 8))[0]
    row, column = divmod(int(got.argmax()), 8)
    assert (row, column) in {(2, 5), (2, 6)}  # relative centre (0.3, 0.7)
    centre = (torch.arange(8, dtype=D) + 0.5) / 8
    assert float((got.sum(1) * centre).sum() / got.sum()) == pytest.approx(0.3, abs=0.02)
    assert float((got.sum(0) * centre).sum() / got.sum()) == pytest.approx(0.7, abs=0.02)
    with pytest.raises(ValueError, match="resample"):
        maps.resample(m, (0, 8))


def test_blur_is_binomial_and_keeps_the_total():
    m = torch.zeros(1, 5, 5, dtype=D)
    m[0, 2, 2] = 16.0
    want = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], dtype=D)
    assert torch.equal(maps.blur(m)[0, 1:4, 1:4], want)
    assert maps.blur(m).sum() == 16.0
    noisy = draw(3, 2, 6, 3)
    torch.testing.assert_close(maps.blur(noisy).sum((-2, -1)), noisy.sum((-2, -1)), rtol=1e-13, atol=0)
    assert torch.equal(maps.blur(torch.ones(2, 1, 4)), torch.ones(2, 1, 4, dtype=D))


def test_sinks_go_with_the_neutral_map():
    object_ = torch.full((8, 8), 0.2, dtype=D)
    object_[2:4, 5:7] = 3.0
    sinks = torch.ones(8, 8, dtype=D)
    sinks[0, 0], sinks[7, 3] = 80.0, 40.0
    raw = (object_ * sinks)[None]
    assert int(raw.argmax()) == 0
    got = maps.remove_sinks(raw, 7.0 * sinks)  # its own scale does not matter
    assert torch.equal(got, maps.remove_sinks(raw, sinks)) or (got - maps.remove_sinks(raw, sinks)).abs().max() < 1e-12
    assert int(got.argmax()) in {2 * 8 + 5, 2 * 8 + 6, 3 * 8 + 5, 3 * 8 + 6}
    neutral = sinks / sinks.mean()
    torch.testing.assert_close(got, raw / (neutral + maps.NEUTRAL_EPS), rtol=1e-13, atol=0)
    hollow = torch.zeros(8, 8)
    hollow[0, 0] = 1.0
    assert maps.remove_sinks(raw, hollow).max() <= raw.max() / maps.NEUTRAL_EPS
    assert torch.equal(maps.remove_sinks(raw, torch.zeros(8, 8)), raw)


def test_percentile_cap():
    m = torch.arange(200, dtype=D).reshape(1, 10, 20)
    got = maps.cap_percentile(m, 99.5)
    assert float(got.max()) == pytest.approx(0.995 * 199)
    assert torch.equal(got.flatten()[:199], m.flatten()[:199])
    two = torch.stack([m[0], 10 * m[0]])
    assert maps.cap_percentile(two, 90.0).amax((-2, -1)).tolist() == pytest.approx([0.9 * 199, 9 * 199])
    assert torch.equal(maps.cap_percentile(m, 100.0), m)
    dot = torch.zeros(1, 32, 32, dtype=D)
    dot[0, 3, 3] = 1.0
    assert torch.equal(maps.cap_percentile(dot, 99.5), dot)  # not wiped out


def test_normalise():
    m, uniform = maps.normalise(torch.tensor([[1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1e-14, 0.0, 0.0, 0.0]]))
    assert m.tolist() == [[1.0, 3.0, 0.0, 0.0], [1.0] * 4, [1.0] * 4]
    assert uniform.tolist() == [False, True, True]
    assert m.dtype == D


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1e-3, 0.2, 1.0, 5.0, 300.0]), min_size=2, max_size=24),
    cap=st.sampled_from([1.001, 1.5, 2.0, 4.0, 100.0]),
)
def test_cap_max_holds_the_cap_and_the_mean(values, cap):
    m, _ = maps.normalise(torch.tensor([values], dtype=D))
    got = maps.cap_max(m, cap)
    assert float(got.mean()) == pytest.approx(1.0, abs=1e-12)
    assert float(got.max()) <= cap * (1 + 1e-12)
    assert got.min() >= 0
    order = m[0].argsort()
    assert (got[0][order].diff() >= -1e-12).all()  # never turns two cells round
    if float(m.max()) <= cap:
        torch.testing.assert_close(got, m, rtol=1e-12, atol=1e-12)
    below = got[0] < cap * (1 - 1e-9)
    if bool((below & (m[0] > 1e-9)).any()) and bool((m[0] > 1e-9).all()):
        ratio = got[0][below] / m[0][below]
        assert float(ratio.max() / ratio.min()) == pytest.approx(1.0, rel=1e-9)  # what is below keeps its proportions


def test_cap_max_examples():
    got = maps.cap_max(torch.tensor([[4.0, 0.0, 0.0, 0.0]]), 2.5)
    assert got[0].tolist() == pytest.approx([2.5, 0.5, 0.5, 0.5])
    got = maps.cap_max(torch.tensor([[3.0, 0.5, 0.5, 0.0]]), 2.0)
    assert got[0].tolist() == pytest.approx([2.0, 1.0, 1.0, 0.0])
    with pytest.raises(ValueError, match="map_max"):
        maps.cap_max(torch.ones(1, 4), 1.0)


def test_blend():
    m = torch.tensor([4.0, 0.0, 0.0, 0.0], dtype=D)
    assert maps.blend(m, 0.25).tolist() == [1.75, 0.75, 0.75, 0.75]
    assert torch.equal(maps.blend(m, 0.0), torch.ones(4, dtype=D))
    assert torch.equal(maps.blend(m, 1.0), m)
    for share in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match="blend"):
            maps.blend(m, share)


def test_prepare_is_the_steps_in_order():
    raw, neutral = draw(4, 3, 9, 9) ** 4, draw(5, 9, 9) + 0.1
    got = maps.prepare(raw, (16, 16), neutral=neutral, map_max=1.6, share=0.7)
    m = maps.cap_percentile(maps.blur(maps.remove_sinks(raw, neutral)), 99.5)
    m, _ = maps.normalise(maps.resample(m, (16, 16)).flatten(1))
    want = maps.cap_max(maps.blend(m, 0.7), 1.6)
    assert torch.equal(got.maps, want)
    assert float(want.max()) == pytest.approx(1.6)
    bare = maps.prepare(raw, (9, 9), blurred=False, percentile_cap=None, share=1.0)
    assert torch.equal(bare.maps, maps.normalise(raw.flatten(1))[0])


def test_prepare_without_maps_and_with_wrong_shapes():
    assert maps.prepare(torch.zeros(0, 4, 4), (8, 8)).maps.shape == (0, 64)
    with pytest.raises(ValueError, match="neutral"):
        maps.prepare(torch.ones(2, 4, 4), (8, 8), neutral=torch.ones(4, 5))
    with pytest.raises(ValueError, match="maps"):
        maps.prepare(torch.ones(4, 4), (8, 8))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), h=st.integers(1, 9), w=st.integers(1, 9), share=st.floats(0, 1), capped=st.booleans()
)
def test_prepared_maps_have_mean_one_whatever_comes_in(seed, h, w, share, capped):
    raw = (draw(seed, 3, 5, 4) * 4 - 1).half()
    raw[0, 0, 0], raw[0, 1, 1], raw[1] = NAN, INF, -1.0
    got = maps.prepare(raw, (h, w), neutral=raw[2], map_max=1.5 if capped else None, share=share)
    assert torch.isfinite(got.maps).all()
    assert got.maps.min() >= 0
    assert (got.maps.mean(-1) - 1).abs().max() < 1e-12
    assert got.uniform.tolist() == [False, True, False]
