from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cast_engine.errors import UserError
from cast_engine.graphs import grammar, words
from cast_engine.tinyworld import prompts
from schemas.graph import AtomKind, Prompt, SceneGraph

SKILL = {AtomKind.RELATION: "position", AtomKind.ACTION: "verb"}


def geneval2() -> list[dict[str, Any]]:
    """The lines at hand; not part of the repository, because their licence forbids commercial use."""
    for folder in Path(__file__).resolve().parents:
        file = folder / "shared" / "geneval2" / "visible.jsonl"
        if file.is_file():
            return [json.loads(line) for line in file.read_text().splitlines()]
    pytest.skip("GenEval 2's lines (CC BY-NC 4.0) are not here")


def asked(graph: SceneGraph) -> list[tuple[str, str, str]]:
    return [(a.question, a.expected, SKILL.get(a.kind, a.kind.value)) for a in graph.atoms]


def test_geneval2_lines_are_reproduced_exactly() -> None:
    lines = geneval2()
    wrong = []
    for line in lines:
        graph = grammar.parse(line["prompt"])
        wanted = [(q, a, s) for (q, a), s in zip(line["vqa_list"], line["skills"], strict=True)]
        if asked(graph) != wanted or graph.prompt != line["prompt"]:
            wrong.append(line["prompt"])
    print(f"{100 * (1 - len(wrong) / len(lines)):.2f}% of {len(lines)} lines reproduced")
    assert not wrong


def test_a_chain_of_groups() -> None:
    graph = grammar.parse("A sheep behind six glass Trucks chasing an owl, and two yellow dogs.")
    assert asked(graph) == [
        ("How many sheeps are in the image?", "one", "count"),
        ("Are there any sheeps in the image?", "Yes", "object"),
        ("Is the sheep behind the trucks?", "Yes", "position"),
        ("How many trucks are in the image?", "six", "count"),
        ("Are the trucks glass?", "Yes", "attribute"),
        ("Are there any trucks in the image?", "Yes", "object"),
        ("Are the trucks chasing the owl?", "Yes", "verb"),
        ("How many owls are in the image?", "one", "count"),
        ("Are there any owls in the image?", "Yes", "object"),
        ("How many dogs are in the image?", "two", "count"),
        ("Are the dogs yellow?", "Yes", "attribute"),
        ("Are there any dogs in the image?", "Yes", "object"),
    ]
    assert [n.id for n in graph.nodes] == ["n0", "n1", "n2", "n3"]
    assert [(e.id, e.subject, e.object, e.predicate) for e in graph.edges] == [
        ("e0", "n0", "n1", "behind"),
        ("e1", "n1", "n2", "chasing"),
    ]
    parents = {a.id: a.parents for a in graph.atoms}
    assert parents["e1"] == ("n1.object", "n2.object")
    assert parents["n1.count"] == parents["n1.attribute"] == ("n1.object",)
    assert parents["n1.object"] == ()
    assert graph.source == "grammar"


def test_tiny_world_prompts_are_read() -> None:
    for text in prompts.split("train", 300, 5):
        spec, graph = prompts.spec_of(text), grammar.parse(text)
        assert [(n.count, n.noun, n.attribute) for n in graph.nodes] == [
            (g.count, g.shape, g.colour) for g in spec.groups
        ]
        assert [e.predicate for e in graph.edges] == ([spec.relation] if spec.relation else [])
        assert graph.prompt_id == Prompt.of(text).prompt_id


@pytest.mark.parametrize(
    ("text", "noun", "plural", "count", "attribute"),
    [
        ("a fire truck", "fire truck", "fire trucks", 1, None),
        ("three red fire trucks", "fire truck", "fire trucks", 3, "red"),
        ("3 wooden knives", "knife", "knives", 3, "wooden"),
        ("an orange", "orange", "oranges", 1, None),
        ("one orange orange", "orange", "oranges", 1, "orange"),
        ("two sheep", "sheep", "sheep", 2, None),
        ("some people", "person", "people", None, None),
        ("several striped cats", "cat", "cats", None, "striped"),
        ("two buses", "bus", "buses", 2, None),
        ("a bus", "bus", "buses", 1, None),
        ("two cat", "cat", "cats", 2, None),
        ("four glasses", "glass", "glasses", 4, None),
        ("a wine glass", "wine glass", "wine glasses", 1, None),
    ],
)
def test_nouns(text: str, noun: str, plural: str, count: int | None, attribute: str | None) -> None:
    (node,) = grammar.parse(text).nodes
    assert (node.noun, node.plural, node.count, node.attribute) == (noun, plural, count, attribute)


def test_groups_without_a_number_are_not_counted() -> None:
    graph = grammar.parse("some cats under a car")
    assert asked(graph)[:2] == [
        ("Are there any cats in the image?", "Yes", "object"),
        ("Are the cats under the car?", "Yes", "position"),
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "the end of the prompt"),
        ("a", "the end of the prompt"),
        ("beautiful sunset over the sea", "'beautiful' (word 1)"),
        ("a cat sitting on a mat", "'on' (word 4)"),
        ("a cat and", "the end of the prompt"),
        ("a cat behind the dog", "'the' (word 4)"),
        ("eleven cats", "'eleven' (word 1)"),
        ("a big red car", "'red' (word 3)"),
        ("a red", None),
        ("two very nice old cats", "'old' (word 4)"),
        ("a red circle and two blue circles", "'circles' (word 7)"),
        ("a cat & a dog", "'&' (word 3)"),
        ("a cat a dog", "'a' (word 3)"),
    ],
)
def test_unreadable_prompts_say_where(text: str, where: str | None) -> None:
    if where is None:
        assert grammar.parse(text).nodes[0].noun == "red"  # a lone word is a noun
        return
    with pytest.raises(UserError) as error:
        grammar.parse(text)
    assert where in str(error.value)
    assert "\n" not in str(error.value)


NOUNS = """
cat sheep bus horse house rose box bench dish glass cookie cherry toy monkey kangaroo tomato shoe knife wolf
leaf glove man snowman woman child person mouse goose pie fox watch brush dress butterfly key vase candle
giraffe octopus lens cactus axe olive wave quiz
"""


@pytest.mark.parametrize("noun", NOUNS.split())
def test_plurals_round_trip(noun: str) -> None:
    many = words.plural(noun)
    assert many != noun
    assert words.singular(many) == noun
