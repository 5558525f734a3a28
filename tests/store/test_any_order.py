"""Write, kill, damage, verify, quarantine, collect, seal in any order: the invariant holds after each step."""

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cast_engine.errors import DatasetError
from cast_engine.store import Dataset
from tests.store.store_fakes import KILLED, commit, create, ended_by, expected, fork, found, keys

PLAN = keys(3, 1)
POINTS = (
    "shard.start",
    "tar.synced",
    "tar.replaced",
    "manifest.replaced",
    "data.durable",
    "done.synced",
    "done.linked",
)


class AnyOrder(RuleBasedStateMachine):
    """The model: which shards are intact on disk, with which bytes; which were damaged."""

    @initialize()
    def start(self):
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        create(self.root / "ds", PLAN)
        self.good: dict[int, int] = {}  # shard -> salt
        self.damaged: set[int] = set()
        self.sealed = False

    @property
    def ds(self) -> Dataset:
        return Dataset.open(self.root / "ds")

    def teardown(self):
        shutil.rmtree(self.root)

    @rule(shard=st.integers(0, 2), salt=st.integers(0, 1))
    def write(self, shard, salt):
        if shard not in self.damaged:  # a commit over damage: see test_crash
            commit(self.ds, shard, salt)
            self.good.setdefault(shard, salt)

    @rule(shard=st.integers(0, 2), point=st.sampled_from(POINTS))
    def kill(self, shard, point):
        if shard in self.damaged:
            return
        was = self.good.get(shard)
        assert ended_by(fork(lambda: commit(self.ds, shard, 0), CAST_CRASH_AT=point)) == KILLED
        if was is None and point == "done.linked":
            self.good[shard] = 0
        assert (self.ds.complete(shard) is not None) == (shard in self.good)

    @rule(shard=st.integers(0, 2), seed=st.integers(0, 99), cut=st.booleans())
    def damage(self, shard, seed, cut):
        receipt = self.ds.complete(shard)
        if receipt is None or shard in self.damaged:
            return
        rng = random.Random(seed)
        path = self.ds.data_path(rng.choice((receipt.tar, receipt.manifest)))
        data = bytearray(path.read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data[: bit // 8] if cut else data)
        self.damaged.add(shard)
        self.good.pop(shard)

    @rule()
    def quarantine(self):
        report = self.ds.verify(quarantine=True)
        assert {d.shard_id for d in report.damaged} == self.damaged
        self.sealed = self.sealed and not self.damaged
        self.damaged.clear()

    @rule()
    def collect(self):
        self.ds.gc(older_than_s=-1)

    @rule()
    def seal(self):
        try:
            self.ds.seal()
        except DatasetError:
            assert len(self.good) < 3
        else:
            assert self.sealed or len(self.good) == 3
            self.sealed = True

    @invariant()
    def what_is_delivered_is_right(self):
        ds = self.ds
        report = ds.verify()
        assert {d.shard_id for d in report.damaged} == self.damaged
        assert ds.sealed == self.sealed
        if not self.damaged:
            wanted = {k: v for shard, salt in self.good.items() for k, v in expected([PLAN[shard]], salt).items()}
            assert found(ds) == wanted
            assert {s.shard_id for s in ds.todo()} == {0, 1, 2} - self.good.keys()


AnyOrder.TestCase.settings = settings(
    max_examples=20, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
