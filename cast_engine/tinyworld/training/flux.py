"""The tiny FLUX.2 during training: latents as the stock pipeline makes them, a fast sampler, and its evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from torch import Tensor, nn

from cast_engine.tinyworld import build, prompts
from cast_engine.tinyworld.training.dataset import from_pixels, prompt_tokens
from cast_engine.tinyworld.training.fast import PromptEncoder
from cast_engine.tinyworld.training.pictures import Marks
from cast_engine.tinyworld.training.workers import Workers

POSITIONS = build.GRID**2
STOCK_SHIFT = math.exp(compute_empirical_mu(POSITIONS, build.NUM_INFERENCE_STEPS))
"""Timestep shift that the stock pipeline computes for 64 positions and 10 steps (about 6.7)."""
_MARKS = "cast_engine.tinyworld.training.pictures:marks"


def shifted(u: Tensor) -> Tensor:
    """Return the noise levels of unshifted times u in [0, 1], as the stock pipeline shifts its ten steps."""
    return STOCK_SHIFT * u / (1 + (STOCK_SHIFT - 1) * u)


def patchify(latents: Tensor) -> Tensor:
    """Turn VAE latents [B, C, 16, 16] into [B, 4C, 8, 8] (2x2 neighbours become channels)."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, c * 4, h // 2, w // 2)


def unpatchify(latents: Tensor) -> Tensor:
    """Undo `patchify`."""
    b, c, h, w = latents.shape
    return latents.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, h * 2, w * 2)


def _scale(vae: Any) -> tuple[Tensor, Tensor]:
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return mean, std


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Turn pictures into the transformer's tokens: [B, 64, 32], about unit variance per channel."""
    mean, std = _scale(vae)
    latents = patchify(vae.encode(pixels).latent_dist.mode().float())
    return ((latents - mean) / std).flatten(2).transpose(1, 2)


def decode(vae: Any, tokens: Tensor) -> Tensor:
    """Turn tokens [B, 64, 32] into uint8 pictures [B, 64, 64, 3]."""
    mean, std = _scale(vae)
    latents = tokens.transpose(1, 2).reshape(len(tokens), -1, build.GRID, build.GRID) * std + mean
    return from_pixels(vae.decode(unpatchify(latents)).sample)


class Velocity(nn.Module):
    """The transformer with its position ids: v(x_t, sigma | prompt, guidance)."""

    transformer: Any
    img: Tensor
    txt: Tensor

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer = transformer
        device = next(transformer.parameters()).device
        zero, g, t = torch.zeros(1, dtype=torch.int64), torch.arange(build.GRID), build.MAX_SEQUENCE_LENGTH
        self.img = nn.Buffer(torch.cartesian_prod(zero, g, g, zero).to(device), persistent=False)
        self.txt = nn.Buffer(torch.cartesian_prod(zero, zero, zero, torch.arange(t)).to(device), persistent=False)

    def forward(self, x: Tensor, sigma: Tensor, embeds: Tensor, guidance: Tensor) -> Tensor:
        """Return the velocity [B, 64, 32] at x [B, 64, 32]; sigma and guidance [B]."""
        out: Tensor = self.transformer(
            hidden_states=x,
            timestep=sigma,
            guidance=guidance,
            encoder_hidden_states=embeds,
            txt_ids=self.txt,
            img_ids=self.img,
            return_dict=False,
        )[0]
        return out


def sigma_table(scheduler: Any, steps: int, shift: float | None = None) -> list[float]:
    """Return the noise levels of the stock pipeline, the last one 0; `shift` replaces the shift it would compute."""
    mu = compute_empirical_mu(POSITIONS, steps) if shift is None else math.log(shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return [float(s) for s in scheduler.sigmas]


@torch.no_grad()
def sample(velocity: Velocity, embeds: Tensor, noise: Tensor, sigmas: Sequence[float], guidance: float) -> Tensor:
    """Integrate from noise [B, 64, 32] to the tokens of pictures, as the stock pipeline does."""
    x = noise
    scale = torch.full((len(x),), guidance, device=x.device)
    for now, then in pairwise(sigmas):
        v = velocity(x, torch.full((len(x),), now, device=x.device), embeds, scale)
        x = x + (then - now) * v.float()
    return x


@dataclass
class Sampler:
    """Draws pictures for prompts and judges them by the exact verifier.

    Attributes:
        velocity, encoder, vae: the parts, in evaluation mode.
        scheduler: the stock scheduler.
        tokens: of every prompt, see `prompt_tokens`.
        workers: processes that verify.
    """

    velocity: Velocity
    encoder: PromptEncoder
    vae: Any
    scheduler: Any
    tokens: Tensor
    workers: Workers

    @staticmethod
    def load(folder: Path, device: torch.device, workers: Workers) -> Sampler:
        """Load a saved pipeline."""
        from diffusers import Flux2Pipeline

        pipe = Flux2Pipeline.from_pretrained(folder, dtype=torch.float32)
        velocity = Velocity(pipe.transformer.to(device).eval().requires_grad_(False))
        encoder = PromptEncoder(pipe.text_encoder.to(device).eval().requires_grad_(False))
        tokens = prompt_tokens(pipe.tokenizer, build.MAX_SEQUENCE_LENGTH).to(device)
        vae = pipe.vae.to(device).eval().requires_grad_(False)
        return Sampler(velocity, encoder, vae, pipe.scheduler, tokens, workers)

    def draw(
        self,
        texts: Sequence[str],
        *,
        steps: int = build.NUM_INFERENCE_STEPS,
        guidance: float = 1.0,
        shift: float | None = None,
        seed: int = 0,
        batch: int = 256,
    ) -> npt.NDArray[np.uint8]:
        """Draw one picture per prompt; the noise depends on the seed and the prompt's place only."""
        from cast_engine.tinyworld.training.pictures import spec_ids

        rows = self.tokens[[spec_ids()[prompts.spec_of(t)] for t in texts]]
        shape = (len(texts), POSITIONS, 32)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(rows.device)
        sigmas = sigma_table(self.scheduler, steps, shift)
        pictures = []
        with torch.no_grad():
            for i in range(0, len(texts), batch):
                embeds = self.encoder(rows[i : i + batch])
                x = sample(self.velocity, embeds, noise[i : i + batch], sigmas, guidance)
                pictures.append(decode(self.vae, x).cpu().numpy())
        return np.concatenate(pictures)

    def judge(self, texts: Sequence[str], **how: Any) -> list[Marks]:
        """Draw one picture per prompt and judge each by the exact verifier."""
        return judged(self.workers, self.draw(texts, **how), texts)

    def evaluate(self, texts: Sequence[str], **how: Any) -> dict[str, float]:
        """Draw one picture per prompt and return the shares of fulfilled atoms."""
        return shares(self.judge(texts, **how))


def judged(workers: Workers, images: npt.NDArray[np.uint8], texts: Sequence[str]) -> list[Marks]:
    """Judge pictures by their prompts, in worker processes."""
    step = max(1, len(texts) // 64)
    parts = [(images[i : i + step], list(texts[i : i + step])) for i in range(0, len(texts), step)]
    return [m for part in workers.map(_MARKS, parts) for m in part]


def atoms_right(marks: Sequence[Marks]) -> npt.NDArray[np.float64]:
    """Return the share of fulfilled atoms of every picture."""
    return np.array([np.mean(m.ok) for m in marks])


def shares(marks: Sequence[Marks]) -> dict[str, float]:
    """Summarise judged pictures.

    Returns:
        Share of atoms that hold by kind; `atoms`, the mean over prompts of the share of a prompt's atoms; `all`, the
        share of prompts with every atom right; `many` and `few`, shares of groups with too many or too few objects.
    """
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for m in marks:
        for kind, ok in zip(m.kinds, m.ok, strict=True):
            by_kind[kind].append(ok)
    excess = np.array([e for m in marks for e in m.excess])
    out = {kind: float(np.mean(by_kind[kind])) for kind in sorted(by_kind)}
    out["atoms"] = float(atoms_right(marks).mean())
    out["all"] = float(np.mean([all(m.ok) for m in marks]))
    out["many"], out["few"] = float((excess > 0).mean()), float((excess < 0).mean())
    return {k: round(v, 4) for k, v in out.items()}


def row(figures: dict[str, float]) -> str:
    """Format figures for the log."""
    return "  ".join(f"{k} {v:.3f}" for k, v in figures.items())


def contact_sheet(images: npt.NDArray[np.uint8], texts: Sequence[str], path: Path, columns: int = 8) -> None:
    """Save pictures with their prompts as one PNG."""
    from PIL import Image, ImageDraw

    cell_w, cell_h = 168, 164
    sheet = Image.new("RGB", (columns * cell_w, -(-len(images) // columns) * cell_h), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        x, y = i % columns * cell_w, i // columns * cell_h
        sheet.paste(Image.fromarray(image).resize((128, 128), Image.Resampling.NEAREST), (x + 20, y + 2))
        words, half = text.split(), (len(text.split()) + 1) // 2
        pen.text((x + 2, y + 132), " ".join(words[:half]), fill="black")
        pen.text((x + 2, y + 146), " ".join(words[half:]), fill="black")
    sheet.save(path)
