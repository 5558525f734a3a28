"""Our sampler without noise is the stock pipeline (G11), and so is everything around it."""

import numpy as np
import pytest
import torch

from cast_engine.models.sampling import sample
from tests.models.random_flux2 import OUT_LAYERS, PROMPTS


@pytest.mark.parametrize(("count", "height", "width"), [(1, 64, 64), (3, 64, 64), (3, 32, 96)])
def test_latents_and_pixels_equal_the_stock_pipelines(model, stock, embeds, count, height, width):
    geometry = model.geometry(height, width)
    seeds = [11, 12, 13][:count]
    ours = sample(model, embeds[:count], seeds, sigmas=model.sigmas(5, geometry), geometry=geometry, guidance=2.5).final
    call = {
        "prompt_embeds": torch.stack([e["prompt_embeds"] for e in embeds[:count]]),
        "height": height,
        "width": width,
        "num_inference_steps": 5,
        "guidance_scale": 2.5,
    }
    generators = lambda: [torch.Generator().manual_seed(s) for s in seeds]  # noqa: E731
    latents = stock(**call, generator=generators(), output_type="latent").images
    images = np.stack([np.asarray(i) for i in stock(**call, generator=generators()).images])
    assert (ours - latents).abs().max() < 1e-5
    pixels = model.decode(ours, geometry)
    assert pixels.dtype == np.uint8
    assert pixels.std() > 5
    np.testing.assert_array_equal(pixels, images)


def test_embeds_equal_the_stock_pipelines(stock, embeds):
    expected, _ = stock.encode_prompt(list(PROMPTS), max_sequence_length=64, text_encoder_out_layers=OUT_LAYERS)
    ours = torch.stack([e["prompt_embeds"] for e in embeds])
    assert (ours - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("steps", "size"), [(1, 64), (7, 64), (28, 1024), (50, 1040)])
def test_sigmas_are_the_schedulers(model, stock, steps, size):
    """The pipeline's table at this size, shift included; past 4,300 tokens its formula is another one."""
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    geometry = model.geometry(size, size)
    mu = compute_empirical_mu(geometry.positions, steps)
    stock.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    assert torch.equal(model.sigmas(steps, geometry), stock.scheduler.sigmas)


def test_initial_noise_is_the_stock_pipelines(model, stock):
    geometry = model.geometry(32, 96)
    expected, ids = stock.prepare_latents(1, 4, 32, 96, torch.float32, "cpu", torch.Generator().manual_seed(5))
    assert torch.equal(model.initial_noise(5, geometry), expected[0])
    assert torch.equal(model.condition([{"prompt_embeds": torch.zeros(2, 32)}], geometry).tensors["image_ids"], ids[0])


def test_positions_run_row_by_row(model):
    """A token that stands out lights up its own square of the image."""
    geometry = model.geometry(32, 96)
    latents = torch.zeros(1, geometry.positions, geometry.channels)
    row, column = 2, 7
    latents[0, row * geometry.grid_w + column] = 8.0
    changed = np.abs(model.decode(latents, geometry)[0].astype(int) - model.decode(latents * 0, geometry)[0]).sum(-1)
    edge = geometry.height // geometry.grid_h
    squares = changed.reshape(geometry.grid_h, edge, geometry.grid_w, edge).sum((1, 3))
    assert np.unravel_index(squares.argmax(), squares.shape) == (row, column)


def test_guidance_reaches_the_model(model, embeds):
    geometry = model.geometry()
    sigmas = model.sigmas(2, geometry)
    low, high = (sample(model, embeds[:1], [1], sigmas=sigmas, geometry=geometry, guidance=g).final for g in (1.0, 4.0))
    assert (low - high).abs().max() > 1e-4
