"""What `run` carries out is what the commands do by hand."""

import itertools
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cast_engine import pipeline
from cast_engine.cli import app
from cast_engine.jobfile import load_job, read_run
from cast_engine.pipeline import Pipeline
from schemas.job import JobConfig
from tests.store.store_fakes import keys, make
from trainer.guards import TrainingStopped


@pytest.fixture
def made(tmp_path):
    made = Pipeline(JobConfig(), tmp_path / "run")
    made.__dict__["session"] = SimpleNamespace(model=SimpleNamespace(info=SimpleNamespace(defaults=_Steps())))
    return made


class _Steps:
    num_steps = 10


@pytest.mark.parametrize(
    ("after", "steps", "name"),
    [
        (0, None, "base"),
        (0, 10, "base"),
        (0, 20, "base-double-steps"),
        (0, 5, "base-5-steps"),
        (3, None, "round-0003"),
        (3, 20, "round-0003-20-steps"),
    ],
)
def test_equal_evaluations_have_one_name(made, after, steps, name):
    assert made._evaluation_name(after, steps) == name


def test_another_interpreter_gets_the_command_of_the_stage(made, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    python.chmod(0o755)
    pipeline._carry_out(made, "build-advantages", str(python), round_=3)
    pipeline._carry_out(made, "evaluate", str(python), after=0, steps=20)
    run = f"--run {made.layout.root}"
    assert (tmp_path / "called").read_text().splitlines() == [
        f"-m cast_engine build-advantages {run} --round 3",
        f"-m cast_engine evaluate {run} --after 0 --steps 20",
    ]
    python.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit) as caught:
        pipeline._carry_out(made, "score", str(python), round_=0)
    assert caught.value.code == 3


def test_another_interpreter_gets_what_was_set_since_the_run_was_started(made, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word" >> {tmp_path}/called; done\n')
    python.chmod(0o755)
    later = ["score.batch_size=3", "score.device=cpu", "train.threads=2", "report.images=1", f"score.python='{python}'"]
    job = load_job(None, [*later, "rollout.python='1.5'"])
    pipeline._carry_out(Pipeline(job, made.layout.root), "score", job.score.python, round_=0)
    words = (tmp_path / "called").read_text().splitlines()
    passed = [item for flag, item in itertools.pairwise(words) if flag == "--set"]
    assert len(passed) == 6
    assert load_job(None, passed, base=read_run(made.layout.run_file)) == job


def test_what_a_guard_stopped_is_forgotten_when_the_run_goes_on(made, monkeypatch):
    layout, error = made.layout, TrainingStopped("gradient norm", "round 1: update 7")
    monkeypatch.setattr(made, "_made", lambda stage, path: SimpleNamespace(path=path))

    def train(round_, outcome):
        def train_round(*args, out, **kwargs):
            if isinstance(outcome, Exception):
                raise outcome
            outcome()
            out.mkdir(parents=True, exist_ok=True)
            return SimpleNamespace(seconds=1.0)

        monkeypatch.setattr("trainer.loop.train_round", train_round)
        made.train(round_)

    def said():
        result = CliRunner().invoke(app, ["status", str(layout.root)])
        assert result.exit_code == 0, result.output
        return [line for line in result.output.splitlines() if "stopped by" in line]

    make(layout.prompts("train"), keys(1, 2))
    train(0, lambda: None)
    assert said() == []
    for _ in range(2):
        with pytest.raises(TrainingStopped):
            train(1, error)
        assert json.loads(layout.stopped.read_text())["reason"] == "gradient norm"
        assert said() == [f"{layout.root}: stopped by a guard in round 1: gradient norm: round 1: update 7"]
    train(0, lambda: None)
    assert said(), "going over finished rounds is not going on"
    train(1, lambda: said() == [] or pytest.fail("shown while the round is trained"))
    assert said() == []
    assert not layout.stopped.exists()
    layout.stopped.write_text('{"round": 1, "reason": "r", "message": "m"}')
    assert said() == [], "trained since, by cast-train"
    layout.stopped.write_text("{")
    assert said() == []
    train(2, lambda: None)
    assert not layout.stopped.exists()


@pytest.mark.parametrize("judge", ["hf", "exact"])
def test_a_judge_that_marks_its_own_work_is_said_when_it_is_loaded(tmp_path, capsys, judge):
    job = JobConfig.model_validate({"score": {"device": "cpu"}, "evaluate": {"judge": judge, "device": "cpu"}})
    assert Pipeline(job, tmp_path / "run").evaluation_judge.name == judge
    warned = "warning: the judge that gave the reward also reports the gain" in capsys.readouterr().err
    assert warned == (judge == job.score.judge)


def test_a_stage_without_its_predecessor_names_the_command(made):
    with pytest.raises(Exception, match="run `cast-engine rollout` first"):
        made.score(0)
