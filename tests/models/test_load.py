"""Checkpoints: what is read from them, what is refused, what is in memory when (G16)."""

import gc
import json
import shutil
import weakref

import pytest
import torch

from cast_engine.errors import UserError
from cast_engine.models import checkpoint
from cast_engine.models.load import load_image_model
from tests.models.random_flux2 import PROMPTS, make_pipeline, write_defaults


@pytest.fixture
def copy(folder, tmp_path):
    """A checkpoint that a test may damage."""
    return shutil.copytree(folder, tmp_path / "copy")


def edit(path, *, drop=(), **changes):
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in drop}))


def test_sizes_come_from_the_checkpoint(model):
    geometry = model.geometry(32, 96)
    assert (geometry.grid_h, geometry.grid_w, geometry.positions, geometry.channels) == (4, 12, 48, 16)
    assert geometry.elements == 768
    assert model.geometry() == model.geometry(64, 64)
    with pytest.raises(UserError, match="multiples of 8; the nearest is 64x96"):
        model.geometry(60, 96)


def test_defaults_are_the_stock_ones_without_the_file(copy):
    (copy / "cast_model.json").unlink()
    found = load_image_model(copy).info.defaults
    assert (found.num_steps, found.height, found.width, found.guidance) == (50, 1024, 1024, 4.0)
    assert (found.max_sequence_length, found.text_encoder_out_layers) == (512, (10, 20, 30))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"steps": 3}, "unknown key 'steps'"), ({"height": "64"}, "a whole number"), ({"guidance": 1}, "unknown key")],
)
def test_a_wrong_defaults_file_is_refused(copy, changes, message):
    write_defaults(copy, **changes)
    with pytest.raises(UserError, match=message):
        _ = load_image_model(copy).info


def test_what_is_not_a_checkpoint_is_refused_in_one_line(copy, tmp_path):
    def refused(path, message):
        with pytest.raises(UserError, match=message) as caught:
            load_image_model(path)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nowhere", "no such folder")
    refused(copy / "vae", "no model_index.json")
    edit(copy / "transformer/config.json", _class_name="FluxTransformer2DModel")
    refused(copy, "class FluxTransformer2DModel; expected Flux2Transformer2DModel")
    edit(copy / "transformer/config.json", _class_name="Flux2Transformer2DModel")
    (copy / "vae/diffusion_pytorch_model.safetensors").rename(copy / "vae/other.safetensors")
    refused(copy, "vae: no weights")
    shutil.rmtree(copy / "vae")
    refused(copy, "component 'vae' is missing")
    edit(copy / "model_index.json", drop=["vae"])
    refused(copy, "no component 'vae'")
    edit(copy / "model_index.json", _class_name="FluxPipeline")
    refused(copy, "pipeline FluxPipeline; expected Flux2Pipeline")


def test_damaged_weights_are_refused_in_one_line(copy):
    file = copy / "transformer/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match="transformer: weights do not load") as caught:
        load_image_model(copy, device="cpu").load_denoiser()
    assert "\n" not in str(caught.value)


def test_missing_tensors_are_refused(copy):
    """diffusers would fill them with random numbers and go on."""
    from safetensors.torch import load_file, save_file

    file = copy / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 tensors are missing, first proj_out\.weight"):
        load_image_model(copy, device="cpu").load_denoiser()


def test_a_missing_shard_is_refused(copy):
    index = {"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
    (copy / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="weight file diffusion_pytorch_model-00001-of-00002"):
        load_image_model(copy)


@pytest.mark.parametrize(("kind", "value"), [("device", "cuda:99"), ("device", "gpu"), ("dtype", "float16")])
def test_impossible_devices_and_dtypes_are_refused(folder, kind, value):
    with pytest.raises(UserError, match=kind):
        load_image_model(folder, **{kind: value})


def test_encoder_and_denoiser_are_never_in_memory_together(folder):
    model = load_image_model(folder, device="cpu")
    with pytest.raises(RuntimeError, match="text encoder first"):
        model.encode(PROMPTS)
    model.load_text_encoder()
    model.encode(PROMPTS)
    encoder = weakref.ref(model._encoder.text_encoder)
    model.load_denoiser()
    assert encoder() is None
    with pytest.raises(RuntimeError, match="free the denoiser"):
        model.load_text_encoder()
    denoiser = weakref.ref(model.transformer)
    model.free_denoiser()
    gc.collect()
    assert denoiser() is None
    model.load_text_encoder()
    assert model.events == [
        "load text_encoder", "free text_encoder", "load transformer", "free transformer", "load text_encoder",
    ]  # fmt: skip


def test_an_embed_does_not_depend_on_its_neighbours(folder, embeds):
    model = load_image_model(folder, device="cpu")
    model.load_text_encoder()
    assert torch.equal(model.encode([PROMPTS[1]])[0]["prompt_embeds"], embeds[1]["prompt_embeds"])


def test_a_prompt_that_would_be_cut_is_refused(folder):
    model = load_image_model(folder, device="cpu")
    model.load_text_encoder()
    with pytest.raises(UserError, match="prompt of 101 tokens"):
        model.encode(["x" * 100])


def test_guidance_is_refused_where_the_model_takes_none(tmp_path, model):
    assert model.resolve_guidance(None) == 3.0
    assert model.resolve_guidance(1.5) == 1.5
    make_pipeline(guidance_embeds=False, double=1, single=1).save_pretrained(tmp_path / "plain")
    plain = load_image_model(tmp_path / "plain", device="cpu")
    assert plain.resolve_guidance(None) == 4.0
    with pytest.raises(UserError, match="takes none"):
        plain.resolve_guidance(1.5)


def test_fingerprints_name_contents_not_places(folder, copy):
    first, second = load_image_model(folder).info, load_image_model(copy).info
    assert (first.sha256, first.encoder_sha256) == (second.sha256, second.encoder_sha256)
    edit(copy / "transformer/config.json", _diffusers_version="9.9.9", _name_or_path="elsewhere")
    edit(copy / "scheduler/scheduler_config.json", shift=2.0)
    write_defaults(copy, max_sequence_length=96)
    third = load_image_model(copy).info
    assert third.sha256 != first.sha256
    assert third.encoder_sha256 != first.encoder_sha256
    edit(copy / "scheduler/scheduler_config.json", shift=3.0)
    assert load_image_model(copy).info.sha256 == first.sha256
    assert load_image_model(folder, dtype="bfloat16").info.encoder_sha256 != first.encoder_sha256


@pytest.mark.parametrize("limit", [checkpoint.FULL_HASH_BYTES, 0])
def test_any_changed_tensor_changes_the_fingerprint(copy, monkeypatch, limit):
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(checkpoint, "FULL_HASH_BYTES", limit)
    checkpoint._file_digest.cache_clear()
    file = copy / "transformer/diffusion_pytorch_model.safetensors"
    seen = {load_image_model(copy).info.sha256}
    for name, tensor in sorted(load_file(file).items())[:8]:
        tensor.view(-1)[-1] += 1
        save_file(load_file(file) | {name: tensor}, file, metadata={"format": "pt"})
        seen.add(load_image_model(copy).info.sha256)
    checkpoint._file_digest.cache_clear()
    assert len(seen) == 9


def test_bfloat16_weights_give_float32_velocities(folder, embeds):
    model = load_image_model(folder, dtype="bfloat16", device="cpu")
    model.load_denoiser()
    geometry = model.geometry()
    latents = model.initial_noise(0, geometry)[None]
    v = model.velocity(latents, torch.ones(1), model.condition(embeds[:1], geometry), torch.ones(1))
    assert v.dtype == torch.float32
    assert next(model.transformer.parameters()).dtype == torch.bfloat16
