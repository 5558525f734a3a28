"""The whole story: prompts, graphs, embeds, then rounds of rollout, score, advantages and training between evaluations.

Every step is a stage that can be run alone (``cast-engine rollout ...``); this file only says what follows what. It
leaves out how a stage is carried out (``cast_engine.run``), what it computes (``cast_engine.stages``) and how an update
is made (``trainer``).
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cast_engine.errors import CastError, DatasetError, UserError
from cast_engine.jobfile import overrides_between, read_run
from cast_engine.run import stopped
from cast_engine.run.console import progress, record_timing, say
from cast_engine.run.layout import RunLayout
from cast_engine.run.runfile import hand_down, open_run
from cast_engine.run.summary import BEFORE, DOUBLE, judge_warning
from cast_engine.store import Dataset
from schemas.graph import Prompt, SceneGraph
from schemas.job import JobConfig

if TYPE_CHECKING:
    from cast_engine.judges.base import Judge
    from cast_engine.models.session import ImageSession
    from cast_engine.run.executor import Outcome
    from cast_engine.run.pool import Worker, WorkerSpec


class Pipeline:
    """A job in its run folder. Models are loaded when a stage first needs them and stay loaded."""

    def __init__(self, job: JobConfig, root: Path) -> None:
        self.job = job
        self.layout = RunLayout(root)
        open_run(self.layout.run_file, job)

    # ---- what is loaded once

    @cached_property
    def session(self) -> ImageSession:
        """The image model."""
        from cast_engine.models.session import ImageSession, SessionSpec

        return ImageSession(SessionSpec(self.job.model, self.layout.embeds))

    @cached_property
    def judge(self) -> Judge:
        """The judge that gives the reward."""
        from cast_engine.judges.load import load_judge

        return load_judge(self.job.score)

    @cached_property
    def evaluation_judge(self) -> Judge:
        """The judge that reports the gain; it is said when it gives the reward too."""
        from cast_engine.judges.load import load_judge
        from cast_engine.stages.evaluate import judge_config

        if warning := judge_warning(self.job):
            say(f"warning: {warning}")
        return load_judge(judge_config(self.job.evaluate), "evaluate")

    def graphs(self, split: str) -> dict[str, SceneGraph]:
        """Return the scene graphs of a split by prompt id."""
        from cast_engine.stages import csg

        if split not in self._graphs:
            self._graphs[split] = csg.load(self._made("csg", self.layout.graphs(split)))
        return self._graphs[split]

    @cached_property
    def _graphs(self) -> dict[str, dict[str, SceneGraph]]:
        return {}

    # ---- before the rounds

    def prompts(self) -> None:
        """Write the prompts of both splits down; refuse held-out prompts that are trained on."""
        from cast_engine.stages import prompts as stage

        config = self.job.prompts
        train = stage.read_prompts(config.train, config.train_count)
        held_out = stage.read_prompts(config.evaluate, config.evaluate_count)
        stage.check_disjoint(train, held_out)
        for split, source, found in (("train", config.train, train), ("evaluate", config.evaluate, held_out)):
            dataset, spec = stage.plan(self.layout.prompts(split), source, found)
            self._carry_out("prompts", dataset, spec, unit="prompts", label=f"prompts {split}")

    def csg(self) -> None:
        """Decompose every prompt into its causal scene graph."""
        from cast_engine.stages import csg as stage

        for split in ("train", "evaluate"):
            dataset, spec = stage.plan(self.layout.graphs(split), self._made("prompts", self.layout.prompts(split)))
            self._carry_out("csg", dataset, spec, unit="graphs", label=f"csg {split}")

    def embed(self) -> None:
        """Encode every prompt of the plan, so that the text encoder never has to come back."""
        graphs = [g for split in ("train", "evaluate") for g in self.graphs(split).values()]
        todo = self.session.not_encoded([Prompt(prompt_id=g.prompt_id, text=g.prompt) for g in graphs])
        if not todo:
            return
        started = time.monotonic()
        with progress("embed", len(todo), unit="prompts") as bar:
            self.session.encode(todo, bar.advance)
        seconds = time.monotonic() - started
        record_timing(self.layout.timings, stage="embed", round_=None, seconds=seconds, samples=len(todo))

    def check(self) -> None:
        """Refuse now what would stop the run only after the first evaluation, which may take hours.

        Raises:
            UserError: a judge that is not there, a window that does not fit the steps, too few prompts for a round, or
                adapter targets that match nothing.
        """
        from cast_engine.judges.load import check_judge
        from cast_engine.stages import rollout

        if self.job.score.python is None:
            check_judge(self.job.score)
        rollout.check(self.job, self.session, len(self.graphs("train")))
        if self.job.train.lora.targets is not None:
            self.session.check_targets(self.job.train.lora.targets)

    # ---- one round

    def rollout(self, round_: int) -> None:
        """Draw the images of a round with the adapter that the round before saved."""
        from cast_engine.stages import rollout as stage

        path = self.layout.round(round_, "rollout")
        graphs = self._made("csg", self.layout.graphs("train"))
        dataset, spec, worker = stage.plan(
            path, self.job, graphs, self.graphs("train"), self.session, round_=round_, adapter=self.adapter(round_)
        )
        config = self.job.rollout
        self._carry_out("rollout", dataset, spec, worker=worker, workers=config.workers, round_=round_)

    def describe_rollout(self) -> str:
        """Return the plan of the rollouts and the noise of every step, without drawing anything."""
        from cast_engine.stages import rollout as stage

        return stage.describe(self.job, self.session, len(self.graphs("train")))

    def score(self, round_: int) -> None:
        """Let the judge answer the questions of a round."""
        from cast_engine.stages import score as stage

        rollout = self._made("rollout", self.layout.round(round_, "rollout"))
        dataset, spec, worker = stage.plan(
            self.layout.round(round_, "score"), self.job.score, rollout, self.graphs("train"), self.judge
        )
        self._carry_out("score", dataset, spec, worker=worker, workers=self.job.score.workers, round_=round_)

    def build_advantages(self, round_: int) -> None:
        """Turn the scores and maps of a round into signed weights."""
        from cast_engine.stages import build_advantages as stage

        rollout = self._made("rollout", self.layout.round(round_, "rollout"))
        score = self._made("score", self.layout.round(round_, "score"))
        path = self.layout.round(round_, "advantages")
        grid = (self.session.geometry.grid_h, self.session.geometry.grid_w)
        dataset, spec, worker = stage.plan(path, self.job, rollout, score, self.graphs("train"), grid)
        self._carry_out("advantages", dataset, spec, worker=worker, round_=round_)

    def train(self, round_: int) -> None:
        """Make the updates of a round and save its checkpoint."""
        from trainer.guards import TrainingStopped
        from trainer.loop import train_round

        started = time.monotonic()
        images = self.job.rollout.prompts_per_round * self.job.rollout.group_size
        out = self.layout.round(round_, "train")
        stopped.forget(self.layout, round_)
        try:
            with ExitStack() as stack:
                bar = None
                if not out.exists():
                    total = images * self.job.train.epochs_per_round
                    bar = stack.enter_context(progress(f"round {round_} train", total))
                done = train_round(
                    self.job,
                    rollout=self._made("rollout", self.layout.round(round_, "rollout")).path,
                    advantages=self._made("build-advantages", self.layout.round(round_, "advantages")).path,
                    embeds=self.layout.embeds,
                    out=out,
                    start=self.layout.round(round_ - 1, "train") if round_ else None,
                    round_=round_,
                    model=self.session.model,
                    advance=bar.advance if bar else lambda _: None,
                )
        except TrainingStopped as error:
            stopped.write(self.layout, stopped.Stop(round_, error.reason, str(error)))
            raise
        if done.seconds:
            seconds = time.monotonic() - started
            record_timing(self.layout.timings, stage="train", round_=round_, seconds=seconds, samples=images)

    def adapter(self, round_: int) -> Path | None:
        """Return the adapter that draws a round: None for the first, else what the round before saved.

        Raises:
            UserError: the round before is not finished.
        """
        if round_ == 0:
            return None
        path = self.layout.round(round_ - 1, "train") / "adapter.safetensors"
        if not path.exists():
            raise UserError("no adapter", where=str(path), expected=f"round {round_ - 1} trained", do="train it first")
        return path

    # ---- measuring

    def measured_adapter(self, rounds: int) -> Path | None:
        """Return what is evaluated after so many rounds: the moving average if there is one, else the adapter itself.

        Rollouts always use the adapter itself: they must come from the policy that is trained.
        """
        adapter = self.adapter(rounds)
        average = None if adapter is None else adapter.with_name("ema.safetensors")
        return average if average is not None and average.exists() else adapter

    def evaluate(self, after: int = 0, steps: int | None = None) -> None:
        """Draw the held-out prompts and let the evaluation judge look at them.

        Args:
            after: rounds of training behind the model; 0 is the bare model.
            steps: denoising steps, None for those of the job.
        """
        from cast_engine.stages import evaluate as stage

        name, adapter = self._evaluation_name(after, steps), self.measured_adapter(after)
        graphs = self._made("csg", self.layout.graphs("evaluate"))
        dataset, spec, worker = stage.plan(
            self.layout.evaluate(name),
            self.job,
            graphs,
            self.graphs("evaluate"),
            self.session,
            self.evaluation_judge,
            num_steps=steps or self.num_steps,
            adapter=adapter,
        )
        config = self.job.evaluate
        self._carry_out("evaluate", dataset, spec, worker=worker, workers=config.workers, label=f"evaluate {name}")

    def _evaluation_name(self, after: int, steps: int | None) -> str:
        name = f"round-{after:04d}" if after else BEFORE
        if steps in {None, self.num_steps}:
            return name
        return DOUBLE if not after and steps == 2 * self.num_steps else f"{name}-{steps}-steps"

    @property
    def num_steps(self) -> int:
        """Denoising steps of rollouts and evaluations."""
        return self.job.rollout.num_steps or self.session.model.info.defaults.num_steps

    # ---- plumbing

    def _made(self, stage: str, path: Path) -> Dataset:
        """Open what an earlier stage made.

        Raises:
            UserError: it has not been run.
        """
        if not (path / "plan.json").exists():
            raise UserError("not there", where=str(path), do=f"run `cast-engine {stage}` first")
        return Dataset.open(path)

    def _carry_out(
        self,
        stage: str,
        dataset: Dataset,
        spec: WorkerSpec,
        *,
        label: str = "",
        unit: str = "images",
        worker: Worker | None = None,
        workers: int = 1,
        round_: int | None = None,
    ) -> None:
        from cast_engine.run.executor import carry_out

        label = label or (stage if round_ is None else f"round {round_} {stage}")
        bad = self.job.score.max_bad_frac
        outcome: Outcome = carry_out(
            dataset, spec, label=label, unit=unit, workers=workers, worker=worker, max_bad_frac=bad
        )
        if outcome.samples:
            record_timing(
                self.layout.timings, stage=stage, round_=round_, seconds=outcome.seconds, samples=outcome.samples
            )


def run_job(job: JobConfig, root: Path) -> Path:
    """Carry out a whole job, or go on where it was stopped; return the path of its summary.

    Args:
        job: the job.
        root: the run folder.
    """
    from cast_engine.stages import report, summarise

    pipeline = Pipeline(job, root)
    if summarise.is_current(pipeline.layout):
        say(f"{root}: finished before, nothing to do")
        return pipeline.layout.summary
    pipeline.prompts()
    pipeline.csg()
    pipeline.embed()
    pipeline.check()
    _carry_out(pipeline, "evaluate", job.evaluate.python, after=0)
    if job.evaluate.double_steps:
        _carry_out(pipeline, "evaluate", job.evaluate.python, after=0, steps=2 * pipeline.num_steps)
    for round_ in range(job.rounds):
        _carry_out(pipeline, "rollout", job.rollout.python, round_=round_)
        _carry_out(pipeline, "score", job.score.python, round_=round_)
        _carry_out(pipeline, "build-advantages", job.advantages.python, round_=round_)
        _carry_out(pipeline, "train", job.train.python, round_=round_)
        if _evaluated_after(job, round_):
            _carry_out(pipeline, "evaluate", job.evaluate.python, after=round_ + 1)
    summarise.write(pipeline.layout, job)
    report.write(pipeline.layout, job)
    return pipeline.layout.summary


def _evaluated_after(job: JobConfig, round_: int) -> bool:
    every = job.evaluate.every
    return round_ + 1 == job.rounds or (every is not None and (round_ + 1) % every == 0)


def _carry_out(pipeline: Pipeline, stage: str, python: str | None, **options: int) -> None:
    """Run a stage here, or by the interpreter that the job names for it: stages meet on disk, so either will do.

    The other one starts from the job that the run folder was made with: what has been set otherwise since (execution
    fields, nothing else can) is passed on.
    """
    if python is None:
        getattr(pipeline, stage.replace("-", "_"))(**options)
        return
    command = [python, "-m", "cast_engine", stage, "--run", str(pipeline.layout.root)]
    for name, value in options.items():
        command += [f"--{name.rstrip('_')}", str(value)]
    for item in overrides_between(read_run(pipeline.layout.run_file), pipeline.job):
        command += ["--set", item]
    fds, env = hand_down(pipeline.layout.root)
    code = subprocess.run(command, check=False, pass_fds=fds, env=env).returncode
    if code:
        say(f"{stage} by {python} ended with exit code {code}")
        sys.exit(code)


def check_checkpoints(root: Path) -> list[str]:
    """Compare the checkpoints of a run folder with their hashes; return a line for each that is damaged.

    A checkpoint's state holds the hashes of its files, and that of the round before the hash of its state.
    """
    from trainer import checkpoint

    problems, before = [], None
    for folder in sorted(root.glob("rounds/*/train")):
        try:
            state = checkpoint.read_state(folder)
            checkpoint.verify_files(folder, state)
            if before is not None and state.start_sha256 != checkpoint.sha256(before / checkpoint.STATE):
                raise DatasetError("not what the next round began with", where=str(before / checkpoint.STATE))
        except CastError as error:
            problems.append(str(error))
        before = folder
    return problems
