"""summary.json: what it says, when it may be trusted, and `cast-engine report` before there is one."""

import json
import shutil

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cast_engine.cli import app
from cast_engine.run.summary import SKILLS, paired
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


def test_images_are_those_in_the_sealed_rollouts(run):
    layout, job = run
    drawn = sum(Dataset.open(layout.round(i, "rollout")).status().samples["ok"] for i in range(job.rounds))
    assert summarise.read(layout.summary)["images"] == drawn == 24
    more = job.model_copy(update={"rollout": job.rollout.model_copy(update={"group_size": 99})})
    assert summarise.write(layout, more)["images"] == drawn
    (layout.round(1, "rollout") / "sealed.json").unlink()
    assert summarise.write(layout, job)["images"] == 16


def test_the_weights_of_all_rounds_are_summed_up(run):
    layout, job = run
    weights = summarise.read(layout.summary)["weights"]
    rows = [r for i in range(job.rounds) for r in Dataset.open(layout.round(i, "advantages")).rows().to_pylist()]
    assert weights["low_std_share"] == pytest.approx(
        sum(r["low_std_mass"] for r in rows) / sum(r["mass"] for r in rows)
    )
    assert weights["weight_drawn"] * weights["weight_background"] != 0
    shutil.rmtree(layout.round(0, "advantages"))
    assert summarise.write(layout, job)["weights"]["group_std"] > 0


def table_of(summary) -> list[str]:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(summarise.summary_table(summary))
    return console.export_text().splitlines()


def test_the_last_table_shows_the_gain_over_twice_the_steps_with_its_paired_error(run):
    layout, _ = run
    summary = summarise.read(layout.summary)
    before, after = (summarise.load_scores(layout, name) for name in ("base-double-steps", "round-0003"))
    expected = paired(before, after)["count"]
    assert expected["se"] > 0
    labels = ["before", "before, 2x steps", "after", "after - before", "after - 2x steps"]
    text = table_of(summary)
    assert [line[:16].strip() for line in text[3:]] == labels
    assert text[-1].split()[4 + SKILLS.index("count")] == f"{100 * expected['mean']:+.1f}±{100 * expected['se']:.1f}"
    assert not any("2x steps" in line for line in table_of(summary | dict.fromkeys(DOUBLED)))


DOUBLED = ("base_double_steps", "after_minus_double_steps")


def test_a_skill_that_no_prompt_asks_for_is_a_dash(run):
    layout, _ = run
    summary = summarise.read(layout.summary)
    for key in ("before", "after", "difference"):
        summary[key]["relation"] = {"mean": None, "se": None, "n": 0}
    summary["after"]["count"]["se"] = None
    text = table_of(summary | dict.fromkeys(DOUBLED))
    assert [line.split().count("–") for line in text[3:]] == [1, 1, 1]
    assert f" {100 * summary['after']['count']['mean']:.1f} " in text[4]


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


@pytest.mark.parametrize("model", ["tinyworld:judge", "another"])
def test_a_judge_that_marks_its_own_work_is_in_the_summary_and_on_the_console(run, model):
    layout, job = run
    body = json.loads(layout.run_file.read_text())
    body["config"]["evaluate"] |= {"judge": job.score.judge, "model": model}
    layout.run_file.write_text(json.dumps(body))
    result = CliRunner().invoke(app, ["report", str(layout.root)])
    said = "the judge that gave the reward also reports the gain" if model == job.score.model else None
    summary = summarise.read(layout.summary)
    assert summary["judge_warning"] == said
    assert (f"warning: {said}" in result.output) == bool(said)
    assert summarise.warnings({"a": summary}) == [f"a: {said}"] * bool(said)
