"""Reads prompts of GenEval 2's form into scene graphs, without a language model.

A prompt is a chain of groups: "two red cars behind a dog, and three cats". A group is a number or article, perhaps
one adjective, and a noun of one or two words (any noun). Neighbouring groups are joined by a relation or an action,
or by a comma and/or "and". The subject of a relation is the group just before it, its object the group just after.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cast_engine.errors import UserError
from cast_engine.graphs import templates, words
from schemas.graph import Atom, AtomKind, Edge, Node, Prompt, SceneGraph

PREDICATES: dict[str, AtomKind] = {
    **dict.fromkeys(
        ("to the left of", "to the right of", "in front of", "behind", "under", "on top of", "above", "below"),
        AtomKind.RELATION,
    ),
    **dict.fromkeys(("playing with", "chasing", "jumping over"), AtomKind.ACTION),
}

_ARTICLES = ("a", "an")
_DIGITS = {str(i): word for i, word in enumerate(words.NUMBERS, start=1)}
_DETERMINERS = frozenset((*_ARTICLES, *words.NUMBERS, *words.VAGUE, *_DIGITS))
_NEVER_NOUN_WORDS = """
the this that these those with without of in on at by to from for into over near beside between is are was were
while who which or but not no left right front next inside outside around through across along
"""
_NEVER_NOUNS = frozenset(_NEVER_NOUN_WORDS.split())
_WORD = re.compile(r"[^\W\d_]+(['’-][^\W\d_]+)*")
_MAX_NOUN_WORDS = 2


@dataclass
class _Reader:
    """A prompt's words (commas are words too), and how far it has been read."""

    prompt: str
    tokens: list[str]
    at: int = 0

    def peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def predicate(self) -> str | None:
        """Return the relation or action that starts here, if any, without consuming it."""
        for name in PREDICATES:
            parts = name.split()
            if self.tokens[self.at : self.at + len(parts)] == parts:
                return name
        return None

    def stop(self, expected: str, at: int | None = None) -> UserError:
        """Return the error for a word that does not fit."""
        at = self.at if at is None else at
        found = f"{self.tokens[at]!r} (word {at + 1})" if at < len(self.tokens) else "the end of the prompt"
        return UserError(
            f"cannot read the prompt at {found}: {self.prompt!r}",
            where="prompt grammar",
            expected=expected,
            do='write it like "two red cars behind a dog, and three cats", or give a graph of your own',
        )


def parse(prompt: str) -> SceneGraph:
    """Read a prompt into its scene graph; atoms are in GenEval 2's order and carry its questions.

    Per group: count (unless open), attribute (if any), object; each relation or action stands between its two groups.
    Ids: nodes n0, n1, ..., edges e0, ..., atoms "n0.count", "n0.attribute", "n0.object" and the edge's id.

    Raises:
        UserError: the prompt is not of this form; names the word where reading stopped.
    """
    text = Prompt.of(prompt).text if prompt.strip() else ""
    reader = _Reader(text, re.findall(r"[^\s,]+|,", text.lower().rstrip(". ")))
    nodes = [_group(reader, 0, ())]
    edges: list[Edge] = []
    follows: dict[int, Edge] = {}  # the edge between a group and the next
    while reader.peek() is not None:
        name = reader.predicate()
        if name is not None:
            reader.at += len(name.split())
        else:
            _joint(reader)
        nodes.append(_group(reader, len(nodes), nodes))
        if name is not None:
            edge = Edge(
                id=f"e{len(edges)}",
                kind=PREDICATES[name],
                predicate=name,
                subject=nodes[-2].id,
                object=nodes[-1].id,
            )
            edges.append(edge)
            follows[len(nodes) - 2] = edge
    atoms: list[Atom] = []
    for i, node in enumerate(nodes):
        atoms += _node_atoms(node)
        if i in follows:
            atoms.append(_edge_atom(follows[i], node, nodes[i + 1]))
    known = Prompt.of(text)
    return SceneGraph(
        prompt_id=known.prompt_id,
        prompt=known.text,
        source="grammar",
        nodes=tuple(nodes),
        edges=tuple(edges),
        atoms=tuple(atoms),
    )


def _joint(reader: _Reader) -> None:
    """Consume a comma, "and", or both."""
    before = reader.at
    if reader.peek() == ",":
        reader.at += 1
    if reader.peek() == "and":
        reader.at += 1
    if reader.at == before:
        raise reader.stop(f'"and", a comma, or one of: {", ".join(PREDICATES)}')


def _group(reader: _Reader, index: int, before: tuple[Node, ...] | list[Node]) -> Node:
    """Consume one group: number or article, perhaps an adjective, noun."""
    determiner = reader.peek()
    if determiner is None or determiner not in _DETERMINERS:
        raise reader.stop(f'"a", "an", "some" or a number from {words.NUMBERS[0]} to {words.NUMBERS[-1]}')
    reader.at += 1
    start = reader.at
    while (word := reader.peek()) is not None and not _ends_group(reader, word):
        reader.at += 1
    found = reader.tokens[start : reader.at]
    attribute = found.pop(0) if len(found) > 1 and found[0] in words.ADJECTIVES else None
    if not found:
        raise reader.stop("a noun")
    first = reader.at - len(found)
    if len(found) > 1 and attribute is not None and found[0] in words.ADJECTIVES:
        raise reader.stop("a noun: one adjective per group is all the questions can ask about", first)
    if len(found) > _MAX_NOUN_WORDS:
        raise reader.stop("a relation, a comma or the end after a noun of one or two words", first + _MAX_NOUN_WORDS)
    noun = " ".join(found)
    count = None if determiner in words.VAGUE else 1 if determiner in _ARTICLES else _number(determiner)
    one = noun if count == 1 else words.singular(noun)
    many = words.plural(noun) if one == noun and not (count != 1 and words.unchanged(noun)) else noun
    if any(n.noun == one for n in before):
        raise reader.stop(f"each noun once: questions about two groups of {many} could not be told apart", first)
    return Node(id=f"n{index}", noun=one, plural=many, count=count, attribute=attribute)


def _ends_group(reader: _Reader, word: str) -> bool:
    """Whether the word here can no longer belong to a group's adjective and noun."""
    joins = word in (",", "and") or reader.predicate() is not None
    return joins or word in _DETERMINERS or word in _NEVER_NOUNS or not _WORD.fullmatch(word)


def _number(word: str) -> int:
    return words.NUMBERS.index(_DIGITS.get(word, word)) + 1


def _node_atoms(node: Node) -> list[Atom]:
    seen = f"{node.id}.object"
    atoms = []
    if node.count is not None:
        atoms.append(
            Atom(
                id=f"{node.id}.count",
                kind=AtomKind.COUNT,
                nodes=(node.id,),
                question=templates.count_question(node),
                expected=words.NUMBERS[node.count - 1],
                parents=(seen,),
            )
        )
    if node.attribute is not None:
        atoms.append(
            Atom(
                id=f"{node.id}.attribute",
                kind=AtomKind.ATTRIBUTE,
                nodes=(node.id,),
                question=templates.attribute_question(node),
                expected="Yes",
                parents=(seen,),
            )
        )
    question = templates.object_question(node)
    atoms.append(Atom(id=seen, kind=AtomKind.OBJECT, nodes=(node.id,), question=question, expected="Yes"))
    return atoms


def _edge_atom(edge: Edge, subject: Node, target: Node) -> Atom:
    return Atom(
        id=edge.id,
        kind=edge.kind,
        nodes=(subject.id, target.id),
        edge=edge.id,
        question=templates.edge_question(edge, subject, target),
        expected="Yes",
        parents=(f"{subject.id}.object", f"{target.id}.object"),
    )
