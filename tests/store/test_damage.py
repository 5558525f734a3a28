"""Every damage is seen, named, and repaired by running the stage again."""

import random
import shutil

import pytest

from cast_engine.errors import DatasetError
from cast_engine.store import Dataset
from tests.store.store_fakes import commit, expected, found, keys, make

PLAN = keys(2, 2)
REMEDY = "verify --quarantine"


@pytest.fixture
def ds(ram_path):
    return make(ram_path / "ds", PLAN)


def tar_of(ds, shard_id):
    return ds.data_path(ds.complete(shard_id).tar)


def files(ds):
    return sorted(p for p in ds.path.rglob("*") if p.is_file())


def assert_seen(path, what, *, delivered_untouched=False):
    """Verify must see it; the reader must refuse, or (files it does not read) deliver exactly the right bytes."""
    try:
        report = Dataset.open(path).verify()
        assert not report.ok, f"not seen by verify: {what}"
        assert all("\n" not in d.problem for d in report.damaged)
    except DatasetError:
        pass
    try:
        got = found(Dataset.open(path))
    except DatasetError:
        return
    assert delivered_untouched, f"not seen by the reader: {what}"
    assert got == expected(PLAN)


def test_truncation_at_every_block_and_elsewhere(ds):
    tar, rng = tar_of(ds, 1), random.Random(0)
    data = tar.read_bytes()
    cuts = [*range(0, len(data), 512), *(rng.randrange(len(data)) for _ in range(100))]
    assert len(cuts) > 119
    for cut in cuts:
        tar.write_bytes(data[:cut])
        assert Dataset.open(ds.path).todo()[0].shard_id == 1
        assert_seen(ds.path, f"cut at {cut}")
    tar.write_bytes(data)
    assert ds.verify().ok


def test_bit_flips_in_every_file(ds):
    rng = random.Random(1)
    for path in files(ds):
        data = bytearray(path.read_bytes())
        for _ in range(200 if path.suffix == ".tar" else 20):
            bit = rng.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            assert_seen(ds.path, f"{path.name}, bit {bit}", delivered_untouched=path == ds.index_path)
            data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
    assert ds.verify().ok


def test_holes_growth_and_loss_of_every_file(ds):
    for path in files(ds):
        data = path.read_bytes()
        unread = path == ds.index_path
        hole = bytes(min(4096, len(data) // 2))
        for damaged in (hole + data[len(hole) :], data + b"\0", data + bytes(512), b"", data[: len(data) // 2]):
            path.write_bytes(damaged)
            assert_seen(ds.path, path.name, delivered_untouched=unread)
        path.unlink()
        if path != ds.seal_path:  # without its seal it is an unsealed dataset, and refused as that
            assert_seen(ds.path, f"{path.name} gone", delivered_untouched=unread)
        path.write_bytes(data)
    assert ds.verify().ok


def test_swapped_shards(ds):
    a, b = tar_of(ds, 0), tar_of(ds, 1)
    one, other = a.read_bytes(), b.read_bytes()
    assert len(one) == len(other)
    a.write_bytes(other)
    b.write_bytes(one)
    assert_seen(ds.path, "swapped tars")
    a.write_bytes(one)
    b.write_bytes(other)
    a, b = ds.done_path(0), ds.done_path(1)
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)
    assert_seen(ds.path, "swapped done files")


def test_a_shard_of_another_run_of_the_same_plan(ds, ram_path):
    other = make(ram_path / "other", PLAN, salt=3)
    ds.done_path(1).unlink()
    shutil.copy(other.done_path(1), ds.done_path(1))
    for path in other.path.glob("data/01/*"):
        shutil.copy(path, ds.path / "data" / "01")
    assert_seen(ds.path, "a valid shard that is not the sealed one")


def test_the_error_names_the_file_the_counts_and_the_command(ds):
    tar = tar_of(ds, 1)
    size = tar.stat().st_size
    data = bytearray(tar.read_bytes())
    data[600] ^= 1
    tar.write_bytes(data)
    with pytest.raises(DatasetError) as err:
        ds.reader()
    assert str(tar) in str(err.value)
    assert REMEDY in str(err.value)
    tar.write_bytes(data[:-512])
    report = ds.verify()
    assert [d.shard_id for d in report.damaged] == [1]
    assert f"{size - 512} bytes; expected {size}" in report.damaged[0].problem
    with pytest.raises(DatasetError, match=REMEDY):
        ds.reader()


def test_damage_after_opening_is_seen_when_read(ds):
    reader = ds.reader()
    key = reader.keys()[0]
    offset = reader.row(key)["members"][2]["offset"]
    tar = tar_of(ds, 0)
    data = bytearray(tar.read_bytes())
    data[offset + 5] ^= 4
    tar.write_bytes(data)
    assert reader.meta(key)  # another member
    with pytest.raises(DatasetError, match="changed since it was verified"):
        reader.read(key)
    with pytest.raises(DatasetError, match="changed since it was verified"):
        reader.tensors(key)
    tar.write_bytes(data[:1000])
    with pytest.raises(DatasetError, match="changed since it was verified"):
        reader.read(key)
    tar.unlink()
    with pytest.raises(DatasetError, match="No such file"):
        reader.read(key)


def test_quarantine_then_run_again(ds):
    before, seal = {p: p.read_bytes() for p in files(ds)}, ds.seal_sha256
    tar = tar_of(ds, 1)
    tar.write_bytes(tar.read_bytes()[:-1024])
    report = ds.verify(quarantine=True)
    assert not report.ok
    assert report.quarantined == 5  # done, tar, manifest; seal and index
    assert not ds.sealed
    assert [s.shard_id for s in ds.todo()] == [1]
    assert found(ds) == expected(PLAN[:1])
    ds = make(ds.path, PLAN)
    assert ds.seal_sha256 == seal  # same bytes, same seal: children stay valid
    assert found(ds) == expected(PLAN)
    now = {p: p.read_bytes() for p in files(ds) if "quarantine" not in p.parts}
    assert now.keys() == before.keys()
    assert len(list(ds.path.glob("quarantine/*"))) == 5


@pytest.mark.parametrize("name", ["seal_path", "index_path"])
def test_a_damaged_seal_or_index(ds, name):
    path, seal = getattr(ds, name), ds.seal_sha256
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DatasetError, match=REMEDY):
        ds.rows() if name == "index_path" else ds.reader()
    report = ds.verify(quarantine=True)
    assert [d.shard_id for d in report.damaged] == [None]
    assert report.quarantined == 2
    assert ds.todo() == []
    assert ds.seal() == seal
    assert ds.verify().ok


def test_quarantine_spares_a_done_file_that_was_renewed_meanwhile(ds):
    from cast_engine.store.verify import move_shard

    bad = ds.complete(0)
    tar = ds.data_path(bad.tar)
    tar.unlink()
    other = commit(ds, 0, salt=9)  # moves the old done file away
    assert other != bad
    assert move_shard(ds, 0, bad, data=True) == 0
    assert ds.complete(0) == other
