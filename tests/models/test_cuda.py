"""The same model on a CUDA device: phases, devices of every tensor, and numbers close to the CPU's."""

import numpy as np
import pytest
import torch

from cast_engine.models import lora
from cast_engine.models.load import load_image_model
from cast_engine.models.sampling import replay, sample
from schemas.job import LoraConfig
from tests.models.random_flux2 import PROMPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance", "replayed"), [("float32", 1e-2, 1e-5), ("bfloat16", 0.5, 0.1)])
def test_cuda_draws_what_the_cpu_draws(folder, model, embeds, dtype, tolerance, replayed):
    ours = load_image_model(folder, dtype=dtype, device="cuda")
    ours.load_text_encoder()
    encoded = ours.encode(PROMPTS)
    assert encoded[0]["prompt_embeds"].device.type == "cpu"
    ours.load_denoiser()
    ours.load_vae()
    for each in (model, ours):
        lora.add_lora(
            each.transformer, LoraConfig(rank=4, alpha=8), each.lora_targets, blocks=each.lora_blocks(), seed=1
        )
    geometry = model.geometry()
    call = {
        "sigmas": model.sigmas(6, geometry), "geometry": geometry, "guidance": 3.0,
        "window": range(1, 4), "dynamics": "flow_sde", "noise_level": 0.7,
    }  # fmt: skip
    seeds = [1, 2, 3]
    here, there = sample(model, embeds, seeds, **call), sample(ours, encoded, seeds, **call)
    assert there.final.device.type == there.logp_old.device.type == "cpu"
    assert (here.final - there.final).abs().max() < tolerance
    pixels = model.decode(here.final, geometry).astype(int) - ours.decode(there.final, geometry)
    assert np.abs(pixels).mean() < 255 * tolerance
    again = replay(
        ours, ours.condition(encoded, geometry), there.latents[:, 1], there.latents[:, 2], there.steps[1].repeat(3),
        sigmas=there.sigmas, guidance=there.guidance, dynamics="flow_sde", noise_level=0.7,
    )  # fmt: skip
    assert (again.log_prob.cpu() - there.logp_old[:, 1]).abs().max() < replayed
    again.log_prob.sum().backward()
    assert all(p.grad is not None for p in lora.lora_parameters(ours.transformer).values())
