"""A random FLUX.2 on disk, rounds drawn with it, and weights for them."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.models.random_flux2 import make_pipeline, write_defaults

os.environ.setdefault("HF_HUB_OFFLINE", "1")

DEVICE = os.environ.get("CAST_TEST_DEVICE", "cpu")
"""Where the tests of whole rounds run."""
PROMPT_IDS = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@dataclass(frozen=True)
class World:
    """A checkpoint and embeds for two prompts."""

    folder: Path
    embeds: Path

    def model(self, dtype="float32"):
        from cast_engine.models.load import load_image_model

        model = load_image_model(self.folder, dtype=dtype, device=DEVICE)
        model.load_denoiser()
        return model


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    from cast_engine.models.embeds import EmbedCache

    root = tmp_path_factory.mktemp("world")
    pipe = make_pipeline(double=1, single=2)
    with torch.no_grad():  # a policy that reacts to its input, as a trained one does
        for name, parameter in pipe.transformer.named_parameters():
            if name.startswith("proj_out"):
                parameter.mul_(4.0)
    pipe.save_pretrained(root / "model")
    write_defaults(root / "model")
    world = World(root / "model", root / "embeds")
    for dtype in ("float32", "bfloat16"):  # an embed belongs to the encoder's dtype too
        cache = EmbedCache(world.embeds, world.model(dtype).info.encoder_sha256)
        for i, prompt_id in enumerate(PROMPT_IDS):
            generator = torch.Generator().manual_seed(i)
            cache.put(prompt_id, {"prompt_embeds": torch.randn(5, 32, generator=generator)})
    return world


@pytest.fixture
def model(world):
    return world.model()
