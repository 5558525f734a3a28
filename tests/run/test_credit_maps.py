"""One way from scores to maps: what an atom is about, and where the blame for absent things goes."""

import torch

from cast_engine.graphs.grammar import parse
from cast_engine.run.credit_maps import credit_maps
from schemas.job import AdvantageConfig

GRAPH = parse("two red circles to the left of a square")
IDS = [a.id for a in GRAPH.atoms]
PLAIN = {"map_blend": 1.0, "blur": False, "neutral": False, "percentile_cap": None}


def tensors(**scores):
    maps = torch.zeros(len(IDS), 1, len(IDS))
    for k in range(len(IDS)):
        maps[k, 0, k] = len(IDS)
    values = torch.tensor([scores.get(i.replace(".", "_"), 1.0) for i in IDS])
    return {"scores": values, "maps": maps.half(), "neutral": torch.ones(1, len(IDS)).half()}


def places(scores, **config):
    made = credit_maps(tensors(**scores), GRAPH, (1, len(IDS)), AdvantageConfig(**PLAIN | config))
    return {i: [IDS[p] for p in row.nonzero().flatten()] for i, row in zip(IDS, made.maps, strict=True)}


def test_every_atom_of_what_is_there_keeps_its_map():
    assert places({"n0_count": 0.1}) == {i: [i] for i in IDS}
    assert places({"n0_object": float("nan")}) == {i: [i] for i in IDS}


def test_the_atoms_of_an_absent_thing_take_what_is_there():
    found = ["e0", "n1.count", "n1.object"]  # a relation has a place while one of its things is there
    expected = {i: sorted(found) if i.startswith("n0") else [i] for i in IDS}
    assert {i: sorted(p) for i, p in places({"n0_object": 0.2}).items()} == expected
    assert places({"n0_object": 0.2}, absent="as_is") == {i: [i] for i in IDS}


def test_nothing_there_is_uniform():
    assert all(p == IDS for p in places({"n0_object": 0.0, "n1_object": 0.0}).values())
