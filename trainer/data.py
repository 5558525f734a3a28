"""What one round trains on: a sealed rollout and the sealed weights made from it, joined by key.

Order rule ("mixed updates"): every update takes equally many images of every group, as far as the numbers allow. Which
member goes into which update follows from sha256 of (seed, round, epoch, key): no generator, no state to save, and the
same on any number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cast_engine.errors import DatasetError, UserError
from cast_engine.store import Dataset, Reader
from schemas.records import RolloutMeta

if TYPE_CHECKING:
    from cast_engine.store import ParentRef

Embeds = Callable[[RolloutMeta], Mapping[str, Tensor]]
"""Gives the prompt embeds that an image was drawn with."""

SHARED = (
    "round",
    "height",
    "width",
    "num_steps",
    "dynamics",
    "noise_level",
    "window_start",
    "window_length",
    "adapter_sha256",
    "model_sha256",
)
"""Fields of :class:`RolloutMeta` that all images of a round must agree in."""


@dataclass(frozen=True)
class Batch:
    """Some images with all they need for replay, on the CPU.

    B images, w window steps, N denoising steps, P latent positions, C channels.
    """

    metas: tuple[RolloutMeta, ...]
    latents: Tensor
    """``[B, w + 1, P, C]`` in the stored dtype."""
    logp_old: Tensor
    """``[B, w, P]`` float32."""
    weight: Tensor
    """W, ``[B, P]`` float32."""
    embeds: tuple[Mapping[str, Tensor], ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.metas)


@dataclass(frozen=True)
class RoundData:
    """The images of a round.

    Attributes:
        groups: Prompt id to the keys of its images, in plan order; only images that both datasets hold.
        meta: What all images have in common (of one of them).
        sigmas: The sigma table of all images, float32 ``[N + 1]``.
        steps: Indices of the window's steps in the table.
        dropped: Images left out, by reason.
    """

    rollout: Reader
    advantages: Reader
    rollout_seal: str
    advantages_seal: str
    groups: dict[str, tuple[str, ...]]
    meta: RolloutMeta
    sigmas: Tensor
    steps: tuple[int, ...]
    latent_dtype: torch.dtype
    dropped: dict[str, int]
    embeds: Embeds

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all images that are trained on."""
        return tuple(key for keys in self.groups.values() for key in keys)

    def load(self, keys: Sequence[str]) -> Batch:
        """Read images.

        Raises:
            DatasetError: An image that differs from the others of the round, or values that are not finite.
        """
        metas, latents, logps, weights = [], [], [], []
        for key in keys:
            meta, tensors = _read_rollout(self.rollout, key)
            weight = self.advantages.tensors(key)["weight"]
            self._check(meta, tensors, weight)
            metas.append(meta)
            latents.append(tensors["latents"])
            logps.append(tensors["logp_old"])
            weights.append(weight)
        embeds = tuple(self.embeds(meta) for meta in metas)
        return Batch(tuple(metas), torch.stack(latents), torch.stack(logps), torch.stack(weights), embeds)

    def _check(self, meta: RolloutMeta, tensors: Mapping[str, Tensor], weight: Tensor) -> None:
        for name in SHARED:
            found, expected = getattr(meta, name), getattr(self.meta, name)
            if found != expected:
                raise _mixed(name, meta.key, found, self.meta.key, expected)
        same_table = torch.equal(tensors["sigmas"], self.sigmas) and tensors["steps"].tolist() == list(self.steps)
        if not same_table or tensors["latents"].dtype != self.latent_dtype:
            raise _mixed("sigma table, window or latent dtype", meta.key, "one", self.meta.key, "another")
        if weight.shape != tensors["logp_old"].shape[-1:]:
            raise DatasetError(
                f"W of {tuple(weight.shape)}", where=meta.key, expected=f"{tensors['logp_old'].shape[-1]}"
            )
        for name, value in (("W", weight), ("logp_old", tensors["logp_old"]), ("latents", tensors["latents"])):
            if not bool(torch.isfinite(value).all()):
                raise DatasetError(
                    f"{name} has values that are not finite",
                    where=meta.key,
                    do="make the advantages of this round again",
                )


def open_round(rollout: Path, advantages: Path, embeds: Embeds) -> RoundData:
    """Open and join the two datasets of a round; every file is hashed.

    Args:
        rollout: A sealed rollout dataset.
        advantages: A sealed advantages dataset that was made from it.
        embeds: Source of prompt embeds.

    Raises:
        DatasetError: Not sealed, damaged, or not made from one another.
        UserError: Nothing to train on, or images that differ in model, adapter, size, steps or window.
    """
    drawn, weighed = _open(rollout, "rollout"), _open(advantages, "advantages")
    _check_parent(drawn, weighed)
    rows = {row["key"]: row for row in drawn.rows().to_pylist()}
    readers = drawn.reader(), weighed.reader()
    weighed_keys = set(readers[1].keys())
    groups: dict[str, list[str]] = {}
    dropped = {"not drawn": len(rows), "without weights": 0, "alone in the group": 0}
    for key in readers[0].keys():  # noqa: SIM118
        dropped["not drawn"] -= 1
        if key in weighed_keys:
            groups.setdefault(rows[key]["prompt_id"], []).append(key)
        else:
            dropped["without weights"] += 1
    dropped["alone in the group"] = sum(len(keys) for keys in groups.values() if len(keys) < 2)
    whole = {prompt: tuple(keys) for prompt, keys in groups.items() if len(keys) >= 2}
    if not whole:
        raise UserError("no group with two images or more", where=str(advantages), do="look at `cast-engine status`")
    first = next(iter(whole.values()))[0]
    meta, tensors = _read_rollout(readers[0], first)
    _check_rows([rows[key] for keys in whole.values() for key in keys], meta)
    return RoundData(
        rollout=readers[0],
        advantages=readers[1],
        rollout_seal=_seal(drawn),
        advantages_seal=_seal(weighed),
        groups=whole,
        meta=meta,
        sigmas=tensors["sigmas"],
        steps=_window(meta, tensors),
        latent_dtype=tensors["latents"].dtype,
        dropped={reason: count for reason, count in dropped.items() if count},
        embeds=embeds,
    )


def plan_updates(
    groups: Mapping[str, Sequence[str]], *, seed: int, round_: int, epochs: int, updates: int
) -> list[tuple[str, ...]]:
    """Return the keys of each update of a round, whole images only.

    In each epoch the members of a group are put in an order of their own, the groups are interleaved, and the sequence
    is cut into ``updates`` pieces whose sizes differ by at most one: 4 groups of 16 in 4 updates give 4 members of
    every group to each.

    Args:
        groups: Prompt id to the keys of its images.
        seed: The run's seed.
        round_: Round, from 0.
        epochs: Passes over the images.
        updates: Updates per epoch.

    Raises:
        UserError: Fewer images than updates.
    """
    total = sum(len(keys) for keys in groups.values())
    if total < updates:
        raise UserError(
            f"{total} images for {updates} updates", where="train.updates_per_round", expected=f"1 to {total}"
        )

    plan = []
    for epoch in range(epochs):
        salt = f"order|{seed}|{round_}|{epoch}"
        members = [_shuffled(groups[prompt], salt) for prompt in _shuffled(list(groups), salt)]
        longest = max(len(m) for m in members)
        sequence = [m[rank] for rank in range(longest) for m in members if rank < len(m)]
        cuts = [total * i // updates for i in range(updates + 1)]
        plan += [tuple(sequence[a:b]) for a, b in pairwise(cuts)]
    return plan


def _shuffled(names: Sequence[str], salt: str) -> list[str]:
    """Return names in an order that only they and the salt decide."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{salt}|{name}".encode()).hexdigest())


def _open(path: Path, stage: str) -> Dataset:
    dataset = Dataset.open(path)
    if dataset.stage != stage:
        raise UserError(f"a dataset of stage {dataset.stage}", where=str(path), expected=f"a {stage} dataset")
    if not dataset.sealed:
        raise DatasetError("not sealed", where=str(path), do=f"run the {stage} stage to its end, then train")
    return dataset


def _seal(dataset: Dataset) -> str:
    seal = dataset.seal_sha256
    assert seal is not None, "checked when it was opened"
    return seal


def _check_parent(rollout: Dataset, advantages: Dataset) -> None:
    """Refuse weights that were made from other images; they may refer to the rollout or to scores that do."""
    refs = _rollout_refs(advantages)
    if any(ref.seal_sha256 == _seal(rollout) for ref in refs):
        return
    found = ", ".join(ref.seal_sha256[:12] for ref in refs) or "no rollout"
    raise DatasetError(
        f"its weights were made from rollout {found}",
        where=str(advantages.path),
        expected=f"{_seal(rollout)[:12]} ({rollout.path})",
        do="run score and build-advantages on this rollout",
    )


def _rollout_refs(dataset: Dataset) -> list[ParentRef]:
    refs = [ref for ref in dataset.parents if ref.stage == "rollout"]
    for ref in dataset.parents:
        if ref.stage != "score" or refs:
            continue
        scores = Dataset.open((Path(dataset.path) / ref.path).resolve())
        if scores.seal_sha256 != ref.seal_sha256:
            raise DatasetError(
                "its scores were made again since", where=str(dataset.path), do="run build-advantages again"
            )
        refs += [r for r in scores.parents if r.stage == "rollout"]
    return refs


def _read_rollout(reader: Reader, key: str) -> tuple[RolloutMeta, dict[str, Tensor]]:
    return RolloutMeta.model_validate(reader.meta(key)), reader.tensors(key)


def _window(meta: RolloutMeta, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    steps = tuple(int(s) for s in tensors["steps"])
    expected = tuple(range(meta.window_start, meta.window_start + meta.window_length))
    if steps != expected or steps[-1] + 1 >= len(tensors["sigmas"]) or len(tensors["latents"]) != len(steps) + 1:
        raise DatasetError(
            f"window steps {steps} with {len(tensors['latents'])} latents",
            where=meta.key,
            expected=f"steps {expected} and one latent more",
        )
    return steps


def _check_rows(rows: Sequence[Mapping[str, Any]], meta: RolloutMeta) -> None:
    """Find images that differ, from the manifest alone: before anything large is read."""
    for name in SHARED:
        expected = getattr(meta, name)
        for row in rows:
            if row.get(name) is not None and row[name] != expected:
                raise _mixed(name, str(row["key"]), row[name], meta.key, expected)


def _mixed(name: str, key: str, found: object, other: str, expected: object) -> UserError:
    return UserError(
        f"{key} has {name} {found}, {other} has {expected}",
        where="rollout",
        expected="images of one model, adapter, size and window in a round",
        do="train on them in separate rounds",
    )
