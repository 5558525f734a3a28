"""Prompts of the tiny world, in GenEval 2's grammar: text <-> specification, and splits that cannot overlap.

A stable hash of the specification decides its split, so training, validation and test prompts are disjoint by
construction, however many are drawn. The order of the groups is part of the specification. Models of this world are
trained on pictures of train specifications only.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from cast_engine.errors import UserError
from cast_engine.tinyworld.scenes import COLOURS, MAX_COUNT, RELATIONS, SHAPES, TOUCHING, GroupSpec, Spec

Split = Literal["train", "validation", "test"]
NUMBERS = ("a", "two", "three", "four")
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
VOCABULARY: tuple[str, ...] = tuple(
    dict.fromkeys(
        [*NUMBERS, *COLOURS, *SHAPES, *PLURALS.values(), "and", *(w for r in RELATIONS for w in r.split())],
    )
)
"""Every word a prompt can hold."""
MAX_WORDS = 10
"""Words in the longest prompt."""

_SINGLE, _PAIR = 0.1, 0.2  # shares of prompts with one group, and with two groups but no relation
_PLAIN = 0.15  # share of groups without a colour


def group_text(group: GroupSpec) -> str:
    """Return for example "two red circles" or "a cross"."""
    noun = group.shape if group.count == 1 else PLURALS[group.shape]
    return " ".join(w for w in (NUMBERS[group.count - 1], group.colour, noun) if w)


def text_of(spec: Spec) -> str:
    """Return the prompt for a specification."""
    joint = f" {spec.relation or 'and'} "
    return joint.join(group_text(g) for g in spec.groups)


def spec_of(text: str) -> Spec:
    """Read a prompt of this world back into its specification.

    Raises:
        UserError: the text is not a prompt of the tiny world.
    """
    norm = re.sub(r"\s+", " ", text).strip().rstrip(".").lower()
    for relation in (None, *RELATIONS):
        parts = norm.split(f" {relation or 'and'} ")
        if len(parts) == 2:
            return _spec(text, (_read_group(parts[0], text), _read_group(parts[1], text)), relation)
    return _spec(text, (_read_group(norm, text),), None)


def _spec(text: str, groups: tuple[GroupSpec, ...], relation: str | None) -> Spec:
    try:
        return Spec(groups, relation)
    except ValueError as e:
        raise UserError(f"{e} (in {text!r})", where="prompt", do="reword the prompt") from None


def _read_group(words: str, text: str) -> GroupSpec:
    singular = {**{s: s for s in SHAPES}, **{p: s for s, p in PLURALS.items()}}
    number, *rest = words.split() or [""]
    colour = rest[0] if len(rest) == 2 and rest[0] in COLOURS else None
    if number not in (*NUMBERS, "one") or not rest or len(rest) != 1 + (colour is not None) or rest[-1] not in singular:
        raise UserError(
            f"cannot read {words!r} in {text!r}",
            where="tiny-world prompt",
            expected='a number up to four, perhaps a colour, and a shape, as in "two red circles"',
            do=f"use the shapes {', '.join(SHAPES)} and the colours {', '.join(COLOURS)}",
        )
    return GroupSpec(1 if number == "one" else NUMBERS.index(number) + 1, singular[rest[-1]], colour)


def canonical(spec: Spec) -> str:
    """Return the specification as the string that is hashed; never change it, or the splits move."""
    groups = [f"{g.count} {g.colour or '-'} {g.shape}" for g in spec.groups]
    return f"{spec.relation or 'none'}|" + "|".join(groups)


def spec_split(spec: Spec) -> Split:
    """Return the split a specification belongs to: 80% train, 10% validation, 10% test."""
    bucket = int.from_bytes(hashlib.sha256(canonical(spec).encode()).digest()[:8], "big") % 10
    return "train" if bucket < 8 else "validation" if bucket == 8 else "test"


@lru_cache(maxsize=1)
def all_specs() -> tuple[Spec, ...]:
    """Return every specification of the world, in a fixed order."""
    groups = [GroupSpec(n, s, c) for n, s, c in itertools.product(range(1, MAX_COUNT + 1), SHAPES, (None, *COLOURS))]
    specs = [Spec((g,)) for g in groups]
    for first, second, relation in itertools.product(groups, groups, (None, *RELATIONS)):
        alike = first.colour is not None and first.colour == second.colour
        if first.shape != second.shape and not (relation in TOUCHING and alike):
            specs.append(Spec((first, second), relation))
    return tuple(specs)


@lru_cache(maxsize=3)
def _pool(name: Split) -> tuple[tuple[Spec, ...], np.ndarray]:
    """Return a split's specifications and their probabilities."""
    specs = tuple(s for s in all_specs() if spec_split(s) == name)
    return specs, _weights(specs)


def _weights(specs: tuple[Spec, ...]) -> np.ndarray:
    """Return sampling probabilities: most prompts have two groups and a relation, some groups no colour."""
    kinds = [1 if len(s.groups) == 1 else 2 if s.relation is None else 3 for s in specs]
    weight = np.ones(len(specs))
    for i, spec in enumerate(specs):
        for group in spec.groups:
            weight[i] *= _PLAIN if group.colour is None else (1 - _PLAIN) / len(COLOURS)
    for kind, share in ((1, _SINGLE), (2, _PAIR), (3, 1 - _SINGLE - _PAIR)):
        chosen = np.array(kinds) == kind
        if chosen.any():
            weight[chosen] *= share / weight[chosen].sum()
    weight /= weight.sum()
    return weight


def sample_specs(rng: np.random.Generator, name: Split, n: int) -> list[Spec]:
    """Draw n specifications of a split independently (repeats occur): the distribution to train models on."""
    specs, weight = _pool(name)
    return [specs[i] for i in rng.choice(len(specs), size=n, p=weight)]


def split(name: str, n: int, seed: int) -> list[str]:
    """Draw distinct prompts of one split.

    Args:
        name: "train", "validation" or "test".
        n: how many; all of them differ.
        seed: the same seed gives the same prompts in the same order, and a smaller n a prefix of them.

    Raises:
        UserError: no such split, or it does not hold n prompts.
    """
    if name not in get_args(Split):
        raise UserError(f"no split {name!r}", where="tiny-world prompts", expected=", ".join(get_args(Split)))
    chosen: Split = "train" if name == "train" else "validation" if name == "validation" else "test"
    specs, weight = _pool(chosen)
    if not 0 <= n <= len(specs):
        raise UserError(
            f"{n} prompts asked for",
            where=f"tiny-world split {name!r}",
            expected=f"at most {len(specs)} (all its distinct prompts)",
            do="ask for fewer prompts",
        )
    # Weighted sampling without replacement (Efraimidis and Spirakis): the n smallest of exponential waiting times.
    wait = np.random.default_rng(seed).exponential(size=len(specs)) / weight
    return [text_of(specs[i]) for i in np.argsort(wait, kind="stable")[:n]]
