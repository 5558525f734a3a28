"""`cast-engine verify` and `status` in words, and with the exit codes that scripts rely on."""

from typer.testing import CliRunner

from cast_engine.cli import app
from cast_engine.errors import ExitCode
from tests.store.store_fakes import keys, make


def engine(*args):
    result = CliRunner().invoke(app, [str(a) for a in args])
    return result.exit_code, result.output


def test_a_whole_dataset(dataset):
    assert engine("verify", dataset.path) == (0, f"{dataset.path}: 2 of 2 shards checked, 0 damaged, sealed\n")
    code, text = engine("status", dataset.path)
    assert code == 0
    assert "2 of 2 shards, samples: 6 ok" in text


def test_a_damaged_shard_is_named_and_can_be_moved_aside(dataset):
    tar = min((dataset.path / "data").rglob("*.tar"))
    tar.chmod(0o644)
    tar.write_bytes(tar.read_bytes()[:-1] + b"x")
    code, text = engine("verify", dataset.path)
    assert code == ExitCode.FAILURES
    assert "1 damaged" in text
    assert tar.name in text
    assert "--quarantine" in text
    code, text = engine("verify", "--quarantine", dataset.path)
    assert code == ExitCode.FAILURES
    assert "moved to quarantine/" in text
    code, text = engine("verify", dataset.path)
    assert code == 0
    assert "1 of 2 shards checked, 1 missing, first 0, 0 damaged, not sealed" in text


def test_a_shard_that_is_missing_from_a_sealed_dataset_is_an_error(dataset):
    dataset.done_path(1).unlink()
    code, text = engine("verify", dataset.path)
    assert code == ExitCode.FAILURES
    assert "1 missing, first 1" in text


def test_one_that_is_not_finished_is_none(tmp_path):
    make(tmp_path / "ds", keys(2, 3), seal=False)
    assert engine("verify", tmp_path)[0] == 0
