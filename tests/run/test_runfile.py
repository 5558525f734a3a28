"""A run folder belongs to one job."""

import subprocess
import sys

import pytest

from cast_engine.errors import DatasetError, UserError
from cast_engine.jobfile import read_run
from cast_engine.run.runfile import hand_down, lock_run, open_run
from schemas.job import EvaluateConfig, JobConfig


def test_a_changed_number_is_refused_and_named(tmp_path):
    path = tmp_path / "run.json"
    open_run(path, JobConfig())
    with pytest.raises(DatasetError, match=r"train\.learning_rate is 0\.1 now.*0\.0003, as this run was started"):
        open_run(path, JobConfig.model_validate({"train": {"learning_rate": 0.1}}))
    assert read_run(path) == JobConfig()


def test_another_judge_of_the_evaluation_is_named_not_the_model_it_brings(tmp_path):
    path = tmp_path / "run.json"
    open_run(path, JobConfig())
    with pytest.raises(DatasetError, match=r"evaluate\.judge is 'hf' now.*'exact', as this run was started"):
        open_run(path, JobConfig.model_validate({"evaluate": {"judge": "hf"}}))


def test_what_the_exact_judge_does_not_use_is_no_part_of_the_job(tmp_path):
    path = tmp_path / "run.json"
    open_run(path, JobConfig())
    open_run(path, JobConfig.model_validate({"evaluate": {"model": "another", "dtype": "bfloat16", "device": "cpu"}}))
    for change in ({"model": "another"}, {"dtype": "bfloat16"}):
        one, other = (EvaluateConfig.model_validate({"judge": "hf", **c}).semantic() for c in ({}, change))
        assert one != other


def test_execution_fields_may_change(tmp_path):
    path = tmp_path / "run.json"
    open_run(path, JobConfig())
    before = path.read_bytes()
    later = JobConfig.model_validate({"rollout": {"workers": 4, "batch_size": 8}, "model": {"device": "cpu"}})
    open_run(path, later)
    assert path.read_bytes() == before, "it holds the job as it was started"
    assert read_run(path) == JobConfig() != later


def test_no_run_folder(tmp_path):
    with pytest.raises(UserError, match=r"no run\.json"):
        read_run(tmp_path / "run.json")


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"schema_version": 99}')
    with pytest.raises(DatasetError, match="schema version 99"):
        read_run(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 1}', '{"schema_version": 1, "config": {"rounds": 0}}'])
def test_a_damaged_run_file_is_one_line(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match="restore it, or start another run"):
        read_run(path)


def test_a_run_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(DatasetError, match=str(tmp_path / "file")):
            lock_run(path)
    with pytest.raises(UserError, match=r"no run\.json"):
        read_run(tmp_path / "file" / "run.json")


def test_one_command_at_a_time_but_for_those_it_starts(tmp_path):
    code = "import sys, pathlib; from cast_engine.run.runfile import lock_run; lock_run(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code]
    lock_run(tmp_path / "run")
    other = subprocess.run([*command, tmp_path / "run"], capture_output=True, text=True)
    assert "another process is working on this run" in other.stderr
    fds, env = hand_down(tmp_path / "run")
    own = subprocess.run([*command, tmp_path / "run"], capture_output=True, text=True, pass_fds=fds, env=env)
    assert own.returncode == 0, own.stderr
    lock_run(tmp_path / "second")
    foreign = subprocess.run([*command, tmp_path / "second"], capture_output=True, text=True, pass_fds=fds, env=env)
    assert "another process is working on this run" in foreign.stderr
