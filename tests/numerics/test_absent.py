"""An absent thing has no place of its own: its blame goes to what is there."""

import torch

from cast_engine.numerics.maps import blame_found


def test_absent_things_take_the_mean_map_of_those_that_are_there():
    maps = torch.ones(3, 2, 2)
    maps[0] = torch.tensor([[4.0, 0.0], [0.0, 0.0]])
    maps[1] = torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    out = blame_found(maps, torch.tensor([True, True, False]))
    assert torch.equal(out[:2], maps[:2].double())
    assert torch.equal(out[2], torch.tensor([[2.0, 2.0], [0.0, 0.0]], dtype=torch.float64))


def test_nothing_there_blames_all_alike():
    out = blame_found(torch.rand(2, 2, 2), torch.tensor([False, False]))
    assert torch.equal(out, torch.ones(2, 2, 2, dtype=torch.float64))


def test_a_bad_cell_of_one_map_does_not_spoil_what_is_blamed():
    maps = torch.ones(3, 2, 2)
    maps[0, 0, 0] = float("nan")
    out = blame_found(maps, torch.tensor([True, True, False]))
    assert torch.equal(out[2], torch.tensor([[0.5, 1.0], [1.0, 1.0]], dtype=torch.float64))
