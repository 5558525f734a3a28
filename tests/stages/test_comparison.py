"""Runs side by side."""

import json
import statistics

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cast_engine.cli import app
from cast_engine.errors import ExitCode
from cast_engine.run.summary import COUNTERS, SKILLS
from cast_engine.stages import summarise
from cast_engine.stages.summarise import comparison_tables
from tests.stages.report_fakes import make_run, small_job


def scores(mean, se=0.01):
    return {skill: {"mean": mean, "se": se, "n": 9} for skill in (*SKILLS, *COUNTERS)}


def summary(seed, before, after, arm="a", credit="cast", double=0.65):
    return {
        "seed": seed,
        "credit": credit,
        "hashes": {"arm": arm},
        "before": scores(before),
        "after": scores(after),
        "difference": scores(after - before, 0.004),
        "base_double_steps": scores(double) if double is not None else None,
        "after_minus_double_steps": scores(after - double, 0.005) if double is not None else None,
    }


def lines(summaries) -> list[str]:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    for table in comparison_tables(summaries):
        console.print(table)
    return console.export_text().splitlines()


def row(text, label, after=0):
    """Label and cells of the first line with this label at or after a line."""
    found = next(line for line in text[after:] if line.startswith(f"{label}  "))
    return [label, *found.removeprefix(label).split()]


def test_a_run_shows_its_own_standard_errors():
    text = lines({"one": summary(0, 0.64, 0.68)})
    assert text[0].startswith("one (cast, seed 0), % right ± standard error")
    assert row(text, "before")[:2] == ["before", "64.0±1.0"]
    assert row(text, "after")[1:] == ["68.0±1.0"] * len(SKILLS)
    assert row(text, "after - before")[1] == "+4.0±0.4"
    assert row(text, "before, 2x steps")[1] == "65.0±1.0"
    assert row(text, "after - 2x steps")[1] == "+3.0±0.5"
    assert not any("mean of" in line for line in text)


def test_seeds_of_one_job_get_a_mean_with_their_sample_standard_deviation():
    gains = [0.04, 0.05, 0.09]
    runs = {f"s{i}": summary(i, 0.6, 0.6 + g) for i, g in enumerate(gains)}
    text = lines(runs | {"other": summary(0, 0.6, 0.9, arm="b", credit="scalar")})
    at = next(i for i, line in enumerate(text) if "mean of 3 (cast, seeds 0, 1, 2)" in line)
    assert "% right ± standard deviation over runs" in text[at]
    expected = f"+{100 * statistics.mean(gains):.1f}±{100 * statistics.stdev(gains):.1f}"
    assert row(text, "after - before", at)[1] == expected == "+6.0±2.6"
    assert row(text, "before", at)[1] == "60.0±0.0"
    assert sum("mean of" in line for line in text) == 1


@pytest.mark.parametrize("double", [0.65, None])
def test_missing_numbers_and_missing_evaluations_are_no_error(double):
    bare = summary(0, 0.6, 0.7, double=double)
    bare["before"]["relation"] = {"mean": None, "se": None, "n": 0}
    bare["after"]["relation"] = {"mean": 0.5, "se": None, "n": 1}
    text = lines({"a": bare, "b": bare | {"seed": 1}})
    place = 1 + SKILLS.index("relation")
    assert row(text, "before")[place] == "–"
    assert row(text, "after")[place] == "50.0"
    assert any("2x steps" in line for line in text) == (double is not None)


def test_a_fall_in_counting_is_said_of_the_runs_where_it_holds(tmp_path):
    warning = "count fell by 5.0 points (± 2.0): more than two standard errors"
    folders = []
    for name, said in (("good", None), ("[b]ad", warning), ("old", "absent")):
        (tmp_path / name).mkdir()
        body = summary(0, 0.6, 0.7) | ({} if said == "absent" else {"warning": said})
        (tmp_path / name / "summary.json").write_text(json.dumps(body))
        folders.append(str(tmp_path / name))
    result = CliRunner().invoke(app, ["compare", *folders])
    assert result.exit_code == 0, result.output
    assert [line for line in result.output.splitlines() if "fell" in line] == [f"warning: {folders[1]}: {warning}"]


def test_a_folder_without_a_summary_is_a_wrong_input(tmp_path):
    result = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert result.exit_code == ExitCode.USER
    assert "no summary.json; expected the folder of a finished run" in result.output


def test_summaries_of_two_seeds_belong_together_and_other_settings_do_not(tmp_path):
    jobs = {
        "a": small_job(rounds=1, name="a", seed=1),
        "b": small_job(rounds=1, name="b", seed=2),
        "c": small_job(rounds=1, train={"updates_per_round": 2, "learning_rate": 1e-3}),
    }
    found = {name: summarise.write(*make_run(tmp_path / name, job)) for name, job in jobs.items()}
    assert found["a"]["updates"] == 2
    read = {name: summarise.read(tmp_path / name / "summary.json") for name in jobs}
    text = lines(read)
    assert sum("mean of 2" in line for line in text) == 1
    assert sum("seed " in line for line in text) == 3
