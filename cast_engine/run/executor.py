"""Carry out the open shards of a dataset: in this process, or in spawned workers that may die.

A worker turns one planned shard into its samples; committing is the same for all. Several workers are processes of
their own (``cast_engine.run.pool``).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cast_engine.errors import FailuresError, Interrupted
from cast_engine.run.console import progress, say
from cast_engine.run.pool import Worker, WorkerSpec, run_pool, threads
from cast_engine.store import Dataset, ShardPlan
from schemas.records import Status


@dataclass(frozen=True)
class Outcome:
    """What a stage did in this call."""

    samples: int
    seconds: float


def carry_out(
    dataset: Dataset,
    spec: WorkerSpec,
    *,
    label: str,
    unit: str = "images",
    workers: int = 1,
    worker: Worker | None = None,
    max_bad_frac: float = 0.0,
) -> Outcome:
    """Do every open shard of a dataset, then seal it. A sealed dataset costs nothing.

    Args:
        dataset: where shards are committed.
        spec: how to make a worker.
        label: name shown to people.
        unit: what a sample is called.
        workers: processes; 1 works in this one.
        worker: a worker that is loaded already (only used in this process).
        max_bad_frac: share of samples that may fail before the stage ends with ``FailuresError``.

    Raises:
        FailuresError: too many failed samples, or a shard that failed ``MAX_ATTEMPTS`` times.
        Interrupted: a signal asked to stop; committed shards stay.
    """
    if dataset.sealed:
        return Outcome(0, 0.0)
    todo = dataset.todo()
    total = sum(len(s.keys) for s in dataset.plan)
    open_samples = sum(len(s.keys) for s in todo)
    started = time.monotonic()
    if todo:
        with progress(label, total, done=total - open_samples, unit=unit) as bar:
            if workers <= 1:
                _in_process(dataset, spec, todo, worker, bar.advance)
            else:
                run_pool(dataset, spec, todo, workers, bar.advance)
    check_failures(dataset, label, max_bad_frac)
    dataset.seal()
    return Outcome(open_samples, time.monotonic() - started)


def check_failures(dataset: Dataset, label: str, max_bad_frac: float) -> None:
    """End the stage when more samples failed, or more scores are missing, than allowed; fewer are only counted.

    Raises:
        FailuresError: naming the first failed sample and its message.
    """
    rows = dataset.rows().to_pylist()
    bad = [r for r in rows if r["status"] != Status.OK]
    first = f"{bad[0]['key']}: {bad[0]['status']} {bad[0]['error_msg'] or ''}".strip() if bad else ""
    scores = [(r["key"], s) for r in rows for s in r.get("atom_scores") or ()]
    missing = [key for key, s in scores if s is None or math.isnan(s)]
    for count, total, what in (
        (len(bad), len(rows), f"samples failed, first {first}"),
        (len(missing), len(scores), f"atom scores are missing, first in {missing[0] if missing else ''}"),
    ):
        if count > max_bad_frac * total:
            raise FailuresError(
                f"{label}: {count} of {total} {what}; more than the allowed share {max_bad_frac:g}; remove "
                f"{dataset.path} to make them again, or accept them with `cast-engine seal {dataset.path}`"
            )
        if count:
            say(f"{label}: {count} of {total} {what}")


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM and SIGUSR1 (Slurm) into ``Interrupted`` while the block runs; only the main thread may."""

    def stop(signum: int, _frame: object) -> None:
        raise Interrupted(f"stopped by {signal.Signals(signum).name}; run the same command again to go on")

    signals = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(s, stop) for s in signals]
    try:
        yield
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)


def _in_process(
    dataset: Dataset,
    spec: WorkerSpec,
    todo: Sequence[ShardPlan],
    worker: Worker | None,
    advance: Callable[[int], None],
) -> None:
    with threads(spec.threads):
        if worker is None:
            worker = spec.factory(**spec.kwargs)
        for shard in todo:
            dataset.commit(shard.shard_id, worker.run(shard))
            advance(len(shard.keys))
