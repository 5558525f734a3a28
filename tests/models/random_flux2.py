"""A FLUX.2 with random weights and every kind of block, saved to disk as a user's checkpoint would be."""

import json
from pathlib import Path

import torch

OUT_LAYERS = (1, 2)
TEXT_LENGTH = 1024
PROMPTS = ("two red circles", "a blue square to the left of a green cross", "three cats")


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<end>", "[IMG]", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # the user's words only: a byte-level system message would make every test slow
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}"
        "<end>{% endif %}{% endfor %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", padding_side="left", chat_template=template
    )


def make_encoder(tokenizer):
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    shared = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {"model_type": "mistral", "num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    vision = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 32, "patch_size": 16}
    config = Mistral3Config(
        text_config={**shared, **text, **ids, "max_position_embeddings": 2048},
        vision_config={**shared, **vision},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    return Mistral3ForConditionalGeneration(config).eval()


def make_pipeline(*, guidance_embeds=True, double=2, single=3):
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2Pipeline,
        Flux2Transformer2DModel,
    )

    torch.manual_seed(0)
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
    )
    vae.bn.running_mean.normal_(0, 0.3)
    vae.bn.running_var.uniform_(0.5, 1.5)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=len(OUT_LAYERS) * 16,
        timestep_guidance_channels=16,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    tokenizer = make_tokenizer()
    return Flux2Pipeline(
        scheduler=scheduler,
        vae=vae.eval(),
        text_encoder=make_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    )


def write_defaults(folder: Path, **changes) -> None:
    values = {
        "text_encoder_out_layers": list(OUT_LAYERS),
        "max_sequence_length": 64,
        "num_inference_steps": 6,
        "height": 64,
        "width": 64,
        "guidance_scale": 3.0,
    }
    (folder / "cast_model.json").write_text(json.dumps(values | changes))
