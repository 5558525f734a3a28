"""One question through the stock classes alone, under eager attention: what the judge has to equal."""

from functools import lru_cache

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

LAYERS = (1, 3)


@lru_cache(maxsize=4)
def stock(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)


@torch.no_grad()
def plain(folder, image, text, answer, *, layers=LAYERS, rows="answer"):
    """Logits that predict the answer, and the eager attention map, by the stock classes alone."""
    model, tok, processor = stock(folder)
    pixels = processor(images=[image], return_tensors="pt")
    _, gh, gw = pixels["image_grid_thw"][0].tolist()
    content = [{"type": "image"}, {"type": "text", "text": text}]
    prompt = tok.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    prompt = prompt.replace("<|image_pad|>", "<|image_pad|>" * (gh * gw // 4))
    question, after = (tok(t, add_special_tokens=False, return_tensors="pt")["input_ids"] for t in (prompt, answer))
    ids = torch.cat((question, after), dim=1)
    out = model(
        input_ids=ids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        **pixels,
        output_attentions=True,
    )
    q, n = question.shape[1], ids.shape[1]
    wanted = range(q, n) if rows == "answer" else range(q - 1, n - 1)
    attention = torch.stack([out.attentions[layer][0] for layer in layers])[:, :, list(wanted)].mean(dim=(0, 1, 2))
    on_image = attention[ids[0] == model.config.image_token_id].view(gh // 2, gw // 2)
    return out.logits[0, q - 1], on_image
