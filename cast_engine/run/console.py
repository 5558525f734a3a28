"""What a person sees while a stage runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Progress(Protocol):
    """Counts finished samples of one stage."""

    def advance(self, count: int) -> None:
        """Add finished samples."""


@dataclass
class _Plain:
    """A line when the stage ends, and one every ``interval`` seconds before that."""

    label: str
    total: int
    interval: float = 30.0
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    printed: float = field(default_factory=time.monotonic)

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.printed >= self.interval and self.done < self.total:
            self.printed = now
            rate = self.done / max(now - self.started, 1e-9)
            left = (self.total - self.done) / max(rate, 1e-9)
            say(f"{self.label}: {self.done}/{self.total}, {rate:.1f}/s, {left:.0f} s left")


@dataclass
class _Bar:
    bar: Any
    task: Any

    def advance(self, count: int) -> None:
        self.bar.advance(self.task, count)


def say(text: str) -> None:
    """Print one line for people (standard error keeps standard output for data)."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def progress(label: str, total: int, *, done: int = 0, unit: str = "images") -> Iterator[Progress]:
    """Show the progress of a stage; ``done`` samples were there before.

    Args:
        label: name of the stage as people see it.
        total: samples planned.
        done: samples that an earlier run finished.
        unit: what is counted.
    """
    if not sys.stderr.isatty():
        plain = _Plain(label, total - done)
        started = time.monotonic()
        yield plain
        if plain.done:
            seconds = time.monotonic() - started
            say(f"{label}: {plain.done} {unit} in {seconds:.1f} s ({plain.done / max(seconds, 1e-9):.1f}/s)")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, completed=done, rate="")
        started, shown = time.monotonic(), _Bar(bar, task)

        class _Rated:
            def __init__(self) -> None:
                self.count = 0

            def advance(self, count: int) -> None:
                self.count += count
                rate = self.count / max(time.monotonic() - started, 1e-9)
                bar.update(task, rate=f"{rate:.1f} {unit}/s")
                shown.advance(count)

        yield _Rated()


def record_timing(path: Path, *, stage: str, round_: int | None, seconds: float, samples: int) -> None:
    """Append one line to ``timings.jsonl``; work that was redone after a kill shows as a line of its own."""
    line = json.dumps({"stage": stage, "round": round_, "seconds": round(seconds, 3), "samples": samples})
    with path.open("a") as f:
        f.write(line + "\n")


def read_timings(path: Path) -> dict[str, dict[str, float]]:
    """Return seconds and samples per stage, summed over a run; a torn last line is ignored."""
    out: dict[str, dict[str, float]] = {}
    if not path.exists():
        return out
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        total = out.setdefault(entry["stage"], {"seconds": 0.0, "samples": 0})
        total["seconds"] = round(total["seconds"] + entry["seconds"], 3)
        total["samples"] += entry["samples"]
    return out
