from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cast_engine.errors import ExitCode, GuardError, UserError, handle_errors
from cast_engine.jobfile import load_job, valid_keys


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_file_then_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "rounds: 3\ntrain:\n  learning_rate: 1e-5\n  lora: {rank: 4}\n")
    job = load_job(path, ["train.lora.rank=8", "train.clip_range=null", "score.layers=[1,2]", "rounds=5"])
    assert (job.rounds, job.train.learning_rate, job.train.lora.rank) == (5, 1e-5, 8)
    assert job.train.clip_range is None
    assert job.score.layers == (1, 2)
    assert load_job(None).rounds == 32
    assert load_job(write(tmp_path, "")).rounds == 32


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        (
            "train: {learning_rat: 1}",
            [],
            ["job.yaml", "unknown key train.learning_rat", "expected train.learning_rate"],
        ),
        ("learning_rate: 1", [], ["unknown key learning_rate", "expected train.learning_rate"]),
        ("zzz: 1", [], ["unknown key zzz", "one of name, seed"]),
        ("rounds: 2", ["train.qqq=1"], ["--set train.qqq=1", "unknown key train.qqq", "one of train.objective"]),
        ("rounds: 2", ["rounds=-1"], ["--set rounds=-1", "rounds = -1", "greater than or equal to 1"]),
        ("rounds: 2", ["rounds"], ["--set", "key.path=value"]),
        ("train: {lora: {dropout: 0.1}}", [], ["train.lora", "dropout must be 0"]),
        ("train: {updates_per_round: 7}", [], ["not a multiple of train.updates_per_round"]),
        ("train: {lora: 3}", [], ["train.lora = 3"]),
        ("a: [1", [], ["job.yaml:"]),
        ("- 1", [], ["holds a list"]),
        ("name: ${nope}", [], ["job.yaml", "nope"]),
    ],
)
def test_errors_are_one_line_and_name_the_key(
    tmp_path: Path, text: str, overrides: list[str], parts: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        load_job(write(tmp_path, text), overrides)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_over_the_job_of_a_run(tmp_path: Path) -> None:
    base = load_job(write(tmp_path, "rounds: 3\nscore: {layers: [1, 2]}\n"))
    assert load_job(None, base=base) == base
    job = load_job(None, ["rollout.batch_size=4"], base=base)
    assert (job.rounds, job.score.layers, job.rollout.batch_size) == (3, (1, 2), 4)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_job(tmp_path / "none.yaml")


def test_valid_keys() -> None:
    assert {"train", "train.lora.rank", "rollout.window.start"} <= set(valid_keys())


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("found", where="here"), ExitCode.USER, "error: here: found\n"),
        (GuardError("stopped"), ExitCode.GUARD, "error: stopped\n"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "run the same command again"),
        (OSError(errno.ENOSPC, "full", "f.tar"), ExitCode.NO_SPACE, "no space left for f.tar"),
        (OSError(errno.EIO, "bad"), ExitCode.BUG, "Traceback"),
        (ValueError("bug"), ExitCode.BUG, "Traceback"),
    ],
)
def test_exit_codes(error: BaseException, code: ExitCode, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    @handle_errors()
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        command()
    assert caught.value.code == int(code)
    assert text in capsys.readouterr().err
