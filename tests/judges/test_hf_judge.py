"""The packed, batched forward against the plain one of transformers, one question at a time."""

import json
import math

import numpy as np
import pytest
import torch

from cast_engine.errors import UserError
from cast_engine.graphs.words import COUNTS
from cast_engine.judges.hf_judge import HFJudge
from cast_engine.judges.prompting import NEUTRAL_ANSWER
from cast_engine.judges.templates import NEUTRAL_QUESTION, answer_text, variants
from cast_engine.tinyworld.build import build_judge
from tests.judges import tiny_vlm
from tests.judges.plain_forward import LAYERS, plain, stock


def reference(folder, image, graph, *, mode="dedup", **kwargs):
    _, tok, _ = stock(folder)
    scores, maps, masses = [], [], []
    for atom in graph.atoms:
        logits, on_image = plain(folder, image, answer_text(atom.question), atom.expected, **kwargs)
        first = [tok(v, add_special_tokens=False)["input_ids"][0] for v in variants(atom)]
        scores.append(logits.softmax(-1)[first if mode == "geneval2" else sorted(set(first))].sum().item())
        maps.append((on_image / on_image.mean()).numpy())
        masses.append(on_image.sum().item())
    _, neutral = plain(folder, image, NEUTRAL_QUESTION, NEUTRAL_ANSWER, **kwargs)
    return scores, np.stack(maps), masses, (neutral / neutral.mean()).numpy()


def assert_equal(result, expected, tol=1e-5):
    scores, maps, masses, neutral = expected
    np.testing.assert_allclose(result.scores, scores, atol=tol)
    np.testing.assert_allclose(result.mass, masses, atol=tol)
    np.testing.assert_allclose(result.maps.astype(np.float32), maps, rtol=1e-3, atol=1e-3)  # stored as float16
    np.testing.assert_allclose(result.neutral.astype(np.float32), neutral, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", ["answer", "predict"])
@pytest.mark.parametrize("mode", ["dedup", "geneval2"])
def test_equals_the_plain_forward(vlm_folder, mode, rows):
    judge = HFJudge(vlm_folder, device="cpu", mode=mode, rows=rows, layers=LAYERS)
    images = [*tiny_vlm.images(2), *tiny_vlm.images(1, 40, 64, seed=1)]
    graphs = [
        tiny_vlm.graph(("circle", "cross"), relation=True),
        tiny_vlm.graph(("square",)),
        tiny_vlm.graph(("triangle", "cow")),
    ]
    results = judge.score(images, graphs)
    for image, graph, result in zip(images, graphs, results, strict=True):
        assert_equal(result, reference(vlm_folder, image, graph, mode=mode, rows=rows))
    assert results[2].maps.shape == (4, 5, 8)


def test_resized_images_equal_the_plain_forward(vlm_folder):
    judge = HFJudge(vlm_folder, device="cpu", layers=LAYERS)
    image, graph = tiny_vlm.images(1, 37, 50)[0], tiny_vlm.graph()
    assert_equal(judge.score([image], [graph])[0], reference(vlm_folder, image, graph))


def test_one_at_a_time_and_many_give_the_same(vlm_folder):
    images = [*tiny_vlm.images(5), *tiny_vlm.images(2, 48, 32)]
    graphs = [tiny_vlm.graph(("circle", "cross", "cow")[: 1 + i % 3]) for i in range(7)]
    many = HFJudge(vlm_folder, device="cpu", batch_size=16).score(images, graphs)
    one = HFJudge(vlm_folder, device="cpu", batch_size=1)
    for image, graph, result in zip(images, graphs, many, strict=True):
        alone = one.score([image], [graph])[0]
        np.testing.assert_allclose(result.scores, alone.scores, atol=1e-5)
        np.testing.assert_allclose(result.mass, alone.mass, atol=1e-5)
        np.testing.assert_allclose(result.maps.astype(np.float32), alone.maps.astype(np.float32), rtol=2e-3, atol=1e-3)
        assert result.answers == alone.answers


def test_the_tiny_worlds_judge_loads_and_equals_the_plain_forward(tmp_path):
    folder = build_judge(tmp_path / "judge")
    judge = HFJudge(folder, device="cpu", layers=LAYERS)
    image, graph = tiny_vlm.images(1, 64, 64)[0], tiny_vlm.graph(("circle", "square"), relation=True)
    result = judge.score([image], [graph])[0]
    assert result.maps.shape == (5, 8, 8)
    assert result.maps.dtype == np.float16
    assert_equal(result, reference(folder, image, graph))
    np.testing.assert_allclose(result.maps.astype(np.float32).mean((1, 2)), 1, atol=1e-3)
    assert set(result.answers[::2]) <= {"Yes", "No"}
    assert set(result.answers[1::2]) <= set(COUNTS)


def test_the_likeliest_answer_is_the_forced_one(vlm_folder):
    judge = HFJudge(vlm_folder, device="cpu")
    ids = {w: judge._prompter.tokenizer(w)["input_ids"][0] for w in ("Yes", "No", "six")}
    graph = tiny_vlm.graph()
    for object_word in ("Yes", "No"):
        logits = torch.full((2, judge._head.out_features), -4.0)
        logits[0, ids[object_word]], logits[1, ids["six"]] = 3.0, 4.0
        answers = judge._likeliest(logits, list(graph.atoms))
        assert answers == [object_word, "six"]


def test_a_nan_is_missing_and_stays_with_its_image(vlm_folder):
    judge = HFJudge(vlm_folder, device="cpu")
    encode = judge._visual.forward

    def broken(*args, **kwargs):
        out = encode(*args, **kwargs)
        out.pooler_output[:1] = math.nan  # a token of the first image
        return out

    judge._visual.forward = broken
    graph = tiny_vlm.graph()
    first, second = judge.score(tiny_vlm.images(2), [graph, graph])
    assert np.isnan(first.scores).all()
    assert first.answers == ("", "")
    assert np.isfinite(second.scores).all()
    assert np.isfinite(second.maps.astype(np.float32)).all()


def test_layers_default_to_the_middle_and_are_checked(vlm_folder):
    assert HFJudge(vlm_folder, device="cpu").layers == (2, 3)
    with pytest.raises(UserError, match="layers between 0 and 4"):
        HFJudge(vlm_folder, device="cpu", layers=(5,))


@pytest.mark.parametrize(("kind", "value"), [("device", "gpu"), ("device", "cuda:99"), ("dtype", "float16")])
def test_impossible_devices_and_dtypes_are_refused(vlm_folder, kind, value):
    with pytest.raises(UserError, match=value):
        HFJudge(vlm_folder, **({"device": "cpu"} | {kind: value}))


def test_hash_names_the_content(vlm_folders, tmp_path):
    a, b, _ = (HFJudge(f, device="cpu").model_sha256 for f in vlm_folders.values())
    assert len(a) == 64
    assert a != b
    again = tiny_vlm.build("qwen3_vl", tmp_path / "again")
    assert HFJudge(again, device="cpu").model_sha256 == a
    settings = json.loads((again / "preprocessor_config.json").read_text())
    (again / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.0, 0.0, 0.0]}))
    assert HFJudge(again, device="cpu").model_sha256 != a


def test_wrong_inputs_are_said_in_one_line(vlm_folder, tmp_path):
    judge = HFJudge(vlm_folder, device="cpu")
    with pytest.raises(UserError, match="uint8, HxWx3"):
        judge.score([np.zeros((32, 32, 3), np.float32)], [tiny_vlm.graph()])
    with pytest.raises(UserError, match=r"no config\.json"):
        HFJudge(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="gpt2"):
        HFJudge(tmp_path, device="cpu")


def test_other_kinds_of_layers_are_refused(vlm_folders, tmp_path):
    config = json.loads((vlm_folders["qwen2_5_vl"] / "config.json").read_text())
    config["text_config"]["layer_types"][-1] = "sliding_attention"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="layers of type sliding_attention"):
        HFJudge(tmp_path, device="cpu")
