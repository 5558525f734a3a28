"""The vision tower, for many images of equal size at once.

Equal to the stock preprocessing and forward, but without their loops: pixels become patches on the device, and
attention runs once per segment length instead of once per image.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from cast_engine.errors import UserError


@dataclass(frozen=True)
class VisionOutput:
    """What the decoder gets of B images with N tokens each."""

    tokens: Tensor  # [B, N, D]
    deepstack: list[Tensor] | None  # Qwen3-VL: [B * N, D] for each of the first decoder layers
    grid: tuple[int, int]  # rows and columns of image tokens, after the patch merge


class Preprocessor:
    """Pixels to patches, by the folder's own preprocessor settings."""

    def __init__(self, path: Path) -> None:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as stock

        if not (path / "preprocessor_config.json").is_file():
            raise UserError(
                "preprocessor_config.json is missing", where=str(path), do="save the judge with its image processor"
            )
        # The PIL one on purpose: it needs no torchvision and resizes alike on every machine.
        self.stock = stock.Qwen2VLImageProcessorPil.from_pretrained(path)
        self._smart_resize = stock.smart_resize
        self.merge = int(self.stock.merge_size)

    def __call__(self, images: list[NDArray[np.uint8]], device: torch.device) -> tuple[Tensor, tuple[int, int]]:
        """Return float32 patches ``[B * gh * gw, features]`` of equal-sized images and their patch grid (gh, gw)."""
        height, width = images[0].shape[:2]
        patch, size = int(self.stock.patch_size), self.stock.size
        target = self._smart_resize(height, width, patch * self.merge, size["shortest_edge"], size["longest_edge"])
        plain = self.stock.do_rescale and self.stock.do_normalize
        if not plain or (self.stock.do_resize and target != (height, width)) or (height % patch or width % patch):
            return self._stock(images, device)
        pixels = torch.from_numpy(np.stack(images)).to(device).permute(0, 3, 1, 2).float()
        mean = torch.tensor(self.stock.image_mean, device=device).view(1, -1, 1, 1)
        std = torch.tensor(self.stock.image_std, device=device).view(1, -1, 1, 1)
        return self._patches((pixels * self.stock.rescale_factor - mean) / std), (height // patch, width // patch)

    def _patches(self, pixels: Tensor) -> Tensor:
        """Cut ``[B, C, H, W]`` into patches, the merge x merge patches of a token next to each other."""
        b, c, h, w = pixels.shape
        p, m, t = int(self.stock.patch_size), self.merge, int(self.stock.temporal_patch_size)
        x = pixels.view(b, c, h // (m * p), m, p, w // (m * p), m, p).permute(0, 2, 5, 3, 6, 1, 4, 7)
        return x[..., None, :, :].expand(*x.shape[:6], t, p, p).reshape(b * (h // p) * (w // p), c * t * p * p)

    def _stock(self, images: list[NDArray[np.uint8]], device: torch.device) -> tuple[Tensor, tuple[int, int]]:
        out = self.stock.preprocess(images, input_data_format="channels_last", return_tensors="pt")
        _, gh, gw = (int(n) for n in out["image_grid_thw"][0])
        return out["pixel_values"].to(device), (gh, gw)


def encode(visual: Any, patches: Tensor, grid: tuple[int, int], merge: int) -> VisionOutput:
    """Run the tower once over B images of one patch grid (gh, gw)."""
    gh, gw = grid
    batch, tokens = patches.shape[0] // (gh * gw), gh * gw // merge**2
    thw = torch.tensor([[1, gh, gw]], device=patches.device).expand(batch, 3)
    out = visual(patches, grid_thw=thw)
    return VisionOutput(
        tokens=out.pooler_output.view(batch, tokens, -1),
        deepstack=getattr(out, "deepstack_features", None),
        grid=(gh // merge, gw // merge),
    )


def accelerate_tower(visual: Any) -> None:
    """Replace the tower's per-image attention loop and its patch convolution by batched equivalents."""
    for block in visual.blocks:
        attention = block.attn
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb_vision
        attention.forward = partial(_batched_attention, attention, rotate)
    visual.patch_embed.forward = partial(_patch_embed, visual.patch_embed.proj)


def _patch_embed(proj: Any, patches: Tensor) -> Tensor:
    # Kernel and stride are equal, so the 3-D convolution is one matrix product.
    return linear(patches.to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)


def _batched_attention(
    module: Any,
    rotate: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """Attend within segments (images or windows) of ``hidden_states`` ``[S, D]``, one call per segment length."""
    qkv = module.qkv(hidden_states).view(hidden_states.shape[0], 3, module.num_heads, -1)
    query, key, value = qkv.unbind(1)
    query, key = rotate(query, key, *position_embeddings)
    lengths = cu_seqlens.diff()
    out = torch.empty_like(query)
    for length in sorted(set(lengths.tolist())):
        starts = cu_seqlens[:-1][lengths == length].long()
        index = (starts[:, None] + torch.arange(length, device=starts.device)).flatten()
        whole = len(index) == len(query)
        q, k, v = ((x if whole else x[index]).unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value))
        part = scaled_dot_product_attention(q, k, v, scale=module.scaling).transpose(1, 2).flatten(0, 1)
        if whole:
            return module.proj(part.flatten(1))  # type: ignore[no-any-return]
        out[index] = part
    return module.proj(out.flatten(1))  # type: ignore[no-any-return]
