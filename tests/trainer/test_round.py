"""A round from datasets to checkpoint, on a random FLUX.2 of the real classes."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from cast_engine.errors import DatasetError, ExitCode, UserError
from cast_engine.models import lora
from cast_engine.numerics import noise, sde
from cast_engine.store import Dataset
from tests.trainer import rounds
from tests.trainer.rounds import draw, job, weigh
from trainer.checkpoint import read_state
from trainer.guards import TrainingStopped


@pytest.fixture(scope="module")
def round0(world, tmp_path_factory):
    return draw(world, tmp_path_factory.mktemp("round0"))


@pytest.fixture(scope="module")
def trained(world, round0, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "train"
    round0.train(world.model(), out)
    return out


@pytest.fixture(scope="module")
def round1(world, trained, tmp_path_factory):
    return draw(world, tmp_path_factory.mktemp("round1"), round_=1, adapter=trained / "adapter.safetensors")


def adapter(path):
    return load_file(path / "adapter.safetensors")


def difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


# ---- the first update starts on-policy


@pytest.mark.parametrize("batch_size", [1, 4])
def test_ratio_is_one_before_the_first_update(round0, model, tmp_path, batch_size):
    state = round0.train(model, tmp_path / "out", job(batch_size=batch_size)).state
    assert max(state.start_ratio.values()) < 1e-5


@pytest.mark.parametrize("batch_size", [1, 4])
def test_ratio_is_one_with_a_trained_adapter(round1, trained, model, tmp_path, batch_size):
    summary = round1.train(model, tmp_path / "out", job(batch_size=batch_size), start=trained)
    assert max(summary.state.start_ratio.values()) < 1e-5
    assert summary.rows[1]["log_ratio_max"] > 0  # and the policy did move after that


@pytest.mark.parametrize("dynamics", ["dance_sde", "cps"])
def test_other_dynamics(world, model, tmp_path, dynamics):
    state = draw(world, tmp_path, dynamics=dynamics).train(model, tmp_path / "out").state
    assert max(state.start_ratio.values()) < 1e-5


@pytest.mark.parametrize("batch_size", [1, 3])
def test_ratio_is_one_with_bfloat16_latents(world, model, tmp_path, batch_size):
    """Old log-probs are those of the stored latents, so their rounding is none of the ratio's."""
    made = draw(world, tmp_path, latent_dtype=torch.bfloat16)
    summary = made.train(model, tmp_path / "out", job(batch_size=batch_size))
    assert max(summary.state.start_ratio.values()) < 1e-5
    assert abs(summary.rows[0]["center_mean"]) < 1e-5  # the rounding of what was stored is no move of the policy


@pytest.mark.parametrize("latent_dtype", [torch.float32, torch.bfloat16])
def test_two_positions_that_cancel_are_refused(world, model, tmp_path, monkeypatch, latent_dtype):
    """The image's log-ratio is exact, those of two positions are not."""

    sample = rounds.sample

    def skewed(*args, **kwargs):
        drawn = sample(*args, **kwargs)
        drawn.logp_old[:, 0, 0] += 1e-3
        drawn.logp_old[:, 0, 1] -= 1e-3
        return drawn

    monkeypatch.setattr(rounds, "sample", skewed)
    made = draw(world, tmp_path, latent_dtype=latent_dtype)
    with pytest.raises(TrainingStopped, match=r"off-policy start.* 0\.001 for a position"):
        made.train(model, tmp_path / "out")


def test_bfloat16_model(world, tmp_path):
    made = draw(world, tmp_path, dtype="bfloat16")
    summary = made.train(world.model("bfloat16"), tmp_path / "out", job(ratio_tolerance=1e-3))
    assert all(t.dtype == torch.float32 for t in adapter(tmp_path / "out").values())
    assert summary.state.start_ratio["image"] < 1e-3


def test_wrong_guidance_is_refused(world, model, tmp_path):
    made = draw(world, tmp_path, change=lambda meta: meta | {"guidance": 4.0})
    with pytest.raises(TrainingStopped, match="off-policy start") as caught:
        made.train(model, tmp_path / "out")
    assert caught.value.exit_code == ExitCode.GUARD
    assert not (tmp_path / "out").exists()


def test_noise_that_cannot_be_drawn_again_is_refused(world, model, tmp_path):
    made = draw(world, tmp_path, change=lambda meta: meta | {"seed": meta["seed"] + 1})
    with pytest.raises(TrainingStopped, match="noise drawn again"):
        made.train(model, tmp_path / "out")


# ---- inputs that do not belong together


def test_stale_rollout_is_refused_with_both_hashes(round0, round1, trained, model, tmp_path):
    sha256 = read_state(trained).adapter_sha256
    with pytest.raises(UserError, match=sha256) as caught:
        round1.train(model, tmp_path / "out")
    assert "no adapter" in str(caught.value)
    second = tmp_path / "second"
    round1.train(model, second, start=trained)
    with pytest.raises(UserError, match=read_state(second).adapter_sha256) as caught:
        round1.train(model, tmp_path / "out", start=second)
    assert sha256 in str(caught.value)


def test_rollout_of_another_model_is_refused(world, model, tmp_path):
    made = draw(world, tmp_path, change=lambda meta: meta | {"model_sha256": "f" * 64})
    with pytest.raises(UserError, match=f"f{{64}}.*{model.info.sha256}"):
        made.train(model, tmp_path / "out")


def test_mixed_images_are_refused(world, model, tmp_path):
    made = draw(world, tmp_path, change=lambda m: m | {"width": 32 if m["member"] == 3 else 64})
    with pytest.raises(UserError, match="width 32"):
        made.train(model, tmp_path / "out")


def test_round_number_must_be_that_of_the_images(round0, model, tmp_path):
    from dataclasses import replace

    with pytest.raises(UserError, match="images of round 0; expected round 3"):
        replace(round0, round_=3).train(model, tmp_path / "out")


def test_weights_of_another_rollout_are_refused(round0, world, model, tmp_path):
    foreign = weigh(Dataset.open(round0.rollout), tmp_path / "advantages", world.embeds, seal="0" * 64)
    with pytest.raises(DatasetError, match="made from rollout 000000000000"):
        foreign.train(model, tmp_path / "out")


def test_weights_that_are_not_finite_are_refused(world, model, tmp_path):
    def weight(key, positions):
        w = torch.ones(positions)
        if key.endswith("3"):
            w[5] = math.nan
        return w

    made = draw(world, tmp_path, weight=weight)
    with pytest.raises(DatasetError, match="W has values that are not finite"):
        made.train(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_shard_is_refused(world, model, tmp_path):
    made = draw(world, tmp_path)
    tar = min((made.rollout / "data").rglob("*.tar"))
    data = bytearray(tar.read_bytes())
    data[len(data) // 2] ^= 1
    tar.chmod(0o644)
    tar.write_bytes(data)
    with pytest.raises(DatasetError):
        made.train(model, tmp_path / "out")


def test_other_rank_than_the_checkpoint_is_refused(round1, trained, model, tmp_path):
    with pytest.raises(UserError, match="rank 2"):
        round1.train(model, tmp_path / "out", job(lora={"rank": 4, "alpha": 4}), start=trained)


# ---- the update itself


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_size_does_not_change_the_update(round0, world, trained, tmp_path, batch_size):
    round0.train(world.model(), tmp_path / "out", job(batch_size=batch_size))
    assert difference(adapter(tmp_path / "out"), adapter(trained)) < 1e-5


def test_gradient_checkpointing_does_not_change_the_update(round0, world, trained, tmp_path):
    round0.train(world.model(), tmp_path / "out", job(gradient_checkpointing=True))
    assert difference(adapter(tmp_path / "out"), adapter(trained)) < 1e-5


def test_uniform_weights_make_flow_grpo_update(world, tmp_path):
    """Two updates by hand: scalar advantage, mean log-prob, clipped ratio, AdamW; then the same by the trainer."""
    scalar = {"aaaaaaaaaaaa": [1.0, -0.5, -1.2, 0.7], "bbbbbbbbbbbb": [-1.0, 0.3, 1.1, -0.4]}

    def weight(key, positions):
        return torch.full((positions,), scalar[key[:12]][int(key[-1])])

    made = draw(world, tmp_path, weight=weight)
    config = job(ratio_center=False, updates_per_round=2, learning_rate=3e-3)
    made.train(world.model(), tmp_path / "out", config)
    by_hand = flow_grpo(world, made, config, scalar)
    assert difference(by_hand, adapter(tmp_path / "out")) < 1e-6


def flow_grpo(world, made, config, scalar):
    from cast_engine.models.embeds import EmbedCache
    from trainer.data import plan_updates

    model, reader = world.model(), Dataset.open(made.rollout).reader()
    train = config.train
    lora.add_lora(model.transformer, train.lora, model.lora_targets, blocks=model.lora_blocks(), seed=0)
    parameters = lora.lora_parameters(model.transformer)
    optimizer = torch.optim.AdamW(parameters.values(), lr=train.learning_rate, betas=train.betas, weight_decay=1e-4)
    groups = {p: [k for k in reader.keys() if k.startswith(p)] for p in scalar}  # noqa: SIM118
    embeds, geometry = EmbedCache(world.embeds, model.info.encoder_sha256), model.geometry()
    epsilon = 1e-4 * math.sqrt(65536 / (geometry.positions * geometry.channels))
    for keys in plan_updates(groups, seed=0, round_=0, epochs=1, updates=2):
        losses = []
        for key in keys:
            t = {name: value.to(model.device) for name, value in reader.tensors(key).items()}
            condition = model.condition([embeds.get(key[:12])], geometry)
            for j, step in enumerate(t["steps"].tolist()):
                x, y = t["latents"][None, j], t["latents"][None, j + 1]
                v = model.velocity(x, t["sigmas"][step : step + 1], condition, torch.tensor([3.0]))
                sigma, after = float(t["sigmas"][step]), float(t["sigmas"][step + 1])
                b2 = 0.7**2 * sigma / (1 - sigma)
                mean = x * (1 + b2 / (2 * sigma) * (after - sigma)) + v * (1 + b2 * (1 - sigma) / (2 * sigma)) * (
                    after - sigma
                )
                variance = b2 * (sigma - after)
                logp = (-((y - mean) ** 2) / (2 * variance) - 0.5 * math.log(2 * math.pi * variance)).mean()
                ratio = (logp - t["logp_old"][j].mean()).exp()
                a = scalar[key[:12]][int(key[-1])]
                losses.append(torch.maximum(-a * ratio, -a * ratio.clamp(1 - epsilon, 1 + epsilon)))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), train.grad_clip)
        optimizer.step()
    return {lora.file_key(n): p.detach().cpu() for n, p in parameters.items()}


def test_zero_weights_count_and_change_only_by_decay(world, model, tmp_path):
    made = draw(world, tmp_path, weight=lambda _, positions: torch.zeros(positions))
    summary = made.train(model, tmp_path / "out")
    assert [row["grad_norm"] for row in summary.rows] == [0.0, 0.0]
    assert not any(t.any() for k, t in adapter(tmp_path / "out").items() if "lora_B" in k)


def test_centre_uses_the_noise_of_the_recorded_seed(round0, world):
    reader = Dataset.open(round0.rollout).reader()
    model = world.model()
    key = reader.keys()[0]
    t, meta = {n: v.to(model.device) for n, v in reader.tensors(key).items()}, reader.meta(key)
    z = noise.step_noise(meta["seed"], 1, t["latents"].shape[1:]).to(model.device)
    from cast_engine.models.embeds import EmbedCache

    embeds = EmbedCache(world.embeds, model.info.encoder_sha256)
    condition = model.condition([embeds.get(key[:12])], model.geometry())
    with torch.no_grad():
        v = model.velocity(t["latents"][None, 0], t["sigmas"][1:2], condition, torch.tensor([3.0]))
    mean, std = sde.apply(sde.step_coefficients("flow_sde", t["sigmas"].cpu(), 1, 0.7), t["latents"][None, 0], v)
    assert float((mean[0] + std * z - t["latents"][1]).abs().max()) < 1e-5


def test_position_ratio_and_ema(round0, model, tmp_path):
    summary = round0.train(model, tmp_path / "out", job(ratio="position", ema_decay=0.5, epochs_per_round=2))
    assert len(summary.rows) == 4
    shadow, last = load_file(tmp_path / "out" / "ema.safetensors"), adapter(tmp_path / "out")
    assert shadow.keys() == last.keys()
    assert 0 < difference(shadow, last) < 1e-2


# ---- guards


@pytest.mark.parametrize("updates", [1, 4])
def test_a_huge_learning_rate_stops_itself(round1, trained, model, tmp_path, updates):
    before = {p.name: p.read_bytes() for p in trained.iterdir()}
    with pytest.raises(TrainingStopped) as caught:
        round1.train(model, tmp_path / "out", job(learning_rate=1e3, updates_per_round=updates), start=trained)
    assert caught.value.exit_code == ExitCode.GUARD
    assert caught.value.reason in {"adapter norm", "log-ratio", "non-finite loss"}
    assert any(f"update {n}:" in str(caught.value) for n in (3, 4, 5))  # of the run: within three of this round
    assert str(trained) in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert {p.name: p.read_bytes() for p in trained.iterdir()} == before


def test_an_image_that_moved_too_far_stops_training(round0, model, tmp_path):
    """Rounding gives update 1 some 1e-9 (more on a GPU), the step before it gives update 2 some 3e-5."""
    with pytest.raises(TrainingStopped, match="log-ratio: round 0: update 2"):
        round0.train(model, tmp_path / "out", job(max_log_ratio=1e-6, learning_rate=1e-2))
    assert not (tmp_path / "out").exists()


# ---- the checkpoint


def test_checkpoint_holds_the_adapter_and_nothing_else(trained, world):
    names = {p.name for p in trained.iterdir()}
    assert names == {"adapter.safetensors", "optimizer.safetensors", "metrics.jsonl", "state.json"}
    tensors = adapter(trained)
    model = world.model()
    lora.set_adapter(model.transformer, trained / "adapter.safetensors")
    parameters = lora.lora_parameters(model.transformer)
    assert len(tensors) == len(parameters) > 0
    assert all(".lora_A." in k or ".lora_B." in k for k in tensors)
    assert any(bool(t.any()) for k, t in tensors.items() if ".lora_B." in k)
    moments = load_file(trained / "optimizer.safetensors")
    assert moments.keys() == {f"{m}.{n}" for n in parameters for m in ("exp_avg", "exp_avg_sq")}
    size = sum(p.numel() * 4 for p in parameters.values())
    assert sum(p.stat().st_size for p in trained.iterdir()) < 3 * size + 40_000
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2]


def test_an_empty_save_stops_training(round0, model, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    def save_nothing(transformer, file, values=None):
        save_file({}, file)
        return ""

    monkeypatch.setattr(lora, "save_lora", save_nothing)
    with pytest.raises(Exception, match="the saved adapter has 0 tensors"):
        round0.train(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["adapter.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_refused(round1, trained, model, tmp_path, name):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    data = bytearray((copy / name).read_bytes())
    data[-5] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(DatasetError, match=f"{name}: damaged"):
        round1.train(model, tmp_path / "out", start=copy)
