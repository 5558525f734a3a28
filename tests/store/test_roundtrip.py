import numpy as np
import torch
from store_fakes import expected, found, keys, rollout_members

from cast_engine.store import Dataset
from schemas.records import ROLLOUT_TENSORS


def test_what_is_written_is_read(dataset):
    plan = keys(2, 3)
    assert found(dataset) == expected(plan)
    reader = dataset.reader()
    assert reader.keys() == [k for s in plan for k in s]
    key = reader.keys()[4]
    assert reader.read(key) == rollout_members(key)
    tensors = reader.tensors(key)
    assert list(tensors) == list(ROLLOUT_TENSORS)
    assert tensors["latents"].dtype == torch.bfloat16
    assert tensors["latents"].shape == (3, 4, 2)
    assert reader.meta(key)["key"] == key
    assert np.asarray(reader.image(key)).shape == (8, 8, 3)
    assert reader.row(key)["member"] == 1


def test_open_again(dataset):
    again = Dataset.open(dataset.path)
    assert again.plan == dataset.plan
    assert again.todo() == []
    assert again.sealed
    assert again.seal() == dataset.seal_sha256
    assert again.verify().ok
    assert again.rows().equals(again.reader().rows)
