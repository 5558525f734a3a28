import pytest

from cast_engine.errors import DatasetError
from cast_engine.store import Dataset, ParentRef, plan, rows, shard
from schemas.records import sample_key
from tests.store.store_fakes import commit, create, fork, keys, make


def refused(path, **changes):
    args = {"stage": "rollout", "config": {"rollout": {"noise_level": 0.7, "steps": 8}}, "shards": keys(2, 2)}
    with pytest.raises(DatasetError) as err:
        Dataset.create(path, **(args | changes))
    assert "\n" not in str(err.value)
    assert str(path) in str(err.value)
    assert "use another output folder" in str(err.value)
    return str(err.value)


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "ds"
    config = {"rollout": {"noise_level": 0.7, "steps": 8}}
    ds = Dataset.create(path, stage="rollout", config=config, shards=keys(2, 2), extra={"host": "a"})
    message = refused(path, config={"rollout": {"noise_level": 0.9, "window": [1, 2]}})
    assert "rollout.noise_level was 0.7, is now 0.9" in message
    assert "rollout.steps was 8, is now 'absent'" in message
    assert "rollout.window was 'absent', is now [1, 2]" in message
    first, last = keys(2, 2)[0]
    assert f"shard 0 was 2 keys from {first} to {last}, is now 1 keys" in refused(path, shards=keys(2, 1))
    assert "shards was 2, is now 3" in refused(path, shards=keys(3, 2))
    assert "parents.0.csg was 'absent', is now 'aaaa" in refused(path, parents=[ParentRef("csg", "../csg", "a" * 64)])
    assert "stage was 'rollout', is now 'evaluate'" in refused(path, stage="evaluate")
    again = Dataset.create(path, stage="rollout", config=config, shards=keys(2, 2), extra={"host": "b"})
    assert again.plan_sha256 == ds.plan_sha256
    assert again.extra == {"host": "a"}


def test_two_processes_with_two_plans_get_one(tmp_path):
    pids = [fork(lambda n=n: create(tmp_path / "ds", keys(3, n + 1))) for n in range(6)]
    import os

    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sorted(codes) == [0, 1, 1, 1, 1, 1]
    assert len(Dataset.open(tmp_path / "ds").plan[0].keys) == codes.index(0) + 1


@pytest.mark.parametrize("key", ["a.b", "FLUX.2-dev", "a/b", "../a", "", "-a", "a b", "A", "é", "a\n", "a" * 65])
def test_bad_keys_are_refused_at_once(tmp_path, key):
    with pytest.raises(DatasetError, match="key"):
        Dataset.create(tmp_path / "ds", stage="rollout", config={}, shards=[[key]])
    assert not (tmp_path / "ds").exists()


@pytest.mark.parametrize("shards", [[], [[]], [["a"], []], [["a", "a"]], [["a"], ["a"]]])
def test_plans_that_are_none(tmp_path, shards):
    with pytest.raises(DatasetError):
        Dataset.create(tmp_path / "ds", stage="rollout", config={}, shards=shards)


def test_unknown_stage_and_nan_config(tmp_path):
    with pytest.raises(DatasetError, match="'roll'"):
        Dataset.create(tmp_path / "ds", stage="roll", config={}, shards=[["a"]])
    with pytest.raises(ValueError, match="JSON"):
        Dataset.create(tmp_path / "ds", stage="rollout", config={"a": float("nan")}, shards=[["a"]])


def test_not_a_dataset(tmp_path):
    with pytest.raises(DatasetError, match=r"not a dataset.*plan\.json"):
        Dataset.open(tmp_path)


def later(monkeypatch, version):
    for module in (plan, rows, shard):
        monkeypatch.setattr(module, "SCHEMA_VERSION", version)


def test_the_version_before_is_read_and_others_are_refused(tmp_path, monkeypatch):
    ds = make(tmp_path / "ds", keys(1, 2))
    open_one = create(tmp_path / "open", keys(1, 2))
    later(monkeypatch, 2)
    monkeypatch.setattr("cast_engine.store.dataset.SCHEMA_VERSION", 2)
    assert len(Dataset.open(ds.path).reader()) == 2
    with pytest.raises(DatasetError, match="version 1 is only read"):
        commit(Dataset.open(open_one.path), 0)
    with pytest.raises(DatasetError, match="schema_version was 1, is now 2"):
        create(ds.path, keys(1, 2))
    later(monkeypatch, 3)
    with pytest.raises(DatasetError, match="format version 1; expected 3 or the one before; read it with"):
        Dataset.open(ds.path)


def test_columns_that_a_former_version_lacks_are_null(dataset):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(dataset.index_path).drop_columns(["guidance"])
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    read = rows.rows_from_bytes(out.getvalue().to_pybytes(), "rollout", dataset.config_hash)
    assert read["guidance"].null_count == 6
    assert read.schema.names == dataset.rows().schema.names


def test_keys_sort_by_prompt_round_member():
    assert sample_key("a" * 12, 3, 7) == "aaaaaaaaaaaa-0003-0007"
