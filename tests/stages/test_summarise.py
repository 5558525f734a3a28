"""summary.json: what it says, when it may be trusted, and `cast-engine report` before there is one."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from cast_engine.cli import app
from cast_engine.stages import report, summarise
from cast_engine.store import Dataset
from tests.stages.report_fakes import make_run


@pytest.fixture
def run(tmp_path):
    layout, job = make_run(tmp_path / "run")
    summarise.write(layout, job)
    report.write(layout, job)
    return layout, job


def damage(dataset):
    tar = next((dataset.path / "data").rglob("*.tar"))
    tar.chmod(0o644)
    tar.write_bytes(tar.read_bytes()[:-1] + b"x")
    dataset.verify(quarantine=True)


@pytest.mark.parametrize("change", [damage, lambda dataset: shutil.rmtree(dataset.path)])
def test_a_summary_of_what_is_gone_or_was_moved_aside_is_not_current(run, change):
    layout, job = run
    assert summarise.is_current(layout)
    change(Dataset.open(layout.evaluate("round-0003")))
    assert not summarise.is_current(layout)
    assert not summarise.is_finished(layout, job)


def test_the_adapter_that_was_measured_is_named_beside_the_one_that_was_trained(run):
    layout, _ = run
    hashes = summarise.read(layout.summary)["hashes"]
    assert hashes["measured_adapter"] == "adapter of round-0003"
    assert hashes["adapter"] == json.loads((layout.round(2, "train") / "state.json").read_text())["adapter_sha256"]


def test_an_evaluation_at_other_steps_is_no_round(run):
    layout, job = run
    shutil.copytree(layout.evaluate("round-0003"), layout.evaluate("round-0003-20-steps"))
    assert set(summarise.write(layout, job)["during"]) == {"round-0002", "round-0003"}
    report.write(layout, job)


def test_the_report_of_a_run_that_is_under_way(tmp_path):
    layout, _ = make_run(tmp_path / "run", rounds=2)
    result = CliRunner().invoke(app, ["report", str(layout.root)])
    assert result.exit_code == 0, result.output
    assert "not finished" in result.output
    assert layout.report.exists()
    assert not layout.summary.exists()
