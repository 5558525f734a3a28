"""Prompts and their causal scene graphs: what must be visible in the image, as separately verifiable atoms."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AtomKind(StrEnum):
    """The kinds of verifiable atoms (`action` is GenEval 2's "verb")."""

    OBJECT = "object"
    COUNT = "count"
    ATTRIBUTE = "attribute"
    RELATION = "relation"
    ACTION = "action"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prompt(_Record):
    """One prompt and the id that every later record refers to."""

    prompt_id: str = Field(pattern=r"^[0-9a-f]{12}$")
    text: str = Field(min_length=1, max_length=4096)

    @classmethod
    def of(cls, text: str) -> Self:
        """Build a prompt; its id is the first 12 hex digits of sha256 over the whitespace-normalised text."""
        norm = re.sub(r"\s+", " ", text).strip()
        return cls(prompt_id=hashlib.sha256(norm.encode()).hexdigest()[:12], text=norm)


class Node(_Record):
    """A group of equal things: "two red circles"."""

    id: str
    noun: str  # singular
    plural: str
    count: int | None = Field(default=None, ge=1)
    attribute: str | None = None


class Edge(_Record):
    """A relation or action between two nodes."""

    id: str
    kind: AtomKind  # RELATION or ACTION
    predicate: str  # as in the prompt: "to the left of", "chasing"
    subject: str  # node id
    object: str  # node id


class Atom(_Record):
    """One question with one expected answer."""

    id: str
    kind: AtomKind
    nodes: tuple[str, ...] = Field(min_length=1)
    edge: str | None = None
    question: str
    expected: str  # "Yes" or a number word, as GenEval 2 writes it
    parents: tuple[str, ...] = ()
    weight: float = Field(default=1.0, ge=0.0)


class SceneGraph(_Record):
    """The causal scene graph of one prompt: nodes, edges and an acyclic set of atoms."""

    prompt_id: str
    prompt: str
    source: str  # "grammar", "geneval2", "llm"
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    atoms: tuple[Atom, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        nodes, edges = {n.id for n in self.nodes}, {e.id for e in self.edges}
        if len(nodes) != len(self.nodes) or len(edges) != len(self.edges):
            raise ValueError("node and edge ids must be unique")
        for edge in self.edges:
            if not {edge.subject, edge.object} <= nodes:
                raise ValueError(f"edge {edge.id} names an unknown node")
        atoms = {a.id for a in self.atoms}
        if len(atoms) != len(self.atoms):
            raise ValueError("atom ids must be unique")
        for atom in self.atoms:
            if not set(atom.nodes) <= nodes or (atom.edge is not None and atom.edge not in edges):
                raise ValueError(f"atom {atom.id} names an unknown node or edge")
            if not set(atom.parents) <= atoms:
                raise ValueError(f"atom {atom.id} names an unknown parent")
        # The order is GenEval 2's (count, attribute, object), so a parent may come after its child.
        left = {a.id: set(a.parents) for a in self.atoms}
        while left:
            ready = {i for i, parents in left.items() if not parents & left.keys()}
            if not ready:
                raise ValueError(f"atoms {', '.join(sorted(left))} depend on each other in a circle")
            left = {i: parents for i, parents in left.items() if i not in ready}
        return self

    def node(self, node_id: str) -> Node:
        """Return the node with this id (KeyError if there is none)."""
        return {n.id: n for n in self.nodes}[node_id]
