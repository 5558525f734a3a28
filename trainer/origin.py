"""What a round is made from, and whether the pieces belong together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from cast_engine.errors import DatasetError, UserError
from cast_engine.models import lora
from cast_engine.models.base import ImageModel
from cast_engine.models.embeds import EmbedCache
from cast_engine.store import Dataset
from schemas.job import JobConfig, config_hash
from schemas.records import RolloutMeta
from trainer import checkpoint
from trainer.data import Embeds, RoundData

EMBEDS_KEPT = 32
"""Prompts whose embeds stay in memory; one of FLUX.2 takes 16 MB."""


@dataclass(frozen=True)
class RoundPaths:
    """Where a round reads and writes; see :func:`trainer.loop.train_round`."""

    rollout: Path
    advantages: Path
    embeds: Path
    out: Path
    start: Path | None = None
    init_adapter: Path | None = None

    @property
    def partial(self) -> Path:
        """Folder of the checkpoints on the way to this round's."""
        return self.out.with_name(self.out.name + ".partial")


def origin(model: ImageModel, job: JobConfig, paths: RoundPaths, round_: int) -> checkpoint.TrainState:
    """Return the state before the first update, from seals, hashes and the checkpoint of the round before.

    Raises:
        UserError: A checkpoint that is of another model, damaged, of a round that was not finished, or too old to train
            on from.
    """
    config, start = job.train, _start(paths, model)
    init = lora.adapter_sha256(paths.init_adapter) if paths.init_adapter is not None else ""
    begun = checkpoint.sha256(paths.start / checkpoint.STATE) if paths.start is not None else init
    per_round = config.updates_per_round * config.epochs_per_round
    return checkpoint.TrainState(
        round=round_,
        update=start.update if start else 0,
        round_update=0,
        round_updates=per_round,
        seed=job.seed,
        total_updates=job.rounds * per_round,
        config=config.semantic(),
        config_hash=config_hash(config.semantic()),
        model_sha256=model.info.sha256,
        rollout_seal=_seal(paths.rollout),
        advantages_seal=_seal(paths.advantages),
        start_sha256=begun,
        start_adapter_sha256=start.adapter_sha256 if start else init,
        adapter_sha256="",
        gradient_norms=start.gradient_norms if start else (),
        start_ratio={},
        files={},
    )


def check_origin(first: checkpoint.TrainState, data: RoundData, paths: RoundPaths) -> None:
    """Refuse rollouts of another round, model or policy than the one that training starts from.

    Raises:
        UserError: With both hashes.
    """
    meta = data.meta
    if meta.round != first.round:
        raise UserError(f"images of round {meta.round}", where=str(paths.rollout), expected=f"round {first.round}")
    if meta.model_sha256 != first.model_sha256:
        raise UserError(
            f"images of model {meta.model_sha256}",
            where=str(paths.rollout),
            expected=first.model_sha256,
            do="train with the model (model.path, model.dtype) that drew them",
        )
    if meta.adapter_sha256 != first.start_adapter_sha256:
        raise UserError(
            f"images of {_adapter_name(meta.adapter_sha256)}",
            where=str(paths.rollout),
            expected=f"{_adapter_name(first.start_adapter_sha256)} ({paths.start or paths.init_adapter or 'new run'})",
            do="draw this round's images with the checkpoint that training starts from",
        )


def changed_settings(first: checkpoint.TrainState, paths: RoundPaths) -> list[str]:
    """Say which settings differ from those of the round before; they may, but not unseen."""
    if paths.start is None:
        return []
    before = checkpoint.read_state(paths.start)
    old, new = (state.config | {"seed": state.seed, "total_updates": state.total_updates} for state in (before, first))
    return [
        f"{name} was {old.get(name)} in {paths.start} and is {new.get(name)} now"
        for name in sorted(old.keys() | new.keys())
        if json.dumps(old.get(name)) != json.dumps(new.get(name))
    ]


def embed_source(folder: Path, model: ImageModel) -> Embeds:
    """Return what gives the embeds that an image was drawn with; another embed of the same prompt is refused."""
    cache = EmbedCache(folder, model.info.encoder_sha256)

    @lru_cache(maxsize=EMBEDS_KEPT)
    def read(prompt_id: str, sha256: str) -> Mapping[str, Tensor]:
        found = cache.sha256(prompt_id)
        if found != sha256:
            raise DatasetError(
                f"embeds {found[:12]} of prompt {prompt_id}",
                where=str(folder),
                expected=f"{sha256[:12]}, which the images were drawn with",
                do="draw the images again",
            )
        return cache.get(prompt_id)

    def source(meta: RolloutMeta) -> Mapping[str, Tensor]:
        return read(meta.prompt_id, meta.embed_sha256)

    return source


def _start(paths: RoundPaths, model: ImageModel) -> checkpoint.TrainState | None:
    if paths.start is None:
        return None
    if paths.init_adapter is not None:
        raise UserError("both a checkpoint and an adapter to begin with", where="cast-train", expected="one of them")
    state = checkpoint.read_state(paths.start)
    if not state.complete:
        raise UserError(
            f"a round stopped after update {state.round_update} of {state.round_updates}",
            where=str(paths.start),
            expected="a whole round",
            do="finish it with the command that began it",
        )
    if state.model_sha256 != model.info.sha256:
        raise UserError(
            f"an adapter of model {state.model_sha256}",
            where=str(paths.start),
            expected=model.info.sha256,
            do="give its model",
        )
    gone = checkpoint.verify_files(paths.start, state)
    if gone and not paths.out.exists() and not paths.partial.exists():
        raise UserError(
            f"its {', '.join(sorted(gone))} was removed when newer rounds were done (train.keep)",
            where=str(paths.start),
            expected="one of the newest rounds",
            do="train on from a newer round, or start over with a larger train.keep",
        )
    return state


def _seal(path: Path) -> str:
    seal = Dataset.open(path).seal_sha256
    if seal is None:
        raise DatasetError("not sealed", where=str(path), do="run its stage to the end, then train")
    return seal


def _adapter_name(sha256: str) -> str:
    return f"adapter {sha256}" if sha256 else "the bare base model (no adapter)"
