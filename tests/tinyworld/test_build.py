import json

import pytest
import torch

from cast_engine.errors import UserError
from cast_engine.graphs.words import COUNTS
from cast_engine.tinyworld import build, bundle


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return build.build_pipeline(root / "flux2", seed=1), build.build_judge(root / "judge", seed=1)


def test_stock_pipeline_loads_and_draws(folders):
    from diffusers import Flux2Pipeline

    pipe = Flux2Pipeline.from_pretrained(folders[0])
    pipe.set_progress_bar_config(disable=True)
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    call = json.loads((folders[0] / "cast_model.json").read_text())
    call["num_inference_steps"] = 2
    images = pipe(prompt=["two red circles", ""], generator=torch.Generator().manual_seed(0), **call).images
    assert [i.size for i in images] == [(64, 64)] * 2
    again = pipe(prompt=["two red circles", ""], generator=torch.Generator().manual_seed(0), **call).images
    assert images[0].tobytes() == again[0].tobytes()


def test_prompt_tokens(folders):
    tok = build.flux_tokenizer()
    message = [{"role": "system", "content": [{"type": "text", "text": "ignored"}]}]
    message += [{"role": "user", "content": [{"type": "text", "text": "Two red circles on top of a square"}]}]
    out = tok.apply_chat_template(
        [message], tokenize=True, return_dict=True, padding="max_length", truncation=True, max_length=16
    )
    words = tok.convert_ids_to_tokens(out["input_ids"][0])
    assert words[:10] == ["<s>", "two", "red", "circles", "on", "top", "of", "a", "square", "</s>"]
    assert set(words[10:]) == {"<pad>"}
    assert build.UNK not in words


def test_nothing_is_stored_that_nobody_reads(folders):
    from safetensors import safe_open

    for file in (f for folder in folders for f in folder.rglob("*.json")):
        text = file.read_text()
        assert text == json.dumps(json.loads(text), separators=(",", ":")) + "\n", file
    with safe_open(folders[0] / "text_encoder" / "model.safetensors", "pt") as weights:
        names = weights.keys()
        tower = sum(weights.get_tensor(n).numel() for n in names if n.startswith("vision_tower."))
        assert 0 < tower < 0.05 * sum(weights.get_tensor(n).numel() for n in names)


def test_same_seed_same_weights(folders, tmp_path):
    build.build_judge(tmp_path / "again", seed=1)
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (folders[1] / name).read_bytes()
    build.build_judge(tmp_path / "other", seed=2)
    assert (tmp_path / "other" / name).read_bytes() != (folders[1] / name).read_bytes()


def test_stock_judge_answers(folders):
    from PIL import Image
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folders[1])
    tok, processor = (c.from_pretrained(folders[1]) for c in (AutoTokenizer, AutoImageProcessor))
    assert model.dtype == torch.float32
    pixels = processor(images=[Image.new("RGB", (64, 64), "red")], return_tensors="pt")
    assert pixels["image_grid_thw"].tolist() == [[1, 16, 16]]
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many circles are there?"}]}]
    text = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tok(text.replace("<|image_pad|>", "<|image_pad|>" * 64), return_tensors="pt", add_special_tokens=False)
    ids = ids["input_ids"]
    assert (ids == model.config.image_token_id).sum() == 64
    assert not (ids == tok.unk_token_id).any()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == model.config.image_token_id).int(), **pixels).logits
    assert torch.isfinite(logits).all()


def test_answers_are_single_tokens_and_keep_their_case():
    tok = build.judge_tokenizer()
    answers = ["Yes", "yes", "No", "no", *COUNTS, *(n.capitalize() for n in COUNTS)]
    answers += [str(i) for i in range(11)]
    ids = [tok.encode(a, add_special_tokens=False) for a in answers]
    assert all(len(i) == 1 and i[0] != tok.unk_token_id for i in ids)
    assert len({i[0] for i in ids}) == len(answers)
    assert tok.encode(" yes", add_special_tokens=False) == tok.encode("yes", add_special_tokens=False)


def test_resolve(tmp_path, monkeypatch):
    assert bundle.resolve(tmp_path) == tmp_path
    assert bundle.is_bundled("tinyworld:flux2")
    assert not bundle.is_bundled("some/folder")
    with pytest.raises(UserError, match="tinyworld:flux2"):
        bundle.resolve("tinyworld:nothing")
    with pytest.raises(UserError, match="no model folder"):
        bundle.resolve(tmp_path / "absent")
    monkeypatch.setattr(bundle, "weights_dir", lambda: tmp_path)
    with pytest.raises(UserError, match="missing"):
        bundle.resolve("tinyworld:flux2")
    (tmp_path / "flux2").mkdir()
    assert bundle.resolve("tinyworld:flux2") == tmp_path / "flux2"
