"""Figures of a round's weights from its manifest rows."""

import math

import pytest

from cast_engine.run.credit_figures import COLUMNS, credit_figures


def row(prompt_id, **values):
    return dict.fromkeys(COLUMNS) | {"prompt_id": prompt_id, "round": 0, "status": "ok"} | values


def test_shares_are_of_sums_and_places_weigh_by_area():
    rows = [
        row("a", mass=3.0, low_std_mass=3.0, group_std=1.0, above_clip_share=0.1),
        row("a", mass=9.0, low_std_mass=0.0, group_std=1.0, above_clip_share=0.1),
        row("b", mass=0.0, low_std_mass=0.0, group_std=3.0, above_clip_share=0.0),
        row("c", status="skipped_parent"),
    ]
    rows[0] |= {"weight_drawn": 1.0, "weight_background": -1.0, "drawn_share": 0.25}
    rows[1] |= {"weight_drawn": 4.0, "weight_background": 0.5, "drawn_share": 0.5}
    rows[2] |= {"weight_drawn": math.nan, "weight_background": 2.0, "drawn_share": 0.0}
    found = credit_figures(rows)
    assert found.low_std_share == 0.25
    assert found.group_std == 2.0, "two groups, not three images"
    assert found.above_clip_share == pytest.approx(0.05)
    assert found.weight_drawn == pytest.approx((0.25 * 1 + 0.5 * 4) / 0.75)
    assert found.weight_background == pytest.approx((-0.75 + 0.25 + 2.0) / 2.25)


def test_what_is_not_known_is_missing_not_zero():
    for rows in ([], [row("a", group_std=0.5)]):
        found = credit_figures(rows)
        assert all(math.isnan(v) for v in (found.low_std_share, found.weight_drawn, found.weight_background))
    assert found.group_std == 0.5
