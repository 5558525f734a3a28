import numpy as np
import polars as pl
import pytest
import torch

from cast_engine.errors import DatasetError
from cast_engine.store import Dataset, Sample, encode_json, encode_tensors, verify
from schemas.manifest import manifest_schema
from schemas.records import ROLLOUT_TENSORS, SCHEMA_VERSION, STAGES
from tests.store.store_fakes import SIDE, commit, create, expected, found, keys, make, rollout_members, rollout_sample


def test_what_is_written_is_read(dataset):
    plan = keys(2, 3)
    assert found(dataset) == expected(plan)
    reader = dataset.reader()
    assert reader.keys() == [k for s in plan for k in s]
    assert len(reader) == 6
    key = reader.keys()[4]
    assert key in reader
    assert reader.read(key) == rollout_members(key)
    tensors = reader.tensors(key)
    assert list(tensors) == list(ROLLOUT_TENSORS)
    assert tensors["latents"].dtype == torch.bfloat16
    assert tensors["latents"].shape == (3, 4, 2)
    assert reader.meta(key)["key"] == key
    assert np.asarray(reader.image(key)).shape == (SIDE, SIDE, 3)
    assert reader.row(key)["member"] == 1
    with pytest.raises(DatasetError, match="no sample"):
        reader.read("0" * 12)


def test_open_again_writes_nothing(dataset):
    before = {p: p.stat().st_mtime_ns for p in dataset.path.rglob("*")}
    again = make(dataset.path, keys(2, 3))
    assert again.plan == dataset.plan
    assert again.todo() == []
    assert again.seal() == dataset.seal_sha256
    assert again.verify().ok
    assert again.rows().equals(again.reader().rows)
    assert Dataset.open(dataset.path).sealed
    # entries of tmp/ and of the root come and go when plan.json is looked for; files stay as they are
    assert {p: p.stat().st_mtime_ns for p in dataset.path.rglob("*")} == before


def test_same_input_same_bytes_and_same_seal(tmp_path):
    plan = keys(3, 2)
    a, b = make(tmp_path / "a", plan), create(tmp_path / "b", plan)
    for shard_id in (2, 0, 1):
        commit(b, shard_id)
    assert a.seal_sha256 == b.seal()
    files = [sorted((p.relative_to(ds.path), p.read_bytes()) for p in ds.path.glob("data/*/*")) for ds in (a, b)]
    assert len(files[0]) == 6
    assert files[0] == files[1]


def test_failed_samples_keep_their_rows(tmp_path):
    plan = keys(2, 3)
    ds = create(tmp_path / "ds", plan)
    bad = [
        Sample(plan[0][0], {}, {"status": "failed", "error_class": "ValueError", "error_msg": "x" * 9999}),
        Sample(plan[0][1], {}, {"status": "nonfinite"}),
        rollout_sample(plan[0][2]),
    ]
    assert ds.commit(0, bad).counts == {"failed": 1, "nonfinite": 1, "ok": 1}
    ds.commit(1, [Sample(key, {}, {"status": "skipped_parent"}) for key in plan[1]])  # an empty tar
    ds.seal()
    assert ds.verify().ok
    reader = ds.reader()
    assert reader.keys() == [plan[0][2]]
    assert reader.rows["key"].to_pylist() == [k for s in plan for k in s]
    assert len(reader.row(plan[0][0])["error_msg"]) == 2000
    with pytest.raises(DatasetError, match="failed"):
        reader.read(plan[0][0])
    assert ds.status().samples == {"failed": 1, "nonfinite": 1, "ok": 1, "skipped_parent": 3}
    assert (ds.status().shards_done, ds.status().shards_planned, ds.status().sealed) == (2, 2, True)


def test_columns_of_a_stage(tmp_path):
    key = keys(1, 1)[0][0]
    ds = Dataset.create(tmp_path / "ds", stage="score", config={}, shards=[[key]])
    tensors = {
        "scores": torch.tensor([0.5, float("nan")]),
        "maps": torch.ones(2, 3, 3, dtype=torch.float16),
        "mass": torch.ones(2),
        "neutral": torch.ones(3, 3, dtype=torch.float16),
    }
    members = {"score.safetensors": encode_tensors(tensors), "meta.json": encode_json({})}
    row = {"atom_kinds": ["object", "count"], "atom_scores": np.array([0.5, np.nan], np.float32)}
    row |= {"reward": np.float32(0.5), "parent_key": key}
    ds.commit(0, [Sample(key, members, row)])
    ds.seal()
    out = ds.reader().row(key)
    assert out["atom_kinds"] == ["object", "count"]
    assert out["atom_scores"][0] == 0.5
    assert np.isnan(out["atom_scores"][1])
    assert ds.reader().tensors(key)["scores"].isnan().tolist() == [False, True]
    frame = pl.read_parquet(ds.index_path)
    assert frame["schema_version"].to_list() == [SCHEMA_VERSION]
    assert frame.columns == manifest_schema("score").names


def test_every_stage_has_a_manifest():
    for stage in STAGES:
        names = manifest_schema(stage).names
        assert len(set(names)) == len(names)


def test_an_unsealed_dataset_is_read_only_when_asked(tmp_path):
    ds = create(tmp_path / "ds", keys(2, 2))
    commit(ds, 1)
    with pytest.raises(DatasetError, match="not sealed"):
        ds.reader()
    with pytest.raises(DatasetError, match="1 of 2 shards are missing, the first is 0"):
        ds.seal()
    assert found(ds) == expected(keys(2, 2)[1:])
    assert ds.rows()["key"].to_pylist() == keys(2, 2)[1]
    assert [s.shard_id for s in ds.todo()] == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[::-1], "in order"),
        (lambda s: s[:1], "in order"),
        (lambda s: [Sample(s[0].key, {**s[0].members, "extra.json": b"{}"}, s[0].row), s[1]], "has members"),
        (lambda s: [Sample(s[0].key, {"meta.json": b"{}"}, s[0].row), s[1]], "has members"),
        (lambda s: [Sample(s[0].key, s[0].members, {"status": "failed"}), s[1]], "has members"),
        (lambda s: [Sample(s[0].key, s[0].members, {"status": "fine"}), s[1]], "status 'fine'"),
        (lambda s: [Sample(s[0].key, s[0].members, {"colour": 1}), s[1]], "columns"),
        (lambda s: [Sample(s[0].key, s[0].members, {"round": "one"}), s[1]], "wrong type"),
        (lambda s: [Sample(s[0].key, s[0].members, {"key": "a"}), s[1]], "columns"),
        (lambda s: [Sample(s[0].key, {**s[0].members, "image.png": b"JFIF"}, {}), s[1]], "not PNG"),
        (lambda s: [Sample(s[0].key, {**s[0].members, "meta.json": b'{"a": NaN}'}, {}), s[1]], "NaN"),
        (lambda s: [Sample(s[0].key, {**s[0].members, "rollout.safetensors": b"\x80\x04."}, {}), s[1]], "safetensors"),
    ],
)
def test_a_commit_that_does_not_fit_is_refused(tmp_path, change, message):
    plan = keys(1, 2)
    ds = create(tmp_path / "ds", plan)
    with pytest.raises(DatasetError, match=message):
        ds.commit(0, change([rollout_sample(key) for key in plan[0]]))
    assert ds.todo()
    assert not list(ds.path.glob("tmp/*"))


def test_parents(tmp_path):
    parent = make(tmp_path / "run" / "rollout", keys(1, 2))
    path = tmp_path / "run" / "score"
    ref = parent.as_parent(path)
    assert ref.path == "../rollout"
    child = Dataset.create(path, stage="score", config={}, shards=keys(1, 2), parents=[ref])
    assert child.parent("rollout").path.resolve() == parent.path.resolve()
    (tmp_path / "run").rename(tmp_path / "moved")
    child = Dataset.open(tmp_path / "moved" / "score")
    assert child.parent("rollout").seal_sha256 == ref.seal_sha256
    with pytest.raises(DatasetError, match="no parent of stage csg"):
        child.parent("csg")
    other = make(tmp_path / "other", keys(1, 2), salt=1)
    (tmp_path / "moved" / "rollout").rename(tmp_path / "away")
    other.path.rename(tmp_path / "moved" / "rollout")
    with pytest.raises(DatasetError, match="was made"):
        child.parent("rollout")


def test_what_is_remembered_of_verified_shards_is_bounded(tmp_path, monkeypatch):
    checked = []

    def check(ds, plan, receipt):
        checked.append(plan.shard_id)
        return check_shard(ds, plan, receipt)

    check_shard = verify.check_shard
    monkeypatch.setattr(verify, "check_shard", check)
    one = make(tmp_path / "one", keys(1, 3)).rows().nbytes
    monkeypatch.setattr(verify, "_seen", seen := verify.SeenShards(int(2.5 * one)))
    ds = make(tmp_path / "ds", keys(4, 3), seal=False)
    checked.clear()
    ds.seal()
    assert (checked, len(seen)) == ([0, 1, 2, 3], 2)
    assert 0 < seen.bytes <= seen.limit
    assert found(ds) == expected(keys(4, 3)), "what was forgotten is only hashed again"
    assert (checked, len(seen)) == ([0, 1, 2, 3] * 2, 2)
    for _ in range(3):
        small = make(tmp_path / "two", keys(2, 3))
        assert found(small) == expected(keys(2, 3))
    assert checked[8:] == [0, 1], "what fits is hashed once"
    assert 0 < seen.bytes <= seen.limit
