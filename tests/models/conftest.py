"""Fixtures around one saved checkpoint with random weights."""

import os
from pathlib import Path

import pytest
import torch

from tests.models.random_flux2 import PROMPTS, make_pipeline, write_defaults

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A saved checkpoint; tests must not change it."""
    path = tmp_path_factory.mktemp("checkpoints") / "flux2-random"
    make_pipeline().save_pretrained(path)
    write_defaults(path)
    return path


@pytest.fixture(scope="session")
def stock(folder):
    """The stock pipeline on the same checkpoint."""
    from diffusers import Flux2Pipeline

    pipe = Flux2Pipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def embeds(folder):
    """Embeds of PROMPTS."""
    from cast_engine.models.load import load_image_model

    model = load_image_model(folder, device="cpu")
    model.load_text_encoder()
    return model.encode(PROMPTS)


@pytest.fixture
def model(folder):
    """Our model on the checkpoint, denoiser and VAE loaded."""
    from cast_engine.models.load import load_image_model

    model = load_image_model(folder, device="cpu")
    model.load_denoiser()
    model.load_vae()
    return model
