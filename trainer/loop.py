"""One round of training: from a rollout and its weights to the next adapter.

This file says where a round begins and ends on disk; its updates are in ``trainer.session``.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from cast_engine.errors import UserError
from cast_engine.models.base import ImageModel
from schemas.job import JobConfig, TrainConfig
from trainer import checkpoint
from trainer.checkpoint import METRICS, TrainState
from trainer.data import open_round
from trainer.metrics import read_rows
from trainer.origin import RoundPaths, changed_settings, check_origin, embed_source, origin
from trainer.processes import Processes
from trainer.retention import remove_old_moments
from trainer.session import RoundSummary, Session

if TYPE_CHECKING:
    from accelerate import Accelerator


def say(text: str) -> None:
    """Print a line for people."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def train_round(
    job: JobConfig,
    *,
    model: ImageModel,
    rollout: Path,
    advantages: Path,
    embeds: Path,
    out: Path,
    round_: int,
    start: Path | None = None,
    init_adapter: Path | None = None,
    accelerator: Accelerator | None = None,
    log: Callable[[str], None] = say,
    stop: Callable[[], bool] = lambda: False,
    advance: Callable[[int], None] = lambda _: None,
) -> RoundSummary:
    """Train one round and write its checkpoint directory.

    Everything starts from files: a model that stays loaded between rounds gives the same checkpoint as one that was
    just loaded. Called again after a kill it goes on after the last update that was saved; called again after the end
    it does nothing. After training the model is left with the new adapter on it.

    Args:
        job: The job; its train section, seed and number of rounds are used.
        model: The image model; its denoiser is loaded and given an adapter if need be.
        rollout: Sealed rollout dataset.
        advantages: Sealed advantages dataset that was made from it.
        embeds: Folder of prompt embeds.
        out: Checkpoint directory to write.
        round_: Round, from 0.
        start: Checkpoint directory of the round before; ``None`` in the first round.
        init_adapter: Adapter file to begin the run with instead of a fresh one; only without ``start``.
        accelerator: For several processes, or ``None``.
        log: Takes lines for people.
        stop: Asked after every update; true saves and raises ``Interrupted``.
        advance: Told after every update how many images it took.

    Raises:
        UserError: Inputs that do not belong together (stale rollouts, another model, another config in ``out``), or
            another process that is training the same ``out``.
        GuardError: A guard stopped training. The checkpoint of the round before is intact.
        Interrupted: ``stop`` said so.
    """
    began, config, processes = time.monotonic(), job.train, Processes(accelerator)
    paths = RoundPaths(rollout, advantages, embeds, out, start, init_adapter)
    with processes.alone(out):
        first = origin(model, job, paths, round_)
        if out.exists():
            done = _already_done(out, first)
        else:
            with _threads(config.threads):
                session = _begin(model, config, paths, first, processes, log)
                with _checkpointing(session.adapter.transformer, on=config.gradient_checkpointing):
                    session.run(stop, advance)
                done = session.finish(began)
        if processes.main:
            shutil.rmtree(paths.partial, ignore_errors=True)  # the checkpoints on the way to this one
            remove_old_moments(out, config.keep)
    return done


def _begin(
    model: ImageModel,
    config: TrainConfig,
    paths: RoundPaths,
    first: TrainState,
    processes: Processes,
    log: Callable[[str], None],
) -> Session:
    data = open_round(paths.rollout, paths.advantages, embed_source(paths.embeds, model))
    check_origin(first, data, paths)
    for line in changed_settings(first, paths):
        log(line)
    return Session(model, config, paths, first, data, processes, log)


def _already_done(out: Path, first: TrainState) -> RoundSummary:
    state = checkpoint.read_state(out)
    here, asked = state.inputs(), first.inputs()
    if here != asked:
        name = next(n for n in here if here[n] != asked[n])
        raise UserError(
            f"holds a checkpoint of other inputs ({name} is {here[name]} there and {asked[name]} now)",
            where=str(out),
            do="give another --out, or move it away",
        )
    gone = checkpoint.verify_files(out, state)
    rows = read_rows(out / METRICS)
    return RoundSummary(out, state, rows, resumed_at=state.round_update, removed=gone)


@contextmanager
def _checkpointing(transformer: nn.Module, *, on: bool) -> Iterator[None]:
    """Recompute activations in the backward pass inside a ``with`` block."""
    model = cast("Any", transformer)
    if on:
        model.enable_gradient_checkpointing()
    try:
        yield
    finally:
        if on:
            model.disable_gradient_checkpointing()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use so many CPU threads inside a ``with`` block (the number decides the order in which sums are rounded)."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
