"""The maps that credit is spread with: one way from a sample's scores for `build-advantages` and for the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cast_engine.numerics.maps import Prepared, blame_found, prepare
from schemas.graph import AtomKind, SceneGraph
from schemas.job import AdvantageConfig

if TYPE_CHECKING:
    from torch import Tensor

FOUND = 0.5
"""Probability of its object question from which on a thing counts as there."""


def credit_maps(
    tensors: Mapping[str, Tensor], graph: SceneGraph, grid: tuple[int, int], config: AdvantageConfig
) -> Prepared:
    """Return the mean-one maps of one image over latent positions.

    Args:
        tensors: of the image's score sample, see ``schemas.records.SCORE_TENSORS``.
        graph: the scene graph of its prompt.
        grid: rows and columns of latent positions.
        config: how maps are treated.
    """
    maps = tensors["maps"]
    if config.absent == "found":
        maps = blame_found(maps, _found(tensors["scores"], graph))
    return prepare(
        maps,
        grid,
        neutral=tensors["neutral"] if config.neutral else None,
        blurred=config.blur,
        percentile_cap=config.percentile_cap,
        map_max=config.map_max,
        share=config.map_blend,
    )


def _found(scores: Tensor, graph: SceneGraph) -> Tensor:
    """Return [K] bool: the judge sees what the atom is about. Object atoms speak for all atoms of their nodes."""
    import torch

    asked = zip(graph.atoms, scores.tolist(), strict=True)
    there = {a.nodes[0]: not score < FOUND for a, score in asked if a.kind is AtomKind.OBJECT}
    return torch.tensor([any(there.get(n, True) for n in a.nodes) for a in graph.atoms])
