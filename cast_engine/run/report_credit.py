"""Where the credit went: training images with their atoms' maps and the signed weight W."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cast_engine.errors import DatasetError
from cast_engine.run.credit_maps import credit_maps
from cast_engine.run.layout import RunLayout
from cast_engine.run.report_data import Notes, sealed
from cast_engine.run.report_images import Grid, Pixels, cell_centre, data_uri, overlay
from cast_engine.store.codec import decode_png
from cast_engine.store.dataset import Dataset
from cast_engine.store.reader import Reader
from schemas.graph import SceneGraph
from schemas.job import JobConfig
from schemas.records import split_key

BYTES = 5_000_000
"""Most characters of pictures in this part."""


@dataclass(frozen=True)
class AtomCredit:
    """One atom of one training image."""

    kind: str
    question: str
    expected: str
    answer: str
    score: float | None
    group_mean: float | None
    advantage: float | None  # None: the rule has no A per atom, or there is none yet
    overlay: str
    peak: float  # largest value of the map; its mean is 1
    uniform: bool  # the judge's map held nothing


@dataclass(frozen=True)
class Weight:
    """W of one training image."""

    overlay: str
    limit: float  # the scale is -limit .. limit
    mean: float
    low: float
    high: float
    positive: float  # share of positions, percent
    marks: Sequence[tuple[str, float, float]]  # sign, left and top in percent, of the extreme cells


@dataclass(frozen=True)
class TrainingImage:
    """One training image and its credit."""

    key: str
    prompt: str
    round: int
    member: int
    group: int
    reward: float
    group_reward: float
    image: str
    map_high: float  # upper end of the maps' scale; the lower is 0
    atoms: Sequence[AtomCredit]
    weight: Weight | None
    advantage: float | None  # A of the image, for rules without atoms


def build(layout: RunLayout, job: JobConfig, notes: Notes) -> list[TrainingImage]:
    """Return training images of the first and the last scored round.

    In each of them, the groups whose rewards differ most; of a group, the image with the highest and the one with the
    lowest reward.
    """
    count, size, out = job.report.maps, 0, list[TrainingImage]()
    ready = [r for r in range(job.rounds) if all(sealed(layout.round(r, s)) for s in ("rollout", "score"))]
    rounds = list(dict.fromkeys([*ready[:1], *ready[-1:]]))
    for i, round_ in enumerate(rounds):
        try:
            source = _Source(layout, job, round_)
            share = (count - len(out)) if i + 1 == len(rounds) else count // len(rounds)
            for key in source.choose(share):
                image = source.image(key)
                size += _size(image)
                if size > BYTES:
                    notes.append(f"Training images: {len(out)} are shown instead of {count}, to keep the page small.")
                    return out
                out.append(image)
            if source.advantages is None:
                notes.append(f"Round {round_}: no advantages yet, so its images have no W.")
        except DatasetError as error:
            notes.append(f"Training images of round {round_}: {error}.")
    return out


def _size(image: TrainingImage) -> int:
    weight = image.weight.overlay if image.weight else ""
    return sum(len(a.overlay) for a in image.atoms) + len(image.image) + len(weight)


class _Source:
    """The datasets of one round."""

    def __init__(self, layout: RunLayout, job: JobConfig, round_: int) -> None:
        self.config, self.round = job.advantages, round_
        self.rollout = Dataset.open(layout.round(round_, "rollout")).reader()
        self.scores = Dataset.open(layout.round(round_, "score")).reader()
        path = layout.round(round_, "advantages")
        made = Dataset.open(path) if sealed(path) else None
        self.advantages: Reader | None = made.reader() if made else None
        self.grid: tuple[int, int] | None = _grid(made.config) if made else None
        self._graphs = Dataset.open(layout.graphs("train")).reader()
        self.groups: dict[str, list[str]] = {}
        for key in self.scores.keys():  # noqa: SIM118
            self.groups.setdefault(split_key(key).prompt_id, []).append(key)

    def reward(self, key: str) -> float:
        """Return the mean score of an image (0 if none is known)."""
        value = self.scores.row(key)["reward"]
        return 0.0 if value is None or math.isnan(value) else float(value)

    def graph(self, key: str) -> SceneGraph:
        """Return the scene graph of an image's prompt."""
        return SceneGraph.model_validate_json(self._graphs.read(split_key(key).prompt_id)["graph.json"])

    def choose(self, count: int) -> list[str]:
        """Return the images with the highest and lowest reward of the groups with the largest difference."""
        pairs = []
        for keys in self.groups.values():
            drawn = sorted((k for k in keys if k in self.rollout), key=self.reward)
            if drawn:
                pairs.append((drawn[-1], drawn[0]))
        pairs.sort(key=lambda p: self.reward(p[1]) - self.reward(p[0]))
        return list(dict.fromkeys(k for pair in pairs for k in pair))[:count]

    def image(self, key: str) -> TrainingImage:
        """Read one image with its scores, maps and weight."""
        members = self.rollout.read(key)
        pixels = decode_png(members["image.png"])
        tensors, meta = self.scores.tensors(key), self.scores.meta(key)
        weighed = self.advantages.tensors(key) if self.advantages and key in self.advantages else None
        positions = len(weighed["weight"]) if weighed else self.rollout.tensors(key)["final_latent"].shape[0]
        grid = self.grid or guess_grid(positions, pixels.shape[0] / pixels.shape[1])
        prepared = credit_maps(tensors, self.graph(key), grid, self.config)
        group = self.groups[split_key(key).prompt_id]
        peak = float(prepared.maps.max()) if prepared.maps.numel() else 1.0
        high = max(2.0, peak)
        own = None if weighed is None else [float(a) for a in weighed["advantage"]]
        by_atom = own if own is not None and len(own) == len(meta["questions"]) else None
        atoms = []
        for k in range(len(meta["questions"])):
            values = prepared.maps[k].reshape(grid).numpy()
            over = data_uri(overlay(pixels, values, low=0.0, high=high, signed=False))
            rest = (by_atom[k] if by_atom else None, over, float(values.max()), bool(prepared.uniform[k]))
            atoms.append(self._atom(meta, tensors, k, group, rest))
        return TrainingImage(
            key=key,
            prompt=self.rollout.meta(key)["prompt"],
            round=self.round,
            member=split_key(key).member,
            group=len(group),
            reward=self.reward(key),
            group_reward=sum(self.reward(k) for k in group) / len(group),
            image=data_uri(pixels),
            map_high=high,
            atoms=atoms,
            weight=None if weighed is None else _weight(pixels, weighed["weight"].double().reshape(grid).numpy()),
            advantage=own[0] if own and not by_atom else None,
        )

    def _atom(
        self,
        meta: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        k: int,
        group: Sequence[str],
        rest: tuple[float | None, str, float, bool],
    ) -> AtomCredit:
        answers = meta.get("answers") or ()
        others = [self.scores.row(key)["atom_scores"][k] for key in group]
        known = [s for s in others if s is not None and not math.isnan(s)]
        advantage, over, peak, uniform = rest
        score = float(tensors["scores"][k])
        return AtomCredit(
            kind=meta["kinds"][k],
            question=meta["questions"][k],
            expected=meta["expected"][k],
            answer=answers[k] if k < len(answers) else "",
            score=None if math.isnan(score) else score,
            group_mean=sum(known) / len(known) if known else None,
            advantage=advantage,
            overlay=over,
            peak=peak,
            uniform=uniform,
        )


def _weight(pixels: Pixels, values: Grid) -> Weight:
    limit = float(np.abs(values).max())
    over = overlay(pixels, values, low=-max(limit, 1e-6), high=max(limit, 1e-6), signed=True)
    marks = []
    for sign, index in (("+", int(values.argmax())), ("−", int(values.argmin()))):
        value = values.flat[index]
        varied = float(np.ptp(values)) > 1e-6 * max(limit, 1e-6)
        if varied and (value > 0) == (sign == "+") and value != 0:
            marks.append((sign, *cell_centre(values, index)))
    return Weight(
        data_uri(over),
        limit,
        float(values.mean()),
        float(values.min()),
        float(values.max()),
        100 * float((values > 0).mean()),
        marks,
    )


def _grid(config: Mapping[str, Any]) -> tuple[int, int] | None:
    grid = config.get("grid")
    return (int(grid[0]), int(grid[1])) if grid else None


def guess_grid(positions: int, aspect: float) -> tuple[int, int]:
    """Return rows and columns of latent positions from the picture's height / width, when nothing says them."""
    options = [(h, positions // h) for h in range(1, positions + 1) if positions % h == 0]
    return min(options, key=lambda g: abs(math.log(g[0] / g[1] / aspect)))
