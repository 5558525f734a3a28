"""Adapters: where they sit (G23), what they start from, and files that others can load (G24)."""

import logging
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cast_engine.errors import UserError
from cast_engine.models import lora
from cast_engine.models.load import load_image_model
from cast_engine.models.patterns import alternatives
from cast_engine.models.sampling import sample
from schemas.job import LoraConfig

CONFIG = LoraConfig(rank=4, alpha=8)


def add(model, config=CONFIG, seed=3):
    return lora.add_lora(model.transformer, config, model.lora_targets, blocks=model.lora_blocks(), seed=seed)


def train(model, seed=0):
    """Random values in place of training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora.lora_parameters(model.transformer).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def final(model, embeds):
    geometry = model.geometry()
    return sample(model, embeds, [1, 2, 3], sigmas=model.sigmas(4, geometry), geometry=geometry, guidance=3.0).final


def fresh(folder, **kwargs):
    model = load_image_model(folder, device="cpu", **kwargs)
    model.load_denoiser()
    return model


@pytest.fixture
def trained(folder):
    model = fresh(folder)
    add(model)
    train(model)
    return model


def test_every_block_of_both_kinds_carries_adapters(model):
    report = add(model)
    assert len(report.blocks) == 5
    assert {count for block, count in report.blocks.items() if block.startswith("single")} == {2}
    assert {count for block, count in report.blocks.items() if not block.startswith("single")} == {12}
    assert sorted(report.targets.values()) == [2] * 12 + [3] * 2
    assert report.parameters == sum(p.numel() for p in model.transformer.parameters() if p.requires_grad)
    assert "2 of 2 transformer_blocks and 3 of 3 single_transformer_blocks: 30 layers" in report.summary()
    inside = [n for n, m in model.transformer.named_modules() if isinstance(m, torch.nn.Linear) and "lora" not in n]
    bare = {n for n in inside if "transformer_blocks" in n and not n.endswith("base_layer")}
    assert not bare  # no linear layer of a block is left out


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (r"transformer_blocks\.\d+\.attn\.(to_q|to_w)", r"to_w' matches no module"),
        (r"transformer_blocks\.\d+\.attn\.to_out", "a ModuleList; expected linear layers"),
        (r"transformer_blocks\.\d+\.attn\.to_q", r"3 of 5 blocks get no adapter, first single_transformer_blocks\.0"),
        (r"single_transformer_blocks\.\d+\.attn\.to_out\.0", "matches no module"),  # the trap of the peers' lists
        ("(", "no regular expression"),
    ],
)
def test_targets_that_miss_are_refused(model, targets, message):
    with pytest.raises(UserError, match=message):
        add(model, CONFIG.model_copy(update={"targets": targets}))
    assert not lora.has_lora(model.transformer)


def test_alternatives_are_split_and_everything_else_is_left_whole():
    assert alternatives(r"a\.(b|(?:c|d)e)|f") == [r"a\.b", r"a\.ce", r"a\.de", "f"]
    for whole in (r"[(|)]a", r"(a|b){2}", r"(a|b)?", r"a\|b", r"(?=a|b)c", r"[^]|]"):
        assert alternatives(whole) == [whole]
        re.compile(whole)


@pytest.mark.parametrize("init", ["gaussian", "default"])
def test_the_start_follows_from_the_seed_alone(folder, init):
    config = CONFIG.model_copy(update={"init": init, "rank": 16})
    states = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        before, model = torch.get_rng_state(), fresh(folder)
        torch.set_rng_state(before)
        add(model, config)
        assert torch.equal(torch.get_rng_state(), before)
        states.append({n: p.detach().clone() for n, p in lora.lora_parameters(model.transformer).items()})
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert all(not p.any() for n, p in states[0].items() if ".lora_B." in n)
    drawn = torch.cat([(p * (16 if init == "gaussian" else p.shape[1] ** 0.5)).flatten() for n, p in states[0].items() if ".lora_A." in n])  # fmt: skip  # noqa: E501
    assert abs(drawn.std() - (1 if init == "gaussian" else 1 / 3**0.5)) < 0.02
    assert len({round(float(p.flatten()[0]), 6) for n, p in states[0].items() if ".lora_A." in n}) > 20
    other = fresh(folder)
    add(other, config, seed=4)
    assert not torch.equal(next(iter(lora.lora_parameters(other.transformer).values())), next(iter(states[0].values())))


def test_a_fresh_adapter_changes_nothing(model, embeds):
    before = final(model, embeds)
    add(model)
    assert torch.equal(final(model, embeds), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_float32_and_alone_trainable(folder, embeds, dtype):
    model = fresh(folder, dtype=dtype)
    base = final(model, embeds)
    add(model)
    train(model)
    assert (final(model, embeds) - base).abs().max() > 1e-2
    trainable = {n: p for n, p in model.transformer.named_parameters() if p.requires_grad}
    assert trainable.keys() == lora.lora_parameters(model.transformer).keys()
    assert {p.dtype for p in trainable.values()} == {torch.float32}


def test_the_stock_pipeline_loads_the_file_whole_and_draws_the_same(folder, trained, embeds, tmp_path, caplog):
    from diffusers import Flux2Pipeline

    file = tmp_path / "adapter.safetensors"
    lora.save_lora(trained.transformer, file)
    pipe = Flux2Pipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    call = {
        "prompt_embeds": torch.stack([e["prompt_embeds"] for e in embeds]),
        "height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 3.0, "output_type": "latent",
    }  # fmt: skip
    draw = lambda: pipe(**call, generator=[torch.Generator().manual_seed(s) for s in (1, 2, 3)]).images  # noqa: E731
    base = draw()
    diffusers_log = logging.getLogger("diffusers")
    diffusers_log.propagate = True
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.load_lora_weights(str(file))
    diffusers_log.propagate = False
    assert not caplog.records
    loaded = {n for n, _ in pipe.transformer.named_parameters() if ".lora_" in n}
    assert len(loaded) == len(load_file(file)) == 60
    scales = {s for m in pipe.transformer.modules() for s in getattr(m, "scaling", {}).values()}
    assert scales == {2.0}
    ours = final(trained, embeds)
    assert (draw() - ours).abs().max() < 1e-5
    assert (base - ours).abs().max() > 1e-2
    by_folder = Flux2Pipeline.from_pretrained(folder)
    by_folder.load_lora_weights(str(tmp_path), weight_name=file.name)


def test_the_file_carries_rank_and_alpha(model, tmp_path):
    add(model, LoraConfig(rank=64, alpha=128))
    lora.save_lora(model.transformer, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as f:
        assert '"transformer.lora_alpha": 128' in f.metadata()["lora_adapter_metadata"]
        assert '"transformer.r": 64' in f.metadata()["lora_adapter_metadata"]


def test_saving_is_whole_repeatable_and_names_itself(trained, tmp_path):
    names = [tmp_path / f"{i}.safetensors" for i in range(8)]  # the library's own header order varies by process
    digests = {lora.save_lora(trained.transformer, file) for file in names}
    assert digests == {lora.adapter_sha256(names[0])}
    assert sorted(tmp_path.iterdir()) == names
    other = (
        "import sys; from pathlib import Path; from cast_engine.models import lora\n"
        "from cast_engine.models.load import load_image_model\n"
        "m = load_image_model(sys.argv[1], device='cpu'); m.load_denoiser()\n"
        "lora.load_lora(m.transformer, Path(sys.argv[2])); print(lora.save_lora(m.transformer, Path(sys.argv[3])))"
    )
    args = [sys.executable, "-c", other, str(trained.path), str(names[0]), str(tmp_path / "other.safetensors")]
    assert subprocess.run(args, capture_output=True, text=True, check=True).stdout.strip() in digests


def test_training_goes_on_bit_for_bit(folder, trained, tmp_path):
    file = tmp_path / "a.safetensors"
    lora.save_lora(trained.transformer, file)
    new, placed = fresh(folder), fresh(folder)
    lora.load_lora(new.transformer, file)
    add(placed)
    before = lora.lora_parameters(placed.transformer)
    lora.load_lora(placed.transformer, file)
    for model in (new, placed):
        found = lora.lora_parameters(model.transformer)
        for name, parameter in lora.lora_parameters(trained.transformer).items():
            assert torch.equal(found[name], parameter)
            assert found[name].requires_grad
    assert all(before[n] is p for n, p in lora.lora_parameters(placed.transformer).items())


def test_other_values_can_be_saved_in_their_place(trained, tmp_path):
    doubled = {n: p.detach() * 2 for n, p in lora.lora_parameters(trained.transformer).items()}
    lora.save_lora(trained.transformer, tmp_path / "a.safetensors", doubled)
    found = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[lora.file_key(n)], v) for n, v in doubled.items())
    with pytest.raises(ValueError, match="0 values for 60"):
        lora.save_lora(trained.transformer, tmp_path / "b.safetensors", {})


def test_files_that_do_not_fit_are_refused(folder, trained, tmp_path):
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    lora.save_lora(trained.transformer, good)
    tensors = load_file(good)

    def refused(message, transformer):
        with pytest.raises(UserError, match=message) as caught:
            lora.load_lora(transformer, bad)
        assert "\n" not in str(caught.value)

    base = fresh(folder).transformer
    refused("no readable adapter", base)
    bad.write_bytes(good.read_bytes()[:-50])
    refused("no readable adapter", base)
    save_file({"transformer.other.lora_A.weight": torch.ones(4, 2), "transformer.other.lora_B.weight": torch.ones(2, 4)}, bad)  # fmt: skip  # noqa: E501
    refused("adapter for other, which the model does not have", base)
    save_file({"unet.lora_A.weight": torch.ones(4, 2)}, bad)
    refused("key 'unet.lora_A.weight'", base)
    first = min(tensors)
    save_file({k: v for k, v in tensors.items() if k != first}, bad)
    refused(f"{first.removeprefix('transformer.')} does not fit", fresh(folder).transformer)
    other = fresh(folder)
    add(other, LoraConfig(rank=8, alpha=8))
    bad.write_bytes(good.read_bytes())
    refused("rank 4, alpha 8; expected rank 8, alpha 8", other.transformer)


def test_files_without_metadata_have_the_scale_diffusers_gives_them(folder, trained, embeds, tmp_path):
    from diffusers import Flux2Pipeline

    lora.save_lora(trained.transformer, tmp_path / "a.safetensors")
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "plain.safetensors")
    model = fresh(folder)
    lora.load_lora(model.transformer, tmp_path / "plain.safetensors")
    pipe = Flux2Pipeline.from_pretrained(folder)
    pipe.load_lora_weights(str(tmp_path / "plain.safetensors"))
    scale = {s for m in pipe.transformer.modules() for s in getattr(m, "scaling", {}).values()}
    assert scale == {s for m in model.transformer.modules() for s in getattr(m, "scaling", {}).values()} == {1.0}


def test_switching_adapters_and_back_to_the_base(folder, trained, embeds, tmp_path):
    lora.save_lora(trained.transformer, tmp_path / "a.safetensors")
    model = fresh(folder)
    base, adapted = final(model, embeds), final(trained, embeds)
    sha = lora.set_adapter(model.transformer, tmp_path / "a.safetensors")
    assert sha == lora.adapter_sha256(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(final(model, embeds), adapted)
    with lora.lora_disabled(model.transformer):
        np.testing.assert_array_equal(final(model, embeds), base)
    np.testing.assert_array_equal(final(model, embeds), adapted)
    assert lora.set_adapter(model.transformer, None) == ""
    np.testing.assert_array_equal(final(model, embeds), base)
    assert not lora.has_lora(model.transformer)
    lora.set_adapter(model.transformer, tmp_path / "a.safetensors")
    np.testing.assert_array_equal(final(model, embeds), adapted)
    with pytest.raises(UserError, match="no such adapter"):
        lora.adapter_sha256(tmp_path / "missing")


def test_merged_weights_say_the_same_and_leave_no_trace(trained, embeds):
    geometry = trained.geometry()
    condition = trained.condition(embeds[:1], geometry)
    x, one = trained.initial_noise(0, geometry)[None], torch.ones(1)
    before = {n: p.detach().clone() for n, p in trained.transformer.named_parameters()}
    with torch.no_grad():
        plain = trained.velocity(x, one, condition, one)
        with lora.merged(trained.transformer):
            inside = trained.velocity(x, one, condition, one)
            assert any(not torch.equal(p, before[n]) for n, p in trained.transformer.named_parameters())
        with lora.lora_disabled(trained.transformer):
            base = trained.velocity(x, one, condition, one)
        assert 0 < (inside - plain).abs().max() < 1e-5 < (base - plain).abs().max()
        with pytest.raises(KeyboardInterrupt), lora.merged(trained.transformer):
            raise KeyboardInterrupt
        assert torch.equal(trained.velocity(x, one, condition, one), plain)
    after = dict(trained.transformer.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in before.items())
    assert {n for n, p in after.items() if p.requires_grad} == lora.lora_parameters(trained.transformer).keys()


def test_bfloat16_weights_are_never_merged(folder):
    model = fresh(folder, dtype="bfloat16")
    add(model)
    train(model)
    before = {n: p.detach().clone() for n, p in model.transformer.named_parameters()}
    with lora.merged(model.transformer):
        assert all(torch.equal(p, before[n]) for n, p in model.transformer.named_parameters())
    with lora.merged(None):  # nothing loaded, nothing to do
        pass


def test_checkpointed_gradients_are_the_plain_ones(trained, embeds):
    """G25: frozen inputs must not detach a checkpointed block."""
    geometry = trained.geometry()
    condition = trained.condition(embeds, geometry)
    x = torch.stack([trained.initial_noise(s, geometry) for s in (1, 2, 3)])
    parameters = lora.lora_parameters(trained.transformer)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            trained.transformer.enable_gradient_checkpointing()
        trained.velocity(x, torch.tensor([0.9, 0.5, 0.2]), condition, torch.full((3,), 3.0)).square().mean().backward()
        grads.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        trained.transformer.zero_grad()
    # the last block's text stream ends in the single blocks, so every adapter takes part
    assert grads[0].keys() == grads[1].keys() == parameters.keys()
    assert all((grads[0][n] - g).abs().max() < 1e-6 for n, g in grads[1].items())
