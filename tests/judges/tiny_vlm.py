"""Random tiny models of the two classes, with a byte-level tokenizer whose words are several tokens long."""

import json

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from schemas.graph import Atom, AtomKind, Edge, Node, SceneGraph

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|v|>",
]
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{%- for c in m.content %}"
    "{%- if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{%- else %}{{ c.text }}{%- endif %}"
    "{%- endfor %}<|im_end|>\n{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    lines = ["Yes yes one two Are there any circles in the image? Answer in one word."] * 5
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def build(kind, path, *, seed=0, patch=4, max_tokens=4096):
    """Write a folder of class "qwen3_vl", "qwen3_vl_moe" or "qwen2_5_vl"; 2 * patch pixels make an image token."""
    tok = tokenizer()
    ids = {
        "image_token_id": tok.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tok.convert_tokens_to_ids("<|v|>"),
        "vision_start_token_id": tok.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tok.convert_tokens_to_ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    text = {
        "vocab_size": len(tok),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": tok.pad_token_id,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 48,
    }
    torch.manual_seed(seed)
    if kind.startswith("qwen3_vl"):
        moe = kind == "qwen3_vl_moe"
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if moe else {}
        config = (Qwen3VLMoeConfig if moe else Qwen3VLConfig)(
            text_config={**text, **experts, "head_dim": 12, "rope_parameters": {**rope, "mrope_interleaved": True}},
            vision_config={**vision, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            **ids,
        )
        model = (Qwen3VLMoeForConditionalGeneration if moe else Qwen3VLForConditionalGeneration)(config)
    else:
        config = Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**vision, "window_size": 8 * patch, "fullatt_block_indexes": [1]},
            **ids,
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():  # sharper than the usual init, so that mistakes show
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3 if "embed" in name else 1.5 * weight[0].numel() ** -0.5)
    model.save_pretrained(path)
    tok.save_pretrained(path)
    pixels = (2 * patch) ** 2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.4, 0.3],
        "size": {"shortest_edge": 4 * pixels, "longest_edge": max_tokens * pixels},
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def graph(nouns=("circle",), relation=False):
    """A graph with a count and an object atom per noun, and a relation if asked."""
    nodes = tuple(Node(id=n, noun=n, plural=f"{n}s", count=2) for n in nouns)
    atoms = []
    for n in nouns:
        number = ("one", "two", "seven")[len(n) % 3]
        atoms += [
            Atom(
                id=f"o-{n}",
                kind=AtomKind.OBJECT,
                nodes=(n,),
                question=f"Are there any {n}s in the image?",
                expected="Yes",
            ),
            Atom(
                id=f"c-{n}",
                kind=AtomKind.COUNT,
                nodes=(n,),
                question=f"How many {n}s are in the image?",
                expected=number,
            ),
        ]
    edges = ()
    if relation:
        a, b = nouns[:2]
        edges = (Edge(id="e", kind=AtomKind.RELATION, predicate="left of", subject=a, object=b),)
        question = f"Are the {a}s to the left of the {b}s?"
        atoms.append(Atom(id="r", kind=AtomKind.RELATION, nodes=(a, b), edge="e", question=question, expected="Yes"))
    return SceneGraph(prompt_id="0" * 12, prompt="x", source="grammar", nodes=nodes, edges=edges, atoms=tuple(atoms))


def images(count, height=32, width=32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]
