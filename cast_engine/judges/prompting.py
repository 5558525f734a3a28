"""From questions to token ids: a shared prefix with the image, then one tail per question with its answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cast_engine.errors import UserError
from cast_engine.graphs.words import COUNTS
from cast_engine.judges.templates import NEUTRAL_QUESTION, answer_text, variants
from schemas.graph import Atom, AtomKind

NEUTRAL_ANSWER = "Yes"
"""Appended to the neutral question: its map is read from an answer token too, so the two maps are comparable."""

_ZERO = ("zero", "Zero", " zero", " Zero", "0", " 0")  # GenEval 2's digits begin at one
_NO = ("No", "no", " no", " No")


@dataclass(frozen=True)
class Tail:
    """What follows the shared prefix for one question: rest of the user turn, generation prompt, expected answer."""

    ids: tuple[int, ...]
    answer: int  # index in ids of the first answer token; the position before it predicts the answer

    def rows(self, which: str) -> range:
        """Return the positions whose attention is read: the answer tokens, or those that predict them."""
        shift = 1 if which == "predict" else 0
        return range(self.answer - shift, len(self.ids) - shift)


@dataclass(frozen=True)
class Candidates:
    """The answers that an atom's question could have, and the first token ids of each one's spellings."""

    words: tuple[str, ...]
    first_ids: tuple[tuple[int, ...], ...]


class Prompter:
    """Renders questions with the tokenizer's own chat template."""

    def __init__(self, path: Path, image_token_id: int, vision_end_token_id: int | None) -> None:
        from transformers import AutoTokenizer

        self.path, self.image_token_id = path, image_token_id
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._template = self.tokenizer.chat_template or _legacy_template(path)
        head, rest = self._split(NEUTRAL_QUESTION)
        closing = rest[:1] if vision_end_token_id is not None and rest[:1] == (vision_end_token_id,) else ()
        self.head, self.closing = head, closing  # before and after the image tokens
        self.tail = lru_cache(maxsize=65536)(self._tail)
        self._spelled: dict[tuple[AtomKind, str], tuple[int, ...]] = {}
        self._candidates: dict[tuple[AtomKind, str], Candidates] = {}

    def prefix(self, tokens: int) -> tuple[int, ...]:
        """Return the shared ids: chat header, the image's tokens and the token that closes it."""
        return (*self.head, *(self.image_token_id,) * tokens, *self.closing)

    def neutral(self) -> Tail:
        """Return the tail of the neutral question."""
        return self.tail(NEUTRAL_QUESTION, NEUTRAL_ANSWER)

    def atom(self, atom: Atom) -> Tail:
        """Return the tail of an atom's question and expected answer."""
        return self.tail(answer_text(atom.question), atom.expected)

    def spellings(self, atom: Atom) -> tuple[int, ...]:
        """Return the first token id of each spelling of the expected answer, those the tokenizer lacks left out."""
        key = (atom.kind, atom.expected)
        if key not in self._spelled:
            self._spelled[key] = self._first_ids(variants(atom))
        return self._spelled[key]

    def candidates(self, atom: Atom) -> Candidates:
        """Return the answers among which the report names the most likely one."""
        key = (atom.kind, atom.expected)
        if key not in self._candidates:
            if atom.kind is AtomKind.COUNT:
                words: tuple[str, ...] = COUNTS if atom.expected in COUNTS else (*COUNTS, atom.expected)
                spelled = [list(_ZERO), *(variants(atom.model_copy(update={"expected": word})) for word in words[1:])]
            else:
                words, spelled = ("Yes", "No"), [variants(atom), list(_NO)]
            self._candidates[key] = Candidates(words, tuple(self._first_ids(texts) for texts in spelled))
        return self._candidates[key]

    def _tail(self, text: str, answer: str) -> Tail:
        head, rest = self._split(text)
        if head != self.head or rest[: len(self.closing)] != self.closing:
            raise UserError(
                "the chat template puts text before the image", where=str(self.path), expected="image first"
            )
        question, answer_ids = rest[len(self.closing) :], self._ids(answer)
        if not answer_ids:
            raise UserError(f"the answer {answer!r} has no tokens", where=str(self.path), expected="a word")
        # Answer ids are taken from the answer alone, as GenEval 2 takes those it adds up.
        return Tail((*question, *answer_ids), len(question))

    def _first_ids(self, texts: list[str]) -> tuple[int, ...]:
        first = (self._ids(text)[:1] for text in texts)
        return tuple(ids[0] for ids in first if ids and ids[0] != self.tokenizer.unk_token_id)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _split(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids before and after the image placeholder of a user turn with one image and this text."""
        content = [{"type": "image"}, {"type": "text", "text": text}]
        rendered: Any = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
        )
        ids = self._ids(rendered)
        if ids.count(self.image_token_id) != 1:
            raise UserError(
                f"the chat template gave {ids.count(self.image_token_id)} image tokens for one image",
                where=str(self.path),
                expected=f"one token of id {self.image_token_id} (image_token_id in config.json)",
            )
        at = ids.index(self.image_token_id)
        return ids[:at], ids[at + 1 :]


def _legacy_template(path: Path) -> str:
    file = path / "chat_template.json"  # older folders keep the template beside the processor
    if not file.is_file():
        raise UserError("the tokenizer has no chat template", where=str(path), do="add chat_template.jinja")
    return str(json.loads(file.read_text(encoding="utf-8"))["chat_template"])
