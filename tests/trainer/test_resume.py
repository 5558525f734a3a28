"""Killed, stopped and repeated rounds; the command line; several processes."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from cast_engine.errors import DatasetError, ExitCode, Interrupted, UserError
from cast_engine.store import hold
from tests.trainer.rounds import draw, job
from trainer.checkpoint import read_state

CONFIG = {"updates_per_round": 4, "checkpoint_seconds": 0.0, "ema_decay": 0.9}


@pytest.fixture(scope="module")
def round0(world, tmp_path_factory):
    return draw(world, tmp_path_factory.mktemp("round0"))


@pytest.fixture(scope="module")
def whole(world, round0, tmp_path_factory):
    """The round without any interruption."""
    out = tmp_path_factory.mktemp("whole") / "train"
    round0.train(world.model(), out, job(**CONFIG))
    return out


def content(path) -> dict:
    """Every byte of a checkpoint but the seconds in its log."""
    files = {p.name: p.read_bytes() for p in path.iterdir()}
    rows = [json.loads(line) for line in files.pop("metrics.jsonl").decode().splitlines()]
    return files | {"rows": [{k: v for k, v in row.items() if k != "seconds"} for row in rows]}


def same(a, b) -> None:
    a, b = content(a), content(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == b[name], name


@pytest.mark.skipif(os.environ.get("CAST_TEST_DEVICE", "cpu") != "cpu", reason="CUDA does not survive a fork")
@pytest.mark.parametrize("point", ["checkpoint.written:1", "checkpoint.durable:2", "checkpoint.renamed:3"])
def test_a_killed_round_ends_with_the_same_bytes(round0, world, whole, tmp_path, point):
    out, log = tmp_path / "train", []

    def until_killed():
        os.environ["CAST_CRASH_AT"] = point
        round0.train(world.model(), out, job(**CONFIG))

    process = multiprocessing.get_context("fork").Process(target=until_killed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    done = {"written:1": 0, "durable:2": 1, "renamed:3": 3}[point.partition(".")[2]]
    summary = round0.train(world.model(), out, job(**CONFIG), log=log.append)
    assert summary.resumed_at == done
    assert any("goes on after update" in line for line in log) == (done > 0)
    same(out, whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train"]


# ---- two commands at once


@pytest.mark.skipif(os.environ.get("CAST_TEST_DEVICE", "cpu") != "cpu", reason="CUDA does not survive a fork")
def test_another_process_is_refused_until_the_first_is_gone(round0, world, whole, tmp_path):
    out, config = tmp_path / "train", job(**CONFIG)

    def until_killed():
        def stop():
            (tmp_path / "made an update").touch()
            time.sleep(60)

        round0.train(world.model(), out, config, stop=stop)

    process = multiprocessing.get_context("fork").Process(target=until_killed)
    process.start()
    while not (tmp_path / "made an update").exists():
        assert process.is_alive()
        time.sleep(0.01)
    with pytest.raises(UserError, match=f"{out}: another process is training it; wait for it, or stop it") as caught:
        round0.train(world.model(), out, config)
    assert caught.value.exit_code == ExitCode.USER
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="another process is training it"):
        round0.train(world.model(), tmp_path / "link" / "train", config)
    assert not out.exists()
    assert not (tmp_path / "train.partial").exists()
    process.kill()
    process.join()
    round0.train(world.model(), out, config)
    same(out, whole)
    assert not (tmp_path / ".train.lock").exists()


def test_the_command_line_says_so_in_one_line(world, round0, tmp_path, capfd):
    with hold(tmp_path / ".out.lock") as held:
        assert held
        result = run_cli(world, round0, tmp_path / "out")
    assert result.exit_code == ExitCode.USER
    assert result.output == f"error: {tmp_path / 'out'}: another process is training it; wait for it, or stop it\n"
    assert list(tmp_path.iterdir()) == []


# ---- going on


def test_resume_keeps_counter_rate_and_moments(round0, world, whole, tmp_path):
    config = job(**CONFIG, schedule="linear", warmup_updates=2)
    out, calls = tmp_path / "train", iter([False, True])
    with pytest.raises(Interrupted) as caught:
        round0.train(world.model(), out, config, stop=lambda: next(calls))
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    state = read_state(tmp_path / "train.partial" / "000002")
    assert (state.update, state.round_update, state.complete) == (2, 2, False)
    counted: list[int] = []
    rows = round0.train(world.model(), out, config, advance=counted.append).rows
    assert counted == [4, 2, 2]  # those of the first call at once
    straight = round0.train(world.model(), tmp_path / "straight", config).rows
    assert (
        [r["learning_rate"] for r in rows] == [r["learning_rate"] for r in straight] == [5e-4, 1e-3, 1e-3, 1e-3 * 5 / 6]
    )
    same(out, tmp_path / "straight")


def test_a_partial_checkpoint_of_other_inputs_is_not_used(round0, world, whole, tmp_path):
    calls = iter([True])
    with pytest.raises(Interrupted):
        round0.train(
            world.model(), tmp_path / "train", job(**CONFIG | {"learning_rate": 0.5e-3}), stop=lambda: next(calls)
        )
    assert round0.train(world.model(), tmp_path / "train", job(**CONFIG)).resumed_at == 0
    same(tmp_path / "train", whole)


def test_a_finished_round_is_left_alone(round0, world, whole, model):
    before = {p: p.stat().st_mtime_ns for p in whole.iterdir()}
    summary = round0.train(model, whole, job(**CONFIG))
    assert summary.resumed_at == 4
    assert {p: p.stat().st_mtime_ns for p in whole.iterdir()} == before
    with pytest.raises(UserError, match="config_hash is"):
        round0.train(model, whole, job(**CONFIG | {"learning_rate": 0.1}))


def test_an_unfinished_round_is_no_start(round0, world, tmp_path):
    calls = iter([True])
    with pytest.raises(Interrupted):
        round0.train(world.model(), tmp_path / "train", job(**CONFIG), stop=lambda: next(calls))
    with pytest.raises(UserError, match="stopped after update 1 of 4"):
        round0.train(world.model(), tmp_path / "b", job(**CONFIG), start=tmp_path / "train.partial" / "000001")


def test_a_folder_that_is_no_checkpoint_is_no_start(round0, model, tmp_path):
    with pytest.raises(UserError, match=r"no state\.json"):
        round0.train(model, tmp_path / "out", start=tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DatasetError, match="damaged"):
        round0.train(model, tmp_path / "out", start=tmp_path)


# ---- a model that stays loaded, and the command line


def test_a_loaded_model_and_the_command_line_write_the_same(world, tmp_path):
    """Two rounds: in one process with one model that also drew in between, then by two commands."""
    model, config = world.model(), job(updates_per_round=2)
    first = draw(world, tmp_path / "r0")
    first.train(model, tmp_path / "a0", config)
    second = draw(world, tmp_path / "r1", round_=1, adapter=tmp_path / "a0" / "adapter.safetensors")
    second.train(model, tmp_path / "a1", config, start=tmp_path / "a0")
    assert read_state(tmp_path / "a1").update == 4

    yaml = tmp_path / "job.yaml"
    yaml.write_text(json.dumps(config.model_dump(mode="json", exclude={"model"})))  # JSON is YAML
    for made, out, extra in ((first, "b0", []), (second, "b1", ["--from", str(tmp_path / "b0"), "--round", "1"])):
        result = run_cli(world, made, tmp_path / out, "--config", str(yaml), *extra)
        assert result.exit_code == 0, result.output
        assert f"after update {2 if out == 'b0' else 4}" in result.output
    same(tmp_path / "a0", tmp_path / "b0")
    same(tmp_path / "a1", tmp_path / "b1")


def run_cli(world, made, out, *args):
    from trainer.cli import app

    fixed = ["--out", str(out), "--embeds", str(world.embeds), "--set", f"model.path={world.folder}"]
    return CliRunner().invoke(
        app, [str(made.rollout), str(made.advantages), *fixed, "--set", "model.device=cpu", *args]
    )


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--set", "train.learning_rat=1"], ExitCode.USER, "expected train.learning_rate"),
        (["--round", "5"], ExitCode.USER, "images of round 0; expected round 5"),
        (["--from", "/nowhere"], ExitCode.USER, "no state.json"),
        (
            ["--set", "train.learning_rate=1e3", "--set", "train.lora={rank: 2, alpha: 4}"],
            ExitCode.GUARD,
            "adapter norm",
        ),
        (["--no-such-flag"], ExitCode.USER, "No such option"),
    ],
)
def test_command_line_errors_are_one_line(world, round0, tmp_path, args, code, text, capfd):
    result = run_cli(world, round0, tmp_path / "out", *args)
    assert result.exit_code == code
    assert text in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_dry_run_writes_nothing(world, round0, tmp_path):
    result = run_cli(world, round0, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "8 images in 2 groups, window steps [1, 2]; 4 updates of 2 images, 16 forward and backward" in result.output
    assert not (tmp_path / "out").exists()


def test_help_imports_nothing_heavy():
    heavy = ("torch", "diffusers", "pyarrow", "accelerate")
    code = f"import sys, trainer.cli; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert out.stdout.strip() == "[]"


# ---- several processes


@pytest.mark.slow
def test_two_processes_make_the_same_update(world, round0, whole, tmp_path):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "29517"]
    command += ["-m", "trainer.cli", str(round0.rollout), str(round0.advantages), "--out", str(tmp_path / "out")]
    command += ["--embeds", str(world.embeds), "--set", f"model.path={world.folder}", "--set", "model.device=cpu"]
    train = {"updates_per_round": 4, "learning_rate": 1e-3, "lora.rank": 2, "lora.alpha": 4, "ema_decay": 0.9}
    for key, value in train.items():
        command += ["--set", f"train.{key}={value}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (load_file(p / "adapter.safetensors") for p in (whole, tmp_path / "out"))
    assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-5
