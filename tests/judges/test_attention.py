"""Attention rows, the vision tower and the layout of image tokens, against the stock classes."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cast_engine.errors import UserError
from cast_engine.judges import attention, vision
from cast_engine.judges.hf_judge import HFJudge, _PackedTails
from cast_engine.judges.templates import answer_text
from tests.judges import tiny_vlm
from tests.judges.plain_forward import LAYERS, plain, stock


def forward(judge, images, graphs):
    """The judge's own steps up to the logits and the attention rows averaged per question."""
    (items,) = judge._batches(images, graphs)
    with torch.inference_mode():
        patches, grid = judge._pixels([images[i.index] for i in items], judge.device)
        seen = vision.encode(judge._visual, patches, grid, judge._merge)
        tails = _PackedTails.of(items, judge.rows, judge.device)
        hidden, rows = judge._forward(seen, grid, tails)
        return items, judge._head(hidden[tails.owner, tails.predict]), torch.bmm(tails.average, rows)


@pytest.mark.parametrize("rows", ["answer", "predict"])
def test_rows_equal_eager_attention_and_logits_are_unchanged(vlm_folder, rows):
    judge = HFJudge(vlm_folder, device="cpu", rows=rows, layers=LAYERS)
    images, graphs = tiny_vlm.images(2, 32, 48), [tiny_vlm.graph(("circle", "cow")), tiny_vlm.graph(("cross",))]
    items, logits, got = forward(judge, images, graphs)
    at = 0
    for b, item in enumerate(items):
        for k, atom in enumerate(item.atoms):
            question = answer_text(atom.question)
            expected, on_image = plain(vlm_folder, images[item.index], question, atom.expected, rows=rows)
            torch.testing.assert_close(got[b, k].view(4, 6), on_image, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(logits[at], expected, atol=1e-5, rtol=1e-5)
            at += 1


def test_a_tail_does_not_see_the_others(vlm_folder):
    judge = HFJudge(vlm_folder, device="cpu")
    image = tiny_vlm.images(1)
    _, two, _ = forward(judge, image, [tiny_vlm.graph(("circle", "cow"))])
    _, one, _ = forward(judge, image, [tiny_vlm.graph(("circle",))])
    torch.testing.assert_close(two[:2], one, atol=1e-5, rtol=1e-5)


class _Shapes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.widest = 0  # of all results: the smaller of the last two sides

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim >= 3:
                self.widest = max(self.widest, min(tensor.shape[-2:]))
        return out


def test_no_tensor_is_as_wide_as_the_sequence_in_two_directions(vlm_folder):
    judge = HFJudge(vlm_folder, device="cpu", layers=(0, 1, 2, 3, 4))
    images, graph = tiny_vlm.images(1, 256, 256), tiny_vlm.graph()  # 1,024 image tokens
    judge.score(tiny_vlm.images(1), [graph])
    hidden = judge._text.config.hidden_size
    (items,) = judge._batches(images, [graph])
    patches, grid = judge._pixels(images, judge.device)
    seen = vision.encode(judge._visual, patches, grid, judge._merge)
    tails = _PackedTails.of(items, "answer", judge.device)
    with torch.inference_mode(), _Shapes() as shapes:
        judge._forward(seen, grid, tails)
    assert shapes.widest <= max(tails.ids.shape[1], 2 * hidden) < 1024


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_nothing_captured_names_the_backend(vlm_folder, backend):
    judge = HFJudge(vlm_folder, device="cpu")
    judge._text.config._attn_implementation = backend
    with pytest.raises(UserError, match=f"no attention was captured .* '{backend}'"):
        judge.score(tiny_vlm.images(1), [tiny_vlm.graph()])


def test_the_backend_serves_packed_forwards_only(vlm_folder):
    judge = HFJudge(vlm_folder, device="cpu")
    with pytest.raises(RuntimeError, match="packed forward only"):
        judge._text(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.parametrize("size", [(32, 32), (48, 80), (37, 50)])
def test_the_batched_tower_equals_the_stock_one(vlm_folder, size):
    judge = HFJudge(vlm_folder, device="cpu")
    model, _, processor = stock(vlm_folder)
    images = tiny_vlm.images(3, *size)
    expected_pixels = processor(images=images, return_tensors="pt")
    patches, grid = judge._pixels(images, judge.device)
    torch.testing.assert_close(patches, expected_pixels["pixel_values"], atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        seen = vision.encode(judge._visual, patches, grid, judge._merge)
        expected = model.model.visual(expected_pixels["pixel_values"], grid_thw=expected_pixels["image_grid_thw"])
    torch.testing.assert_close(seen.tokens.flatten(0, 1), expected.pooler_output, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(seen.deepstack or [], getattr(expected, "deepstack_features", None) or [], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(512, 512), (480, 832), (1328, 1328)])
@pytest.mark.parametrize("patch", [14, 16])
def test_a_bright_block_and_its_token_share_a_cell(tmp_path, height, width, patch):
    tiny_vlm.build("qwen2_5_vl" if patch == 14 else "qwen3_vl", tmp_path, patch=patch)
    pixels = vision.Preprocessor(tmp_path)
    image = np.zeros((height, width, 3), np.uint8)
    top, left = round(height * 0.7), round(width * 0.2)  # below the middle, left of it
    image[top : top + 12, left : left + 12] = 255
    patches, (gh, gw) = pixels([image], torch.device("cpu"))
    grid = (gh // 2, gw // 2)
    brightness = patches.view(grid[0] * grid[1], -1).sum(dim=1)
    one_hot = torch.zeros(grid[0] * grid[1])
    one_hot[brightness.argmax()] = 0.25
    maps, mass = attention.to_maps(one_hot, grid)
    row, column = divmod(int(maps.flatten().argmax()), grid[1])
    assert row == int((top + 6) / height * grid[0])
    assert column == int((left + 6) / width * grid[1])
    assert maps.mean().item() == pytest.approx(1)
    assert mass.item() == pytest.approx(0.25)


def test_a_row_without_image_attention_is_missing():
    maps, mass = attention.to_maps(torch.zeros(2, 6), (2, 3))
    assert maps.isnan().all()
    assert (mass == 0).all()


@pytest.mark.parametrize(
    ("depth", "layers"), [(36, range(15, 29)), (28, range(12, 23)), (6, [3, 4]), (2, [1]), (1, [0])]
)
def test_default_layers(depth, layers):
    assert attention.default_layers(depth) == tuple(layers)
