"""The text and vision towers of the tiny models as plain batched functions of the stock modules' weights.

The stock code builds masks and positions per sample in Python and attends picture by picture, which takes most of a
training step at this size. Here every sequence of a batch has the same layout, so masks, positions and rotary angles
are made once. Outputs equal the stock modules' (checked at the start of every training).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from cast_engine.tinyworld import build


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def decoder_layer(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run one decoder layer (Mistral or Qwen3-VL).

    Args:
        layer: the stock layer.
        x: hidden states [B, L, D].
        cos: rotary cosines [L, head_dim].
        sin: rotary sines [L, head_dim].
        mask: bool, broadcastable to [B, heads, L, L]; True where a row may look.

    Returns:
        New hidden states, and the rotated queries and keys [B, heads, L, head_dim].
    """
    a = layer.self_attn
    q, k, v = _project(layer, x)
    q, k = _rotate(q.transpose(1, 2), cos, sin), _rotate(k.transpose(1, 2), cos, sin)
    groups = q.shape[1] // k.shape[1]
    v = v.transpose(1, 2)
    if groups > 1:  # each key and value head serves several query heads
        k, v = (t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
    y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
    x = x + a.o_proj(y.transpose(1, 2).flatten(2))
    mlp = layer.mlp
    h = layer.post_attention_layernorm(x)
    return x + mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h)), q, k


def _project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (p(h).unflatten(-1, (-1, a.head_dim)) for p in (a.q_proj, a.k_proj, a.v_proj))
    return (a.q_norm(q), a.k_norm(k), v) if hasattr(a, "q_norm") else (q, k, v)


def _rotary(module: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = module(like, positions)
    return cos[0].float(), sin[0].float()


class PromptEncoder(nn.Module):
    """The pipeline's prompt embedding: the hidden states it stacks, [B, T, layers * D].

    Args:
        encoder: the stock Mistral3 model; its weights are used in place.
    """

    text: Any
    cos: Tensor
    sin: Tensor
    causal: Tensor

    def __init__(self, encoder: Any, length: int = build.MAX_SEQUENCE_LENGTH) -> None:
        super().__init__()
        self.text = encoder.model.language_model
        self.out_layers = build.TEXT_ENCODER_OUT_LAYERS
        device = self.text.embed_tokens.weight.device
        like = torch.zeros(1, length, 1, device=device)
        cos, sin = _rotary(self.text.rotary_emb, like, torch.arange(length, device=device)[None])
        self.cos, self.sin = nn.Buffer(cos, persistent=False), nn.Buffer(sin, persistent=False)
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        self.causal = nn.Buffer(causal, persistent=False)
        for unread in (*self.text.layers[max(self.out_layers) :], self.text.norm):
            unread.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed token ids [B, T] (0 pads on the right)."""
        mask = self.causal & (ids != 0)[:, None, None, :]
        x = self.text.embed_tokens(ids)
        kept = []
        for i, layer in enumerate(self.text.layers[: max(self.out_layers)], start=1):
            x, _, _ = decoder_layer(layer, x, self.cos, self.sin, mask)
            if i in self.out_layers:
                kept.append(x)
        return torch.cat(kept, dim=-1)


@dataclass(frozen=True)
class Layout:
    """Token layout of one picture with several questions, each of which sees only the picture and itself.

    The picture's part is computed once and shared. Attributes are indices into the sequence.
    """

    prefix: int
    slot: int
    slots: int
    length: int

    @staticmethod
    def of(slot: int, slots: int) -> Layout:
        """Lay out `slots` questions of at most `slot` tokens; the length is a multiple of 8, as fast kernels want."""
        prefix = 3 + build.GRID**2 + 1  # <|im_start|> user <|vision_start|> picture <|vision_end|>
        return Layout(prefix, slot, slots, -(-(prefix + slot * slots) // 8) * 8)

    def mask(self) -> Tensor:
        """Return who sees whom: bool [L, L]."""
        part = torch.full((self.length,), -1)
        part[self.prefix : self.prefix + self.slot * self.slots] = torch.arange(self.slots).repeat_interleave(self.slot)
        part[self.prefix + self.slot * self.slots :] = self.slots
        seen = (part[None, :] == part[:, None]) | (part[None, :] == -1)
        return seen & torch.ones(self.length, self.length, dtype=torch.bool).tril()

    def positions(self) -> Tensor:
        """Return rotary positions (time, row, column) as the stock model numbers them: [3, L]."""
        g = build.GRID
        cells = torch.arange(g * g)
        picture = torch.stack([torch.full((g * g,), 3), 3 + cells // g, 3 + cells % g])
        head = torch.arange(3).expand(3, 3)
        end = torch.full((3, 1), 3 + g)
        body = (4 + g + torch.arange(self.slot)).repeat(self.slots)
        tail = 4 + g + torch.arange(self.length - self.prefix - self.slot * self.slots)
        return torch.cat([head, picture, end, torch.cat([body, tail]).expand(3, -1)], dim=1)


class JudgeCore(nn.Module):
    """The stock Qwen3-VL judge on equal layouts: many questions per picture in one pass.

    Args:
        model: the stock model; its weights are used in place.
        layout: of the token sequence.
        head: ids of the five kinds of prefix tokens in order: im_start, user, vision_start, image_pad, vision_end.
    """

    model: Any
    prefix: Tensor
    mask: Tensor
    cos: Tensor
    sin: Tensor
    order: Tensor
    vcos: Tensor
    vsin: Tensor

    def __init__(self, model: Any, layout: Layout, head: list[int]) -> None:
        super().__init__()
        self.model = model
        self.layer: Any = decoder_layer
        self.block: Any = vision_block
        self.layout = layout
        text, device = self.model.model.language_model, self.model.lm_head.weight.device
        g = build.GRID
        ids = torch.tensor([*head[:3], *([head[3]] * g * g), head[4]], device=device)
        self.prefix = nn.Buffer(ids, persistent=False)
        self.mask = nn.Buffer(layout.mask().to(device), persistent=False)
        like = torch.zeros(1, layout.length, 1, device=device)
        cos, sin = _rotary(text.rotary_emb, like, layout.positions()[:, None].to(device))
        self.cos, self.sin = nn.Buffer(cos, persistent=False), nn.Buffer(sin, persistent=False)
        row, column = patch_places()
        self.order = nn.Buffer((row * 2 * g + column).to(device), persistent=False)
        vision = self.model.config.vision_config
        quarter = vision.hidden_size // vision.num_heads // 4
        frequency = 10000.0 ** (-torch.arange(quarter) / quarter)
        angles = torch.cat([row[:, None] * frequency, column[:, None] * frequency], dim=1).repeat(1, 2).to(device)
        self.vcos, self.vsin = nn.Buffer(angles.cos(), persistent=False), nn.Buffer(angles.sin(), persistent=False)

    def compile_layers(self) -> None:
        """Compile the repeated layers, one by one."""
        self.layer = torch.compile(decoder_layer, dynamic=False)
        self.block = torch.compile(vision_block, dynamic=False)

    def look(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Encode pictures, [B, 3, 64, 64] in [-1, 1], to tokens [B, 64, D] and the deep-stack features."""
        vision = self.model.model.visual
        embed = vision.patch_embed.proj
        x = F.linear(patches(pixels), embed.weight.flatten(1), embed.bias)
        x = x + vision.pos_embed.weight[self.order]
        deep = []
        for i, block in enumerate(vision.blocks):
            x = self.block(block, x, self.vcos, self.vsin)
            if i in vision.deepstack_visual_indexes:
                merger = vision.deepstack_merger_list[vision.deepstack_visual_indexes.index(i)]
                deep.append(merger(x).unflatten(0, (len(x), -1)))
        return vision.merger(x).unflatten(0, (len(x), -1)), deep

    def forward(
        self, pixels: Tensor, questions: Tensor, attention: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Read questions about pictures.

        Args:
            pixels: [B, 3, 64, 64] in [-1, 1].
            questions: token ids [B, slots, slot], each the text after the picture up to and including the answer.
            attention: indices of the layers whose attention over the picture is wanted.

        Returns:
            Hidden states of the questions [B, slots, slot, D], after the final norm; and per wanted layer the share
            of attention that each question token puts on each image token, mean over heads [B, slots, slot, 64].
        """
        text = self.model.model.language_model
        lay, g2 = self.layout, build.GRID**2
        image, deep = self.look(pixels)
        words = F.pad(questions.flatten(1), (0, lay.length - lay.prefix - lay.slot * lay.slots))
        ids = torch.cat([self.prefix.expand(len(words), -1), words], dim=1)
        x = text.embed_tokens(ids)
        x = torch.cat([x[:, :3], image.to(x.dtype), x[:, 3 + g2 :]], dim=1)
        maps = []
        first, last = lay.prefix, lay.prefix + lay.slot * lay.slots
        for i, layer in enumerate(text.layers):
            x, q, k = self.layer(layer, x, self.cos, self.sin, self.mask)
            if i < len(deep):
                x = x + F.pad(deep[i].to(x.dtype), (0, 0, 3, lay.length - 3 - g2))
            if i in attention:
                scale = q.shape[-1] ** -0.5
                scores = (q[:, :, first:last].float() @ k.float().transpose(2, 3)) * scale
                scores = scores.masked_fill(~self.mask[first:last], float("-inf")).softmax(-1)
                maps.append(scores[..., 3 : 3 + g2].mean(1).unflatten(1, (lay.slots, lay.slot)))
        return text.norm(x[:, first:last]).unflatten(1, (lay.slots, lay.slot)), maps


def patch_places() -> tuple[Tensor, Tensor]:
    """Return row and column of each 4x4 patch in the processor's order: 2x2 blocks of patches, row by row."""
    side = 2 * build.GRID
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    shape = (build.GRID, 2, build.GRID, 2)
    return row.reshape(shape).transpose(1, 2).flatten(), column.reshape(shape).transpose(1, 2).flatten()


def patches(pixels: Tensor) -> Tensor:
    """Cut [B, 3, 64, 64] into the processor's patches: [B, 256, 3 * 2 * 4 * 4], each picture twice in time."""
    b, g = len(pixels), build.GRID
    x = pixels.view(b, 3, g, 2, 4, g, 2, 4).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return x.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(b, 4 * g * g, 96)


def vision_block(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Run one vision block on a batch of equal pictures [B, N, D]."""
    a = block.attn
    q, k, v = a.qkv(block.norm1(x)).unflatten(-1, (3, a.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = _rotate(q.float(), cos, sin), _rotate(k.float(), cos, sin)
    y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
    x = x + a.proj(y.transpose(1, 2).flatten(2))
    out: Tensor = x + block.mlp(block.norm2(x))
    return out
