"""What a judge gets wrong is an image that failed, with the reason, and costs no other image."""

from dataclasses import replace

import numpy as np
import pytest

from cast_engine.errors import Interrupted, NoSpaceError
from cast_engine.graphs.grammar import parse
from cast_engine.judges.ask import ask
from cast_engine.judges.base import AtomScores

GRAPHS = [parse("two red circles"), parse("a blue cross")]
IMAGES = [np.full((8, 8, 3), shade, np.uint8) for shade in (10, 200)]


def scores(graph):
    k = len(graph.atoms)
    ones = np.ones((k, 2, 2), np.float16)
    return AtomScores(np.full(k, 0.5, np.float32), ("yes",) * k, ones, np.ones(k, np.float32), ones[0])


class Judge:
    """Judges well, except what it is told to do to the second image."""

    name, model_sha256 = "mine", "0"

    def __init__(self, spoil):
        self.spoil = spoil

    def score(self, images, graphs):
        return [self.spoil(scores(g)) if i[0, 0, 0] == 200 else scores(g) for i, g in zip(images, graphs, strict=True)]


def boom(_):
    raise RuntimeError("judge boom")


SPOILT = {
    "raised RuntimeError: judge boom": boom,
    "returned a NoneType, not AtomScores": lambda _: None,
    "a score of 40 is no probability": lambda s: replace(s, scores=s.scores + 39.5),
    "a score of -3 is no probability": lambda s: replace(s, scores=s.scores - 3.5),
    "expected (3,) each": lambda s: replace(s, scores=s.scores[:, None]),
    "0 answers, expected 3 texts": lambda s: replace(s, answers=()),
    "3 answers, expected 3 texts": lambda s: replace(s, answers=(1, 2, 3)),
    "expected [3, h, w] and [h, w]": lambda s: replace(s, maps=s.maps[:1]),
    "a map that is not finite": lambda s: replace(s, maps=s.maps * np.nan),
}


@pytest.mark.parametrize("reason", SPOILT)
def test_a_bad_answer_fails_its_image_alone(reason):
    good, bad = ask(Judge(SPOILT[reason]), IMAGES, [GRAPHS[0], GRAPHS[0]])
    assert isinstance(good, AtomScores)
    assert isinstance(bad, str)
    assert reason in bad


def test_missing_answers_are_no_mistake():
    def missing(s):
        return replace(s, scores=s.scores * np.nan, maps=s.maps * np.nan)

    assert all(isinstance(a, AtomScores) for a in ask(Judge(missing), IMAGES, GRAPHS))
    assert ask(Judge(boom), [], []) == []


def test_too_few_results_are_seen_and_asked_for_one_by_one():
    class Lazy(Judge):
        def score(self, images, graphs):
            return super().score(images, graphs)[:1]

    assert all(isinstance(a, AtomScores) for a in ask(Lazy(lambda s: s), IMAGES, GRAPHS))
    never = Judge(lambda s: s)
    never.score = lambda images, graphs: []
    assert ask(never, IMAGES, GRAPHS) == ["the judge returned 0 results for 1 images"] * 2


@pytest.mark.parametrize("error", [Interrupted("stopped by SIGTERM"), NoSpaceError("full")])
def test_a_full_disk_and_a_signal_are_not_the_judges_fault(error):
    def end(_):
        if isinstance(error, NoSpaceError):
            raise error
        raise RuntimeError("Failed to import") from error  # as lazy imports wrap it

    with pytest.raises(type(error)):
        ask(Judge(end), IMAGES, GRAPHS)
