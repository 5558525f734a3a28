"""What `run` carries out is what the commands do by hand."""

from types import SimpleNamespace

import pytest

from cast_engine import pipeline
from cast_engine.pipeline import Pipeline
from schemas.job import JobConfig


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


def test_a_stage_without_its_predecessor_names_the_command(made):
    with pytest.raises(Exception, match="run `cast-engine rollout` first"):
        made.score(0)
