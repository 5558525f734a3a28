"""A Qwen3-VL or Qwen2.5-VL class model as judge, through transformers under SDPA.

The model is causal, so one forward over image, question and the expected answer gives both numbers: the logits at the
position before the answer do not see it and are the score; the rows of the answer tokens are the map. Per image there
is one packed sequence: the image once, then all questions and a neutral one (see ``attention``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cast_engine.errors import UserError
from cast_engine.judges import attention, vision
from cast_engine.judges.base import AtomScores
from cast_engine.judges.prompting import Prompter, Tail
from cast_engine.models.checkpoint import fingerprint
from cast_engine.models.load import torch_device, torch_dtype
from cast_engine.numerics.soft_tifa import Mode, answer_probability
from schemas.graph import Atom, SceneGraph

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")
Rows = Literal["answer", "predict"]


@dataclass(frozen=True)
class _Item:
    """One image's questions; the last tail is the neutral one."""

    index: int
    atoms: tuple[Atom, ...]
    tails: tuple[Tail, ...]

    @property
    def length(self) -> int:
        return sum(len(tail.ids) for tail in self.tails)


class HFJudge:
    """Scores images by the probability of the expected answers and reads where the answer tokens looked.

    Args:
        path: model folder in transformers' format.
        dtype: of the weights and activations; probabilities and maps are float32 throughout.
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        mode: ``geneval2`` adds a token once per spelling that begins with it, ``dedup`` once.
        rows: read the rows of the answer tokens, or of the positions that predict them.
        layers: decoder layers to read; None: those from 40% to 80% of the depth.
        batch_size: images per forward.
    """

    name = "hf"

    def __init__(
        self,
        path: str | Path,
        dtype: str = "float32",
        device: str = "auto",
        mode: Mode = "dedup",
        rows: Rows = "answer",
        layers: Sequence[int] | None = None,
        batch_size: int = 16,
    ) -> None:
        self.path, self.mode, self.rows, self.batch_size = Path(path), mode, rows, batch_size
        self.device = torch_device(device)
        model = _load(self.path, torch_dtype(dtype), self.device)
        inner, config = model.model, model.config
        self._text, self._visual, self._head = inner.language_model, inner.visual, model.lm_head
        self._rope_index = inner.get_rope_index
        self._merge = int(config.vision_config.spatial_merge_size)
        depth = len(self._text.layers)
        self.layers = tuple(sorted(set(layers))) if layers is not None else attention.default_layers(depth)
        if not self.layers or self.layers[0] < 0 or self.layers[-1] >= depth:
            raise UserError(f"score.layers = {list(self.layers)}", expected=f"layers between 0 and {depth - 1}")
        attention.install(self._text)
        vision.accelerate_tower(self._visual)
        self._pixels = vision.Preprocessor(self.path)
        self._prompter = Prompter(self.path, config.image_token_id, getattr(config, "vision_end_token_id", None))

    @cached_property
    def model_sha256(self) -> str:
        """Fingerprint of all that decides the scores and maps: the folder's content, dtype, mode, rows and layers."""
        settings = [str(self._text.dtype), self.mode, self.rows, str(self.layers)]
        return fingerprint([self.path], settings)

    @torch.inference_mode()
    def score(self, images: Sequence[NDArray[np.uint8]], graphs: Sequence[SceneGraph]) -> list[AtomScores]:
        """Score each image (uint8 HWC) against the graph beside it; the result does not depend on the batching."""
        results: dict[int, AtomScores] = {}
        for items in self._batches(images, graphs):
            batch = self._score_batch([images[item.index] for item in items], items)
            results.update(zip((item.index for item in items), batch, strict=True))
        return [results[i] for i in range(len(images))]

    def _batches(self, images: Sequence[NDArray[np.uint8]], graphs: Sequence[SceneGraph]) -> Iterator[list[_Item]]:
        """Yield images of equal size, and of about equal amounts of text, so that little is padding."""
        by_size: dict[tuple[int, ...], list[_Item]] = {}
        neutral = self._prompter.neutral()
        for index, (image, graph) in enumerate(zip(images, graphs, strict=True)):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise UserError(f"image {index} is {image.dtype} of shape {image.shape}", expected="uint8, HxWx3")
            tails = (*(self._prompter.atom(atom) for atom in graph.atoms), neutral)
            by_size.setdefault(image.shape, []).append(_Item(index, graph.atoms, tails))
        for items in by_size.values():
            items.sort(key=lambda item: item.length)
            for start in range(0, len(items), self.batch_size):
                yield items[start : start + self.batch_size]

    def _score_batch(self, images: list[NDArray[np.uint8]], items: list[_Item]) -> list[AtomScores]:
        patches, patch_grid = self._pixels(images, self.device)
        seen = vision.encode(self._visual, patches, patch_grid, self._merge)
        tails = _PackedTails.of(items, self.rows, self.device)
        hidden, rows = self._forward(seen, patch_grid, tails)
        logits = self._head(hidden[tails.owner, tails.predict]).float()  # [all atoms of the batch, V]
        atoms = [atom for item in items for atom in item.atoms]
        scores = answer_probability(logits, [self._prompter.spellings(atom) for atom in atoms], self.mode)
        answers = self._likeliest(logits, atoms)
        maps, mass = attention.to_maps(torch.bmm(tails.average, rows), seen.grid)
        return _split(items, scores, answers, maps, mass)

    def _forward(
        self, seen: vision.VisionOutput, patch_grid: tuple[int, int], tails: _PackedTails
    ) -> tuple[Tensor, Tensor]:
        """Run the decoder; return the tails' hidden states ``[B, R, D]`` and the wanted rows ``[B, n, N]``."""
        batch, tokens = seen.tokens.shape[:2]
        prefix = torch.tensor(self._prompter.prefix(tokens), device=self.device)
        start, length = len(self._prompter.head), len(prefix)
        ids = torch.cat((prefix.expand(batch, -1), tails.ids), dim=1)
        embeds = self._text.get_input_embeddings()(ids)
        embeds[:, start : start + tokens] = seen.tokens.to(embeds.dtype)
        reader = attention.RowReader(frozenset(self.layers), tails.rows, slice(start, start + tokens))
        extra: dict[str, Any] = {}
        if seen.deepstack is not None:
            extra = {
                "visual_pos_masks": ids == self._prompter.image_token_id,
                "deepstack_visual_embeds": seen.deepstack,
            }
        out = self._text(
            inputs_embeds=embeds,
            position_ids=self._positions(prefix, patch_grid, tails),
            use_cache=False,
            packing=attention.Packing.of(length, tails.question),
            reader=reader,
            **extra,
        )
        backend = str(self._text.config._attn_implementation)  # noqa: SLF001
        return out.last_hidden_state[:, length:], reader.result(backend)

    def _positions(self, prefix: Tensor, patch_grid: tuple[int, int], tails: _PackedTails) -> Tensor:
        """Return M-RoPE positions ``[3, B, P + R]``: the model's own for the prefix; every tail starts right after."""
        ids = torch.cat((prefix, prefix.new_zeros(1)))[None]  # one text token more shows where text goes on
        kinds = (ids == self._prompter.image_token_id).int()
        kinds[0, -1] = 0
        grid = torch.tensor([[1, *patch_grid]], device=self.device)
        positions, _ = self._rope_index(input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=grid)
        batch = tails.offset.shape[0]
        after = (positions[:, :, -1:] + tails.offset).to(positions.dtype)
        return torch.cat((positions[:, :, :-1].expand(-1, batch, -1), after), dim=2)

    def _likeliest(self, logits: Tensor, atoms: list[Atom]) -> list[str]:
        """Return the most likely of each atom's possible answers ("" where the logits are not finite)."""
        options = [self._prompter.candidates(atom) for atom in atoms]
        flat = torch.tensor([q for q, option in enumerate(options) for _ in option.words], device=logits.device)
        ids = [first for option in options for first in option.first_ids]
        probability = answer_probability(logits, ids, "dedup", position=flat).cpu().numpy()
        answers, at = [], 0
        for option in options:
            each = probability[at : at + len(option.words)]
            at += len(option.words)
            answers.append("" if np.isnan(each).all() else option.words[int(np.nanargmax(each))])
        return answers


@dataclass(frozen=True)
class _PackedTails:
    """The tails of a batch, one after another per image, padded at the end to R positions."""

    ids: Tensor  # [B, R]
    question: Tensor  # [B, R], index of the question; -1: padding
    offset: Tensor  # [B, R], position within its tail
    owner: Tensor  # [A], image of each atom of the batch
    predict: Tensor  # [A], tail position that predicts the first answer token
    rows: Tensor  # [B, n], tail positions whose attention is read
    average: Tensor  # [B, Q, n], mean over the rows of each question (the neutral one included)

    @staticmethod
    def of(items: list[_Item], which: Rows, device: torch.device) -> _PackedTails:
        length = max(item.length for item in items)
        questions = max(len(item.tails) for item in items)
        width = max(sum(len(tail.rows(which)) for tail in item.tails) for item in items)
        shape = (len(items), length)
        ids, question, offset = np.zeros(shape, np.int64), np.full(shape, -1), np.zeros(shape, np.int64)
        rows, average = np.zeros((len(items), width), np.int64), np.zeros((len(items), questions, width), np.float32)
        owner, predict = [], []
        for b, item in enumerate(items):
            at = row = 0
            for q, tail in enumerate(item.tails):
                stop, wanted = at + len(tail.ids), [at + r for r in tail.rows(which)]
                ids[b, at:stop], question[b, at:stop], offset[b, at:stop] = tail.ids, q, range(len(tail.ids))
                rows[b, row : row + len(wanted)] = wanted
                average[b, q, row : row + len(wanted)] = 1 / len(wanted)
                if q < len(item.atoms):
                    owner.append(b)
                    predict.append(at + tail.answer - 1)
                at, row = stop, row + len(wanted)
        arrays = (ids, question, offset, np.array(owner), np.array(predict), rows, average)
        return _PackedTails(*(torch.from_numpy(a).to(device) for a in arrays))


def _split(items: list[_Item], scores: Tensor, answers: list[str], maps: Tensor, mass: Tensor) -> list[AtomScores]:
    """Cut a batch's results by image; ``maps`` [B, Q, gh, gw] holds the neutral map after each image's K atoms."""
    score, shares, half = scores.cpu().numpy(), mass.cpu().numpy(), maps.half().cpu().numpy()
    out, at = [], 0
    for b, item in enumerate(items):
        k = len(item.atoms)
        out.append(
            AtomScores(
                scores=score[at : at + k].copy(),
                answers=tuple(answers[at : at + k]),
                maps=half[b, :k].copy(),
                mass=shares[b, :k].copy(),
                neutral=half[b, k].copy(),
            )
        )
        at += k
    return out


def _load(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the model in evaluation mode; one line for a folder that is not what it should be."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils import logging

    if not (path / "config.json").is_file():
        raise UserError("no config.json", where=str(path), expected="a model folder in transformers' format")
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in MODEL_TYPES:
        raise UserError(
            f"model type {config.model_type!r}", where=str(path), expected=f"one of {', '.join(MODEL_TYPES)}"
        )
    other = set(getattr(config.text_config, "layer_types", None) or ()) - {"full_attention"}
    if other:  # the packed sequence would be attended wrongly
        found = f"the decoder has layers of type {', '.join(sorted(other))}"
        raise UserError(found, where=str(path), expected="full attention in every layer")
    place = {"device_map": {"": device}} if device.type == "cuda" else {}  # straight to the card, no copy in between
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # the stage has one of its own
    try:
        model = AutoModelForImageTextToText.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation="sdpa", **place
        )
    finally:
        if bars:
            logging.enable_progress_bar()
    return model.eval()
