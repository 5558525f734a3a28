"""The stock pipeline loads what a run exports, and draws what the engine draws."""

import json
import logging
import re

import numpy as np
import pytest
import torch
from PIL import Image

from cast_engine.models.session import DrawRequest, ImageSession, SessionSpec
from cast_engine.store import Dataset
from cast_engine.tinyworld.bundle import resolve
from cast_engine.tinyworld.verify import detect
from schemas.job import ModelConfig
from tests.loop.commands import ROOT, copy_run

FOLDER = resolve("tinyworld:flux2")
SETTINGS = json.loads((FOLDER / "cast_model.json").read_text())


@pytest.fixture
def stock():
    """The stock pipeline on the shipped model, as the README makes it; loading and fusing adapters leaves traces."""
    from diffusers import Flux2Pipeline

    pipe = Flux2Pipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def with_adapter(finished, caplog):
    """The same with the adapter of the last round's evaluation, loaded by diffusers' own loader."""
    from diffusers import Flux2Pipeline

    pipe = Flux2Pipeline.from_pretrained(FOLDER)  # of its own: unloading leaves other kernels behind
    pipe.set_progress_bar_config(disable=True)
    with caplog.at_level(logging.WARNING):
        pipe.load_lora_weights(finished / "rounds/0001/train/ema.safetensors")
    assert not caplog.records, "the loader had something to say"
    return pipe


def evaluated(root, name):
    """Metas and images of an evaluation."""
    reader = Dataset.open(root / "evaluate" / name).reader()
    return [(reader.meta(k), np.asarray(reader.image(k))) for k in reader.keys()]  # noqa: SIM118


def drawn(pipe, meta, **changes):
    """What the README's example draws, with the recorded seed."""
    generator = torch.Generator().manual_seed(meta["seed"])
    return np.asarray(pipe(prompt=meta["prompt"], **(SETTINGS | changes), generator=generator).images[0])


def assert_alike(one, other):
    """Equal but for the rounding of some pixels: batches and merged adapters round otherwise."""
    difference = np.abs(one.astype(int) - other)
    assert difference.max() <= 2
    assert (difference > 0).mean() < 0.01


def test_the_readmes_example_runs(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "Flux2Pipeline" in block]
    monkeypatch.chdir(tmp_path)
    names = {}
    torch.manual_seed(0)  # the example draws without a generator of its own
    exec(example, names)
    picture = np.asarray(Image.open(tmp_path / "picture.png"))
    assert picture.shape == (256, 256, 3)
    assert len(detect(picture[2::4, 2::4])) >= 1, "shapes of the tiny world"
    assert names["settings"] == SETTINGS


def test_stock_pictures_are_the_evaluations_pixel_by_pixel(stock, job, finished, nursery, tmp_path):
    """One image at a time on both sides; the run itself drew in batches."""
    root = copy_run(finished, tmp_path / "run", "evaluate")
    result = nursery.engine("evaluate", "--config", job, "--run", root, "--set", "evaluate.batch_size=1")
    assert result.code == 0, result.err
    batched = {meta["key"]: image for meta, image in evaluated(finished, "base")}
    for number, (meta, image) in enumerate(evaluated(root, "base")):
        assert_alike(batched[meta["key"]], image)
        if number < 4:
            np.testing.assert_array_equal(drawn(stock, meta), image)


def test_twice_the_steps(stock, finished):
    meta, image = evaluated(finished, "base-double-steps")[0]
    assert_alike(drawn(stock, meta, num_inference_steps=2 * SETTINGS["num_inference_steps"]), image)


def test_the_exported_adapter_draws_the_images_of_the_evaluation(with_adapter, finished):
    bare = {meta["key"]: image for meta, image in evaluated(finished, "base")}
    for meta, image in evaluated(finished, "round-0002")[:4]:
        assert_alike(drawn(with_adapter, meta), image)
        assert (bare[meta["key"]] != image).mean() > 0.01, "the adapter changes what is drawn"


@pytest.mark.parametrize("name", ["adapter", "ema"])
def test_every_key_of_the_adapter_is_used(name, stock, finished):
    from safetensors.torch import load_file

    file = finished / f"rounds/0001/train/{name}.safetensors"
    stock.load_lora_weights(file)
    loaded = {n.replace(".default_0", ""): p for n, p in stock.transformer.named_parameters() if ".lora_" in n}
    expected = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[n], expected[n]) for n in expected)
    blocks = {tuple(n.split(".")[:2]) for n in expected}
    transformer = stock.transformer
    assert {b for b in blocks if "blocks" in b[0]} == {
        *(("transformer_blocks", str(i)) for i in range(len(transformer.transformer_blocks))),
        *(("single_transformer_blocks", str(i)) for i in range(len(transformer.single_transformer_blocks))),
    }, "every block carries an adapter"


def test_latents_of_the_exported_adapter(with_adapter, finished):
    """Engine and stock pipeline from the same embeds and seeds: 1e-5 with the adapter fused, as the engine draws.

    Beside the weights instead of added to them it is rounded otherwise, and ten steps of this model can make that a
    hundred times larger: then the median is held to 1e-5.
    """
    session = ImageSession(SessionSpec(ModelConfig(device="cpu"), finished / "embeds"))
    metas = [meta for meta, _ in evaluated(finished, "base")]
    request = DrawRequest([m["prompt_id"] for m in metas], [m["seed"] for m in metas], 10)
    bare = session.draw(request).final
    session.use_adapter(finished / "rounds/0001/train/ema.safetensors")
    ours = session.draw(request).final
    embeds = torch.stack([session.embeds.get(m["prompt_id"])["prompt_embeds"] for m in metas])
    beside = (ours - stock_latents(with_adapter, embeds, request.seeds)).abs()
    assert beside.median() < 1e-6
    assert beside.amax((1, 2)).median() < 1e-5
    assert beside.max() < 1e-2
    with_adapter.fuse_lora()
    assert (ours - stock_latents(with_adapter, embeds, request.seeds)).abs().max() < 1e-5
    assert (ours - bare).abs().amax((1, 2)).min() > 1e-2


def test_velocity_of_the_exported_adapter(with_adapter, finished):
    """One evaluation of the model as training calls it: 1e-5, the adapter beside the weights on both sides."""
    session = ImageSession(SessionSpec(ModelConfig(device="cpu"), finished / "embeds"))
    meta, _ = evaluated(finished, "base")[0]
    session.use_adapter(finished / "rounds/0001/train/ema.safetensors")
    session._prepare()
    model, geometry = session.model, session.geometry
    condition = model.condition([session.embeds.get(meta["prompt_id"])], geometry)
    x = model.initial_noise(meta["seed"], geometry)[None]
    with torch.no_grad():
        ours = model.velocity(x, torch.tensor([0.7]), condition, torch.tensor([2.0]))
        theirs = with_adapter.transformer(
            hidden_states=x,
            timestep=torch.tensor([0.7]),
            guidance=torch.tensor([2.0]),
            encoder_hidden_states=condition.tensors["prompt_embeds"],
            txt_ids=condition.tensors["text_ids"],
            img_ids=condition.tensors["image_ids"],
        ).sample
    assert (ours - theirs).abs().max() < 1e-5


def stock_latents(pipe, embeds, seeds):
    call = {k: v for k, v in SETTINGS.items() if k not in {"max_sequence_length", "text_encoder_out_layers"}}
    generators = [torch.Generator().manual_seed(s) for s in seeds]
    return pipe(prompt_embeds=embeds, generator=generators, output_type="latent", **call).images


def test_rollouts_without_noise_are_the_stock_pipelines(stock, job, finished, nursery, tmp_path):
    """Noise level 0: final latents of the shards against the stock pipeline, same prompts, seeds, steps and batches."""
    root = copy_run(finished, tmp_path / "run", "rounds", "run.json")
    result = nursery.engine("rollout", "--config", job, "--run", root, "--set", "rollout.noise_level=0")
    assert result.code == 0, result.err
    dataset = Dataset.open(root / "rounds/0000/rollout")
    reader = dataset.reader()
    for shard in dataset.plan:
        metas = [reader.meta(k) for k in shard.keys]
        tensors = [reader.tensors(k) for k in shard.keys]
        embeds, _ = stock.encode_prompt(
            metas[0]["prompt"],
            max_sequence_length=SETTINGS["max_sequence_length"],
            text_encoder_out_layers=SETTINGS["text_encoder_out_layers"],
        )
        expected = stock_latents(stock, embeds.expand(len(metas), -1, -1), [m["seed"] for m in metas])
        assert (torch.stack([t["final_latent"] for t in tensors]) - expected).abs().max() < 1e-5
        assert all(len(t["latents"]) == len(t["steps"]) + 1 for t in tensors), "the window is kept all the same"
        assert {m["guidance"] for m in metas} == {SETTINGS["guidance_scale"]}


@pytest.mark.parametrize("dynamics", ["flow_sde", "cps"])
def test_rollouts_without_noise_are_not_trained_on(job, finished, nursery, tmp_path, dynamics):
    root = copy_run(finished, tmp_path / "run", "rounds", "run.json")
    changes = ("--set", "rollout.noise_level=0", "--set", f"rollout.dynamics={dynamics}")
    command = ("--config", job, "--run", root, *changes)
    for stage in ("rollout", "score", "build-advantages"):
        result = nursery.engine(stage, *command)
        assert result.code == 0, result.err
    result = nursery.engine("train", *command)
    assert result.code == 2
    assert "rollout.noise_level: a step without noise has no log-probability" in result.error
    assert not (root / "rounds/0000/train").exists()
