"""The training scripts: equal to the stock classes, reproducible, fit for a CUDA graph. Nothing is trained here."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cast_engine.graphs.grammar import parse
from cast_engine.tinyworld import build, prompts
from cast_engine.tinyworld.training import (
    base,
    dataset,
    engine,
    fast,
    flux,
    judge,
    judge_eval,
    pictures,
    questions,
    vae,
)
from cast_engine.tinyworld.training.workers import Workers

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(scope="module")
def pipe():
    return build.pipeline(3)


@pytest.fixture(scope="module")
def judged():
    model, tok = build.judge(3)
    table = questions.QuestionTable.of(tok, CPU)
    core = fast.JudgeCore(model, fast.Layout.of(table.ids.shape[1], len(judge.SLOTS)), table.head)
    return core, table, tok


def test_prompt_encoder_equals_the_stock_pipeline(pipe):
    texts = ["two red circles to the left of three blue squares", "", "a cross"]
    every = {prompts.text_of(s): i for i, s in enumerate(prompts.all_specs())} | {"": len(prompts.all_specs())}
    tokens = dataset.prompt_tokens(pipe.tokenizer, build.MAX_SEQUENCE_LENGTH)[[every[t] for t in texts]]
    stock, _ = pipe.encode_prompt(
        texts, max_sequence_length=build.MAX_SEQUENCE_LENGTH, text_encoder_out_layers=build.TEXT_ENCODER_OUT_LAYERS
    )
    torch.testing.assert_close(fast.PromptEncoder(pipe.text_encoder)(tokens), stock, atol=1e-5, rtol=1e-5)


def test_sampler_equals_the_stock_pipeline(tmp_path, pipe):
    pipe.vae.bn.running_mean.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    build.save_pipeline(pipe, tmp_path)
    texts = ["two red circles", "a cross under four blue squares"]
    with Workers(0) as workers:
        sampler = flux.Sampler.load(tmp_path, CPU, workers)
        assert base.compare_with_stock(tmp_path, sampler, texts, 2.0) == 0.0
        assert set(sampler.evaluate(texts, steps=2)) >= {"object", "count", "relation", "atoms", "all"}


def test_judge_core_equals_the_stock_judge(judged):
    core, table, tok = judged
    assert judge_eval.compare_with_stock(core, table, tok) < 1e-4


def test_catalogue_asks_what_the_grammar_asks():
    texts = questions.catalogue()
    assert len(texts) == questions.NEUTRAL_AT + 1
    known = set(texts)
    for text in prompts.split("validation", 60, 0):
        assert {a.question for a in parse(text).atoms} <= known


def test_answers_follow_the_facts():
    with Workers(0) as workers:
        drawn = workers.map("cast_engine.tinyworld.training.pictures:draw_with_facts", [(1, 0, 40, "validation", {})])[
            0
        ]
    facts = questions.Facts.of(drawn, CPU)
    specs = [prompts.all_specs()[i] for i in drawn["spec"]]
    counts = np.zeros((40, questions.S), int)
    for row, spec in zip(counts, specs, strict=True):
        for g in spec.groups:
            row[questions.SHAPES.index(g.shape)] += g.count
    np.testing.assert_array_equal(facts.count.numpy(), counts)
    torch.manual_seed(0)
    texts = questions.catalogue()
    asked = questions.ask_all(facts, (questions.OBJECT, questions.COUNT))
    for i in range(40):
        shape = int(asked.question[i, 0])
        assert (int(asked.truth[i, 0]) == 0) == (counts[i, shape] > 0)
        assert texts[int(asked.question[i, 1])].startswith("How many")
        assert int(asked.truth[i, 1]) - 2 == counts[i, int(asked.question[i, 1]) - questions.S]


def test_captions_are_train_specifications_and_sometimes_wrong():
    drawn = pictures.draw(0, 0, 64, "train", {})
    again = pictures.draw(0, 0, 64, "train", {})
    assert all(np.array_equal(drawn[k], again[k]) for k in drawn)
    said = [prompts.all_specs()[i] for i in drawn["captions"].ravel()]
    assert all(prompts.spec_split(s) == "train" for s in said)
    wrong = (drawn["captions"] != drawn["spec"][:, None]).mean()
    assert 0.4 < wrong < 0.95
    silent = dict.fromkeys(pictures.noise_dict(pictures.CaptionNoise()), 0.0)
    exact = pictures.draw(0, 0, 16, "train", silent)
    assert (exact["captions"] == exact["spec"][:, None]).all()


def test_worker_processes_agree_with_this_one():
    arguments = [(0, i, 4, "train", {}) for i in range(2)]
    with Workers(0) as here, Workers(1) as there:
        one, two = (w.map("cast_engine.tinyworld.training.pictures:draw", arguments) for w in (here, there))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            there.map("operator:truediv", [(1, 0)])
    assert all(np.array_equal(a[k], b[k]) for a, b in zip(one, two, strict=True) for k in a)


class _Backward:
    """Stands in for the optimiser, which has no meta kernels."""

    def step(self, loss):
        loss.backward()


def test_no_step_waits_for_the_device(judged, pipe, monkeypatch):
    """On the meta device every operation that needs a value on the host raises; a CUDA graph allows none either."""
    monkeypatch.setattr(engine, "autocast", lambda device: torch.autocast("cpu", enabled=False))
    core, table, _ = judged
    core = engine.frozen_copy(core).requires_grad_(True).to(META)
    table = questions.QuestionTable(
        *(getattr(table, f).to(META) for f in ("ids", "answer", "words", "cells")), table.head
    )
    drawn = pictures.draw_with_facts(0, 0, 4, "train", {})
    data = judge.Data.__new__(judge.Data)
    data.images, data.rendered, data.share = torch.from_numpy(drawn["images"]).to(META), 3, 0.3
    data.facts = questions.Facts.of(drawn, META)
    args = SimpleNamespace(batch=2, attention_weight=0.1, pointing_weight=0.25)
    assert judge.Step(args, core, table, data, _Backward())().shape == (4,)

    trainer = base.Trainer.__new__(base.Trainer)
    trainer.device, trainer.latents = META, torch.zeros(4, 64, 32, device=META)
    trainer.captions = torch.zeros(4, 8, dtype=torch.int64, device=META)
    velocity = flux.Velocity(engine.frozen_copy(pipe.transformer).requires_grad_(True)).to(META)
    encoder = fast.PromptEncoder(engine.frozen_copy(pipe.text_encoder).requires_grad_(True)).to(META)
    x, sigma, caption, target = trainer.batch(2)
    tokens = torch.zeros(9, build.MAX_SEQUENCE_LENGTH, dtype=torch.int64, device=META)
    v = velocity(x, sigma, encoder(tokens[caption]), torch.ones(2, device=META))
    (v - target).pow(2).mean().backward()

    model = engine.frozen_copy(pipe.vae).requires_grad_(True).to(META)
    vae.loss_of(model, dataset.to_pixels(data.images))[0].backward()
