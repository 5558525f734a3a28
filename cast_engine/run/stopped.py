"""``stopped.json``: why a guard ended the training of a run, until that round is trained again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from cast_engine.run.layout import RunLayout
from cast_engine.store.atomic import write_file


@dataclass(frozen=True)
class Stop:
    """Which round was stopped, the guard that did it, and its message."""

    round: int
    reason: str
    message: str


def write(layout: RunLayout, stop: Stop) -> None:
    """Note that a guard ended the training."""
    write_file(layout.stopped, (json.dumps(asdict(stop), indent=1) + "\n").encode())


def read(layout: RunLayout) -> Stop | None:
    """Return why the run stands still; None if no guard stopped it, or its round was trained since."""
    stop = _read(layout)
    return None if stop is None or layout.round(stop.round, "train").exists() else stop


def forget(layout: RunLayout, round_: int) -> None:
    """Remove what was noted of this round or of an earlier one: the run goes on."""
    stop = _read(layout)
    if stop is None or stop.round <= round_:
        layout.stopped.unlink(missing_ok=True)


def _read(layout: RunLayout) -> Stop | None:
    try:
        body = json.loads(layout.stopped.read_text())
        return Stop(int(body["round"]), str(body["reason"]), str(body["message"]))
    except (OSError, ValueError, KeyError, TypeError):  # for people only: a damaged one says nothing
        return None
