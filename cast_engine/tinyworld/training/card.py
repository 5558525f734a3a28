"""Model cards, written from the figures that the trainings leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cast_engine.tinyworld.training import engine


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(k for r in rows for k in r))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(r.get(c, "")) for c in columns) + " |" for r in rows]
    return lines


def _speed(name: str, figures: dict[str, Any]) -> str:
    return f"- {name}: {figures.get('steps')} steps in {figures.get('seconds')} s ({figures.get('steps_per_second')}/s)"


def write_flux2(out: Path) -> None:
    """Write OUT/flux2/MODEL_CARD.md from OUT/vae.json and OUT/base.json."""
    vae, base = engine.read_json(out / "vae.json"), engine.read_json(out / "base.json")
    lines = [
        "# tinyworld:flux2",
        "",
        "A FLUX.2 pipeline of the real classes in miniature: 64x64 pictures of coloured shapes, 8x8 latent positions.",
        "It is a test object, not an image model. Made by `python -m cast_engine.tinyworld.training.all`.",
        "",
        f"Data: {base.get('pictures')} rendered scenes of training specifications, eight noisy captions each.",
        f"Caption noise: {json.dumps(base.get('caption_noise'))}. Like web captions, they are often wrong, so the",
        "model now and then draws another number or another side: there is competence for a reward to elicit.",
        "Relations: to the left of, to the right of, on top of and under (touching), above and below (apart). Not in",
        "the world: in front of, behind (nothing overlaps).",
        "",
        "Training:",
        _speed("VAE", vae),
        *(_speed(name, found) for name, found in base.items() if name.startswith("phase")),
        "",
        "Phase 1: flow matching with the text encoder. Phase 2: guidance distillation, the scale is an input as in",
        "FLUX.2-dev. Phase 3: step distillation, one step of the 10-step schedule lands where four finer ones do, from",
        "noised pictures and from the student's own ten-step paths.",
        "One H200, bfloat16 autocast, seed 0.",
        "",
        f"VAE, held-out reconstructions judged by the exact verifier: {json.dumps(vae.get('held_out'))}",
        "",
        "Validation prompts (none of their specifications was seen in training), exact verifier, one picture each;",
        "`atoms` is the mean share of a prompt's atoms, `all` the share of prompts with every atom right,",
        "`many` and `few` the shares of groups with too many or too few objects, `gain` the difference in `atoms` to",
        "ten steps at the stock shift (6.7) from the same noise, with its paired standard error:",
        "",
        *_table(base.get("table", [])),
        "",
    ]
    (out / "flux2" / "MODEL_CARD.md").write_text("\n".join(lines))


def write_judge(out: Path) -> None:
    """Write OUT/judge/MODEL_CARD.md from OUT/judge.json."""
    figures = engine.read_json(out / "judge.json")
    lines = [
        "# tinyworld:judge",
        "",
        "A Qwen3-VL of the real class in miniature that answers GenEval 2's questions about the tiny world's pictures.",
        "Made by `python -m cast_engine.tinyworld.training.all`.",
        "",
        f"Data: {figures.get('pictures')} rendered scenes of training specifications,",
        f"{figures.get('samples')} pictures drawn by the tiny FLUX.2 for training prompts.",
        "Answers by the exact verifier.",
        "After the answer token the model was trained to point: the next token is a distribution over the 64 grid",
        "cells that hold what was asked about. That gives the answer's attention row something to look for.",
        f"Weight of direct supervision of the answer rows' attention: {figures.get('attention_weight')}: the figures",
        "below say that credit maps can be relied on in this world, not that a VLM localises without being taught to.",
        "One H200, bfloat16 autocast, seed 0.",
        "",
        *(_speed("Earlier training", found) for found in figures.get("earlier", [])),
        _speed("Training", figures.get("training", {})),
        "",
        "Held-out accuracy:",
        "",
        *_table([{"pictures": k, **v} for k, v in figures.get("accuracy", {}).items()]),
        "",
        "Pointing game, two-group scenes, correctly answered: share of attention maps (layers from 40% to 80% of the",
        "depth, mean over heads) whose largest cell lies on the queried objects; `chance` is the share for a map that",
        "always finds some object, queried or not:",
        "",
        *_table(figures.get("pointing", [])),
        "",
    ]
    (out / "judge" / "MODEL_CARD.md").write_text("\n".join(lines))
