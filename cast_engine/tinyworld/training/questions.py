"""GenEval 2's questions about the tiny world as tokens, and balanced draws of them with their true answers.

Everything is drawn on the device with plain tensor operations, so that it can be part of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cast_engine.graphs import templates
from cast_engine.graphs.words import COUNTS
from cast_engine.judges.templates import NEUTRAL_QUESTION, answer_text
from cast_engine.tinyworld import build
from cast_engine.tinyworld.prompts import PLURALS
from cast_engine.tinyworld.scenes import COLOURS, RELATIONS, SHAPES
from schemas.graph import AtomKind, Edge, Node

S, C, R = len(SHAPES), len(COLOURS), len(RELATIONS)
KINDS = ("object", "count", "attribute", "relation", "neutral")
OBJECT, COUNT, ATTRIBUTE, RELATION, NEUTRAL = range(5)
ATTRIBUTE_AT, RELATION_AT = 2 * S, 2 * S + 2 * S * C
NEUTRAL_AT = RELATION_AT + 4 * S * S * R
"""Where kinds begin in the catalogue: object, count, attribute [S, C, 2], relation [S, S, R, 2, 2], neutral."""


def _node(shape: str, *, many: bool, colour: str | None = None) -> Node:
    return Node(id=shape, noun=shape, plural=PLURALS[shape], count=2 if many else 1, attribute=colour)


def catalogue() -> list[str]:
    """Return the text of every question, in the constants' order (without "Answer in one word.")."""
    many = [_node(s, many=True) for s in SHAPES]
    texts = [templates.object_question(n) for n in many] + [templates.count_question(n) for n in many]
    for shape in SHAPES:
        for colour in COLOURS:
            texts += [templates.attribute_question(_node(shape, many=m, colour=colour)) for m in (False, True)]
    for subject in SHAPES:
        for target in SHAPES:
            for predicate in RELATIONS:
                edge = Edge(id="e", kind=AtomKind.RELATION, predicate=predicate, subject=subject, object=target)
                for a in (False, True):
                    for b in (False, True):
                        ends = _node(subject, many=a), _node(target, many=b)
                        texts.append(templates.edge_question(edge, *ends))
    return [*texts, NEUTRAL_QUESTION]


@dataclass(frozen=True)
class QuestionTable:
    """The catalogue as tokens.

    Attributes:
        ids: int64 [Q, slot], from after the picture to the token before the answer, padded on the right.
        answer: int64 [Q], where the answer token goes.
        words: int64 [13], ids of "Yes", "No", "zero", "one" .. "ten".
        cells: int64 [64], ids of the place tokens.
        head: ids before and after the picture, see `fast.JudgeCore`.
    """

    ids: Tensor
    answer: Tensor
    words: Tensor
    cells: Tensor
    head: list[int]

    @staticmethod
    def of(tok: Any, device: torch.device) -> QuestionTable:
        """Tokenise the catalogue."""
        end, start = tok.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
        assistant = tok.convert_tokens_to_ids("assistant")
        texts = catalogue()
        asked = [*(answer_text(t) for t in texts[:-1]), texts[-1]]
        rows = [[*tok.encode(t, add_special_tokens=False), end, start, assistant] for t in asked]
        assert tok.unk_token_id not in {i for r in rows for i in r}
        slot = max(map(len, rows)) + 1
        table = np.full((len(rows), slot), tok.pad_token_id, np.int64)
        for line, ids in zip(table, rows, strict=True):
            line[: len(ids)] = ids
        names = ["<|im_start|>", "user", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
        return QuestionTable(
            torch.from_numpy(table).to(device),
            torch.tensor([len(r) for r in rows], device=device),
            torch.tensor(tok.convert_tokens_to_ids(["Yes", "No", *COUNTS]), device=device),
            torch.tensor(tok.convert_tokens_to_ids(list(build.JUDGE_CELLS)), device=device),
            tok.convert_tokens_to_ids(names),
        )


@dataclass(frozen=True)
class Facts:
    """What is true of each picture, on the device; see `pictures.facts`."""

    count: Tensor
    colour: Tensor
    relation: Tensor
    mass: Tensor

    @staticmethod
    def of(arrays: dict[str, Any], device: torch.device) -> Facts:
        """Move arrays to the device."""
        names = ("count", "colour", "relation", "mass")
        return Facts(*(torch.from_numpy(arrays[n]).to(device) for n in names))

    def of_pictures(self, chosen: Tensor) -> Facts:
        """Return the facts of some pictures."""
        return Facts(self.count[chosen], self.colour[chosen], self.relation[chosen], self.mass[chosen])


@dataclass(frozen=True)
class Asked:
    """Questions drawn about a batch of pictures.

    Attributes:
        question: [B, slots], index in the catalogue.
        kind: [B, slots], index in `KINDS`.
        truth: [B, slots], index in `QuestionTable.words` of the right answer.
        given: [B, slots], index of the answer that is appended: what a prompt may expect, right or not.
        pixels: float [B, slots, 64], pixels per cell of what is asked about.
    """

    question: Tensor
    kind: Tensor
    truth: Tensor
    given: Tensor
    pixels: Tensor

    @property
    def share(self) -> Tensor:
        """Return how what is asked about spreads over the cells, sum one; uniform if it is not there."""
        total = self.pixels.sum(-1, keepdim=True)
        uniform = torch.full_like(self.pixels, 1 / self.pixels.shape[-1])
        return torch.where(total > 0, self.pixels / total.clamp(min=1), uniform)


def _pick(allowed: Tensor) -> Tensor:
    """Return a random index with `allowed` true along the last axis (any index where none is)."""
    return (torch.rand(allowed.shape, device=allowed.device) + allowed.float()).argmax(-1)


def _chance(p: float, like: Tensor) -> Tensor:
    return torch.rand(like.shape[0], device=like.device) < p


def _take(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(1, index.view(-1, 1, *([1] * (table.ndim - 2))).expand(-1, 1, *table.shape[2:])).squeeze(1)


def ask(facts: Facts, kind: int, *, two_groups: bool = False) -> Asked:
    """Draw one question of a kind about each picture, answers balanced.

    Args:
        facts: of the pictures [B].
        kind: index in `KINDS`.
        two_groups: ask about what is there, and append the true answer (for the pointing game).
    """
    there = facts.count > 0
    if kind == NEUTRAL:
        return _neutral(facts)
    absent = _chance({OBJECT: 0.5, COUNT: 0.15, ATTRIBUTE: 0.08, RELATION: 0.1}[kind], there)
    if two_groups:
        absent = torch.zeros_like(absent)
    shape = _pick(torch.where(absent[:, None], ~there, there))
    number = _take(facts.count, shape).long()
    mass = _take(facts.mass, shape).float()
    yes = _chance(0.5, there)
    flag = _chance(0.5, there).long()
    if kind == OBJECT:
        question, truth = shape, (number == 0).long()
    elif kind == COUNT:
        question, truth = S + shape, 2 + number.clamp(max=10)
    elif kind == ATTRIBUTE:
        mine = _take(facts.colour, shape)  # all false if there are several colours, or nothing
        others = facts.colour.any(1) & ~mine
        hard = torch.where((_chance(0.5, there) & others.any(1))[:, None], others, ~mine)
        colour = _pick(torch.where((yes & mine.any(1))[:, None], mine, hard))
        plural = torch.where(_chance(0.8, there), (number != 1).long(), flag)
        question = ATTRIBUTE_AT + (shape * C + colour) * 2 + plural
        truth = (~_take(mine, colour)).long()
    else:
        question, truth, mass = _relation(facts, shape, yes, mass)
    given = _given(kind, truth, two_groups=two_groups)
    return Asked(question, torch.full_like(question, kind), truth, given, mass)


def _relation(facts: Facts, subject: Tensor, yes: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    other = torch.arange(S, device=subject.device) != subject[:, None]
    there = (facts.count > 0) & other
    target = _pick(torch.where((there.any(1) & ~_chance(0.05, subject))[:, None], there, other))
    holds = _take(_take(facts.relation, subject), target)
    predicate = _pick(torch.where(yes[:, None], holds, ~holds))
    plural = (torch.stack([_take(facts.count, i).long() for i in (subject, target)]) != 1).long()
    plural = torch.where(torch.rand(plural.shape, device=plural.device) < 0.8, plural, 1 - plural)
    question = RELATION_AT + ((subject * S + target) * R + predicate) * 4 + plural[0] * 2 + plural[1]
    return question, (~_take(holds, predicate)).long(), mass + _take(facts.mass, target).float()


def _given(kind: int, truth: Tensor, *, two_groups: bool) -> Tensor:
    """Return the appended answer: "Yes" or the number that a prompt may ask for, the true one often enough."""
    if two_groups:
        return truth
    if kind == COUNT:
        likely = torch.randint(3, 7, truth.shape, device=truth.device)  # "one" to "four"
        return torch.where(_chance(0.5, truth), truth, likely)
    return torch.where(_chance(0.3, truth), truth, torch.zeros_like(truth))


def _neutral(facts: Facts) -> Asked:
    b = len(facts.count)
    zero = torch.zeros(b, dtype=torch.int64, device=facts.count.device)
    nothing = torch.zeros(b, facts.mass.shape[-1], device=zero.device)
    return Asked(zero + NEUTRAL_AT, zero + NEUTRAL, zero, zero, nothing)


def ask_all(facts: Facts, kinds: tuple[int, ...], *, two_groups: bool = False) -> Asked:
    """Draw one question per entry of `kinds` about each picture."""
    parts = [ask(facts, kind, two_groups=two_groups) for kind in kinds]
    stacked = ([getattr(p, name) for p in parts] for name in ("question", "kind", "truth", "given", "pixels"))
    return Asked(*(torch.stack(s, dim=1) for s in stacked))


def sequences(table: QuestionTable, asked: Asked) -> Tensor:
    """Return the token ids of the questions with the given answers appended: [B, slots, slot]."""
    ids = table.ids[asked.question]
    return ids.scatter(2, table.answer[asked.question][..., None], table.words[asked.given][..., None])
