"""Embeds are streamed to disk, skipped when there, and memory does not grow with their number (G17)."""

import multiprocessing
import tracemalloc

import numpy as np
import pytest
import torch

from cast_engine.errors import DatasetError, UserError
from cast_engine.models.embeds import EmbedCache, RecentEmbeds, fill
from cast_engine.models.load import load_image_model
from schemas.graph import Prompt


class FakeModel:
    """An encoder whose embeds are big enough to be seen in the memory of a test."""

    def __init__(self, fail_at=None):
        self.info = type("Info", (), {"encoder_sha256": "e" * 64})
        self.log, self.fail_at = [], fail_at

    def load_text_encoder(self):
        self.log.append("load")

    def free_text_encoder(self):
        self.log.append("free")

    def encode(self, prompts):
        if self.fail_at == len(self.log):
            raise KeyboardInterrupt
        self.log.append(prompts[0])
        seed = sum(map(ord, prompts[0]))
        # numpy's memory is traced, torch's is not
        return [{"prompt_embeds": torch.from_numpy(np.full((64, 1024), float(seed), dtype=np.float32))}]


def prompts(count):
    return [Prompt.of(f"prompt {i}") for i in range(count)]


def test_a_second_run_skips_what_is_done_and_loads_nothing(tmp_path):
    cache, model = EmbedCache(tmp_path, "e" * 64), FakeModel()
    assert fill(model, cache, prompts(3) + prompts(2)) == 3
    assert model.log == ["load", "prompt 0", "prompt 1", "prompt 2", "free"]
    again = FakeModel()
    assert fill(again, cache, prompts(3)) == 0
    assert again.log == []
    counted: list[int] = []
    assert fill(again, cache, prompts(4), counted.append) == 1
    assert counted == [1]
    assert again.log == ["load", "prompt 3", "free"]


def test_a_killed_run_goes_on_and_frees_the_encoder(tmp_path):
    cache, model = EmbedCache(tmp_path, "e" * 64), FakeModel(fail_at=3)
    with pytest.raises(KeyboardInterrupt):
        fill(model, cache, prompts(5))
    assert model.log[-1] == "free"
    assert fill(FakeModel(), cache, prompts(5)) == 3


def test_what_is_read_is_what_was_written(tmp_path):
    cache = EmbedCache(tmp_path, "e" * 64)
    embeds = {"prompt_embeds": torch.randn(3, 5).bfloat16(), "mask": torch.ones(3, dtype=torch.bool)}
    cache.put("0" * 12, embeds)
    found = cache.get("0" * 12)
    assert found.keys() == embeds.keys()
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in embeds.items())
    first = cache.sha256("0" * 12)
    cache.put("0" * 12, embeds)
    assert cache.sha256("0" * 12) == first


def test_another_encoder_has_embeds_of_its_own(tmp_path):
    EmbedCache(tmp_path, "e" * 64).put("0" * 12, {"prompt_embeds": torch.ones(2, 2)})
    other = EmbedCache(tmp_path, "f" * 64)
    with pytest.raises(DatasetError, match="no such embed"):
        other.get("0" * 12)
    with pytest.raises(DatasetError, match="no such embed"):
        other.sha256("0" * 12)
    with pytest.raises(UserError, match="another text encoder"):
        fill(FakeModel(), other, prompts(1))
    twin = EmbedCache(tmp_path, "e" * 63 + "f")  # the same folder name, another fingerprint
    with pytest.raises(DatasetError, match="made by encoder"):
        twin.get("0" * 12)


def test_damage_is_named(tmp_path):
    cache = EmbedCache(tmp_path, "e" * 64)
    cache.put("0" * 12, {"prompt_embeds": torch.ones(20, 20)})
    path = cache.path("0" * 12)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DatasetError, match="not readable") as caught:
        cache.get("0" * 12)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_does_not_grow_with_the_number_of_prompts(tmp_path):
    def peak(count):
        todo = prompts(count)
        tracemalloc.start()
        fill(FakeModel(), EmbedCache(tmp_path / str(count), "e" * 64), todo)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(2)
    assert peak(200) < 1.5 * peak(20)


def _fill(folder, barrier):
    barrier.wait()
    fill(FakeModel(), EmbedCache(folder, "e" * 64), prompts(20))


def test_two_processes_may_fill_one_cache(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    workers = [context.Process(target=_fill, args=(tmp_path, barrier)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    cache = EmbedCache(tmp_path, "e" * 64)
    assert len(list(cache.folder.iterdir())) == 20
    assert all(cache.get(p.prompt_id)["prompt_embeds"].shape == (64, 1024) for p in prompts(20))


def test_the_real_encoder_fills_a_cache(folder, tmp_path):
    model = load_image_model(folder, device="cpu")
    cache = EmbedCache(tmp_path, model.info.encoder_sha256)
    assert fill(model, cache, [Prompt.of("two cats")]) == 1
    assert model.events == ["load text_encoder", "free text_encoder"]
    assert cache.get(Prompt.of("two cats").prompt_id)["prompt_embeds"].shape == (64, 32)


class Disk:
    """A cache of embeds of 100 bytes that notes what is read from it."""

    def __init__(self):
        self.read = []

    def get(self, prompt_id):
        self.read.append(prompt_id)
        return {"prompt_embeds": torch.zeros(80, dtype=torch.uint8), "mask": torch.zeros(20, dtype=torch.uint8)}


def test_memory_keeps_the_embeds_used_last_up_to_a_number_of_bytes():
    disk = Disk()
    recent = RecentEmbeds(disk, limit=250)
    for prompt in "abacab":
        assert recent.get(prompt)["mask"].nbytes == 20
        assert recent.bytes <= 250
    assert disk.read == ["a", "b", "c", "b"]  # c took the place of b: a had been used after it
    small = RecentEmbeds(disk, limit=10)
    assert small.get("a") is small.get("a")
