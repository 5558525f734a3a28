"""Workers of the stages on their own: what they write down of each sample, and what becomes of bad answers."""

from types import SimpleNamespace

import numpy as np
import pytest

from cast_engine.errors import FailuresError
from cast_engine.judges.exact_judge import ExactJudge
from cast_engine.run.executor import carry_out
from cast_engine.stages import build_advantages, csg, evaluate, prompts, score
from cast_engine.store import Dataset
from cast_engine.tinyworld.verify import detect_batch, union
from schemas.graph import Prompt
from schemas.job import EvaluateConfig, JobConfig
from schemas.records import split_key
from tests.stages.report_fakes import GRID, make_run, small_job

ALWAYS_EMPTY = {"error_class", "error_msg"}


class Spoilt(ExactJudge):
    """Gives one score of each image away for something else."""

    def __init__(self, value: float, images: int = 1000):
        super().__init__()
        self.value, self.left = value, images

    def score(self, images, graphs):
        out = super().score(images, graphs)
        for answer in out:
            if self.left:
                self.left -= 1
                answer.scores[0] = self.value
        return out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    layout, job = make_run(tmp_path_factory.mktemp("run") / "run", small_job(rounds=1), rounds=1)
    rollout = Dataset.open(layout.round(0, "rollout"))
    ids = sorted({row["prompt_id"] for row in rollout.rows().to_pylist()})
    texts = {row: rollout.reader().meta(f"{row}-0000-0000")["prompt"] for row in ids}
    return SimpleNamespace(layout=layout, job=job, rollout=rollout, texts=texts)


def graphs_of(run):
    return {p: csg.parse(text) for p, text in run.texts.items()}


def empty_columns(dataset) -> set[str]:
    table = dataset.rows()
    return {name for name in table.column_names if table[name].null_count == len(table)}


def carry(planned, **options):
    dataset, spec, *worker = planned
    carry_out(dataset, spec, label="test", worker=worker[0] if worker else None, **options)
    return dataset


def test_every_column_is_filled_in(run, tmp_path):
    asked = [Prompt.of(text) for text in run.texts.values()]
    written = carry(prompts.plan(tmp_path / "prompts", "file", asked))
    assert empty_columns(written) == ALWAYS_EMPTY | {"round", "parent_key"}
    assert empty_columns(carry(csg.plan(tmp_path / "csg", written))) == ALWAYS_EMPTY | {"round"}
    scored = carry(score.plan(tmp_path / "score", run.job.score, run.rollout, graphs_of(run), ExactJudge()))
    assert empty_columns(scored) == ALWAYS_EMPTY
    weighed = build_advantages.plan(tmp_path / "adv", run.job, run.rollout, scored, graphs_of(run), GRID)
    assert empty_columns(carry(weighed)) == ALWAYS_EMPTY


def advantages(run, path, job):
    scored = carry(score.plan(path / "score", job.score, run.rollout, graphs_of(run), ExactJudge()))
    made = carry(build_advantages.plan(path / "adv", job, run.rollout, scored, graphs_of(run), GRID))
    return made.rows().to_pylist(), made.reader()


def test_advantages_say_where_their_weight_lies(run, tmp_path):
    """By hand from W and from the detector's own masks."""
    rows, reader = advantages(run, tmp_path, run.job)
    for row in rows:
        weight = reader.tensors(row["key"])["weight"].double().numpy()
        mask = union(detect_batch([np.asarray(run.rollout.reader().image(row["key"]))])[0])
        cover = mask.reshape(8, 8, 8, 8).mean((1, 3)).reshape(-1)
        assert row["drawn_share"] == pytest.approx(mask.mean())
        assert row["weight_drawn"] == pytest.approx((weight * cover).sum() / cover.sum())
        assert row["weight_background"] == pytest.approx((weight * (1 - cover)).sum() / (1 - cover).sum())
        assert row["mass"] == pytest.approx(np.abs(row["advantage"]).sum(), rel=1e-6)
    for prompt_id in run.texts:
        group = [r for r in rows if r["prompt_id"] == prompt_id]
        expected = np.std([r["weight_mean"] for r in group])
        assert [r["group_std"] for r in group] == pytest.approx([expected] * len(group), abs=1e-6)
    assert all(r["low_std_mass"] == 0 for r in rows), "exact verdicts spread widely or not at all"


def test_advantages_of_other_pictures_leave_out_what_is_not_known(run, tmp_path):
    job = run.job.model_copy(update={"model": run.job.model.model_copy(update={"path": "/models/other"})})
    rows, _ = advantages(run, tmp_path / "place", job)
    assert {(r["weight_drawn"], r["weight_background"], r["drawn_share"]) for r in rows} == {(None, None, None)}
    scalar = run.job.model_copy(update={"advantages": run.job.advantages.model_copy(update={"credit": "scalar"})})
    rows, _ = advantages(run, tmp_path / "mass", scalar)
    assert {(r["mass"], r["low_std_mass"]) for r in rows} == {(None, None)}
    assert all(r["group_std"] is not None and r["weight_drawn"] is not None for r in rows)


def test_what_a_clip_touches_is_a_share_of_positions(run, tmp_path):
    config = run.job.advantages.model_copy(update={"weight_clip": 0.5})
    rows, reader = advantages(run, tmp_path, run.job.model_copy(update={"advantages": config}))
    for prompt_id in run.texts:
        group = [r for r in rows if r["prompt_id"] == prompt_id]
        touched = np.mean([float((reader.tensors(r["key"])["weight"].abs() == 0.5).float().mean()) for r in group])
        assert [r["above_clip_share"] for r in group] == pytest.approx([touched] * len(group))
        assert 0 < touched < 1


class Session:
    """Draws grey pictures."""

    guidance, adapter_sha256, spec = 2.0, "a", None
    geometry = SimpleNamespace(height=64, width=64)
    model = SimpleNamespace(info=SimpleNamespace(sha256="m"))

    def identity(self):
        return {"model_sha256": "m"}

    def use_adapter(self, adapter):
        pass

    def draw(self, request):
        return SimpleNamespace(images=np.full((len(request.seeds), 64, 64, 3), 128, np.uint8))


def evaluation(run, path, judge, **options):
    graphs = Dataset.open(run.layout.graphs("evaluate"))
    job = JobConfig(evaluate=EvaluateConfig(**options))
    return evaluate.plan(path, job, graphs, graphs_of(run), Session(), judge, num_steps=4, adapter=None)


def test_an_evaluation_says_how_it_was_drawn(run, tmp_path):
    made = carry(evaluation(run, tmp_path / "e", ExactJudge()))
    assert empty_columns(made) == ALWAYS_EMPTY | {"parent_key"}
    row = made.rows().to_pylist()[0]
    assert (row["guidance"], row["num_steps"], row["adapter_sha256"], row["judge"]) == (2.0, 4, "a", "exact")


def test_a_shard_of_an_evaluation_holds_whole_prompts(run, tmp_path):
    options = {"shard_prompts": 2, "images_per_prompt": 3}
    made = carry(evaluation(run, tmp_path / "e", ExactJudge(), **options))
    keys = [[split_key(k) for k in shard.keys] for shard in made.plan]
    assert [k.prompt_id for shard in keys for k in shard[::3]] == list(graphs_of(run))
    assert {len({k.prompt_id for k in shard}) for shard in keys[:-1]} <= {2}
    assert len(keys[0]) == 6
    assert {tuple(k.member for k in shard[i : i + 3]) for shard in keys for i in range(0, len(shard), 3)} == {(0, 1, 2)}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_missing_scores_are_counted_like_failed_samples(run, tmp_path, value):
    def planned(name, judge):
        return score.plan(tmp_path / name, run.job.score, run.rollout, graphs_of(run), judge)

    with pytest.raises(FailuresError, match=r"8 of \d+ atom scores are missing.*cast-engine seal"):
        carry(planned("all", Spoilt(value)), max_bad_frac=0.01)
    made = carry(planned("one", Spoilt(value, images=1)), max_bad_frac=0.1)
    scores = made.reader().tensors(made.reader().keys()[0])["scores"]
    assert np.isnan(scores[0])
    weighed = build_advantages.plan(tmp_path / "adv", run.job, run.rollout, made, graphs_of(run), GRID)
    assert all(row["status"] == "ok" for row in carry(weighed).rows().to_pylist())
    with pytest.raises(FailuresError, match="atom scores are missing"):
        carry(evaluation(run, tmp_path / "e", Spoilt(value)), max_bad_frac=0.01)
