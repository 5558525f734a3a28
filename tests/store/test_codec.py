import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_engine.errors import DatasetError
from cast_engine.store import decode_json, decode_png, decode_tensors, encode_json, encode_png, encode_tensors
from cast_engine.store.codec import check_tensors
from schemas.records import ADVANTAGE_TENSORS, ROLLOUT_TENSORS, SCORE_TENSORS, TensorField


def rollout(w=2, p=4, c=3, n=5, dtype=torch.float32):
    return {
        "latents": torch.randn(w + 1, p, c).to(dtype),
        "final_latent": torch.randn(p, c).to(dtype),
        "steps": torch.arange(w),
        "sigmas": torch.linspace(1, 0, n + 1),
        "logp_old": torch.randn(w, p),
    }


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.integers(1, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_rollouts(w, p, c, n, half):
    tensors = rollout(w, p, c, n, torch.bfloat16 if half else torch.float32)
    data = encode_tensors(tensors)
    assert encode_tensors(dict(reversed(tensors.items()))) == data
    out = decode_tensors(data, ROLLOUT_TENSORS)
    assert list(out) == list(ROLLOUT_TENSORS)
    for name, tensor in tensors.items():
        assert out[name].dtype == tensor.dtype
        assert torch.equal(out[name], tensor)
    assert check_tensors(data, ROLLOUT_TENSORS) == {"w": w, "P": p, "C": c, "N": n}


def test_views_and_gradients_are_written_too():
    x = torch.randn(3, 4, 2, requires_grad=True)
    tensors = rollout(2, 4, 2) | {"latents": x, "final_latent": x[-1], "logp_old": torch.randn(4, 2).T}
    out = decode_tensors(encode_tensors(tensors), ROLLOUT_TENSORS)
    assert torch.equal(out["final_latent"], x[-1])
    assert torch.equal(out["logp_old"], tensors["logp_old"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents": torch.randn(4, 4, 3)}, "so w = 2; expected .* with w = 3"),
        ({"final_latent": torch.randn(5, 3)}, "so P = 5"),
        ({"final_latent": torch.randn(4, 3, 1)}, "has shape"),
        ({"logp_old": torch.randn(2, 4, dtype=torch.float64)}, "malformed"),
        ({"logp_old": torch.randn(2, 4).half()}, "is float16; expected float32"),
        ({"steps": torch.zeros(2)}, "is float32; expected int64"),
        ({"more": torch.zeros(1)}, "expected"),
        ({"steps": None}, "expected"),
    ],
)
def test_tensors_that_do_not_fit(change, message):
    tensors = {k: v for k, v in (rollout() | change).items() if v is not None}
    with pytest.raises(DatasetError, match=message):
        decode_tensors(encode_tensors(tensors), ROLLOUT_TENSORS)


def test_symbols_hold_within_a_member():
    scores = {
        "scores": torch.randn(3),
        "maps": torch.randn(3, 2, 5).half(),
        "mass": torch.randn(3),
        "neutral": torch.randn(2, 5).half(),
    }
    assert check_tensors(encode_tensors(scores), SCORE_TENSORS) == {"K": 3, "gh": 2, "gw": 5}
    with pytest.raises(DatasetError, match="gh = 5"):
        check_tensors(encode_tensors(scores | {"neutral": scores["neutral"].T}), SCORE_TENSORS)
    advantage = {"weight": torch.randn(4), "advantage": torch.randn(1)}
    assert check_tensors(encode_tensors(advantage), ADVANTAGE_TENSORS) == {"P": 4, "K": 1}


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_altered_headers_never_get_through_wrongly(data):
    """Any change of the header is refused, or what is read still has the schema's dtypes and shapes."""
    good = bytearray(encode_tensors({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3)}))
    fields = {"a": TensorField(("float32",), ("m", "n")), "b": TensorField(("int64",), ("n",))}
    length = int.from_bytes(good[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.integers(0, 255))
    try:
        out = decode_tensors(bytes(good), fields)
    except DatasetError:
        return
    assert out["a"].dtype == torch.float32
    assert out["a"].numel() == 6
    assert out["b"].shape == (out["a"].shape[1],)


def test_images():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    data = encode_png(image)
    assert np.array_equal(decode_png(data), image)
    assert np.array_equal(decode_png(encode_png(image[:, ::-1]), 5, 7), image[:, ::-1])
    with pytest.raises(DatasetError, match="height 5, width 7"):
        decode_png(data, 7, 5)
    with pytest.raises(ValueError, match="uint8"):
        encode_png(image.astype(np.float32))
    with pytest.raises(ValueError, match="uint8"):
        encode_png(image[..., :1])
    for cut in range(len(data)):
        with pytest.raises(DatasetError):
            decode_png(data[:cut])


def test_json():
    assert decode_json(encode_json({"b": "é", "a": [1.5, None]})) == {"a": [1.5, None], "b": "é"}
    with pytest.raises(ValueError, match="JSON"):
        encode_json({"a": float("nan")})
