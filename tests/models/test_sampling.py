"""Windows, rounding, and log-probs that come out again when the steps are gone over once more (G10, G12, G14)."""

from types import SimpleNamespace

import pytest
import torch

from cast_engine.errors import UserError
from cast_engine.models import lora
from cast_engine.models.base import Geometry
from cast_engine.models.sampling import replay, sample
from schemas.job import LoraConfig

WINDOW = range(1, 4)
STEPS = 6


def draw(model, embeds, seeds=(1, 2, 3, 4, 5), **changes):
    geometry = model.geometry(changes.pop("height", None), changes.pop("width", None))
    settings = {
        "sigmas": model.sigmas(STEPS, geometry),
        "geometry": geometry,
        "guidance": 3.0,
        "window": WINDOW,
        "dynamics": "flow_sde",
        "noise_level": 0.7,
    }
    chosen = [embeds[s % len(embeds)] for s in seeds]
    return sample(model, chosen, list(seeds), **(settings | changes))


def log_ratios(model, embeds, drawn, seeds, batch, *, guidance=None, noise_level=0.7, dynamics="flow_sde"):
    """Replay every (image, step) pair in batches of mixed steps; returns log-ratios [B, w, P]."""
    geometry = model.geometry()
    pairs = [(b, t) for t in range(len(drawn.steps)) for b in range(len(seeds))]
    out = torch.full_like(drawn.logp_old, torch.nan)
    for start in range(0, len(pairs), batch):
        part = pairs[start : start + batch]
        again = replay(
            model,
            model.condition([embeds[seeds[b] % len(embeds)] for b, _ in part], geometry),
            torch.stack([drawn.latents[b, t] for b, t in part]),
            torch.stack([drawn.latents[b, t + 1] for b, t in part]),
            torch.stack([drawn.steps[t] for _, t in part]),
            sigmas=drawn.sigmas,
            guidance=torch.stack([drawn.guidance[b] if guidance is None else torch.tensor(guidance) for b, _ in part]),
            dynamics=dynamics,
            noise_level=noise_level,
        )
        for (b, t), value in zip(part, again.log_prob, strict=True):
            out[b, t] = value - drawn.logp_old[b, t]
    return out


def test_only_the_window_is_kept(model, embeds):
    drawn = draw(model, embeds)
    assert drawn.latents.shape == (5, len(WINDOW) + 1, 64 // 8 * 64 // 8, 16)
    assert drawn.logp_old.shape == (5, 3, 64)
    assert drawn.logp_old.dtype == torch.float32
    assert drawn.steps.tolist() == [1, 2, 3]
    assert drawn.sigmas.shape == (STEPS + 1,)
    assert not torch.equal(drawn.latents[:, -1], drawn.final)


def test_without_a_window_nothing_but_the_image_is_kept(model, embeds):
    drawn = draw(model, embeds, window=range(0))
    assert drawn.latents.shape[1] == drawn.logp_old.shape[1] == len(drawn.steps) == 0


@pytest.mark.parametrize("dynamics", ["flow_sde", "dance_sde", "cps"])
def test_with_next_to_no_noise_the_window_is_the_ode(model, embeds, dynamics):
    quiet = draw(model, embeds, noise_level=1e-7, dynamics=dynamics)
    assert (quiet.final - draw(model, embeds, window=range(0)).final).abs().max() < 1e-5


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_replay_with_an_adapter_equals_the_rollout_with_it(model, embeds, batch, spread):
    """G10, with a fresh adapter (B = 0) and with one that does something."""
    lora.add_lora(model.transformer, LoraConfig(rank=8, alpha=16), model.lora_targets, blocks=model.lora_blocks())
    with torch.no_grad():
        for name, parameter in lora.lora_parameters(model.transformer).items():
            if ".lora_B." in name:
                parameter.normal_(0, spread)
    seeds = [1, 2, 3, 4, 5]
    ratios = log_ratios(model, embeds, draw(model, embeds, seeds), seeds, batch)
    assert ratios.abs().max() < 1e-5
    assert ratios.mean(-1).abs().max() < 1e-6


@pytest.mark.parametrize("dynamics", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_log_probs_equal_the_stored_ones(model, embeds, batch, dtype, dynamics):
    seeds = [1, 2, 3, 4, 5]
    drawn = draw(model, embeds, seeds, latent_dtype=dtype, dynamics=dynamics)
    assert drawn.latents.dtype == drawn.final.dtype == dtype
    ratios = log_ratios(model, embeds, drawn, seeds, batch, dynamics=dynamics)
    assert ratios.abs().max() < 1e-5  # the largest single position
    assert ratios.mean(-1).abs().max() < 1e-6  # whole images


def test_replay_needs_the_recorded_guidance(model, embeds):
    seeds = [1, 2]
    drawn = draw(model, embeds, seeds, guidance=[2.0, 3.0])
    assert drawn.guidance.tolist() == [2.0, 3.0]
    assert log_ratios(model, embeds, drawn, seeds, 2).abs().max() < 1e-5
    assert log_ratios(model, embeds, drawn, seeds, 2, guidance=1.0).abs().max() > 1e-4


def test_neighbours_change_nothing_but_rounding(model, embeds):
    together, alone = draw(model, embeds), draw(model, embeds, seeds=(3,))
    assert (together.final[2] - alone.final[0]).abs().max() < 1e-5
    backwards = draw(model, embeds, seeds=(5, 4, 3, 2, 1))
    assert (together.final.flip(0) - backwards.final).abs().max() < 1e-5


def test_members_differ_and_a_seed_says_it_all(model, embeds):
    first, again = draw(model, embeds, seeds=(1, 4)), draw(model, embeds, seeds=(1, 4))
    assert torch.equal(first.final, again.final)
    assert (first.final[0] - first.final[1]).abs().max() > 0.1


def test_the_walk_goes_on_from_the_rounded_latent(model, embeds):
    """Starting the remaining ODE steps from the stored bfloat16 latent gives the stored image."""
    drawn = draw(model, embeds, latent_dtype=torch.bfloat16)
    geometry = model.geometry()
    condition = model.condition([embeds[s % 3] for s in (1, 2, 3, 4, 5)], geometry)
    x = drawn.latents[:, -1].float()
    for i in range(WINDOW.stop, STEPS):
        with torch.no_grad():
            v = model.velocity(x, drawn.sigmas[i].expand(5), condition, drawn.guidance)
        x = x + v * (drawn.sigmas[i + 1] - drawn.sigmas[i])
    assert torch.equal(x.bfloat16(), drawn.final)


def test_replay_carries_gradients_and_sampling_does_not(model, embeds):
    drawn = draw(model, embeds)
    assert not drawn.logp_old.requires_grad
    model.transformer.requires_grad_(True)
    condition = model.condition(embeds[:1], model.geometry())
    again = replay(
        model, condition, drawn.latents[:1, 0], drawn.latents[:1, 1], drawn.steps[:1],
        sigmas=drawn.sigmas, guidance=drawn.guidance[:1], dynamics="flow_sde", noise_level=0.7,
    )  # fmt: skip
    again.log_prob.sum().backward()
    assert model.transformer.proj_out.weight.grad.abs().max() > 0


@pytest.mark.parametrize("window", [range(3, 6), range(-1, 2), (0, 2)])
def test_a_window_is_contiguous_and_leaves_the_last_step_alone(model, embeds, window):
    with pytest.raises(UserError, match=r"rollout\.window"):
        draw(model, embeds, window=window)


@pytest.mark.parametrize("dynamics", ["flow_sde", "dance_sde", "cps"])
def test_without_noise_the_window_is_the_ode_and_there_is_nothing_to_replay(model, embeds, dynamics):
    drawn = draw(model, embeds, noise_level=0.0, dynamics=dynamics)
    assert torch.equal(drawn.final, draw(model, embeds, window=range(0)).final)
    assert drawn.logp_old.shape == (5, 3, 64)
    assert not drawn.logp_old.any()
    for level in (0.0, 1e-60):  # as good as none in float32
        with pytest.raises(UserError, match=r"rollout\.noise_level: a step without noise has no log-probability"):
            log_ratios(model, embeds, drawn, [1, 2, 3, 4, 5], 5, noise_level=level, dynamics=dynamics)


class OnMeta:
    """A model on the meta device, whose values cannot be asked for: what would wait for a GPU is an error here."""

    transformer, device = None, torch.device("meta")

    def __init__(self):
        self.calls = 0

    def condition(self, embeds, geometry):
        return None

    def initial_noise(self, seed, geometry):
        return torch.zeros(geometry.positions, geometry.channels)

    def velocity(self, latents, sigma, condition, guidance):
        assert {t.device.type for t in (latents, sigma, guidance)} == {"meta"}
        self.calls += 1
        return latents * sigma[:, None, None]


@pytest.mark.parametrize("dynamics", ["flow_sde", "cps"])
def test_the_host_does_not_wait_for_the_device_between_steps(dynamics):
    model, sigmas, geometry = OnMeta(), torch.linspace(1, 0, 9), Geometry(32, 32, 2, 2, 4)
    with pytest.raises(NotImplementedError, match="meta"):  # when the walk is over, its end is moved to the CPU
        sample(
            model, [{}] * 2, [1, 2],
            sigmas=sigmas, geometry=geometry, guidance=2.0, window=range(1, 4), dynamics=dynamics, noise_level=0.7,
        )  # fmt: skip
    assert model.calls == 8
    x = torch.zeros(2, 4, 4, device="meta")
    again = replay(
        model, SimpleNamespace(size=2), x, x, torch.tensor([2, 2]),
        sigmas=sigmas, guidance=x[:, 0, 0], dynamics=dynamics, noise_level=0.7,
    )  # fmt: skip
    assert again.log_prob.shape == (2, 4)
