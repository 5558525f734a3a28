"""What all training scripts share: device, time budget, the optimiser step and its CUDA graph, moving averages.

The models are so small that on a GPU the time goes into launching kernels. A whole training step (drawing the batch,
forward, backward, clipping, AdamW, moving average) is therefore captured once as a CUDA graph and replayed. When
compiling or capturing fails, the same step runs without it, slower.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

Mode = Literal["auto", "graph", "eager"]
M = TypeVar("M", bound=nn.Module)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every training script understands."""
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, figures and logs")
    parser.add_argument(
        "--cache", type=Path, default=None, help="folder for rendered scenes (default: in the temporary folder)"
    )
    parser.add_argument("--publish", type=Path, default=None, help="also pack saved models as .tar files here")
    parser.add_argument("--minutes", type=float, default=None, help="time for the training loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that render and verify")
    parser.add_argument("--pictures", type=int, default=200_000, help="size of the training set")
    parser.add_argument("--engine", choices=("auto", "graph", "eager"), default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--smoke", action="store_true", help="toy sizes: every code path in under a minute, no quality")


def prepare(args: argparse.Namespace) -> torch.device:
    """Seed everything, allow TF32, make the output folder and return the device."""
    warnings.filterwarnings("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    args.cache = args.cache or Path(tempfile.gettempdir()) / "cast-tinyworld"
    if args.smoke:
        torch.set_num_threads(1)
        args.pictures, args.workers, args.minutes = 64, min(args.workers, 1), 0.02
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        log(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    return device


_START = time.monotonic()


def log(text: str) -> None:
    """Print a line with the seconds since the start, at once."""
    print(f"[{time.monotonic() - _START:7.1f}s] {text}", flush=True)


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return bfloat16 autocast on CUDA, nothing on the CPU (where training in it is slower)."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def may_compile(args: argparse.Namespace) -> bool:
    """Return whether to compile; a failure to compile then only costs speed."""
    if not (args.device.startswith("cuda") and args.compile and args.engine != "eager"):
        return False
    from torch._dynamo import config

    config.suppress_errors = True
    config.recompile_limit = 64
    return True


def write_json(path: Path, value: object) -> None:
    """Write a JSON file that a crash cannot leave half-written."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    aside.replace(path)


def publish(folder: Path, target: Path | None) -> None:
    """Pack a folder into ``target/<name>.tar``, replacing an older one in one step."""
    if target is None:
        return
    target.mkdir(parents=True, exist_ok=True)
    aside = target / f".{folder.name}.tmp"
    with tarfile.open(aside, "w") as tar:
        tar.add(folder, arcname=folder.name)
    aside.replace(target / f"{folder.name}.tar")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is not there."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


class Budget:
    """A span of wall-clock time."""

    def __init__(self, minutes: float) -> None:
        self.seconds = minutes * 60
        self.start = time.monotonic()

    @property
    def used(self) -> float:
        """Share of the time that has passed, capped at 1."""
        return min(1.0, (time.monotonic() - self.start) / max(self.seconds, 1e-9))


class Optimiser:
    """AdamW on one learning rate that can be captured in a CUDA graph, with clipping and a moving average.

    Args:
        modules: what is trained; the moving averages are in `averages`, in the same order.
        peak: highest learning rate.
        decay: of the moving average, per step; None keeps none.
    """

    def __init__(
        self, modules: Iterable[nn.Module], peak: float, *, weight_decay: float = 0.01, decay: float | None = 0.999
    ) -> None:
        self.modules = list(modules)
        self.averages = [frozen_copy(m) for m in self.modules] if decay is not None else []
        self.weight = 1 - (decay or 0.0)
        self.params = [p for m in self.modules for p in m.parameters() if p.requires_grad]
        names = {id(p) for m in self.modules for p in m.parameters() if p.requires_grad}
        self._pairs = [
            (e, p)
            for a, m in zip(self.averages, self.modules, strict=False)
            for e, p in zip(a.parameters(), m.parameters(), strict=True)
            if id(p) in names
        ]
        cuda = self.params[0].is_cuda
        self.lr = torch.tensor(0.0, device=self.params[0].device)
        self.peak = peak
        groups = [
            {"params": [p for p in self.params if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.params if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.98), capturable=cuda, fused=cuda or None)

    def schedule(self, used: float, warmup: float = 0.02, floor: float = 0.02) -> None:
        """Set the learning rate by the share of the time used: linear warm-up, then a cosine to `floor` of the peak."""
        rise = min(1.0, (used + 1e-3) / (warmup + 1e-3))
        fall = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, used)))
        self.lr.fill_(self.peak * rise * fall)

    def step(self, loss: Tensor) -> None:
        """One update from `loss`."""
        self.adam.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        self.adam.step()
        if self._pairs:
            with torch.no_grad():
                torch._foreach_lerp_([e for e, _ in self._pairs], [p for _, p in self._pairs], self.weight)

    @torch.no_grad()
    def restart_averages(self) -> None:
        """Set the moving averages to the present weights, which forgets the random start."""
        for average, current in self._pairs:
            average.copy_(current)


def frozen_copy(module: M) -> M:
    """Return a copy without gradients, in evaluation mode."""
    return copy.deepcopy(module).requires_grad_(False).eval()


class Runner:
    """Calls a training step again and again, as a CUDA graph where possible.

    Args:
        step: does one update and returns the values to be logged as one tensor. Reads only tensors that stay in place.
        mode: "auto" tries a graph and falls back; "graph" raises instead; "eager" does not try.
    """

    def __init__(self, step: Callable[[], Tensor], device: torch.device, mode: Mode = "auto") -> None:
        self._step, self.device = step, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Tensor | None = None
        self.steps = 0
        if device.type == "cuda" and mode != "eager":
            try:
                self._capture()
            except Exception as error:
                if mode == "graph":
                    raise
                self._graph = None
                log(f"no CUDA graph, going on without: {error!r:.300}")

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(4):  # compiles, and lets every library allocate its workspace
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._out = self._step()
        self._graph = graph
        log("training step captured as a CUDA graph")

    def __call__(self) -> Tensor:
        """Do one step and return its log values (still on the device)."""
        self.steps += 1
        if self._graph is None:
            return self._step()
        self._graph.replay()
        assert self._out is not None
        return self._out


def train(
    runner: Runner,
    optimiser: Optimiser,
    minutes: float,
    *,
    reports: int = 8,
    report: Callable[[int, Tensor, float], None],
    max_steps: int | None = None,
) -> dict[str, float]:
    """Run steps until the time is used up; call ``report(steps, values, share of time used)`` now and then.

    Returns:
        Steps done, seconds used and steps per second (without the reports).
    """
    budget, next_report, averaged = Budget(minutes), 1 / reports, False
    busy, mark = 0.0, time.monotonic()
    total: Tensor | None = None
    since = 0
    while budget.used < 1.0 and (max_steps is None or runner.steps < max_steps):
        optimiser.schedule(budget.used)
        values = runner()
        total = values.clone() if total is None else total + values
        since += 1
        if runner.steps % 32 == 0 and runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)  # the clock must not run ahead of the device
        if not averaged and budget.used > 0.1:
            optimiser.restart_averages()
            averaged = True
        if budget.used >= next_report and budget.used < 1.0:
            mean = (total / since).float().cpu()
            busy += time.monotonic() - mark
            if not bool(torch.isfinite(mean).all()):
                raise RuntimeError(f"training diverged at step {runner.steps}: {mean.tolist()}")
            report(runner.steps, mean, budget.used)
            total, since, next_report, mark = None, 0, next_report + 1 / reports, time.monotonic()
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    busy += time.monotonic() - mark
    return {"steps": runner.steps, "seconds": round(busy, 1), "steps_per_second": round(runner.steps / busy, 2)}
