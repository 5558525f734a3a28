"""The small parts of the trainer: order, learning rate, guards, averages, metrics, and the chain of parents."""

import json
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cast_engine.errors import DatasetError, UserError
from cast_engine.store import Dataset, ParentRef, Sample, encode_json, encode_tensors
from schemas.job import TrainConfig
from schemas.records import ScoreMeta, sample_key
from tests.trainer.rounds import draw, job
from trainer.data import open_round, plan_updates
from trainer.ema import Ema
from trainer.guards import Guards, TrainingStopped
from trainer.metrics import UpdateStats, read_rows, write_rows
from trainer.objective import policy_loss
from trainer.schedule import learning_rate


def groups(*sizes):
    return {f"{i:012x}": [sample_key(f"{i:012x}", 0, m) for m in range(size)] for i, size in enumerate(sizes)}


# ---- order


def test_every_update_takes_equally_many_of_every_group():
    plan = plan_updates(groups(16, 16, 16, 16), seed=1, round_=2, epochs=2, updates=4)
    assert len(plan) == 8
    for keys in plan:
        assert Counter(key[:12] for key in keys) == {f"{i:012x}": 4 for i in range(4)}


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 3), st.integers(0, 9))
def test_each_epoch_is_the_round_exactly_once(sizes, updates, epochs, seed):
    made = groups(*sizes)
    if sum(sizes) < updates:
        with pytest.raises(UserError, match="updates_per_round"):
            plan_updates(made, seed=seed, round_=0, epochs=epochs, updates=updates)
        return
    plan = plan_updates(made, seed=seed, round_=0, epochs=epochs, updates=updates)
    lengths = [len(keys) for keys in plan]
    assert max(lengths) - min(lengths) <= 1
    for epoch in range(epochs):
        part = [key for keys in plan[epoch * updates : (epoch + 1) * updates] for key in keys]
        assert sorted(part) == sorted(key for keys in made.values() for key in keys)


def test_order_follows_from_seed_round_and_epoch_alone():
    made = groups(8, 8)
    shuffled = {name: made[name][::-1] for name in reversed(made)}
    a = plan_updates(made, seed=1, round_=2, epochs=2, updates=2)
    assert a == plan_updates(shuffled, seed=1, round_=2, epochs=2, updates=2)
    assert a[:2] != a[2:]
    assert a != plan_updates(made, seed=2, round_=2, epochs=2, updates=2)
    assert a != plan_updates(made, seed=1, round_=3, epochs=2, updates=2)


# ---- learning rate


def test_schedules():
    constant = TrainConfig(learning_rate=1.0, warmup_updates=2)
    assert [learning_rate(constant, u, 6) for u in range(6)] == [0.5, 1, 1, 1, 1, 1]
    linear = TrainConfig(learning_rate=1.0, schedule="linear")
    assert [learning_rate(linear, u, 4) for u in range(4)] == [1, 0.75, 0.5, 0.25]
    cosine = TrainConfig(learning_rate=1.0, schedule="cosine")
    assert [learning_rate(cosine, u, 2) for u in range(3)] == pytest.approx([1, 0.5, 0])
    assert learning_rate(linear, 9, 4) == 0


# ---- guards


def guards(**config):
    return Guards(TrainConfig(**config), "round 1", "all is well")


def test_start_holds_positions_to_the_limit_only_in_float32():
    guards().check_start(1e-6, 9e-6, exact=True)
    guards().check_start(1e-6, 1e-2, exact=False)
    for image, position, exact in (
        (2e-5, 2e-5, False),
        (1e-6, 2e-5, True),
        (math.nan, 0.0, True),
        (0, math.nan, False),
    ):
        with pytest.raises(TrainingStopped, match=r"off-policy start.*ratio_tolerance.*all is well"):
            guards().check_start(image, position, exact=exact)


def test_gradient_norm_is_held_to_the_median_of_the_run():
    made = guards(max_grad_norm_ratio=10)
    made.check_gradient(1, 1e6)  # nothing to compare with yet
    for update, norm in enumerate([0.0, 1.0, 1.0, 1.0], start=2):
        made.check_gradient(update, norm)
    made.check_gradient(6, 9.0)
    with pytest.raises(TrainingStopped, match="gradient norm: round 1: update 7"):
        made.check_gradient(7, 11.0)
    assert made.norms == [1e6, 0.0, 1.0, 1.0, 1.0, 9.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_no_numbers_stop(bad):
    for check in (
        lambda g: g.check_loss(1, bad, 0.0),
        lambda g: g.check_loss(1, 0.0, bad),
        lambda g: g.check_gradient(1, bad),
        lambda g: g.check_adapter(1, bad),
    ):
        with pytest.raises(TrainingStopped):
            check(guards())


# ---- averages and metrics


def test_ema_follows_and_starts_from_a_shadow():
    p = {"a": torch.zeros(2)}
    ema = Ema(p, 0.75)
    p["a"] += 4.0
    ema.update(p)
    assert ema.shadow["a"].tolist() == [1.0, 1.0]
    assert Ema(p, 0.75, ema.shadow).shadow["a"].tolist() == [1.0, 1.0]


def test_metrics_are_means_over_all_passes_and_processes():
    torch.manual_seed(0)
    weight = torch.randn(4, 6)
    old, new = torch.zeros(4, 1, 6), torch.randn(4, 1, 6) * 1e-3
    whole, halves = UpdateStats(torch.device("cpu")), [UpdateStats(torch.device("cpu")) for _ in range(2)]

    def add(stats, rows):
        loss = policy_loss(new[rows], old[rows], weight[rows], clip_range=1e-4)
        stats.add(loss, (new - old)[rows, 0], weight[rows])

    add(whole, slice(0, 4))
    add(halves[0], slice(0, 1))
    add(halves[1], slice(1, 4))
    vectors = iter([torch.cat([h._sums for h in halves]), torch.cat([h._maxima for h in halves])])
    row, merged = whole.collect(lambda v: v), halves[0].collect(lambda _: next(vectors))
    assert merged == pytest.approx(row, rel=1e-5)
    assert row["weight_std"] == pytest.approx(float(weight.std(correction=0)), rel=1e-5)
    assert row["position_log_ratio_max"] == pytest.approx(float(new.abs().max()))
    image = new.mean(dim=-1)
    assert row["log_ratio_max"] == pytest.approx(float(image.abs().max()))
    positive = weight > 0
    share = float((positive & (image.exp() > 1 + 1e-4)).sum() / positive.sum())
    assert row["clip_share_positive"] == pytest.approx(share)


def test_a_nan_log_ratio_is_not_lost():
    stats = UpdateStats(torch.device("cpu"))
    for value in (math.nan, 0.0):
        new = torch.full((1, 1, 2), value)
        stats.add(policy_loss(new, torch.zeros(1, 1, 2), torch.ones(1, 2), clip_range=0.1), new[:, 0], torch.ones(1, 2))
    assert math.isnan(stats.collect(lambda v: v)["log_ratio_max"])


def test_rows_are_json(tmp_path):
    write_rows(tmp_path / "m.jsonl", [{"a": 1.5, "b": math.nan}, {"a": 2}])
    assert read_rows(tmp_path / "m.jsonl") == [{"a": 1.5, "b": None}, {"a": 2}]
    json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])


# ---- the chain rollout -> score -> advantages


def scores_of(rollout: Dataset, path) -> Dataset:
    keys = rollout.reader().keys()
    ref = ParentRef("rollout", "../rollout", rollout.seal_sha256)
    made = Dataset.create(path, stage="score", config={}, shards=[keys], parents=[ref])
    samples = []
    for key in keys:
        tensors = {
            "scores": torch.ones(1),
            "maps": torch.ones(1, 2, 2).half(),
            "mass": torch.ones(1),
            "neutral": torch.ones(2, 2).half(),
        }
        meta = ScoreMeta(
            key=key,
            prompt_id=key[:12],
            judge="exact",
            model_sha256="",
            mode="dedup",
            atom_ids=("a",),
            kinds=("object",),
            questions=("?",),
            expected=("Yes",),
        )
        members = {"score.safetensors": encode_tensors(tensors), "meta.json": encode_json(meta.model_dump())}
        samples.append(Sample(key, members, {"prompt_id": key[:12]}))
    made.commit(0, samples)
    made.seal()
    return Dataset.open(path)


def advantages_from(score: Dataset, made, path, keys, *, seal=None):
    reader = Dataset.open(made.advantages).reader()
    parent = ParentRef("score", "../score", seal or score.seal_sha256)
    dataset = Dataset.create(path, stage="advantages", config={}, shards=[keys], parents=[parent])
    dataset.commit(0, [Sample(key, reader.read(key), {"prompt_id": key[:12]}) for key in keys])
    return dataset


@pytest.fixture(scope="module")
def chain(world, tmp_path_factory):
    path = tmp_path_factory.mktemp("chain")
    made = draw(world, path)
    return made, scores_of(Dataset.open(made.rollout), path / "score")


def test_weights_may_refer_to_scores_of_the_rollout(chain, tmp_path_factory):
    made, score = chain
    keys = Dataset.open(made.rollout).reader().keys()
    path = score.path.parent / "advantages-by-score"
    part = [key for key in keys if key not in {keys[0], *keys[5:]}]  # 3 of the first group, 1 of the second
    dataset = advantages_from(score, made, path, part)
    with pytest.raises(DatasetError, match="not sealed"):
        open_round(made.rollout, path, lambda _: {})
    dataset.seal()
    data = open_round(made.rollout, path, lambda _: {})
    assert data.groups == {keys[0][:12]: tuple(keys[1:4])}
    assert data.dropped == {"without weights": 4, "alone in the group": 1}
    other = advantages_from(score, made, score.path.parent / "advantages-stale", part, seal="1" * 64)
    other.seal()
    with pytest.raises(DatasetError, match="made again since"):
        open_round(made.rollout, other.path, lambda _: {})


def test_datasets_in_the_wrong_order_are_refused(chain):
    made, _ = chain
    with pytest.raises(UserError, match="a dataset of stage advantages; expected a rollout dataset"):
        open_round(made.advantages, made.rollout, lambda _: {})


def test_a_window_with_a_missing_neighbour_is_refused(world, model, tmp_path):
    made = draw(world, tmp_path, change=lambda meta: meta | {"window_start": 2})
    with pytest.raises(DatasetError, match=r"window steps \(1, 2\) with 3 latents"):
        made.train(model, tmp_path / "out", job())
