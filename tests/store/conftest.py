import pytest
from store_fakes import keys, make

from cast_engine.store import Dataset


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return make(tmp_path / "ds", keys(2, 3))
