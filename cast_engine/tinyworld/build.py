"""Tiny models of the real classes: a FLUX.2 pipeline for 64x64 pictures and a Qwen3-VL judge, with random weights.

Both folders load with the stock ``from_pretrained``. Beside the pipeline's ``model_index.json`` lies
``cast_model.json`` with what the stock call has to be told: hidden layers of the text encoder, prompt length, steps.

The judge's folder holds a tokenizer, an image processor and the model. Without torchvision there is no
``AutoProcessor`` for Qwen3-VL, so load ``AutoTokenizer`` and ``AutoImageProcessor`` one by one, render the chat
template with one image and one text part, and replace ``<|image_pad|>`` by 64 of them (8x8 tokens for a 64x64 picture).
"""

# ruff: noqa: S105, S106 (library objects without types; special tokens are not passwords)

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from cast_engine.graphs.words import COUNTS

IMAGE_SIZE = 64
GRID = 8
"""Latent positions and judge image tokens per side: both see the same 8x8 grid."""
MAX_SEQUENCE_LENGTH = 16
TEXT_ENCODER_OUT_LAYERS = (1, 2, 3)
NUM_INFERENCE_STEPS = 10
GUIDANCE_SCALE = 1.0

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<s>", "</s>"
IMAGE_TOKEN = "[IMG]"
JUDGE_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<unk>",
)
JUDGE_CELLS = tuple(f"<|cell_{i:02d}|>" for i in range(GRID * GRID))
"""Tokens that name a place in the picture, row by row; the judge is trained to point with them after its answer."""

_VOCABULARY = {
    "colours": "red green blue yellow purple orange pink cyan black white brown gray grey",
    "shapes": "circle square triangle cross star diamond heart hexagon ring rectangle shape object",
    "joints": """a an the and or with to left right of above below under over on top in inside next beside near behind
        front touching between at bottom""",
    "question": """are is there any how many image picture answer one word do does what which color colour describe not
        each every all user assistant system it this that they them yes no""",
}
"""More words than the world uses, so that a wider world keeps the ids."""
_COLOURS, _SHAPES, _JOINTS, _QUESTION = (words.split() for words in _VOCABULARY.values())
_PLURALS = [w + ("es" if w.endswith("s") else "s") for w in _SHAPES]
_MARKS = list(",.?!:;-'")

_FLUX_TEMPLATE = (
    "<s> {% for m in messages %}{% if m['role'] != 'system' %}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endif %}{% endfor %} </s>"
)
_JUDGE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% elif c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _word_tokenizer(vocab: list[str], unk: str, special: list[str], *, lower: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token=unk))
    if lower:
        tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.Whitespace()  # words and punctuation marks
    # not normalised, so that an upper-case special token survives the lower-casing
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    return tok


def flux_tokenizer() -> Any:
    """Return the prompt tokenizer: lower-case words, right padding, a template that drops the system message."""
    from transformers import PreTrainedTokenizerFast

    special = [PAD, UNK, BOS, EOS, IMAGE_TOKEN]
    words = [*_COLOURS, *_SHAPES, *_PLURALS, *COUNTS, *_JOINTS, *_MARKS]
    vocab = list(dict.fromkeys([*special, *words]))
    return PreTrainedTokenizerFast(
        tokenizer_object=_word_tokenizer(vocab, UNK, special, lower=True),
        pad_token=PAD,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="right",  # a causal encoder then gives the pads, which take part, a defined value
        model_max_length=512,
        chat_template=_FLUX_TEMPLATE,
    )


def judge_tokenizer() -> Any:
    """Return the judge's tokenizer: whole words, case kept ("Yes" and "yes" differ), Qwen's special tokens."""
    from transformers import PreTrainedTokenizerFast

    special = [*JUDGE_SPECIAL, *JUDGE_CELLS]
    lower = [*_COLOURS, *_SHAPES, *_PLURALS, *COUNTS, *_JOINTS, *_QUESTION]
    words = [*lower, *(w.capitalize() for w in lower), *(str(i) for i in range(11)), *_MARKS]
    vocab = list(dict.fromkeys([*special, *words]))
    return PreTrainedTokenizerFast(
        tokenizer_object=_word_tokenizer(vocab, "<unk>", special, lower=False),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=2048,
        chat_template=_JUDGE_TEMPLATE,
    )


def _scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(
        block_out_channels=(20, 40, 40),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=4,
        mid_block_add_attention=False,
        sample_size=IMAGE_SIZE,
    ).eval()


def _transformer(joint: int) -> Any:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=32,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=joint,
        timestep_guidance_channels=128,
        mlp_ratio=2.5,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=True,
    ).eval()


def _text_encoder(tok: Any) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {
        "model_type": "mistral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,  # the last one is not read, as in the real pipeline
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "sliding_window": None,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "vocab_size": len(tok),
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 16,
        "image_size": IMAGE_SIZE,
        "patch_size": 4,  # nothing reads it, so it is small
    }
    config = Mistral3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=tok.convert_tokens_to_ids(IMAGE_TOKEN),
        spatial_merge_size=2,
        tie_word_embeddings=True,
    )
    return Mistral3ForConditionalGeneration(config).eval()


def pipeline(seed: int = 0) -> Any:
    """Return a ``Flux2Pipeline`` with random weights drawn from ``seed``."""
    import torch
    from diffusers import Flux2Pipeline

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        tok = flux_tokenizer()
        encoder = _text_encoder(tok)
        joint = len(TEXT_ENCODER_OUT_LAYERS) * encoder.config.text_config.hidden_size
        return Flux2Pipeline(
            scheduler=_scheduler(), vae=_vae(), text_encoder=encoder, tokenizer=tok, transformer=_transformer(joint)
        )


def call_arguments(**overrides: Any) -> dict[str, Any]:
    """Return the content of ``cast_model.json``: arguments of the stock pipeline call for this model."""
    return {
        "text_encoder_out_layers": list(TEXT_ENCODER_OUT_LAYERS),
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "num_inference_steps": NUM_INFERENCE_STEPS,
        "height": IMAGE_SIZE,
        "width": IMAGE_SIZE,
        "guidance_scale": GUIDANCE_SCALE,
        **overrides,
    }


def save_pipeline(pipe: Any, path: Path, *, half: bool = True, **overrides: Any) -> None:
    """Save a pipeline and its ``cast_model.json``; weights as float16 on disk unless ``half`` is off."""
    path.mkdir(parents=True, exist_ok=True)
    pipe.save_pretrained(path)
    if half:
        halve_weights(path)
    (path / "cast_model.json").write_text(json.dumps(call_arguments(**overrides)))
    compact_json(path)


def build_pipeline(path: Path | str, seed: int = 0) -> Path:
    """Write the tiny FLUX.2 pipeline with random weights to ``path`` and return it."""
    path = Path(path)
    save_pipeline(pipeline(seed), path)
    return path


def _judge_config(tok: Any) -> Any:
    from transformers import Qwen3VLConfig

    text = {
        "hidden_size": 192,
        "intermediate_size": 288,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "vocab_size": len(tok),
        "bos_token_id": None,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,  # positions stay below 60
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 4,
        "hidden_size": 96,
        "intermediate_size": 224,
        "num_heads": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 192,
        "num_position_embeddings": (IMAGE_SIZE // 4) ** 2,
        "deepstack_visual_indexes": [1, 2],
        "initializer_range": 0.06,
    }
    ids = tok.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,  # as in the small Qwen3-VL models
    )


def judge(seed: int = 0) -> tuple[Any, Any]:
    """Return the judge's model, random weights drawn from ``seed``, and its tokenizer."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    tok = judge_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(_judge_config(tok)).eval(), tok


def save_judge(model: Any, tok: Any, path: Path, *, half: bool = True) -> None:
    """Save the judge's model, tokenizer and image processor; weights as float16 on disk unless ``half`` is off."""
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tok.save_pretrained(path)
    side = {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}  # in pixels, despite the names
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": side,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    compact_json(path)
    if half:
        halve_weights(path)


def build_judge(path: Path | str, seed: int = 0) -> Path:
    """Write the tiny judge with random weights to ``path`` and return it."""
    path = Path(path)
    save_judge(*judge(seed), path)
    return path


def compact_json(path: Path) -> None:
    """Rewrite every ``.json`` file under ``path`` without blanks: both models have to fit into 10 MB with all files."""
    for file in sorted(path.rglob("*.json")):
        file.write_text(json.dumps(json.loads(file.read_text()), separators=(",", ":")) + "\n")


def halve_weights(path: Path) -> None:
    """Rewrite every ``.safetensors`` file under ``path`` with float16 weights.

    The configs go on saying float32, so that loading without a dtype gives float32 too. The VAE's latent statistics
    stay float32: they scale every latent.
    """
    import torch
    from safetensors.torch import load_file, save_file

    for file in sorted(path.rglob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float32 and not name.startswith("bn."):
                tensors[name] = tensor.half().contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors writes files only their owner may read
