"""What people get wrong, and what breaks: the documented exit code, one clear line, nothing lost or half-written."""

import json
import shutil

import pytest

from tests.loop.commands import KILLED, assert_equal_runs, copy_run, lasting, seals, snapshot, wait_for

GOOD = [f"{n} {c} {s}" for n in ("two", "three", "four") for c in ("red", "blue") for s in ("circles", "squares")]


def assert_refused(result, *said, code=2):
    """One line that says all this, and the exit code."""
    assert result.code == code, result.err
    for part in said:
        assert str(part) in result.error


# ---- job files


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rollout.group_size=1", ("rollout.group_size = 1", "greater than or equal to 2")),
        ("train.learning_rat=1", ("unknown key train.learning_rat", "train.learning_rate")),
        ("trian.learning_rate=1", ("unknown key trian",)),
        ("train.updates_per_round=5", ("12", "train.updates_per_round = 5")),
        ("rollout.window={start: 9, length: 1}", ("rollout.window",)),
        ("rollout.window={start: 3, length: 20}", ("rollout.window",)),
        ("rollout.noise_level=0", ("rollout.noise_level = 0", "above 0")),
        ("advantages.kind_weights={count: -1}", ("advantages.kind_weights.count = -1", "greater than or equal to 0")),
        ("rollout.dynamics=ode", ("rollout.dynamics = 'ode'",)),
        ("train.lora.targets=nothing_like_it", ("nothing_like_it",)),
        ("train.lora.dropout=0.1", ("dropout",)),
        ("model.path=/no/such/folder", ("/no/such/folder", "expected")),
        ("model.path=tinyworld:flux3", ("tinyworld:flux3",)),
        ("score.model=/no/such/judge", ("/no/such/judge",)),
        ("score.judge=vllm7", ("vllm7",)),
        ("score.judge=no.such.module:Judge", ("no.such.module",)),
        ("prompts.train_count=2", ("2 training prompts", "at least", "3")),
        ("prompts.train=tinyworld:tests", ("tests",)),
        ("model.height=60", ("60",)),
        ("model.device=cuda:7", ("cuda:7",)),
        ("rounds=zwei", ("rounds = 'zwei'",)),
        ("rounds", ("--set", "key.path=value")),
    ],
)
def test_a_wrong_setting_is_named_before_work_is_done(change, said, job, nursery, tmp_path):
    result = nursery.engine("run", job, "--out", tmp_path / "run", "--set", change)
    assert_refused(result, *said)
    assert not (tmp_path / "run/evaluate").exists(), "hours of work came before the refusal"


def test_an_unknown_key_in_the_file(nursery, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("rollout: {group_siez: 4}\n")
    assert_refused(nursery.engine("run", path), f"{path}: unknown key rollout.group_siez", "rollout.group_size")


def test_a_changed_job_on_a_run_folder(job, finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run")
    before = snapshot(root)
    command = ("run", job, "--out", root)
    result = nursery.engine(*command, "--set", "train.learning_rate=0.1", "--set", "seed=9")
    assert_refused(result, root / "run.json", "seed is 9 now (and 1 more)", "3, as this run was started")
    result = nursery.engine(*command, "--set", "advantages.credit=scalar")
    assert_refused(result, "advantages.credit is 'scalar' now", "'cast', as this run was started", "--out")
    assert snapshot(root) == before
    assert nursery.engine(*command, "--set", "rollout.batch_size=5").code == 0, "how it is run may change"


# ---- prompts


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", ("no prompts in it",)),
        ("blank.txt", b"\n  \n", ("no prompts in it",)),
        ("latin.txt", "zwei \xfcbel".encode("latin-1"), ("UTF-8",)),
        ("control.txt", b"two red circles\na \x07 circle\n", (":2", "control characters")),
        ("long.txt", b"two " * 2000, (":1", "characters")),
        ("broken.jsonl", b'{"prompt": "two red circles"}\n{"prompt": \n', (":2", "not JSON")),
        ("other.jsonl", b'{"text": "two red circles"}\n', (":1", "no prompt in it")),
        ("list.jsonl", b'["two red circles"]\n', (":1", "no prompt in it")),
        ("number.jsonl", b'{"prompt": 3}\n', (":1", "no prompt in it")),
        ("few.txt", b"two red circles\n", ("1 distinct prompts", "at least 12")),
        ("none.txt", None, ("no such file",)),
        ("folder.txt", "folder", ("not a file",)),
    ],
)
def test_a_prompts_file_that_is_none(name, content, said, job, nursery, tmp_path):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    command = ("prompts", "--config", job, "--run", tmp_path / "run")
    assert_refused(nursery.engine(*command, "--set", f"prompts.train={path}"), path, *said)
    assert not list((tmp_path / "run").rglob("plan.json"))


def test_held_out_prompts_that_are_trained_on(job, nursery, tmp_path):
    (tmp_path / "train.txt").write_text("\n".join(GOOD))
    (tmp_path / "evaluate.txt").write_text(f"a red cross\n{GOOD[3]}\n")
    result = nursery.engine(
        *("run", job, "--out", tmp_path / "run"),
        *("--set", f"prompts.train={tmp_path / 'train.txt'}"),
        *("--set", f"prompts.evaluate={tmp_path / 'evaluate.txt'}", "--set", "prompts.evaluate_count=null"),
    )
    assert_refused(result, "1 evaluation prompts are training prompts too", repr(GOOD[3]), "prompts.evaluate")


@pytest.fixture
def unreadable(job, tmp_path):
    """A run of twelve training prompts, one of which the grammar cannot read."""
    (tmp_path / "train.txt").write_text("\n".join([*GOOD[:11], "serendipity over the edge of tomorrow"]))
    return ("--config", job, "--run", tmp_path / "run", "--set", f"prompts.train={tmp_path / 'train.txt'}")


def test_too_many_prompts_that_the_grammar_cannot_read(unreadable, nursery, tmp_path):
    assert nursery.engine("prompts", *unreadable).code == 0
    result = nursery.engine("csg", *unreadable)
    assert_refused(result, "1 of 12 samples failed", "serendipity", "allowed share 0.01", code=3)
    assert not (tmp_path / "run/graphs/train/sealed.json").exists()
    assert_refused(nursery.engine("csg", *unreadable), "1 of 12 samples failed", code=3)


def test_a_prompt_that_the_grammar_cannot_read_among_many(unreadable, nursery, tmp_path):
    allowed = (*unreadable, "--set", "score.max_bad_frac=0.1", "--set", "rollout.prompts_per_round=11")
    changes = ("--set", "train.updates_per_round=1", "--set", "rounds=1", "--set", "rollout.group_size=2")
    for stage in ("prompts", "csg", "embed", "rollout"):
        result = nursery.engine(stage, *allowed, *changes)
        assert result.code == 0, result.err
    rows = rows_of(tmp_path / "run/graphs/train")
    assert [r["status"] for r in rows].count("failed") == 1
    assert "serendipity" in next(r["error_msg"] for r in rows if r["status"] == "failed")
    drawn = {r["prompt_id"] for r in rows_of(tmp_path / "run/rounds/0000/rollout")}
    assert drawn == {r["prompt_id"] for r in rows if r["status"] == "ok"}


def rows_of(folder):
    from cast_engine.store import Dataset

    return Dataset.open(folder).rows().to_pylist()


# ---- a judge that gives no numbers

JUDGES = """
import numpy as np
from dataclasses import replace
from cast_engine.judges.exact_judge import ExactJudge


class Broken:
    name, model_sha256 = "broken", "0" * 64

    def __init__(self, config):
        self.exact = ExactJudge()

    def score(self, images, graphs):
        scored = self.exact.score(images, graphs)
        return [replace(s, scores=self.spoil(i, s.scores.copy())) for i, s in enumerate(scored)]


class Always(Broken):
    def spoil(self, i, scores):
        scores[:] = np.nan
        return scores


class OneImageOfFour(Broken):
    def spoil(self, i, scores):
        return scores * np.nan if i == 1 else scores


class OneAtom(Broken):
    def spoil(self, i, scores):
        scores[0] = np.nan
        return scores


class Infinite(Broken):
    def spoil(self, i, scores):
        scores[:] = np.inf
        return scores


class Bug(Broken):
    def spoil(self, i, scores):
        raise RuntimeError("my own mistake")
"""


@pytest.fixture
def scored_by(finished, nursery, job, tmp_path):
    """Score the first round of the run with a judge of one's own."""
    (tmp_path / "my_judges.py").write_text(JUDGES)
    root = copy_run(
        finished, tmp_path / "run", "run.json", "rounds/0000/score", "rounds/0000/advantages", "rounds/0001"
    )
    shutil.rmtree(root / "rounds/0000/train")

    def run(stage, judge, share):
        changes = ("--set", f"score.judge=my_judges:{judge}", "--set", f"score.max_bad_frac={share}")
        return nursery.engine(stage, "--config", job, "--run", root, *changes, cwd=tmp_path)

    run.root = root
    return run


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ("Always", "12 of 12 samples failed"),
        ("Infinite", "12 of 12 samples failed"),
        ("OneImageOfFour", "3 of 12 samples failed"),
        ("OneAtom", "12 of 80 atom scores are missing"),
    ],
)
def test_a_judge_that_returns_nan(judge, said, scored_by):
    assert_refused(scored_by("score", judge, 0.01), said, "allowed share 0.01", code=3)
    assert not (scored_by.root / "rounds/0000/score/sealed.json").exists()


def test_images_without_a_score_are_skipped_never_zero(scored_by):
    for stage in ("score", "build-advantages", "train"):
        result = scored_by(stage, "OneImageOfFour", 0.3)
        assert result.code == 0, result.err
    folder = scored_by.root / "rounds/0000"
    scores = rows_of(folder / "score")
    bad = [r["key"] for r in scores if r["status"] == "nonfinite"]
    assert bad == [k for k in (r["key"] for r in scores) if k.endswith("0001")]
    assert all(r["reward"] is None and not r["atom_scores"] for r in scores if r["key"] in bad)
    weights = {r["key"]: r for r in rows_of(folder / "advantages")}
    assert all(weights[k]["status"] == "skipped_parent" and weights[k]["weight_mean"] is None for k in bad)
    rows = [json.loads(line) for line in (folder / "train/metrics.jsonl").read_text().splitlines()]
    assert sum(r["images"] for r in rows) == 9


def test_an_atom_without_an_answer_stays_missing(scored_by):
    for stage in ("score", "build-advantages", "train"):
        result = scored_by(stage, "OneAtom", 0.5)
        assert result.code == 0, result.err
    for row in rows_of(scored_by.root / "rounds/0000/score"):
        assert row["atom_scores"][0] != row["atom_scores"][0], "NaN"
        known = row["atom_scores"][1:]
        assert abs(row["reward"] - sum(known) / len(known)) < 1e-6
    for row in rows_of(scored_by.root / "rounds/0000/advantages"):
        assert row["advantage"][0] == 0
        assert abs(row["weight_mean"]) < 10


def test_a_judge_with_a_bug_of_its_own_fails_its_images_and_says_why(scored_by):
    result = scored_by("score", "Bug", 0.01)
    assert_refused(result, "12 of 12 samples failed", "RuntimeError: my own mistake", code=3)


# ---- damage


def cut(path):
    """Truncate a file by a tenth."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 9 // 10)


def test_a_truncated_shard(job, finished, nursery, tmp_path):
    """Found by verify, stops the next stage, and the way out that the message names leads back to the same run."""
    root = copy_run(finished, tmp_path / "run", "rounds/0001/score", "rounds/0001/advantages", "rounds/0001/train")
    shutil.rmtree(root / "evaluate/round-0002")
    (root / "summary.json").unlink()
    shard = next(root.glob("rounds/0001/rollout/data/*/rollout-000001-*.tar"))
    cut(shard)
    assert_refused(nursery.engine("verify", root), "1 datasets are damaged", "--quarantine", code=3)
    assert shard.name in nursery.engine("verify", root).out
    for command in (("score", "--run", root, "--round", 1), ("run", job, "--out", root)):
        assert_refused(nursery.engine(*command), "rounds/0001/rollout: shard 1", "verify --quarantine")
    assert not list(root.glob("rounds/0001/score/done/*"))
    result = nursery.engine("verify", "--quarantine", root)
    assert_refused(result, "1 datasets are damaged", "run the stage again", code=3)
    assert nursery.engine("run", job, "--out", root).code == 0
    shutil.rmtree(root / "rounds/0001/rollout/quarantine")
    assert_equal_runs(root, finished)
    assert nursery.engine("verify", root).code == 0


@pytest.mark.parametrize(
    ("damaged", "without"),
    [
        ("embeds/*/*.safetensors", ("rounds/0000/rollout",)),
        ("rounds/0000/train/adapter.safetensors", ("rounds/0001/rollout", "rounds/0001/train")),
        ("rounds/0000/train/optimizer.safetensors", ("rounds/0001/train",)),
        ("rounds/0000/train/state.json", ("rounds/0001/train",)),
        ("graphs/train/sealed.json", ("rounds/0001/rollout",)),
        ("run.json", ()),
        ("rounds/0001/advantages/data/*/*.tar", ("rounds/0001/train",)),
    ],
)
def test_a_truncated_file_of_a_run(damaged, without, job, finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run", *without, "summary.json")
    for path in root.glob(damaged):
        cut(path)
    assert_refused(nursery.engine("run", job, "--out", root), damaged.rpartition("/")[2].partition("*")[0])


# ---- what does not belong together


def test_a_round_on_rollouts_of_another_adapter(job, finished, nursery, tmp_path):
    inputs = [finished / f"rounds/0001/{stage}" for stage in ("rollout", "advantages")]
    command = ("cast-train", *inputs, "--config", job, "--out", tmp_path / "train")
    assert_refused(nursery.run(*command), "images of adapter", "expected the bare base model")
    other = copy_run(finished / "rounds/0000/train", tmp_path / "other")
    state = json.loads((other / "state.json").read_text())
    averaged = state["files"]["ema.safetensors"]
    shutil.copy(other / "ema.safetensors", other / "adapter.safetensors")
    state["files"]["adapter.safetensors"] = state["adapter_sha256"] = averaged
    (other / "state.json").write_text(json.dumps(state))
    refused = nursery.run(*command, "--from", other)
    assert_refused(refused, "images of adapter", averaged, str(other))
    assert not (tmp_path / "train").exists()


def test_a_run_whose_adapter_was_exchanged(job, finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run", "rounds/0001/train", "summary.json")
    train = root / "rounds/0000/train"
    shutil.copy(train / "ema.safetensors", train / "adapter.safetensors")
    assert_refused(nursery.engine("run", job, "--out", root), train / "adapter.safetensors", "damaged")
    shutil.rmtree(train)
    result = nursery.engine("train", "--run", root, "--set", "train.learning_rate=0.01")
    assert_refused(result, "train.learning_rate")
    other = nursery.run(
        *("cast-train", root / "rounds/0000/rollout", root / "rounds/0000/advantages", "--config", job),
        *("--out", train, "--set", "train.learning_rate=0.01"),
    )
    assert_refused(other, "train.learning_rate", "as the run was started")
    assert nursery.engine("run", job, "--out", root).code == 0
    assert_equal_runs(root, finished)


def test_weights_of_other_images(job, finished, nursery, tmp_path):
    result = nursery.run(
        *("cast-train", finished / "rounds/0000/rollout", finished / "rounds/0001/advantages"),
        *("--config", job, "--out", tmp_path / "train"),
    )
    assert_refused(result, "rounds/0001/advantages", "weights were made from rollout")


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("csg", ("prompts/train", "cast-engine prompts")),
        ("embed", ("graphs/train", "cast-engine csg")),
        ("rollout", ("graphs/train", "cast-engine csg")),
        ("score", ("rounds/0000/rollout", "cast-engine rollout")),
        ("build-advantages", ("rounds/0000/rollout", "cast-engine rollout")),
        ("train", ("rounds/0000/rollout", "cast-engine rollout")),
        ("evaluate", ("graphs/evaluate", "cast-engine csg")),
    ],
)
def test_a_stage_before_its_turn(stage, said, job, nursery, tmp_path):
    assert_refused(nursery.engine(stage, "--config", job, "--run", tmp_path / "run"), *said)


def test_a_round_before_its_turn(finished, nursery, tmp_path):
    root = copy_run(finished, tmp_path / "run")
    assert_refused(nursery.engine("rollout", "--run", root, "--round", 5), "rounds/0004/train", "train it first")


def test_folders_that_are_none(nursery, tmp_path):
    for stage in ("verify", "status", "seal"):
        assert_refused(nursery.engine(stage, tmp_path), tmp_path, "no dataset in it")
    for stage in ("report", "compare"):
        assert_refused(nursery.engine(stage, tmp_path), tmp_path)
    assert_refused(nursery.engine("run", tmp_path / "none.yaml"), "none.yaml", "no such file")
    result = nursery.run("cast-train", tmp_path, tmp_path, "--out", tmp_path / "x", "--embeds", tmp_path)
    assert_refused(result, tmp_path)


def test_two_commands_on_one_run_folder(job, nursery, tmp_path):
    root = tmp_path / "run"
    running = nursery.start("cast-engine", "run", job, "--out", root)
    wait_for((root / "run.json").exists)
    for command in (("run", job, "--out", root), ("rollout", "--run", root)):
        assert_refused(nursery.engine(*command), root, "another process is working on this run")
    assert nursery.engine("status", root).code in {0, 2}
    running.send(9)
    assert running.wait().code == KILLED
    assert nursery.engine("prompts", "--run", root).code == 0


def test_unchanged(finished, nursery):
    """The finished run that all these tests borrow from is as it was."""
    assert nursery.engine("verify", finished).code == 0
    assert lasting(finished)
    assert len(seals(finished)) == 14
