"""Other people's tools read a run's files."""

import json
import subprocess

import polars as pl
import webdataset as wds

from cast_engine.store import Dataset
from schemas.records import STAGES
from tests.loop.commands import datasets


def test_shards_in_webdataset_tar_and_polars(finished):
    stages = set()
    for name, dataset in datasets(finished).items():
        tars = sorted((finished / name).glob("data/*/*.tar"))
        planned = [key for shard in dataset.plan for key in shard.keys]
        samples = list(wds.WebDataset([str(t) for t in tars], shardshuffle=False))
        assert sorted(s["__key__"] for s in samples) == sorted(planned)
        assert all(s.keys() >= set(STAGES[dataset.stage].members) for s in samples)
        listed = [subprocess.check_output(["tar", "-tf", t], text=True).split() for t in tars]
        assert sum(map(len, listed)) == len(planned) * len(STAGES[dataset.stage].members)
        rows = pl.read_parquet(str(finished / name / "data/*/*.parquet"))
        assert sorted(rows["key"]) == sorted(planned)
        assert rows["status"].unique().to_list() == ["ok"]
        stages.add(dataset.stage)
    assert stages == {"prompts", "csg", "rollout", "score", "advantages", "evaluate"}


def test_the_numbers_of_a_round_in_polars(finished):
    folder = finished / "rounds/0001"
    score = pl.read_parquet(str(folder / "score/data/*/*.parquet"))
    weights = pl.read_parquet(str(folder / "advantages/data/*/*.parquet"))
    both = score.join(weights, on="key", suffix="_weights")
    assert len(both) == 12
    assert (both["reward"] - both["reward_weights"]).abs().max() < 1e-6
    reader = Dataset.open(folder / "advantages").reader()
    for row in weights.iter_rows(named=True):
        weight = reader.tensors(row["key"])["weight"]
        assert weight.shape == (64,)
        assert abs(float(weight.double().mean()) - row["weight_mean"]) < 1e-9
    assert json.loads((finished / "evaluate/base/sealed.json").read_text())["stage"] == "evaluate"
