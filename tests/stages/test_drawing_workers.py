"""Workers that draw: what they read once, which device they get, and counts of what they drew."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cast_engine.judges.exact_judge import ExactJudge
from cast_engine.run.executor import carry_out
from cast_engine.run.summary import score_prompts
from cast_engine.stages import csg, evaluate, rollout, score
from cast_engine.store import Dataset, ShardPlan
from cast_engine.tinyworld.prompts import spec_of
from cast_engine.tinyworld.render import render
from cast_engine.tinyworld.scenes import Scene, SceneObject
from schemas.job import JobConfig, RolloutConfig
from tests.stages.report_fakes import make_run, small_job


class Session:
    """Draws one picture again and again, and notes the adapters it is given."""

    guidance, adapter_sha256, spec = 2.0, "a", None
    geometry = SimpleNamespace(height=64, width=64)
    model = SimpleNamespace(info=SimpleNamespace(sha256="m", encoder_sha256="e"))

    def __init__(self, picture=None):
        self.picture = np.full((64, 64, 3), 128, np.uint8) if picture is None else picture
        self.adapters = []

    def identity(self):
        return {"adapter_sha256": self.adapter_sha256}

    def use_adapter(self, adapter):
        self.adapters.append(adapter)

    def draw(self, request):
        return SimpleNamespace(images=np.stack([self.picture] * len(request.seeds)))


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "run", small_job(rounds=1), rounds=1)[0]


def graphs_of(*texts):
    return {g.prompt_id: g for g in map(csg.parse, texts)}


def evaluation(layout, path, session, graphs, **changes):
    parent, job = Dataset.open(layout.graphs("evaluate")), JobConfig.model_validate({"evaluate": changes})
    return evaluate.plan(path, job, parent, graphs, session, ExactJudge(), num_steps=4, adapter=None)


def carry(planned):
    dataset, spec, worker = planned
    carry_out(dataset, spec, label="test", worker=worker)
    return dataset


def test_more_than_ten_are_too_many(layout, tmp_path):
    graphs = graphs_of("three red circles")
    circles = [SceneObject("circle", "red", 10 + 14 * x, 12 + 20 * y, 5.0) for x in range(4) for y in range(3)]
    session = Session(render(Scene(spec_of("three red circles"), tuple(circles))))
    (meta,) = evaluate.load(carry(evaluation(layout, tmp_path / "e", session, graphs)))
    assert [n for n in meta.counted if n is not None] == [12]
    assert score_prompts([meta])[meta.prompt_id].values["over_count"] == 1.0


def test_a_worker_reads_its_adapter_once(layout, tmp_path):
    session, graphs = Session(), graphs_of("a red circle", "two red circles", "three red circles")
    made = carry(evaluation(layout, tmp_path / "e", session, graphs, shard_prompts=1))
    assert len(made.plan) == 3
    assert len(session.adapters) == 2  # to plan, and before the first shard
    session = Session()
    work = rollout.RolloutWorker(None, RolloutConfig(), {}, 0, 0, tmp_path / "adapter", 4, session=session)
    for shard in range(3):
        assert work.run(ShardPlan(shard, ())) == []
    assert session.adapters == [tmp_path / "adapter"]


def test_workers_of_every_stage_have_a_device_each(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,8")
    changes = {"rollout": {"workers": 2, "num_steps": 8, "prompts_per_round": 2}, "score": {"workers": 2}}
    job, graphs = JobConfig.model_validate(changes), graphs_of("a red circle", "two red circles")
    drawn = rollout.plan(
        tmp_path / "r", job, Dataset.open(layout.graphs("train")), graphs, Session(), round_=0, adapter=None
    )
    images = Dataset.open(layout.round(0, "rollout"))
    prompts = {images.reader().meta(key)["prompt"] for key in images.reader().keys()}  # noqa: SIM118
    scored = score.plan(tmp_path / "s", job.score, images, graphs_of(*prompts), ExactJudge())
    for _, spec, _ in (drawn, scored, evaluation(layout, tmp_path / "e", Session(), graphs, workers=2)):
        assert [e["CUDA_VISIBLE_DEVICES"] for e in spec.env] == ["3", "8"]
