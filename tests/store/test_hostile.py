"""Datasets that lie consistently: every hash fits, the content is made to harm."""

import hashlib
import io
import json
import pickle
import resource
import struct
import tarfile
import time
import zlib
from dataclasses import asdict

import pyarrow as pa
import pytest

from cast_engine.errors import DatasetError
from cast_engine.store import Dataset, atomic
from cast_engine.store.rows import rows_to_bytes
from cast_engine.store.tar import walk_tar
from tests.store.store_fakes import commit, create, keys, rollout_members

PLAN = keys(1, 2)
A, B = PLAN[0]


@pytest.fixture(autouse=True)
def cheap():
    """Refusing takes neither time nor memory."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def pack(entries, *, form=tarfile.USTAR_FORMAT) -> bytes:
    """A tar of (name or TarInfo, bytes)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in entries:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def forge(path, tar: bytes, *, members=None, change=lambda rows: rows) -> Dataset:
    """Replace the one shard of a dataset by a tar, with manifest and done file that fit it.

    Args:
        members: What the manifest says: name -> (offset, size); default: what the tar holds.
    """
    ds = create(path, PLAN)
    receipt = commit(ds, 0)
    table = ds.rows().to_pylist()
    if members is None:
        with tarfile.open(fileobj=io.BytesIO(tar)) as t:
            members = {i.name: (i.offset_data, i.size) for i in t}
    sha = hashlib.sha256(tar).hexdigest()
    name = f"rollout-000000-{sha[:12]}.tar"
    for row in table:
        own = [(n, at) for n, at in members.items() if n.startswith(row["key"])]
        row["members"] = [{"name": n, "offset": o, "size": s, "crc32": zlib.crc32(tar[o : o + s])} for n, (o, s) in own]
        row["shard_file"] = name
    manifest = rows_to_bytes(pa.Table.from_pylist(change(table), schema=ds.rows().schema))
    msha = hashlib.sha256(manifest).hexdigest()
    mname = f"rollout-000000-{msha[:12]}.parquet"
    ds.data_path(name).write_bytes(tar)
    ds.data_path(mname).write_bytes(manifest)
    body = asdict(receipt) | {"tar": name, "tar_bytes": len(tar), "tar_sha256": sha}
    body |= {"manifest": mname, "manifest_bytes": len(manifest), "manifest_sha256": msha}
    ds.done_path(0).write_bytes(atomic.dump_record(body))
    assert not ds.todo()
    return ds


def entries(**changes):
    """Members of both samples in order; ``changes`` replaces A's by suffix with '_' for '.'."""
    out = []
    for key in PLAN[0]:
        for suffix, data in sorted(rollout_members(key).items()):
            out.append((f"{key}.{suffix}", changes.get(suffix.replace(".", "_"), data) if key == A else data))
    return out


def refused(ds, message):
    for attempt in (lambda: ds.reader(allow_unsealed=True), ds.seal):
        with pytest.raises(DatasetError, match=message) as err:
            attempt()
        assert "\n" not in str(err.value)
    assert not ds.verify().ok


def test_an_honest_forgery_is_read(tmp_path):
    ds = forge(tmp_path / "ds", pack(entries()))
    assert ds.reader(allow_unsealed=True).read(A) == rollout_members(A)


def link(kind):
    info = tarfile.TarInfo(f"{A}.image.png")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "evil",
    [
        "../x.png",
        "/etc/x.png",
        "a/../../b.png",
        "a.b/../c",
        f"{A}.IMAGE.PNG",
        "noext",
        ".png",
        f"{A}.",
        "a\nb.png",
        link(tarfile.SYMTYPE),
        link(tarfile.LNKTYPE),
        link(tarfile.CHRTYPE),
        link(tarfile.BLKTYPE),
        link(tarfile.FIFOTYPE),
        link(tarfile.DIRTYPE),
        link(tarfile.GNUTYPE_SPARSE),
        link(tarfile.CONTTYPE),
    ],
    ids=lambda e: repr(e if isinstance(e, str) else e.type),
)
@pytest.mark.parametrize("at", [0, 3, 6])
def test_names_and_types(tmp_path, evil, at):
    good = entries()
    refused(forge(tmp_path / "ds", pack([*good[:at], (evil, b""), *good[at:]])), "tar member|members")


def test_pax_and_gnu_extensions(tmp_path):
    long = f"{A}.{'x' * 200}"
    for number, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        ds = forge(tmp_path / str(number), pack([*entries(), (long, b"")], form=form))
        refused(ds, "tar member|has members")


def test_repeated_missing_extra_interleaved(tmp_path):
    good = entries()
    refused(forge(tmp_path / "repeated", pack([good[0], *good])), "tar member 0 is")
    refused(forge(tmp_path / "again", pack([*good, *good[:3]])), "tar member")
    refused(forge(tmp_path / "missing", pack(good[1:])), f"sample {A} .ok. has members")
    refused(forge(tmp_path / "extra", pack([*good, (f"{B}.zzz.png", b"")])), f"sample {B} .ok. has members")
    refused(forge(tmp_path / "foreign", pack([*good, ("zz.png", b"")])), "tar member 6")
    mixed = [good[i] for i in (0, 3, 1, 4, 2, 5)]
    refused(forge(tmp_path / "interleaved", pack(mixed)), f"tar member 1 is .*{B}.*as in the manifest")
    # a manifest that hides what the tar really holds
    with tarfile.open(fileobj=io.BytesIO(pack(good))) as t:
        places = {i.name: (i.offset_data, i.size) for i in t}
    refused(forge(tmp_path / "hidden", pack([*good, (f"{A}.x", b"")]), members=places), "tar member 6")
    shifted = {n: (o + 1, s - 1) for n, (o, s) in places.items()}
    refused(forge(tmp_path / "shifted", pack(good), members=shifted), "tar member 0")


def test_a_million_members(tmp_path):
    block = pack([("a.png", b"")])[:512]
    refused(
        forge(tmp_path / "ds", pack(entries())[: -(10240 // 2)] + block * 100_000 + bytes(10240), members={}), "has"
    )
    with pytest.raises(DatasetError, match=r"tar member|damaged"):
        list(walk_tar(io.BytesIO(block[:156] + b"5" + block[157:] * 10), 5120))


def test_sizes_that_are_not_there(tmp_path):
    data = pack(entries())
    for number, size in enumerate((b"77777777777\0", b"00000100000\0", b"\x80" + b"\xff" * 11, b"\xff" * 12)):
        head = bytearray(data[:512])
        head[124:136] = size
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        with pytest.raises(DatasetError, match=r"declares|damaged tar header"):
            list(walk_tar(io.BytesIO(bytes(head) + data[512:]), len(data)))
        ds = forge(tmp_path / str(number), bytes(head) + data[512:], members={n: (512, 1) for n, _ in entries()})
        refused(ds, r"declares|damaged tar header")


def test_bytes_after_the_end(tmp_path):
    data = pack(entries())
    for number, tail in enumerate((b"PK" + bytes(10238), bytes(10240), bytes(1))):
        refused(forge(tmp_path / str(number), data + tail), "end mark|after its last member")
    refused(forge(tmp_path / "short", data[: -(-len(data.rstrip(b"\0")) // 512) * 512]), "end")


def opens_but_refuses(ds, what, message):
    reader = ds.reader(allow_unsealed=True)
    with pytest.raises(DatasetError, match=message) as err:
        what(reader)(A)
    assert A in str(err.value)
    assert "\n" not in str(err.value)
    assert what(reader)(B) is not None  # the others are not harmed


class Bomb:
    def __reduce__(self):
        return (print, ("this must never run",))


def header(**tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


HUGE = {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}


@pytest.mark.parametrize(
    "evil",
    [
        pickle.dumps(Bomb()),
        b"",
        struct.pack("<Q", 1 << 30) + b"{",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 3) + b"[1]",
        header(latents=HUGE),
        header(latents=HUGE, final_latent=HUGE, steps=HUGE, sigmas=HUGE, logp_old=HUGE),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        rollout_members(A)["rollout.safetensors"].replace(b'{"', b'{"__metadata__":{"a":5},"', 1),
    ],
    ids=["pickle", "empty", "1 GB header", "endless header", "list", "one huge", "all huge", "deep", "metadata"],
)
def test_tensors(tmp_path, evil, capsys):
    ds = forge(tmp_path / "ds", pack(entries(rollout_safetensors=evil)))
    opens_but_refuses(ds, lambda r: r.tensors, "tensor|JSON")
    assert "never" not in capsys.readouterr().out


def png(width, height, *, depth=8, colour=2):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    ihdr = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("evil", "message"),
    [
        (png(60000, 60000), "PNG of height 60000|60000 x 60000"),
        (png(0, 8), "PNG of 0 x 8"),
        (png(9, 8), "expected 8, 8"),
        (png(8, 8, depth=16), "bit depth 16"),
        (png(8, 8, colour=3), "colour type 3"),
        (png(8, 8)[:-1], "not all of it"),
        (png(8, 8).replace(b"IDAT", b"JDAT"), "damaged PNG"),
        (b"\xff\xd8\xff\xe0JFIF", "not PNG"),
        (b"<svg/>", "not PNG"),
    ],
)
def test_images(tmp_path, evil, message):
    opens_but_refuses(forge(tmp_path / "ds", pack(entries(image_png=evil))), lambda r: r.image, message)


@pytest.mark.parametrize(
    "evil", [b'{"a": NaN}', b'{"a": Infinity}', b"[1]", b"{", b"\xff", b'{"a":1,"a":2}', b"[" * 99999]
)
def test_json(tmp_path, evil):
    opens_but_refuses(forge(tmp_path / "ds", pack(entries(meta_json=evil))), lambda r: r.meta, "JSON")


def test_rows_that_do_not_fit_the_plan(tmp_path):
    def change(**values):
        return lambda rows: [rows[0] | values, *rows[1:]]

    for number, (values, message) in enumerate(
        [
            ({"key": "zz"}, "not those of the plan"),
            ({"shard_id": 5}, "another shard"),
            ({"shard_file": "../../etc/passwd"}, "another shard"),
            ({"stage": "score"}, "another shard"),
            ({"status": "fine"}, "has members"),
            ({"status": "failed"}, "has members"),
            ({"status": "fine", "members": []}, "samples by status"),
        ]
    ):
        refused(forge(tmp_path / str(number), pack(entries()), change=change(**values)), message)
    refused(forge(tmp_path / "few", pack(entries()), change=lambda rows: rows[:1]), "not those of the plan")


@pytest.mark.parametrize(
    "values",
    [
        {"tar": "../../../etc/passwd"},
        {"tar": "rollout-000000-0123456789ab.parquet"},
        {"tar": "rollout-000001-0123456789ab.tar"},
        {"tar": "/etc/rollout-000000-0123456789ab.tar"},
        {"tar": 5},
        {"shard_id": 1},
        {"shard_id": "0"},
        {"plan_sha256": "0" * 64},
        {"config_hash": "0" * 64},
        {"more": 1},
    ],
)
def test_done_files_that_point_elsewhere_count_as_absent(tmp_path, values):
    ds = create(tmp_path / "ds", PLAN)
    ds.done_path(0).write_bytes(atomic.dump_record(asdict(commit(ds, 0)) | values))
    assert len(ds.todo()) == 1
    assert ds.verify().damaged


@pytest.mark.parametrize(
    "body", [[], {}, {"stage": "rollout"}, {"schema_version": "1"}, {"schema_version": 1, "stage": 5}]
)
def test_plans(tmp_path, body):
    ds = create(tmp_path / "ds", PLAN)
    text = atomic.dump_record(body) if isinstance(body, dict) else b"[]"
    (ds.path / "plan.json").write_bytes(text)
    with pytest.raises(DatasetError):
        Dataset.open(ds.path)


def test_a_link_in_place_of_a_file(tmp_path):
    ds = create(tmp_path / "ds", PLAN)
    receipt = commit(ds, 0)
    path = ds.data_path(receipt.tar)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert len(ds.todo()) == 1  # a link has another size
    assert not ds.verify().ok


def test_a_manifest_that_is_none(tmp_path):
    ds = forge(tmp_path / "ds", pack(entries()))
    receipt = ds.complete(0)
    for data in (b"PAR1", b"", pickle.dumps(Bomb()), b"PAR1" + bytes(100) + b"PAR1"):
        sha = hashlib.sha256(data).hexdigest()
        name = f"rollout-000000-{sha[:12]}.parquet"
        ds.data_path(name).write_bytes(data)
        body = asdict(receipt) | {"manifest": name, "manifest_bytes": len(data), "manifest_sha256": sha}
        ds.done_path(0).write_bytes(atomic.dump_record(body))
        refused(ds, "not a manifest")
