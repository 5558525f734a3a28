"""Attention over a packed sequence, and the few attention rows that the maps need, both under SDPA.

One sequence per image holds the shared prefix (chat header and image) once and then every question's tail. A tail sees
the prefix and itself, never another tail, so each question is answered as if it had been asked alone.

The function is registered as an attention backend of transformers, which hands it queries and keys after RoPE for every
model class alike. SDPA returns no weights: the wanted rows are recomputed from their queries, with no L x L matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from cast_engine.errors import UserError

BACKEND = "cast_packed_sdpa"


@dataclass(frozen=True)
class Packing:
    """How a batch of packed sequences is laid out: P prefix positions, then R tail positions."""

    prefix: int
    visible: Tensor  # bool [B, 1, R, P + R]: which positions each tail position sees

    @staticmethod
    def of(prefix: int, question: Tensor) -> Packing:
        """Build the layout from the question index of each tail position (``[B, R]``; padding has an index too)."""
        same = question[:, :, None] == question[:, None, :]
        causal = same.tril()
        return Packing(prefix, torch.nn.functional.pad(causal, (prefix, 0), value=True)[:, None])


@dataclass
class RowReader:
    """Collects attention rows: the mean over heads and chosen layers, at the image tokens."""

    layers: frozenset[int]
    rows: Tensor  # long [B, n]: tail positions whose attention is read
    image: slice  # key positions of the image tokens
    seen: set[int] = field(default_factory=set)
    total: Tensor | None = None  # [B, n, N], summed over layers

    def read(self, layer: int, query: Tensor, key: Tensor, packing: Packing, scaling: float) -> None:
        """Add one layer's rows (query ``[B, H, R, D]`` of the tails, key ``[B, H_kv, P + R, D]``, both after RoPE)."""
        if layer not in self.layers:
            return
        batch, heads, _, dim = query.shape
        kv_heads, count = key.shape[1], self.rows.shape[1]
        index = self.rows[:, None, :, None].expand(batch, heads, count, dim)
        # Queries of the heads that share a key head are stacked, so keys are not copied.
        rows = query.gather(2, index).reshape(batch, kv_heads, heads // kv_heads * count, dim)
        logits = (rows @ key.transpose(2, 3)).float().mul_(scaling).view(batch, heads, count, -1)
        mask = packing.visible.gather(2, self.rows[:, None, :, None].expand(batch, 1, count, packing.visible.shape[3]))
        share = logits.masked_fill_(~mask, float("-inf")).softmax(dim=-1)[..., self.image].mean(dim=1)
        self.total = share if self.total is None else self.total + share
        self.seen.add(layer)

    def result(self, backend: str) -> Tensor:
        """Return the rows ``[B, n, N]``: the share of attention on each of the N image tokens (sums to the mass)."""
        if self.total is None or self.seen != self.layers:
            missing = sorted(self.layers - self.seen)
            raise UserError(
                f"no attention was captured in layers {missing} under the attention backend {backend!r}",
                expected=f"the backend {BACKEND!r}",
                do="load the judge anew and leave its attention backend alone",
            )
        return self.total / len(self.layers)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    reader: RowReader | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within a packed batch (transformers' attention interface).

    Args:
        module: the attention layer.
        query: ``[B, H, P + R, D]`` after RoPE.
        key: ``[B, H_kv, P + R, D]`` after RoPE.
        value: ``[B, H_kv, P + R, D]``.
        attention_mask: unused; the layout says who sees whom.
        scaling: factor on the logits.
        packing: the layout.
        reader: collects rows of this layer, if it wants them.

    Returns:
        ``[B, P + R, H, D]`` and no weights.
    """
    del attention_mask
    if packing is None:
        raise RuntimeError(f"the attention backend {BACKEND!r} serves the judge's packed forward only")
    p = packing.prefix
    if reader is not None:
        layer = module.layer_idx
        assert isinstance(layer, int)
        reader.read(layer, query[:, :, p:], key, packing, scaling)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    prefix = scaled_dot_product_attention(
        query[:, :, :p], key[:, :, :p], value[:, :, :p], is_causal=True, scale=scaling
    )
    tails = scaled_dot_product_attention(query[:, :, p:], key, value, attn_mask=packing.visible, scale=scaling)
    return torch.cat((prefix, tails), dim=2).transpose(1, 2), None


def install(text_model: Any) -> None:
    """Make this backend the text model's; the vision tower keeps its own."""
    from transformers import AttentionInterface

    # No mask function of this name is registered, so transformers builds no mask.
    AttentionInterface.register(BACKEND, packed_attention)
    text_model.config._attn_implementation = BACKEND  # noqa: SLF001


def default_layers(depth: int) -> tuple[int, ...]:
    """Return the decoder layers from 40% to 80% of the depth, at least one."""
    first, stop = -(-depth * 4 // 10), -(-depth * 8 // 10)
    return tuple(range(first, stop)) or (depth // 2,)


def to_maps(rows: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Turn attention rows into maps.

    Args:
        rows: ``[..., N]`` float32, share of attention on each image token.
        grid: (rows, columns) of image tokens; tokens are row-major, each a block of merge x merge patches.

    Returns:
        maps ``[..., gh, gw]`` with mean one (NaN where no attention fell on the image or it was not finite),
        and the mass ``[...]``.
    """
    mass = rows.sum(dim=-1)
    maps = rows / rows.mean(dim=-1, keepdim=True)
    return maps.reshape(*rows.shape[:-1], *grid), mass
