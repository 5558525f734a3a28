"""What stays of a round when newer ones are there: all but what only serves to train on from it.

Rollouts, evaluations, summary and report read adapters, averages, metrics and states of every round; nothing but the
next round reads the optimiser's moments, which are twice the size of the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cast_engine.errors import CastError
from cast_engine.store import atomic
from trainer import checkpoint
from trainer.checkpoint import OPTIMIZER, REMOVED, STATE

ONLY_TO_CONTINUE = (OPTIMIZER,)


def remove_old_moments(out: Path, keep: int) -> list[Path]:
    """Remove what only serves to continue from rounds older than the newest ``keep``, of which ``out`` is the last.

    Only checkpoints that ``out`` was made from are touched, and only those beside it in a run folder
    (``rounds/0007/train`` and ``rounds/0006/train``). Which files go is written into each checkpoint first, and the
    oldest goes first: after a kill at any moment, calling this again finishes the work.

    Args:
        out: A complete checkpoint.
        keep: Rounds that stay whole, at least 1.

    Returns:
        The checkpoints that were whole before.

    Raises:
        DatasetError: The file system refused.
        NoSpaceError: The disk is full.
    """
    old = []
    for age, folder in enumerate(_ancestors(out), start=1):
        if age < keep:
            continue
        if _is_thin(folder):
            break  # and so are all before it
        old.append(folder)
    for folder in reversed(old):
        _thin(folder)
    return old


def _ancestors(out: Path) -> Iterator[Path]:
    """Give the checkpoints that one was made from and that lie in its run folder, the newest first."""
    folder, state = out.absolute(), checkpoint.read_state(out)
    while state.round > 0 and folder.parent.name == f"{state.round:04d}":
        folder = folder.parent.with_name(f"{state.round - 1:04d}") / folder.name
        try:
            if checkpoint.sha256(folder / STATE) != state.start_sha256:
                return
            state = checkpoint.read_state(folder)
        except (OSError, CastError):
            return
        yield folder


def _is_thin(folder: Path) -> bool:
    removed = checkpoint.removed_files(folder)
    return removed.issuperset(ONLY_TO_CONTINUE) and not any((folder / name).exists() for name in ONLY_TO_CONTINUE)


def _thin(folder: Path) -> None:
    body = {"schema_version": 1, "removed": list(ONLY_TO_CONTINUE)}
    atomic.write_file(folder / REMOVED, atomic.dump_record(body), point="removed")
    with atomic.at(folder):
        for name in ONLY_TO_CONTINUE:
            (folder / name).unlink(missing_ok=True)
        atomic.crash("moments.removed")
        atomic.sync_dir(folder)
