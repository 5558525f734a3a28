"""Train the tiny world's VAE.

    python -m cast_engine.tinyworld.training.vae --out OUT --minutes 1.5

Squared error, a little absolute error of values and of edges, and a tiny KL term. Noise on the latents in training
makes the decoder forgive what a denoiser gets slightly wrong. At the end the running statistics, with which the stock
pipeline scales latents but which no part of it fills, are measured. Writes OUT/vae (float32) and OUT/vae.json.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cast_engine.tinyworld import build, prompts
from cast_engine.tinyworld.training import engine, flux
from cast_engine.tinyworld.training.dataset import from_pixels, scenes, to_pixels
from cast_engine.tinyworld.training.engine import log
from cast_engine.tinyworld.training.workers import Workers

EDGES, ABSOLUTE, KL, LATENT_NOISE = 0.25, 0.1, 1e-5, 0.1


def loss_of(vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and the squared error and the KL term for the log."""
    posterior = vae.encode(pixels).latent_dist
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    latents = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    latents = latents + LATENT_NOISE * mean.detach().std() * torch.randn_like(mean)
    error = vae.decode(latents).sample.float() - pixels
    kl = 0.5 * (mean.pow(2) + logvar.exp() - 1 - logvar).mean()
    squared = error.pow(2).mean()
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    total = squared + ABSOLUTE * error.abs().mean() + EDGES * edges + KL * kl
    return total, torch.stack([squared.detach(), kl.detach()])


@torch.no_grad()
def fill_statistics(vae: Any, images: Tensor, batch: int = 512) -> None:
    """Set the latents' channel mean and variance that the stock pipeline scales with."""
    vae.bn.reset_running_stats()
    parts = [
        flux.patchify(vae.encode(to_pixels(images[i : i + batch])).latent_dist.mode().float())
        for i in range(0, len(images), batch)
    ]
    latents = torch.cat(parts)
    vae.bn.running_mean.copy_(latents.mean((0, 2, 3)))
    vae.bn.running_var.copy_(latents.var((0, 2, 3)))


@torch.no_grad()
def evaluate(vae: Any, images: Tensor, texts: list[str], workers: Workers) -> dict[str, float]:
    """Verify reconstructions of held-out pictures."""
    parts = [to_pixels(images[i : i + 256]) for i in range(0, len(images), 256)]
    again = [vae.decode(vae.encode(p).latent_dist.mode()).sample for p in parts]
    error = torch.stack([(a - p).pow(2).mean() for a, p in zip(again, parts, strict=True)]).mean()
    pictures = from_pixels(torch.cat(again)).cpu().numpy()
    return {**flux.shares(flux.judged(workers, pictures, texts)), "mse": round(float(error), 6)}


def main() -> None:
    """Train, measure and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    engine.add_common_arguments(parser)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    device = engine.prepare(args)
    minutes = 1.5 if args.minutes is None else args.minutes
    if args.smoke:
        args.batch = 4
    with Workers(args.workers) as workers:
        data = scenes(workers, "train", args.pictures, args.seed, args.cache)
        held = scenes(workers, "validation", 16 if args.smoke else 1024, args.seed, args.cache)
        images = torch.from_numpy(data["images"]).to(device)
        held_images = torch.from_numpy(held["images"]).to(device)
        texts = [prompts.text_of(prompts.all_specs()[i]) for i in held["spec"]]
        log(f"drawn pictures: {flux.row(flux.shares(flux.judged(workers, held['images'], texts)))}")
        figures = fit(args, device, images, minutes, held_images, texts, workers)
    engine.write_json(args.out / "vae.json", figures)


def fit(
    args: argparse.Namespace,
    device: torch.device,
    images: Tensor,
    minutes: float,
    held: Tensor,
    texts: list[str],
    workers: Workers,
) -> dict[str, Any]:
    """Train on pictures on the device; returns the figures that vae.json holds."""
    vae = build.pipeline(args.seed).vae.to(device, memory_format=torch.channels_last).train()
    optimiser = engine.Optimiser([vae], args.lr, decay=0.998)
    average: Any = optimiser.averages[0]

    def step() -> Tensor:
        chosen = torch.randint(len(images), (args.batch,), device=device)
        pixels = to_pixels(images[chosen]).contiguous(memory_format=torch.channels_last)
        with engine.autocast(device):
            loss, values = loss_of(vae, pixels)
        optimiser.step(loss)
        return values

    def report(steps: int, values: Tensor, used: float) -> None:
        found = evaluate(average, held, texts, workers)
        log(f"vae {used:4.0%} step {steps}: mse {values[0]:.5f} kl {values[1]:.2f} | held-out {flux.row(found)}")
        save()

    def save() -> None:
        average.save_pretrained(args.out / "vae")
        engine.publish(args.out / "vae", args.publish)

    runner = engine.Runner(step, device, args.engine)
    speed = engine.train(runner, optimiser, minutes, reports=4, report=report)
    fill_statistics(average, images[: 20_000 if not args.smoke else 32])
    save()
    found = evaluate(average, held, texts, workers)
    log(f"vae done: {speed} | held-out {flux.row(found)}")
    drawn = held[: 16 if args.smoke else 32]
    with torch.no_grad():
        again = from_pixels(average.decode(average.encode(to_pixels(drawn)).latent_dist.mode()).sample)
    pairs = torch.stack([drawn, again], 1).flatten(0, 1).cpu().numpy()
    flux.contact_sheet(pairs, np.repeat(texts[: len(drawn)], 2).tolist(), args.out / "vae.png")
    return {"held_out": found, **speed, "pictures": len(images), "batch": args.batch, "cores": os.cpu_count()}


if __name__ == "__main__":
    main()
