import shutil
import tempfile
from pathlib import Path

import pytest

from cast_engine.store import Dataset
from tests.store.store_fakes import keys, make


@pytest.fixture(scope="module")
def ram_root():
    """A folder in memory where there is one: a killed process loses no page cache, so the disk adds only time."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() and shutil.disk_usage(memory).free > 1 << 27 else None))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def ram_path(ram_root):
    """An empty folder in memory."""
    return Path(tempfile.mkdtemp(dir=ram_root))


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return make(tmp_path / "ds", keys(2, 3))
