"""Run commands as processes of their own, and say what a run folder holds."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cast_engine.store import Dataset

ROOT = Path(__file__).resolve().parents[2]
KILLED = -signal.SIGKILL
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
"""One thread, so that sums are rounded alike in every process."""
MODULES = {"cast-engine": "cast_engine", "cast-train": "trainer.cli"}


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong; there must be one, and no traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error:")]
        assert len(lines) == 1, self.err
        return lines[0]


def spawn(program: str, *args: object, cwd: Path = ROOT, **env: str) -> Result:
    """Run a command in a new interpreter, as a shell would."""
    command = [sys.executable, "-m", MODULES[program], *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **ENVIRONMENT, **env}, capture_output=True, text=True)
    return Result(done.returncode, done.stdout, done.stderr)


class Running:
    """A command that is under way."""

    def __init__(self, nursery: "Nursery", pid: int, folder: Path) -> None:
        self._nursery, self.pid, self._folder = nursery, pid, folder

    def send(self, number: int) -> None:
        """Send a signal (the process stays a zombie until it is waited for, so its pid is nobody else's)."""
        os.kill(self.pid, number)

    def wait(self) -> Result:
        code = self._nursery.ask({"wait": self.pid})["code"]
        return Result(code, (self._folder / "out").read_text(), (self._folder / "err").read_text())


class Nursery:
    """Starts commands in forks of a process that has imported everything (see nursery.py)."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            text=True,
        )

    def ask(self, request: dict) -> dict:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, program: str, *args: object, cwd: Path = ROOT, file_limit: int | None = None, **env: str):
        self._count += 1
        folder = self._folder / f"{self._count:04d}"
        folder.mkdir()
        request = {
            "program": program,
            "argv": [program, *map(str, args)],
            "cwd": str(cwd),
            "env": env,
            "stdout": str(folder / "out"),
            "stderr": str(folder / "err"),
            "file_limit": file_limit,
        }
        return Running(self, self.ask(request)["pid"], folder)

    def run(self, program: str, *args: object, **kwargs) -> Result:
        return self.start(program, *args, **kwargs).wait()

    def engine(self, *args: object, **kwargs) -> Result:
        return self.run("cast-engine", *args, **kwargs)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def wait_for(condition, seconds: float = 60) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def copy_run(source: Path, target: Path, *without: str) -> Path:
    """Copy a run folder, leaving out what is named (relative to it)."""
    shutil.copytree(source, target)
    for name in without:
        path = target / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return target


def datasets(root: Path) -> dict[str, Dataset]:
    """Every dataset of a run by its place in it."""
    plans = sorted(root.rglob("plan.json"))
    return {p.parent.relative_to(root).as_posix(): Dataset.open(p.parent) for p in plans}


def seals(root: Path) -> dict[str, str]:
    """The seal of every dataset of a run."""
    return {name: dataset.seal_sha256 for name, dataset in datasets(root).items()}


def summary(root: Path) -> dict:
    """What summary.json says, without the seconds."""
    return {k: v for k, v in json.loads((root / "summary.json").read_text()).items() if k != "seconds"}


def snapshot(root: Path) -> dict[str, tuple[int, str]]:
    """Time and content of every file."""
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    return {
        p.relative_to(root).as_posix(): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest())
        for p in files
    }


TIMED = {"report.html", "summary.json", "timings.jsonl", "metrics.jsonl"}
"""Files that tell the time, or nothing."""


def lasting(root: Path) -> dict[str, str]:
    """Content of every file of a run that must not depend on when, how often or in how many pieces it was made.

    Left out: who committed a shard (`done/`), what is never read (`tmp/`, hidden files), and what tells seconds; of the
    metrics only those.
    """
    out = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        skipped = path.name in TIMED or path.name.startswith(".") or {"done", "tmp"} & set(relative.parts)
        if path.is_file() and not skipped:
            out[relative.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(root.rglob("metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        out[path.relative_to(root).as_posix()] = repr([{k: v for k, v in r.items() if k != "seconds"} for r in rows])
    return out


def assert_equal_runs(one: Path, other: Path) -> None:
    """Both run folders hold the same datasets, checkpoints and figures."""
    assert seals(one) == seals(other)
    found, expected = lasting(one), lasting(other)
    assert sorted(found.keys() ^ expected.keys()) == []
    assert [name for name in found if found[name] != expected[name]] == []
    assert summary(one) == summary(other)
