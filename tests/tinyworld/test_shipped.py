"""The shipped models are what their cards say: small, converged, and a judge that sees what it is asked about."""

import itertools
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from cast_engine.graphs.grammar import parse
from cast_engine.judges.hf_judge import HFJudge
from cast_engine.models.session import DrawRequest, ImageSession, SessionSpec
from cast_engine.numerics.maps import remove_sinks
from cast_engine.numerics.noise import member_seed
from cast_engine.tinyworld import build, prompts, scenes
from cast_engine.tinyworld.bundle import resolve, weights_dir
from cast_engine.tinyworld.render import render_batch
from cast_engine.tinyworld.scenes import COLOURS, RELATIONS, SHAPES, Spec
from cast_engine.tinyworld.verify import verify, verify_batch
from schemas.graph import Prompt
from schemas.job import ModelConfig

KINDS = ("object", "attribute", "count", "relation")
DRAWN, RENDERED = 96, 150
ON_OBJECT = 16
"""Pixels of 64 from which a cell of the map lies on an object."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def graphs():
    """Graphs of validation prompts."""
    return [parse(text) for text in prompts.split("validation", DRAWN, seed=5)]


@pytest.fixture(scope="module")
def draw(graphs, tmp_path_factory):
    """Draws the first so many prompts with the base model, always from the same noise."""
    embeds = tmp_path_factory.mktemp("embeds")
    sessions = {}

    def draw(*, steps=10, guidance=None, count=DRAWN):
        if guidance not in sessions:
            sessions[guidance] = ImageSession(SessionSpec(ModelConfig(device="cpu", guidance=guidance), embeds))
        chosen, session = graphs[:count], sessions[guidance]
        ids = [Prompt.of(g.prompt).prompt_id for g in chosen]
        seeds = [member_seed(1, 0, i, 0) for i in ids]
        images = []
        session.encode([Prompt.of(g.prompt) for g in chosen], lambda _: None)
        for start in range(0, count, 32):
            part = slice(start, start + 32)
            images += list(session.draw(DrawRequest(ids[part], seeds[part], steps)).images)
        return images

    return draw


@pytest.fixture(scope="module")
def base(draw):
    """What the base model draws for the prompts, with its own settings."""
    return draw()


@pytest.fixture(scope="module")
def judge():
    return HFJudge(resolve("tinyworld:judge"), device="cpu")


def right(images, graphs):
    """Share of right atoms by kind and of all, per prompt where that makes sense."""
    found = defaultdict(list)
    for graph, verdicts in zip(graphs, verify_batch(images, graphs), strict=True):
        for atom, verdict in zip(graph.atoms, verdicts, strict=True):
            found[str(atom.kind)].append(verdict.ok)
        found["atoms"].append(np.mean([v.ok for v in verdicts]))
    return {kind: float(np.mean(values)) for kind, values in found.items()}


def test_sizes():
    files = [f for f in weights_dir().rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 10_000_000, "weights, tokenizers, configs and cards together"
    assert {f.suffix for f in files} == {".safetensors", ".json", ".jinja", ".md"}, "no pickle, nothing of the training"
    for card in ("README.md", "flux2/MODEL_CARD.md", "judge/MODEL_CARD.md"):
        assert (weights_dir() / card).stat().st_size > 500


def test_tokenizers_are_those_that_the_code_makes(tmp_path):
    for name, made in (("flux2/tokenizer", build.flux_tokenizer()), ("judge", build.judge_tokenizer())):
        made.save_pretrained(tmp_path / name)
        build.compact_json(tmp_path / name)
        file = f"{name}/tokenizer.json"
        assert (weights_dir() / file).read_text() == (tmp_path / file).read_text()


def test_settings_that_the_folder_cannot_hold():
    settings = json.loads((resolve("tinyworld:flux2") / "cast_model.json").read_text())
    assert settings["max_sequence_length"] <= 64
    assert settings.keys() == {
        *("text_encoder_out_layers", "max_sequence_length", "num_inference_steps"),
        *("height", "width", "guidance_scale"),
    }


def test_the_base_model_can_improve_and_is_converged(draw, base, graphs):
    ten, twenty = right(base, graphs), right(draw(steps=20), graphs)
    print("10 steps", ten, "20 steps", twenty)
    assert 0.55 <= ten["atoms"] <= 0.75
    assert twenty["atoms"] - ten["atoms"] < 0.03, "more steps should not be what helps"
    assert max(ten["count"], ten["relation"]) < min(ten["object"], ten["attribute"])
    assert ten["object"] > 0.85


def test_guidance_matters(draw, base, graphs):
    strong = draw(guidance=4.0, count=24)
    changed = [np.abs(a.astype(int) - b).mean() for a, b in zip(strong, base, strict=False)]
    assert np.median(changed) > 2
    assert right(strong, graphs[:24])["atoms"] > right(draw(guidance=1.0, count=24), graphs[:24])["atoms"] - 0.02


@pytest.fixture(scope="module")
def renderings():
    """Scenes of held-out specifications, and their pictures."""
    rng = np.random.default_rng(11)
    drawn = [scenes.sample(rng, spec) for spec in prompts.sample_specs(rng, "validation", RENDERED)]
    return drawn, list(render_batch(drawn))


def changed(spec, number):
    """The specification with something else asked for: hard negatives, of one kind after the other."""
    first, *rest = spec.groups
    options = {
        "relation": [((first, *rest), r) for r in RELATIONS if spec.relation not in (None, r)],
        "attribute": [((replace(first, colour=c), *rest), spec.relation) for c in COLOURS if c != first.colour],
        "count": [((replace(first, count=n), *rest), spec.relation) for n in range(1, 5) if n != first.count],
        "object": [((replace(first, shape=s), *rest), spec.relation) for s in SHAPES if s != first.shape],
    }
    kinds = list(options)
    for kind in kinds[number % 4 :] + kinds[: number % 4]:
        possible = [s for s in itertools.starmap(_spec, options[kind]) if s is not None]
        if possible:
            return possible[number // 4 % len(possible)]
    raise AssertionError(f"nothing else can be asked for in {spec}")


def _spec(groups, relation):
    try:
        return Spec(groups, relation)
    except ValueError:  # two touching groups of one colour, say
        return None


def test_the_judge_answers_right_on_held_out_renderings(judge, renderings):
    drawn, pictures = renderings
    asked = [parse(prompts.text_of(s.spec)) for s in drawn]
    asked += [parse(prompts.text_of(changed(s.spec, i))) for i, s in enumerate(drawn)]
    found, answers = defaultdict(list), defaultdict(set)
    for picture, graph, scored in zip(pictures * 2, asked, judge.score(pictures * 2, asked), strict=True):
        for atom, verdict, score in zip(graph.atoms, verify(picture, graph), scored.scores, strict=True):
            found[str(atom.kind)].append((score >= 0.5) == verdict.ok)
            answers[str(atom.kind)].add(verdict.ok)
    accuracy = {kind: float(np.mean(found[kind])) for kind in KINDS}
    print("held-out renderings", accuracy, {k: len(v) for k, v in found.items()})
    assert all(answers[kind] == {True, False} for kind in KINDS), "both answers are asked for"
    assert min(accuracy["object"], accuracy["attribute"]) >= 0.97
    assert min(accuracy["count"], accuracy["relation"]) >= 0.92


def test_the_judge_looks_at_what_it_is_asked_about(judge, renderings):
    """Pointing game on two-group scenes, correct answers, maps as credit uses them."""
    drawn, pictures = renderings
    pairs = [(s, p) for s, p in zip(drawn, pictures, strict=True) if len(s.spec.groups) == 2]
    asked = [parse(prompts.text_of(s.spec)) for s, _ in pairs]
    hits, chance = defaultdict(list), defaultdict(list)
    for (_, picture), graph, scored in zip(pairs, asked, judge.score([p for _, p in pairs], asked), strict=True):
        verdicts = verify(picture, graph)
        anything = np.any([v.mask for v in verdicts], axis=0)
        for k, (atom, verdict) in enumerate(zip(graph.atoms, verdicts, strict=True)):
            if str(atom.kind) == "relation" or not verdict.ok or scored.scores[k] < 0.5:
                continue
            wanted, any_object = cells(verdict.mask, scored.neutral.shape), cells(anything, scored.neutral.shape)
            sharp = remove_sinks(torch.from_numpy(scored.maps[k]), torch.from_numpy(scored.neutral)).numpy()
            hits[str(atom.kind)].append(wanted.flat[sharp.argmax()])
            chance[str(atom.kind)].append(wanted.sum() / any_object.sum())
    for kind in KINDS[:3]:
        share, random = float(np.mean(hits[kind])), float(np.mean(chance[kind]))
        print(f"pointing, {kind}: {share:.3f} (any object: {random:.3f}, n {len(hits[kind])})")
        assert share >= 0.9
        assert random < 0.6, "a scene of one group would show nothing"


def cells(mask, grid):
    """Which cells of a map lie on a mask."""
    rows, columns = grid
    height, width = mask.shape[0] // rows, mask.shape[1] // columns
    return mask.reshape(rows, height, columns, width).sum((1, 3)) >= ON_OBJECT * height * width / 64


def test_the_judge_agrees_with_the_verifier_on_samples(judge, base, graphs):
    agree = defaultdict(list)
    for image, graph, scored in zip(base, graphs, judge.score(base, graphs), strict=True):
        for atom, verdict, score in zip(graph.atoms, verify(image, graph), scored.scores, strict=True):
            agree[str(atom.kind)].append((score >= 0.5) == verdict.ok)
    shares = {kind: float(np.mean(agree[kind])) for kind in KINDS}
    print("agreement on samples", shares)
    assert min(shares.values()) >= 0.9
