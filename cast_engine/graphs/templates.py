"""GenEval 2's questions about a group of things, word for word."""

from __future__ import annotations

from schemas.graph import Edge, Node


def count_question(node: Node) -> str:
    """Return for example "How many cars are in the image?"."""
    return f"How many {node.plural} are in the image?"


def object_question(node: Node) -> str:
    """Return for example "Are there any cars in the image?" (plural also for a single car)."""
    return f"Are there any {node.plural} in the image?"


def attribute_question(node: Node) -> str:
    """Return for example "Are the cars red?" or "Is the car red?"."""
    return f"{_is_the(node)} {node.attribute}?"


def edge_question(edge: Edge, subject: Node, target: Node) -> str:
    """Return for example "Are the horses on top of the motorcycle?"."""
    return f"{_is_the(subject)} {edge.predicate} the {_noun(target)}?"


def _noun(node: Node) -> str:
    return node.noun if node.count == 1 else node.plural


def _is_the(node: Node) -> str:
    return f"{'Is' if node.count == 1 else 'Are'} the {_noun(node)}"
