"""Worker processes that may die.

Each is spawned, with a pipe; the parent waits on pipes and process sentinels together, so a worker that is killed is
seen at once, its shard goes back into the queue (at most ``MAX_ATTEMPTS`` times) and a new worker takes its place. Only
receipts travel through pipes. A worker whose parent is gone ends by itself.
"""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection as mpc
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cast_engine.errors import CastError, FailuresError
from cast_engine.store import Dataset, Sample, ShardPlan

MAX_ATTEMPTS = 3


class Worker(Protocol):
    """One loaded model (or none) that turns planned shards into samples."""

    def run(self, shard: ShardPlan) -> Sequence[Sample]:
        """Return one sample per planned key, in plan order; failed ones carry a status and no members."""


@dataclass(frozen=True)
class WorkerSpec:
    """How to make a worker in another process: everything must pickle."""

    factory: Callable[..., Worker]
    kwargs: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    env: tuple[dict[str, str], ...] = ()
    """Environments that worker processes take in turn, see :func:`cast_engine.run.devices.device_environments`."""


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use so many of torch's intra-op threads inside a ``with`` block; ``None`` changes nothing.

    Bit-equality between runs needs equal threads, so a stage's number must not stay for the next stage.
    """
    if count is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Process:
    process: Any
    pipe: Any
    shard: ShardPlan | None = None


def run_pool(
    dataset: Dataset, spec: WorkerSpec, todo: Sequence[ShardPlan], workers: int, advance: Callable[[int], None]
) -> None:
    """Carry out shards in worker processes.

    Args:
        dataset: where the workers commit.
        spec: how a worker is made.
        todo: open shards.
        workers: number of processes.
        advance: called with the number of samples of each committed shard.

    Raises:
        FailuresError: a shard failed ``MAX_ATTEMPTS`` times (all others are done first).
        CastError: what a worker reported to be the user's to mend.
    """
    queue, attempts = deque(todo), {s.shard_id: 0 for s in todo}
    failures: dict[int, str] = {}
    context = mp.get_context("spawn")
    pool = [_start(context, dataset.path, spec, slot) for slot in range(min(workers, len(todo)))]
    try:
        while queue or any(m.shard for m in pool):
            for member in pool:
                if member.shard is None and queue:
                    _hand_over(member, queue.popleft(), attempts)
            for slot in _wait(pool):
                shard, error = _settle(pool[slot])
                if error is None:
                    advance(len(shard.keys))
                elif attempts[shard.shard_id] < MAX_ATTEMPTS:
                    queue.append(shard)
                else:
                    failures[shard.shard_id] = error
                if not pool[slot].process.is_alive():
                    pool[slot] = _start(context, dataset.path, spec, slot)
    finally:
        for member in pool:
            _stop(member)
    if failures:
        shard_id, message = next(iter(failures.items()))
        raise FailuresError(
            f"{dataset.path}: {len(failures)} shards failed {MAX_ATTEMPTS} times, first shard {shard_id}: {message}"
        )


def _start(context: Any, path: Path, spec: WorkerSpec, slot: int) -> _Process:
    parent, child = context.Pipe()
    env = spec.env[slot % len(spec.env)] if spec.env else {}
    process = context.Process(target=_serve, args=(child, str(path), spec), daemon=True)
    with _environment(env):  # inherited, so that it holds before the worker imports anything
        process.start()
    child.close()
    return _Process(process, parent)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _hand_over(member: _Process, shard: ShardPlan, attempts: dict[int, int]) -> None:
    attempts[shard.shard_id] += 1
    member.shard = shard
    with suppress(OSError):  # a worker that just died is found by its sentinel
        member.pipe.send(shard)


def _wait(pool: Sequence[_Process]) -> set[int]:
    """Return the slots of busy workers that answered or died; never waits longer than five seconds."""
    busy = [(i, m) for i, m in enumerate(pool) if m.shard]
    slots = {m.pipe: i for i, m in busy} | {m.process.sentinel: i for i, m in busy}
    return {slots[ready] for ready in mpc.wait(list(slots), timeout=5.0)}


def _settle(member: _Process) -> tuple[ShardPlan, str | None]:
    """Take the answer of a busy worker; it is idle (or dead) afterwards."""
    shard = member.shard
    assert shard is not None
    error = _receive(member)
    member.shard = None
    return shard, error


def _receive(member: _Process) -> str | None:
    """Return None for a committed shard, else what went wrong; a dead worker is an answer too."""
    with suppress(EOFError, OSError):
        if member.pipe.poll():
            answer = member.pipe.recv()
            if isinstance(answer, CastError):
                raise answer
            return None if answer is None else str(answer)
    member.process.join()
    return f"the worker died with exit code {member.process.exitcode}"


def _stop(member: _Process) -> None:
    """End an idle worker by asking, a busy one by force."""
    if member.shard is None:
        with suppress(OSError):
            member.pipe.send(None)
    else:
        member.process.kill()
    member.process.join()


def _serve(pipe: Any, path: str, spec: WorkerSpec) -> None:
    """Body of a worker process: shards in, receipts (None or an error) out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with threads(spec.threads):
        _work(pipe, Dataset.open(Path(path)), spec)


def _work(pipe: Any, dataset: Dataset, spec: WorkerSpec) -> None:
    worker: Worker | None = None
    while (shard := _next(pipe)) is not None:
        try:
            if worker is None:
                worker = spec.factory(**spec.kwargs)
            dataset.commit(shard.shard_id, worker.run(shard))
            pipe.send(None)
        except CastError as error:
            pipe.send(error)
        except Exception:  # noqa: BLE001 - every error must reach the parent, which decides about retries
            pipe.send(traceback.format_exc(limit=4))


def _next(pipe: Any) -> ShardPlan | None:
    try:
        shard: ShardPlan | None = pipe.recv()
    except EOFError:  # the parent is gone
        return None
    return shard
