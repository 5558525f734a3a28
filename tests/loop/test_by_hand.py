"""Every stage run alone gives what `cast-engine run` gives."""

from tests.loop.commands import assert_equal_runs, copy_run, seals


def test_every_stage_by_hand(job, finished, nursery, tmp_path):
    root, trained = tmp_path / "run", []

    def engine(stage, *args):
        result = nursery.engine(stage, "--run", root, *args)
        assert result.code == 0, (stage, args, result.err)

    engine("prompts", "--config", job)
    engine("csg")
    engine("embed")
    engine("evaluate")
    engine("evaluate", "--steps", 20)
    for round_ in (0, 1):
        folder = root / f"rounds/{round_:04d}"
        for stage in ("rollout", "score", "build-advantages"):
            engine(stage, "--round", round_)
        before = ("--from", trained[-1]) if trained else ()
        trained.append(folder / "train")
        inputs = (folder / "rollout", folder / "advantages")
        result = nursery.run("cast-train", *inputs, "--config", job, "--out", trained[-1], *before)
        assert result.code == 0, result.err
        engine("evaluate", "--after", round_ + 1)
    assert nursery.engine("report", root).code == 0
    assert_equal_runs(root, finished)
    assert (root / "report.html").exists()
    again = nursery.engine("run", job, "--out", root)
    assert again.code == 0, again.err
    assert "nothing to do" in again.err


def test_a_stage_run_again_does_nothing(job, finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file() and p.name != "timings.jsonl"}
    for stage in ("prompts", "csg", "embed", "evaluate"):
        assert nursery.engine(stage, "--run", root).code == 0
    for stage in ("rollout", "score", "build-advantages", "train"):
        assert nursery.engine(stage, "--run", root, "--round", 1).code == 0
    folder = root / "rounds/0001"
    result = nursery.run(
        *("cast-train", folder / "rollout", folder / "advantages", "--config", job),
        *("--out", folder / "train", "--from", root / "rounds/0000/train"),
    )
    assert result.code == 0, result.err
    assert "finished before, nothing to do" in result.out
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert seals(root) == seals(finished)
