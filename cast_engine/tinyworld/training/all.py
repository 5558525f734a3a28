"""Train all tiny models, in the order of what needs what, on one or several GPUs or (at toy size) on the CPU.

    python -m cast_engine.tinyworld.training.all --out OUT

Stages: `vae`; `base` and `judge`, side by side where there are two GPUs; `judge2`, which goes on with the judge on the
base model's own pictures. Every stage is a process of its own; one that fails is run once more without CUDA graphs and
without compiling. OUT receives each model as a .tar as soon as it is saved, results.tar with all figures, and pictures.
A later call can go on from there: ``--restore OUT --stages judge2``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

STAGES = ("vae", "base", "judge", "judge2")


def command(stage: str, args: argparse.Namespace) -> list[str]:
    """Return the command line of one stage."""
    module = "judge" if stage == "judge2" else stage
    minutes = getattr(args, f"{stage}_minutes")
    line = [sys.executable, "-m", f"cast_engine.tinyworld.training.{module}"]
    line += ["--out", str(args.work), "--cache", str(args.work / "cache"), "--publish", str(args.out)]
    line += ["--minutes", str(minutes), "--seed", str(args.seed), "--pictures", str(args.pictures)]
    if stage == "judge2":
        line += ["--init", str(args.work / "judge"), "--samples-from", str(args.work / "flux2"), "--lr", "5e-4"]
    if args.smoke:
        line.append("--smoke")
    return [*line, *getattr(args, f"{stage}_args").split()]


class Stage(threading.Thread):
    """Runs one stage, once more if it fails; its output goes to the console and to OUT/log.txt.

    Args:
        name: of the stage.
        args: of the command line.
        gpu: index of its GPU.
        workers: processes it may use.
    """

    lock = threading.Lock()

    def __init__(self, name: str, args: argparse.Namespace, gpu: int, workers: int) -> None:
        super().__init__(name=name)
        self.args, self.code = args, 1
        self.line = [*command(name, args), "--workers", str(workers)]
        self.env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        if gpus() > 1:
            self.env["CUDA_VISIBLE_DEVICES"] = str(gpu)

    def run(self) -> None:
        """Run the process."""
        self.code = self._once([])
        if self.code != 0:
            self.code = self._once(["--engine", "eager", "--no-compile"])

    def _once(self, more: list[str]) -> int:
        self._say(f"$ {' '.join([*self.line[1:], *more])}\n")
        process = subprocess.Popen(
            [*self.line, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.env, text=True
        )
        assert process.stdout is not None
        for text in process.stdout:
            if text.strip() and "it/s]" not in text:  # no progress bars of the libraries
                self._say(text)
        code = process.wait()
        self._say(f"exit status {code}\n")
        return code

    def _say(self, text: str) -> None:
        line = f"{self.name:6} {text}"
        with self.lock, (self.args.out / "log.txt").open("a") as log:
            log.write(line)
            print(line, end="", flush=True)


def gpus() -> int:
    """Return the number of GPUs without touching them in this process."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return sum(text.startswith("GPU") for text in listed.stdout.splitlines())


def run_side_by_side(names: list[str], args: argparse.Namespace) -> None:
    """Run independent stages at once where each has its GPU, else one after another."""
    width = max(1, min(len(names), gpus()))
    cores = os.cpu_count() or 1
    for start in range(0, len(names), width):
        stages = [Stage(n, args, i, max(1, cores // width)) for i, n in enumerate(names[start : start + width])]
        for stage in stages:
            stage.start()
        for stage in stages:
            stage.join()
        collect(args)
        failed = [s.name for s in stages if s.code != 0]
        if failed:
            raise SystemExit(f"failed twice: {', '.join(failed)}")


def collect(args: argparse.Namespace) -> None:
    """Copy figures and pictures to OUT."""
    with tarfile.open(args.out / "results.tar", "w") as tar:
        for file in sorted(args.work.glob("*.json")):
            tar.add(file, arcname=file.name)
    for file in args.work.glob("*.png"):
        shutil.copy(file, args.out / file.name)


def main() -> None:
    """Run the chosen stages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="receives .tar files, figures, pictures and the log")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "cast-tinyworld", help="work folder")
    parser.add_argument("--restore", type=Path, default=None, help="OUT of an earlier call to go on from")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated, of: " + ", ".join(STAGES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=200_000)
    parser.add_argument("--smoke", action="store_true")
    for stage, minutes in (("vae", 1.5), ("base", 8.0), ("judge", 8.0), ("judge2", 3.0)):
        parser.add_argument(f"--{stage}-minutes", type=float, default=minutes)
        parser.add_argument(f"--{stage}-args", default="", help=f"more options for {stage}, in one string")
    args = parser.parse_args()
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    if args.restore is not None:
        for archive in args.restore.glob("*.tar"):
            with tarfile.open(archive) as tar:
                tar.extractall(args.work, filter="data")
    wanted = [s for s in STAGES if s in args.stages.split(",")]
    for group in (["vae"], ["base", "judge"], ["judge2"]):
        names = [s for s in group if s in wanted]
        if names:
            run_side_by_side(names, args)


if __name__ == "__main__":
    main()
