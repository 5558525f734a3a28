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


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("advantages.kind_weights={count: -1}", "advantages.kind_weights.count = -1: input should be greater than or"),
        ("advantages.kind_weights={count: .inf}", "advantages.kind_weights.count = inf: input should be a finite"),
        ("advantages.kind_weights={counts: 1}", "should be 'object', 'count', 'attribute', 'relation' or 'action'"),
        ("train.betas=[0.9,1.0]", "train.betas.1 = 1.0: input should be less than 1"),
        ("train.betas=[-0.1,0.9]", "train.betas.0 = -0.1: input should be greater than or equal to 0"),
        ("train.adam_eps=0", "train.adam_eps = 0: input should be greater than 0"),
        ("train.learning_rate=.inf", "train.learning_rate = inf: input should be a finite number"),
        ("train.ratio_tolerance=.nan", "train.ratio_tolerance = nan: input should be a finite number"),
        ("train.clip_range=0", "train.clip_range = 0: input should be greater than 0"),
        ("train.ema_decay=1", "train.ema_decay = 1: input should be less than 1"),
        ("train.weight_decay=-1", "train.weight_decay = -1: input should be greater than or equal to 0"),
        ("train.keep=0", "train.keep = 0: input should be greater than or equal to 1"),
        ("rollout.group_size=1", "rollout.group_size = 1: input should be greater than or equal to 2"),
        ("rollout.noise_level=-0.1", "rollout.noise_level = -0.1: input should be greater than or equal to 0"),
        ("rollout={dynamics: cps, noise_level: 1.5}", "noise_level must be 0 to 1 for cps, not 1.5"),
        ("score.layers=[3,-1]", "score.layers.1 = -1: input should be greater than or equal to 0"),
        ("score.layers=[]", "score.layers = []: tuple should have at least 1 item"),
        ("evaluate.seed=-1", "evaluate.seed = -1: input should be greater than or equal to 0"),
        ("model.guidance=.inf", "model.guidance = inf: input should be a finite number"),
    ],
)
def test_numbers_out_of_their_range_are_refused_in_one_line(override: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job(None, [override])
    assert str(caught.value).startswith(f"--set {override}: ")
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_ends_of_ranges_are_allowed() -> None:
    ends = ["advantages.kind_weights={count: 0}", "train.betas=[0, 0.999]", "rollout.noise_level=0", "train.keep=1"]
    job = load_job(None, [*ends, "rollout.dynamics=cps", "score.layers=[0]"])
    assert (job.train.betas, job.score.layers, job.rollout.noise_level) == ((0.0, 0.999), (0,), 0.0)
    assert list(job.advantages.kind_weights.values()) == [0.0]


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
