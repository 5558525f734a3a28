"""Held-out images before and after, side by side, from the same prompt and the same noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cast_engine.errors import DatasetError
from cast_engine.run.layout import RunLayout
from cast_engine.run.report_data import Evaluation, Notes
from cast_engine.run.report_images import data_uri
from cast_engine.store.codec import decode_png
from cast_engine.store.dataset import Dataset
from schemas.graph import SceneGraph
from schemas.records import EvaluateMeta

BYTES = 8_000_000
"""Most characters of pictures in the gallery."""
CHANGES = {("wrong", "right"): "fixed", ("right", "wrong"): "broken"}


@dataclass(frozen=True)
class Verdict:
    """What the evaluation judge said about one atom of one image."""

    mark: str  # "right", "wrong", "missing"
    detail: str  # what it counted, or a score that is neither 0 nor 1


@dataclass(frozen=True)
class AtomRow:
    """One atom, before and after."""

    kind: str
    question: str
    expected: str
    before: Verdict
    after: Verdict | None
    change: str  # "fixed", "broken", ""


@dataclass(frozen=True)
class Card:
    """One held-out prompt."""

    key: str
    prompt: str
    before: str  # data URI
    after: str | None
    rows: Sequence[AtomRow]
    shares: Mapping[str, tuple[float, float | None]]
    """Share right before and after by kind, and under ``atoms`` for all."""


@dataclass(frozen=True)
class Gallery:
    """The cards, and what the rest did."""

    cards: Sequence[Card]
    before_name: str
    after_name: str | None
    improved: int
    worse: int
    same: int
    rule: str


def shares(meta: EvaluateMeta) -> dict[str, float]:
    """Return the mean score of the atoms of each kind, and of all (``atoms``); missing ones left out."""
    parts: dict[str, list[float]] = {"atoms": []}
    for kind, score in zip(meta.kinds, meta.scores, strict=True):
        if score is not None:
            parts["atoms"].append(score)
            parts.setdefault(kind, []).append(score)
    return {k: sum(v) / len(v) for k, v in parts.items() if v}


def choose(changes: Mapping[str, float], count: int) -> list[str]:
    """Choose prompts to show: a third with the largest gains, a third with the largest losses, the rest spread evenly.

    Args:
        changes: change of the share of right atoms by key, in the order of the prompts.
        count: how many.
    """
    keys = list(changes)
    third = count // 3
    gains = sorted((k for k in keys if changes[k] > 1e-9), key=lambda k: -changes[k])[:third]
    losses = sorted((k for k in keys if changes[k] < -1e-9), key=lambda k: changes[k])[:third]
    rest = [k for k in keys if k not in {*gains, *losses}]
    missing = min(count - len(gains) - len(losses), len(rest))
    spread = [rest[i * len(rest) // missing] for i in range(missing)]
    return [*gains, *losses, *spread]


def build(
    layout: RunLayout,
    before: Evaluation,
    after: Evaluation | None,
    graphs: Mapping[str, SceneGraph],
    count: int,
    notes: Notes,
) -> Gallery | None:
    """Read the images of the chosen prompts.

    Args:
        layout: the run folder.
        before: the base.
        after: the newest evaluation of the trained model, or None.
        graphs: held-out scene graphs, for the questions.
        count: cards to make.
        notes: what is missing is added here.
    """
    changes = {}
    for key, meta in before.metas.items():
        if after is None:
            changes[key] = 0.0
        elif key in after.metas:
            a, b = shares(meta).get("atoms", math.nan), shares(after.metas[key]).get("atoms", math.nan)
            changes[key] = b - a if math.isfinite(b - a) else 0.0
    cards: list[Card] = []
    try:
        old = Dataset.open(layout.evaluate(before.name)).reader()
        new = Dataset.open(layout.evaluate(after.name)).reader() if after else None
        size = 0
        for key in choose(changes, count):
            first = data_uri(decode_png(old.read(key)["image.png"]))
            second = data_uri(decode_png(new.read(key)["image.png"])) if new else None
            size += len(first) + len(second or "")
            if size > BYTES:
                notes.append(f"Gallery: {len(cards)} prompts are shown instead of {count}, to keep the page small.")
                break
            meta = before.metas[key]
            cards.append(_card(meta, after.metas[key] if after else None, first, second, graphs.get(meta.prompt_id)))
    except DatasetError as error:
        notes.append(f"Gallery: {error}.")
    if not cards:
        return None
    order = {key: i for i, key in enumerate(changes)}
    cards.sort(key=lambda c: order[c.key])
    improved, worse = sum(c > 1e-9 for c in changes.values()), sum(c < -1e-9 for c in changes.values())
    same = len(changes) - improved - worse
    rule = _rule(after, len(changes))
    return Gallery(cards, before.name, after.name if after else None, improved, worse, same, rule)


def _rule(after: Evaluation | None, total: int) -> str:
    if after is None:
        return f"Chosen evenly from {total} held-out prompts."
    return (
        f"Chosen from {total} held-out prompts: a third with the largest gains, a third with the largest losses, "
        "the others spread evenly over the rest."
    )


def _card(
    before: EvaluateMeta, after: EvaluateMeta | None, first: str, second: str | None, graph: SceneGraph | None
) -> Card:
    questions = [a.question for a in graph.atoms] if graph else list(before.atom_ids)
    rows = []
    for k, kind in enumerate(before.kinds):
        old, new = _verdict(before, k), _verdict(after, k) if after else None
        change = CHANGES.get((old.mark, new.mark if new else ""), "")
        expected = before.expected[k] if k < len(before.expected) else ""
        rows.append(AtomRow(kind, questions[k], expected, old, new, change))
    a, b = shares(before), shares(after) if after else {}
    return Card(before.key, before.prompt, first, second, rows, {k: (v, b.get(k)) for k, v in a.items()})


def _verdict(meta: EvaluateMeta, k: int) -> Verdict:
    score = meta.scores[k]
    counted = meta.counted[k] if k < len(meta.counted) else None
    if score is None:
        return Verdict("missing", "")
    detail = f"counted {counted}" if counted is not None else ""
    if 0.0 < score < 1.0:
        detail = f"{detail} {score:.2f}".strip()
    return Verdict("right" if score >= 0.5 else "wrong", detail)
