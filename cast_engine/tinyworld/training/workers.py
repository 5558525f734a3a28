"""Worker processes for NumPy work (rendering, verifying) beside a process that holds a GPU.

Each worker is a fresh interpreter that imports no torch: forking a CUDA process fails, and spawning through
``multiprocessing`` would import the whole training script in every worker. Requests and replies are pickles on pipes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


class Workers:
    """A pool of worker processes.

    Args:
        count: number of processes; 0 runs the work in this process.
    """

    def __init__(self, count: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(_PACKAGE_ROOT), env.get("PYTHONPATH", "")) if p)
        command = [sys.executable, "-m", "cast_engine.tinyworld.training.workers"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) for _ in range(count)
        ]

    def map(self, function: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call ``package.module:function`` with each tuple of arguments and return the results in order."""
        if not self._processes:
            call = _lookup(function)
            return [call(*a) for a in arguments]
        lanes: list[list[int]] = [[] for _ in self._processes]
        for lane, i in zip(cycle(lanes), range(len(arguments)), strict=False):
            lane.append(i)
        results: dict[int, Any] = {}

        def serve(process: subprocess.Popen[bytes], lane: list[int]) -> None:
            for i in lane:
                results[i] = _ask(process, function, arguments[i])

        with ThreadPoolExecutor(len(lanes)) as threads:
            for done in [threads.submit(serve, p, lane) for p, lane in zip(self._processes, lanes, strict=True)]:
                done.result()
        return [results[i] for i in range(len(arguments))]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
            process.wait()
        self._processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _lookup(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


def _ask(process: subprocess.Popen[bytes], function: str, arguments: tuple[Any, ...]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump((function, arguments), process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
    process.stdin.flush()
    ok, value = pickle.load(process.stdout)  # noqa: S301 - our own worker's reply
    if not ok:
        raise RuntimeError(f"worker failed in {function}: {value}")
    return value


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not end up between the pickles
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own parent's request
        except EOFError:
            return
        try:
            reply: tuple[bool, Any] = (True, _lookup(function)(*arguments))
        except Exception as error:  # noqa: BLE001 - reported to the parent, which raises
            reply = (False, repr(error))
        pickle.dump(reply, replies, protocol=pickle.HIGHEST_PROTOCOL)
        replies.flush()


if __name__ == "__main__":
    _serve()
