"""The shards in other people's readers; no key can ever split a sample."""

import subprocess
import tarfile

import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_engine.errors import DatasetError
from cast_engine.store.shard import check_key
from schemas.graph import Prompt
from schemas.records import sample_key
from tests.store.store_fakes import keys, make, rollout_members


def test_webdataset(dataset, monkeypatch):
    monkeypatch.setenv("WDS_SECURE", "1")
    import webdataset as wds

    seen = {}
    for path in sorted(dataset.path.glob("data/*/*.tar")):
        for sample in wds.WebDataset(str(path), shardshuffle=False):
            assert sample["__key__"] not in seen
            seen[sample["__key__"]] = {k: v for k, v in sample.items() if not k.startswith("__")}
    assert seen == {k: rollout_members(k) for shard in keys(2, 3) for k in shard}


def test_tar(dataset):
    names = []
    for path in sorted(dataset.path.glob("data/*/*.tar")):
        with tarfile.open(path) as tar:
            for info in tar:
                assert (info.mtime, info.mode, info.uid, info.gid, info.uname) == (0, 0o444, 0, 0, "")
                assert info.isreg()
        names += subprocess.run(["tar", "-tf", path], check=True, capture_output=True, text=True).stdout.split()
    suffixes = ("image.png", "meta.json", "rollout.safetensors")
    assert names == [f"{k}.{s}" for shard in keys(2, 3) for k in shard for s in suffixes]


def test_polars_and_pyarrow(dataset):
    frame = pl.read_parquet(dataset.index_path)
    assert frame["key"].to_list() == [k for s in keys(2, 3) for k in s]
    assert frame.filter(pl.col("status") == "ok").height == 6
    scan = pl.scan_parquet(dataset.path / "data" / "*" / "*.parquet").sort("shard_id").collect()
    assert scan["sample_sha256"].to_list() == frame["sample_sha256"].to_list()
    member = frame["members"][4][2]
    assert member["name"].endswith(".rollout.safetensors")
    with next(dataset.path.glob(f"data/*/{frame['shard_file'][4]}")).open("rb") as tar:
        tar.seek(member["offset"])
        assert tar.read(member["size"]) == rollout_members(frame["key"][4])["rollout.safetensors"]
    metadata = pq.read_schema(dataset.index_path).metadata
    assert metadata[b"cast.schema_version"] == b"1"
    assert metadata[b"cast.config_hash"].decode() == dataset.config_hash


@given(st.text(min_size=1).filter(str.strip), st.integers(0, 9999), st.integers(0, 9999))
@settings(max_examples=200, deadline=None)
def test_any_prompt_makes_a_good_key(text, round_, member):
    try:
        prompt = Prompt.of(text[:4000])
    except UnicodeEncodeError:
        return  # lone surrogates are no text
    key = check_key(sample_key(prompt.prompt_id, round_, member))
    name = f"{key}.rollout.safetensors"
    assert name.partition(".")[0] == key
    assert name == name.lower()
    assert len(name) < 100


@given(st.text(max_size=80))
@settings(max_examples=300, deadline=None)
def test_other_keys_are_refused(text):
    good = 0 < len(text) <= 64 and set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and text[0] != "-"
    if good:
        assert check_key(text) == text
    else:
        with pytest.raises(DatasetError):
            check_key(text)


@pytest.mark.parametrize("name", ["FLUX.2-dev", "Qwen/Qwen-Image", "a photo of 1.5 cats"])
def test_dots_in_names_of_models_and_prompts_do_no_harm(tmp_path, name):
    plan = [[sample_key(Prompt.of(name).prompt_id, 0, n) for n in range(2)]]
    ds = make(tmp_path / name.replace("/", "_"), plan)  # folders may have dots
    assert ds.reader().keys() == plan[0]
    with tarfile.open(next(ds.path.glob("data/*/*.tar"))) as tar:
        assert sorted({name.partition(".")[0] for name in tar.getnames()}) == plan[0]
