"""Killed at any moment, then the same command: nothing lost, nothing twice, the same bytes in the end."""

import json
import random
import signal
import time

from tests.loop.commands import KILLED, assert_equal_runs, datasets, wait_for

ROUNDS = ("rounds/0000", "rounds/0001")
KILLS = [
    # crash point: n-th time, what must be there by then, what must not
    ("create.written:1", "", "run.json"),
    ("plan.linked:2", "prompts/evaluate/plan.json", "prompts/evaluate/sealed.json"),
    ("create.linked:8", "embeds", "evaluate"),
    ("tar.sample:5", "evaluate/base/plan.json", "evaluate/base/done/000000.json"),
    ("done.linked:1", "evaluate/base/done/000000.json", "evaluate/base/sealed.json"),
    ("index.replaced:2", "evaluate/base-double-steps/index.parquet", "evaluate/base-double-steps/sealed.json"),
    ("manifest.replaced:2", f"{ROUNDS[0]}/rollout/done/000000.json", f"{ROUNDS[0]}/rollout/done/000001.json"),
    ("data.durable:4", f"{ROUNDS[0]}/rollout/sealed.json", f"{ROUNDS[0]}/score/done/000001.json"),
    ("seal.linked:2", f"{ROUNDS[0]}/advantages/sealed.json", f"{ROUNDS[0]}/train.partial"),
    ("checkpoint.synced:1", f"{ROUNDS[0]}/train.partial", f"{ROUNDS[0]}/train.partial/000001"),
    ("checkpoint.renamed:1", f"{ROUNDS[0]}/train.partial/000001", f"{ROUNDS[0]}/train"),
    ("checkpoint.replaced:1", f"{ROUNDS[0]}/.train.tmp/state.json", f"{ROUNDS[0]}/train"),
    ("checkpoint.renamed:1", f"{ROUNDS[0]}/train/state.json", "evaluate/round-0001"),
    ("shard.start:3", f"{ROUNDS[1]}/rollout/done/000000.json", f"{ROUNDS[1]}/rollout/done/000001.json"),
    ("checkpoint.renamed:2", f"{ROUNDS[1]}/train/state.json", "evaluate/round-0002"),
    ("write.synced:1", "evaluate/round-0002/sealed.json", "summary.json"),
    ("write.replaced:1", "summary.json", "report.html"),
]
"""In this order one run is killed in every stage of both rounds."""


def assert_nothing_damaged(root):
    """Whatever the moment: what is committed holds."""
    for name, dataset in datasets(root).items():
        assert not dataset.verify().damaged, name


def test_killed_in_every_stage_of_both_rounds(job, finished, nursery, tmp_path):
    root, command = tmp_path / "run", ("run", job, "--out", tmp_path / "run")
    for point, there, absent in KILLS:
        result = nursery.engine(*command, CAST_CRASH_AT=point)
        assert result.code == KILLED, (point, result.err)
        assert (root / there).exists(), (point, result.err)
        assert not (root / absent).exists(), (point, result.err)
        assert_nothing_damaged(root)
    result = nursery.engine(*command)
    assert result.code == 0, result.err
    assert_equal_runs(root, finished)
    assert not list(root.rglob("train.partial"))
    assert not list(root.rglob(".train.tmp"))
    timings = [json.loads(line) for line in (root / "timings.jsonl").read_text().splitlines()]
    drawn = sum(t["samples"] for t in timings if t["stage"] == "rollout")
    assert drawn < 24, "a stage that was done is not done again, and one that was killed has no line"


def committed(root):
    try:
        return len(list(root.rglob("done/*.json")))
    except FileNotFoundError:  # a folder that was renamed while it was walked
        return 0


def test_killed_at_random_moments(job, finished, nursery, tmp_path):
    order, kills = random.SystemRandom(), []
    root, command = tmp_path / "run", ("run", job, "--out", tmp_path / "run")
    for low, high in ((1, 10), (11, 20), (21, 25)):
        at, wait = order.randint(low, high), order.uniform(0, 0.3)
        running = nursery.start("cast-engine", *command)
        wait_for(lambda at=at: committed(root) >= at)
        time.sleep(wait)
        running.send(signal.SIGKILL)
        kills.append((at, wait, running.wait().code))
    result = nursery.engine(*command)
    assert result.code == 0, (kills, result.err)
    assert [code for *_, code in kills] == [KILLED] * 3, kills
    assert_equal_runs(root, finished)


def test_asked_to_stop(job, finished, nursery, tmp_path):
    """Batch systems and people stop a run by signals: exit code 75, one line, and the same command goes on."""
    root, command = tmp_path / "run", ("run", job, "--out", tmp_path / "run")
    for number, moment in (
        (signal.SIGTERM, "evaluate/base/plan.json"),
        (signal.SIGUSR1, f"{ROUNDS[0]}/score/plan.json"),
        (signal.SIGINT, f"{ROUNDS[1]}/advantages/sealed.json"),
    ):
        running = nursery.start("cast-engine", *command)
        wait_for(lambda moment=moment: (root / moment).exists())
        time.sleep(random.SystemRandom().uniform(0, 0.5))
        running.send(number)
        result = running.wait()
        assert result.code == 75, result.err
        assert "run the same command again" in result.error
        assert_nothing_damaged(root)
    assert nursery.engine(*command).code == 0
    assert_equal_runs(root, finished)
