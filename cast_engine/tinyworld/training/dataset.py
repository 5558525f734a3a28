"""Rendered scenes as arrays, kept in a cache folder so that the three trainings of one run share them."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cast_engine.tinyworld import prompts
from cast_engine.tinyworld.training.engine import log
from cast_engine.tinyworld.training.pictures import Array, CaptionNoise, noise_dict
from cast_engine.tinyworld.training.workers import Workers

_SHARD = 1024
_DRAW = "cast_engine.tinyworld.training.pictures:draw_with_facts"
_MERGED = "cast_engine.tinyworld.training.pictures:draw_merged"

Arrays = dict[str, Array]


def scenes(
    workers: Workers,
    split: prompts.Split,
    pictures: int,
    seed: int,
    cache: Path,
    noise: CaptionNoise | None = None,
) -> Arrays:
    """Return pictures of one split with their captions and facts, from the cache or drawn now.

    Args:
        workers: the processes that draw. The result does not depend on their number.
        split: which specifications.
        pictures: how many.
        seed: of everything random.
        cache: folder for the arrays (about 14 kB a picture).
        noise: of the captions.
    """
    noise = noise or CaptionNoise()
    what = [split, seed, noise_dict(noise), len(prompts.all_specs())]
    arguments = [(seed, i, size, split, noise_dict(noise)) for i, size in enumerate(_sizes(pictures))]
    return _cached(workers, split, pictures, what, cache, _DRAW, arguments)


def merged(workers: Workers, pictures: int, seed: int, cache: Path) -> Arrays:
    """Return pictures and facts of `pictures.draw_merged`, from the cache or drawn now."""
    arguments = [(seed, i, size) for i, size in enumerate(_sizes(pictures))]
    return _cached(workers, "merged", pictures, [seed], cache, _MERGED, arguments)


def _sizes(pictures: int) -> list[int]:
    return [min(_SHARD, pictures - start) for start in range(0, pictures, _SHARD)]


def _cached(
    workers: Workers,
    name: str,
    pictures: int,
    what: object,
    cache: Path,
    function: str,
    arguments: Sequence[tuple[Any, ...]],
) -> Arrays:
    folder = cache / f"{name}-{pictures}-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:10]}"
    if (folder / "done").exists():
        return {file.stem: np.load(file) for file in sorted(folder.glob("*.npy"))}
    drawn = workers.map(function, arguments)
    whole = {field: np.concatenate([d[field] for d in drawn]) for field in drawn[0]}
    with tempfile.TemporaryDirectory(dir=_made(cache)) as aside:
        for field, array in whole.items():
            np.save(Path(aside) / f"{field}.npy", array)
        for file in Path(aside).iterdir():
            file.replace(_made(folder) / file.name)
    (folder / "done").touch()
    log(f"drew {pictures} {name} pictures")
    return whole


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def to_pixels(images: Tensor) -> Tensor:
    """Turn uint8 [B, 64, 64, 3] into float32 [B, 3, 64, 64] in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def from_pixels(pixels: Tensor) -> Tensor:
    """Turn [B, 3, 64, 64] in [-1, 1] into uint8 [B, 64, 64, 3], as the stock pipeline does on its way to PIL."""
    unit = (pixels.float() / 2 + 0.5).clamp(0, 1)
    return (unit.permute(0, 2, 3, 1) * 255).round().to(torch.uint8)


def prompt_tokens(tokenizer: object, length: int) -> Tensor:
    """Return the token ids of every specification's prompt, and of the empty prompt as the last row: int64 [N+1, T]."""
    vocab: dict[str, int] = tokenizer.get_vocab()  # type: ignore[attr-defined]
    rows = np.zeros((len(prompts.all_specs()) + 1, length), np.int64)
    assert vocab["<pad>"] == 0
    for row, text in zip(rows, [*(prompts.text_of(s) for s in prompts.all_specs()), ""], strict=True):
        ids = [vocab[w] for w in ("<s>", *text.split(), "</s>")]
        row[: len(ids)] = ids  # a prompt that does not fit raises here
    return torch.from_numpy(rows)
