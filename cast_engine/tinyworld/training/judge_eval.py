"""Evaluation of the tiny judge: accuracy on held-out pictures, and whether its attention finds what was asked about."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cast_engine.judges.attention import default_layers
from cast_engine.judges.templates import answer_text
from cast_engine.numerics.maps import NEUTRAL_EPS
from cast_engine.tinyworld import build
from cast_engine.tinyworld.training import flux, questions
from cast_engine.tinyworld.training.dataset import scenes, to_pixels
from cast_engine.tinyworld.training.engine import log
from cast_engine.tinyworld.training.fast import JudgeCore
from cast_engine.tinyworld.training.questions import ATTRIBUTE, COUNT, KINDS, NEUTRAL, OBJECT, RELATION, Facts
from cast_engine.tinyworld.training.workers import Workers

Held = dict[str, tuple[Tensor, Facts]]
_HIT = 16
"""Pixels of the queried objects (of 64) from which a cell counts as lying on them."""


def held_out(args: argparse.Namespace, device: torch.device, workers: Workers) -> Held:
    """Return held-out pictures by name: renderings, and samples of the base model if there is one."""
    from cast_engine.tinyworld.training.judge import base_samples

    count = 16 if args.smoke else 2048
    drawn = scenes(workers, "validation", count, args.seed, args.cache)
    sets = {"renderings": drawn}
    if args.samples_from is not None:
        sets["samples"] = base_samples(args, device, workers, "validation", count)
    return {name: (torch.from_numpy(s["images"]).to(device), Facts.of(s, device)) for name, s in sets.items()}


def report(core: JudgeCore, table: questions.QuestionTable, held: Held) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Log and return accuracy by kind per set, and the pointing game."""
    with torch.random.fork_rng(devices=[held["renderings"][0].device.index or 0] if _cuda(held) else []):
        torch.manual_seed(0)
        accuracy = {name: accuracies(core, table, *pictures) for name, pictures in held.items()}
        pointing = [row for name, pictures in held.items() for row in pointing_game(core, table, name, *pictures)]
    for name, figures in accuracy.items():
        log(f"    {name}: {flux.row(figures)}")
    for r in pointing:
        log("    pointing " + "  ".join(f"{k} {v}" for k, v in r.items()))
    return accuracy, pointing


def _cuda(held: Held) -> bool:
    return held["renderings"][0].is_cuda


@torch.no_grad()
def accuracies(core: JudgeCore, table: questions.QuestionTable, images: Tensor, facts: Facts) -> dict[str, float]:
    """Return the share of right answers by kind of question, and for counts by the true number."""
    right: dict[str, list[Tensor]] = {}
    kinds = (OBJECT, COUNT, COUNT, ATTRIBUTE, ATTRIBUTE, RELATION, RELATION, NEUTRAL)
    for chosen in torch.split(torch.arange(len(images), device=images.device), 256):
        asked = questions.ask_all(facts.of_pictures(chosen), kinds)
        answer, _ = answers(core, table, images[chosen], asked)
        ok = answer == asked.truth
        for kind in (OBJECT, COUNT, ATTRIBUTE, RELATION):
            right.setdefault(KINDS[kind], []).append(ok[asked.kind == kind])
        for number in range(6):
            this = (asked.kind == COUNT) & (asked.truth == 2 + number)
            right.setdefault(f"count {number}", []).append(ok[this])
        for word, truth in (("yes", 0), ("no", 1)):
            this = (asked.kind == RELATION) & (asked.truth == truth)
            right.setdefault(f"relation {word}", []).append(ok[this])
    joined = {name: torch.cat(parts).float() for name, parts in right.items()}
    return {name: round(float(ok.mean()), 4) for name, ok in joined.items() if len(ok)}


def answers(
    core: JudgeCore,
    table: questions.QuestionTable,
    images: Tensor,
    asked: questions.Asked,
    layers: tuple[int, ...] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Return the likeliest answer (index in ``table.words``) to each question [B, slots], and attention maps."""
    hidden, maps = core(to_pixels(images), questions.sequences(table, asked), layers)
    at = table.answer[asked.question][..., None, None].expand(-1, -1, 1, hidden.shape[-1])
    logits = core.model.lm_head(hidden.gather(2, at - 1).squeeze(2))
    return logits[..., table.words].argmax(-1), maps


@torch.no_grad()
def pointing_game(
    core: JudgeCore, table: questions.QuestionTable, name: str, images: Tensor, facts: Facts
) -> list[dict[str, Any]]:
    """Ask about one of two groups, and look whether the attention map peaks on it.

    Returns:
        Per kind and row (the appended answer, or the position that predicts it): number of correctly answered
        questions; share of hits of the bare map and after division by the neutral question's map; share of the
        attention row on the picture; chance of a map that peaks on any object at random.
    """
    two = ((facts.count > 0).sum(1) == 2).nonzero()[:1024, 0]
    kinds = (OBJECT, COUNT, ATTRIBUTE, NEUTRAL, NEUTRAL, NEUTRAL, NEUTRAL, NEUTRAL)
    layers = default_layers(len(core.model.model.language_model.layers))
    found: dict[tuple[int, str], list[Tensor]] = {}
    for chosen in torch.split(two, 128) if len(two) else ():
        mine = facts.of_pictures(chosen)
        asked = questions.ask_all(mine, kinds, two_groups=True)
        answer, maps = answers(core, table, images[chosen], asked, layers)
        wanted = asked.pixels[:, :3] >= _HIT
        anything = (mine.mass.sum(1) >= _HIT)[:, None].expand_as(wanted)
        chance = (wanted & anything).sum(-1) / anything.sum(-1).clamp(min=1)
        for which, shift in (("answer", 0), ("predict", 1)):
            at = (table.answer[asked.question] - shift)[..., None, None].expand(-1, -1, 1, maps[0].shape[-1])
            rows = torch.stack(maps).mean(0).gather(2, at).squeeze(2)
            mass = rows.sum(-1)
            unit = rows / rows.mean(-1, keepdim=True).clamp(min=1e-9)
            divided = unit[:, :3] / (unit[:, 3:4] + NEUTRAL_EPS)
            hits = [wanted.gather(2, m.argmax(-1, keepdim=True))[..., 0].float() for m in (unit[:, :3], divided)]
            for kind in range(3):
                ok = (answer[:, kind] == asked.truth[:, kind]) & wanted[:, kind].any(-1)
                values = torch.stack([*(h[:, kind] for h in hits), mass[:, kind], chance[:, kind]], -1)
                found.setdefault((kind, which), []).append(values[ok])
    result = []
    for (kind, which), parts in found.items():
        values = torch.cat(parts)
        mean = [round(float(v), 3) for v in values.mean(0)] if len(values) else [None] * 4
        figures = dict(zip(("bare", "neutral", "mass", "chance"), mean, strict=True))
        result.append({"pictures": name, "kind": KINDS[kind], "rows": which, "n": len(values), **figures})
    return result


def check_equal(core: JudgeCore, table: questions.QuestionTable, tok: Any) -> None:
    """Stop if the fast judge differs from the stock model by more than rounding."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        difference = compare_with_stock(core, table, tok)
    except (TypeError, AttributeError) as error:  # another version of the library: the check is not worth the training
        log(f"could not compare with the stock model: {error!r:.200}")
        return
    finally:
        torch.set_float32_matmul_precision(precision)
    log(f"largest difference from the stock model's logits: {difference:.2e}")
    if difference > 0.2:
        raise RuntimeError(f"the fast judge differs from the stock model by {difference}")


@torch.no_grad()
def compare_with_stock(core: JudgeCore, table: questions.QuestionTable, tok: Any, model: Any = None) -> float:
    """Ask one question through the stock model and tokenizer; return the largest difference of the logits."""
    device = table.ids.device
    index = questions.RELATION_AT + 5
    text = answer_text(questions.catalogue()[index])
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    prompt = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + "Yes"
    prompt = prompt.replace("<|image_pad|>", "<|image_pad|>" * build.GRID**2)
    ids = tok(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(device)
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(device) * 2 - 1
    zero = torch.zeros(1, core.layout.slots, dtype=torch.int64, device=device)
    asked = questions.Asked(zero + index, zero, zero, zero, zero)
    hidden, _ = core(pixels, questions.sequences(table, asked))
    stock = (model or core.model).eval()
    out = stock(
        input_ids=ids,
        pixel_values=_patches(pixels),
        image_grid_thw=torch.tensor([[1, 2 * build.GRID, 2 * build.GRID]], device=device),
        mm_token_type_ids=(ids == stock.config.image_token_id).int(),
    )
    tail = ids.shape[1] - core.layout.prefix
    return float((core.model.lm_head(hidden[0, 0, :tail]) - out.logits[0, -tail:]).abs().max())


def _patches(pixels: Tensor) -> Tensor:
    from cast_engine.tinyworld.training.fast import patches

    return patches(pixels).flatten(0, 1)


def reload(folder: Path, core: JudgeCore, table: questions.QuestionTable) -> float:
    """Load a saved judge with the stock classes; return the largest difference of its logits from `core`'s."""
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder).to(table.ids.device)
    difference = compare_with_stock(core, table, AutoTokenizer.from_pretrained(folder), model)
    log(f"saved judge differs from the trained one by {difference:.2e} in the logits ({model.dtype})")
    return difference
