"""Train the tiny FLUX.2: text encoder and transformer together, then guidance distillation, then step distillation.

    python -m cast_engine.tinyworld.training.base --out OUT --minutes 8

Phase 1 is flow matching on noisy captions (`pictures.CaptionNoise`), one caption in ten left out. Phase 2 freezes the
text encoder and teaches the transformer to give, in one pass and for every guidance g it is told, what the phase-1
model gives in two: v_u + g (v_c - v_u). At g = 1 that is the phase-1 model. Phase 3 teaches it to reach in one Euler
step of the stock 10-step schedule the point that `SUBSTEPS` finer steps of the phase-2 model reach, from noised
pictures and from the student's own paths, where its errors add up: ten steps then follow the path that forty took, so
that what a reward repairs later is composition and not discretisation. Needs
OUT/vae (or --vae).
Writes OUT/flux2 (a stock pipeline folder, float16), OUT/base.json with the final table, OUT/samples.png.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cast_engine.tinyworld import build, prompts
from cast_engine.tinyworld.training import card, engine, flux
from cast_engine.tinyworld.training.dataset import prompt_tokens, scenes, to_pixels
from cast_engine.tinyworld.training.engine import log
from cast_engine.tinyworld.training.fast import PromptEncoder
from cast_engine.tinyworld.training.pictures import CaptionNoise, noise_dict
from cast_engine.tinyworld.training.workers import Workers

GUIDANCE = (1.0, 5.0)
EMPTY = 0.1
"""Share of captions left out in phase 1."""
SUBSTEPS = 4
"""Steps of the phase-2 model that one step of phase 3 stands for."""
OWN_SHARE = 0.625
"""Share of a phase-3 batch that lies on the student's own ten-step paths; the rest is noised pictures."""
PHASES = {"1": 0.3, "2": 0.1, "3": 0.6}
"""Phases and their shares of the time."""
UNIFORM = 0.3
"""Share of noise levels drawn uniformly; the others follow the density of the stock sampler's steps."""


def draw_sigma(n: int, device: torch.device) -> Tensor:
    """Draw noise levels: dense where the shifted sampler steps, but none left out."""
    u = torch.rand(n, device=device)
    return torch.where(torch.rand(n, device=device) < UNIFORM, torch.rand(n, device=device), flux.shifted(u))


def draw_step(n: int, device: torch.device) -> Tensor:
    """Draw where steps of the stock schedule begin, as unshifted times u in (0, 1]."""
    steps = build.NUM_INFERENCE_STEPS
    return (1 + torch.randint(steps, (n,), device=device)) / steps


def draw_guidance(n: int, device: torch.device) -> Tensor:
    """Draw guidance for phase 3: dense at the low end, where the default is."""
    low, high = GUIDANCE
    return low + (high - low) * torch.rand(n, device=device).square()


class OwnPaths:
    """A batch of the student's ten-step paths, each moved on by one step at a time and begun anew when it ends.

    Training on them costs no extra pass: the velocity that the loss needs is the one that moves them. Tensors stay in
    place, so a captured step may hold them.

    Args:
        x, u: where the paths begin, [n, 64, 32] and [n]: anywhere, so that they do not walk in step.
        caption: index of each one's caption [n].
        captions: all caption indices of the training set, to draw from.
    """

    def __init__(self, x: Tensor, u: Tensor, caption: Tensor, captions: Tensor) -> None:
        self.x, self.u, self.caption = x.clone(), u.clone(), caption.clone()
        self.guidance = draw_guidance(len(x), x.device)
        self._captions = captions.flatten()

    @torch.no_grad()
    def advance(self, velocity: Tensor) -> None:
        """Move every path by one step along velocity [n, 64, 32]; those at the end begin again from noise."""
        n, device = len(self.x), self.x.device
        after = self.u - 1 / build.NUM_INFERENCE_STEPS
        done = after < 0.5 / build.NUM_INFERENCE_STEPS
        sigma_step = flux.shifted(after.clamp(min=0)) - flux.shifted(self.u)
        moved = self.x + sigma_step[:, None, None] * velocity.float()
        drawn = self._captions[torch.randint(len(self._captions), (n,), device=device)]
        self.x.copy_(torch.where(done[:, None, None], torch.randn_like(moved), moved))
        self.u.copy_(torch.where(done, torch.ones_like(after), after))
        self.caption.copy_(torch.where(done, drawn, self.caption))
        self.guidance.copy_(torch.where(done, draw_guidance(n, device), self.guidance))


def fine_velocity(teacher: flux.Velocity, x: Tensor, u: Tensor, embeds: Tensor, guidance: Tensor) -> Tensor:
    """Return the mean velocity of `SUBSTEPS` Euler steps from x at time u [n] over one step of the stock schedule."""
    last = (u - 1 / build.NUM_INFERENCE_STEPS).clamp(min=0)
    times = [u + (last - u) * (i / SUBSTEPS) for i in range(SUBSTEPS + 1)]
    sigmas = [flux.shifted(t) for t in times]
    moved = torch.zeros_like(x)
    for here, there in itertools.pairwise(sigmas):
        v = teacher(x + moved, here, embeds, guidance).float()
        moved = moved + (there - here)[:, None, None] * v
    return moved / (sigmas[-1] - sigmas[0])[:, None, None]


class Trainer:
    """The models and data of both phases.

    Args:
        args: of the command line.
        device: where everything lives.
        workers: processes that draw and verify.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, workers: Workers) -> None:
        from diffusers import AutoencoderKLFlux2, Flux2Pipeline

        self.args, self.device = args, device
        self.pipe = build.pipeline(args.seed) if args.init is None else Flux2Pipeline.from_pretrained(args.init)
        vae_folder = args.vae or (args.out / "vae" if args.init is None else args.init / "vae")
        self.pipe.vae.load_state_dict(AutoencoderKLFlux2.from_pretrained(vae_folder).state_dict())
        self.vae: Any = engine.frozen_copy(self.pipe.vae).to(device)
        self.tokens = prompt_tokens(self.pipe.tokenizer, build.MAX_SEQUENCE_LENGTH).to(device)
        self.velocity = flux.Velocity(engine.frozen_copy(self.pipe.transformer).to(device).requires_grad_(True))
        text = engine.frozen_copy(self.pipe.text_encoder).to(device)
        text.model.language_model.requires_grad_(True)
        self.encoder = PromptEncoder(text)
        self.noise = CaptionNoise(**{k: getattr(args, f"{k}_noise") for k in ("count", "relation", "colour", "shape")})
        data = scenes(workers, "train", args.pictures, args.seed, args.cache, self.noise)
        self.captions = torch.from_numpy(data["captions"]).to(device, torch.int64)
        self.latents = self._encode(torch.from_numpy(data["images"]))
        self.workers = workers
        self.texts = prompts.split("validation", 16 if args.smoke else args.prompts, 7)
        earlier = engine.read_json(args.out / "base.json") if args.init is not None else {}
        self.figures: dict[str, Any] = {**earlier, "caption_noise": noise_dict(self.noise), "pictures": args.pictures}

    @torch.no_grad()
    def _encode(self, images: Tensor) -> Tensor:
        parts = [
            flux.encode(self.vae, to_pixels(images[i : i + 1024].to(self.device))) for i in range(0, len(images), 1024)
        ]
        latents = torch.cat(parts)
        log(f"latents {tuple(latents.shape)} mean {float(latents.mean()):.3f} std {float(latents.std()):.3f}")
        return latents

    def batch(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw x_t [n, 64, 32], sigma [n], caption index [n] and the target velocity."""
        return self.noised(draw_sigma(n, self.device))

    def noised(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Put noise of the levels sigma [n] on pictures drawn at random; returns what `batch` does."""
        n = len(sigma)
        chosen = torch.randint(len(self.latents), (n,), device=self.device)
        which = torch.randint(self.captions.shape[1], (n,), device=self.device)
        x0 = self.latents[chosen]
        noise = torch.randn_like(x0)
        s = sigma[:, None, None]
        return (1 - s) * x0 + s * noise, sigma, self.captions[chosen, which], noise - x0

    def sampler(self, velocity: flux.Velocity, encoder: PromptEncoder) -> flux.Sampler:
        """Return the fast sampler on these models."""
        return flux.Sampler(velocity, encoder, self.vae, self.pipe.scheduler, self.tokens, self.workers)

    def match_captions(self, minutes: float) -> None:
        """Phase 1: flow matching. Leaves the averaged weights in `velocity` and `encoder`."""
        args, device = self.args, self.device
        optimiser = engine.Optimiser([self.velocity, self.encoder], args.lr)
        velocity, encoder = optimiser.averages
        assert isinstance(velocity, flux.Velocity)
        assert isinstance(encoder, PromptEncoder)
        compile_models(args, self.velocity.transformer, self.encoder)
        one = torch.ones(args.batch, device=device)
        empty = torch.full((args.batch,), len(self.tokens) - 1, device=device)

        def step() -> Tensor:
            x, sigma, caption, target = self.batch(args.batch)
            caption = torch.where(torch.rand(args.batch, device=device) < EMPTY, empty, caption)
            with engine.autocast(device):
                v = self.velocity(x, sigma, self.encoder(self.tokens[caption]), one)
            loss = (v.float() - target).pow(2).mean()
            optimiser.step(loss)
            value: Tensor = loss.detach().reshape(1)
            return value

        def report(steps: int, values: Tensor, used: float) -> None:
            found = self.sampler(velocity, encoder).evaluate(self.texts)
            log(f"base phase 1 {used:4.0%} step {steps}: loss {values[0]:.4f} | {flux.row(found)}")
            self.save(velocity, encoder)

        runner = engine.Runner(step, device, args.engine)
        done = engine.train(runner, optimiser, minutes, report=report)
        self.velocity.load_state_dict(velocity.state_dict())
        self.encoder.load_state_dict(encoder.state_dict())
        self.finish("phase1", done)

    def distil_guidance(self, minutes: float) -> None:
        """Phase 2: one pass that gives what guidance takes two for. Leaves the averaged weights in `velocity`."""
        args, device, n = self.args, self.device, self.args.batch
        embeds = self.all_embeds()
        teacher = engine.frozen_copy(self.velocity)
        optimiser = engine.Optimiser([self.velocity], args.lr * 0.4)
        average = optimiser.averages[0]
        assert isinstance(average, flux.Velocity)
        compile_models(args, teacher.transformer)
        one = torch.ones(2 * n, device=device)
        empty = torch.full((n,), len(self.tokens) - 1, device=device)
        low, high = GUIDANCE

        def step() -> Tensor:
            x, sigma, caption, _ = self.batch(n)
            guidance = low + (high - low) * torch.rand(n, device=device)
            with engine.autocast(device):
                with torch.no_grad():
                    both = embeds[torch.cat([caption, empty])]
                    v_c, v_u = teacher(x.repeat(2, 1, 1), sigma.repeat(2), both, one).float().chunk(2)
                v = self.velocity(x, sigma, embeds[caption], guidance)
            loss = (v.float() - v_u - guidance[:, None, None] * (v_c - v_u)).pow(2).mean()
            optimiser.step(loss)
            value: Tensor = loss.detach().reshape(1)
            return value

        def report(steps: int, values: Tensor, used: float) -> None:
            sampler = self.sampler(average, self.encoder)
            found = sampler.evaluate(self.texts, guidance=build.GUIDANCE_SCALE)
            log(f"base phase 2 {used:4.0%} step {steps}: loss {values[0]:.4f} | {flux.row(found)}")
            self.save(average, self.encoder)

        runner = engine.Runner(step, device, args.engine)
        done = engine.train(runner, optimiser, minutes, reports=5, report=report)
        self.velocity.load_state_dict(average.state_dict())
        self.finish("phase2", done)

    def distil_steps(self, minutes: float) -> None:
        """Phase 3: one step of the stock schedule that lands where `SUBSTEPS` finer ones do."""
        args, device, n = self.args, self.device, self.args.batch
        embeds = self.all_embeds()
        teacher = engine.frozen_copy(self.velocity)
        optimiser = engine.Optimiser([self.velocity], args.lr * 0.2)
        average = optimiser.averages[0]
        assert isinstance(average, flux.Velocity)
        compile_models(args, teacher.transformer)
        own = round(n * OWN_SHARE)
        u = draw_step(own, device)
        x, _, caption, _ = self.noised(flux.shifted(u))
        paths = OwnPaths(x, u, caption, self.captions)

        def step() -> Tensor:
            u = torch.cat([paths.u, draw_step(n - own, device)])
            noised, _, drawn, _ = self.noised(flux.shifted(u[own:]))
            x, caption = torch.cat([paths.x, noised]), torch.cat([paths.caption, drawn])
            guidance = torch.cat([paths.guidance, draw_guidance(n - own, device)])
            sigma = flux.shifted(u)
            with engine.autocast(device):
                with torch.no_grad():
                    target = fine_velocity(teacher, x, u, embeds[caption], guidance)
                v = self.velocity(x, sigma, embeds[caption], guidance)
            loss = (v.float() - target).pow(2).mean()
            paths.advance(v.detach()[:own])
            optimiser.step(loss)
            value: Tensor = loss.detach().reshape(1)
            return value

        def report(steps: int, values: Tensor, used: float) -> None:
            found = self.sampler(average, self.encoder).evaluate(self.texts, guidance=args.guidance)
            log(f"base phase 3 {used:4.0%} step {steps}: loss {values[0]:.5f} | {flux.row(found)}")
            self.save(average, self.encoder)

        runner = engine.Runner(step, device, args.engine)
        done = engine.train(runner, optimiser, minutes, reports=5, report=report)
        self.velocity.load_state_dict(average.state_dict())
        self.finish("phase3", done)

    @torch.no_grad()
    def all_embeds(self) -> Tensor:
        """Embed every prompt of the world, the empty one last: [N+1, T, D] in the dtype that training runs in."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        encoder = engine.frozen_copy(self.encoder)
        return torch.cat([encoder(rows).to(dtype) for rows in torch.split(self.tokens, 2048)])

    def finish(self, name: str, done: dict[str, Any]) -> None:
        """Evaluate and save what `velocity` and `encoder` hold; a phase gone through again gets a line of its own."""
        velocity = engine.frozen_copy(self.velocity)
        encoder = engine.frozen_copy(self.encoder)
        found = self.sampler(velocity, encoder).evaluate(self.texts)
        log(f"base {name} done: {done} | guidance 1: {flux.row(found)}")
        times = sum(k.split(" ")[0] == name for k in self.figures)
        self.figures[name if not times else f"{name} go {times + 1}"] = {**done, "validation": found}
        self.save(velocity, encoder)

    def save(self, velocity: flux.Velocity, encoder: PromptEncoder) -> None:
        """Write OUT/flux2."""
        self.pipe.transformer.load_state_dict(velocity.transformer.state_dict())
        self.pipe.text_encoder.model.language_model.load_state_dict(encoder.text.state_dict())
        build.save_pipeline(self.pipe, self.args.out / "flux2", guidance_scale=self.args.guidance)
        engine.publish(self.args.out / "flux2", self.args.publish)


def compile_models(args: argparse.Namespace, transformer: Any, encoder: PromptEncoder | None = None) -> None:
    """Compile block by block (seconds, where the whole model takes a minute); a failure only costs speed."""
    if engine.may_compile(args):
        transformer.compile_repeated_blocks(dynamic=False)
        if encoder is not None:
            encoder.compile(dynamic=False)


def final_table(sampler: flux.Sampler, texts: list[str], guidance: float, *, smoke: bool) -> list[dict[str, Any]]:
    """Evaluate by guidance and steps, and by timestep shift at the default guidance, all from the same noise.

    `gain` and `gain_se` are the difference in `atoms` to ten steps at the stock shift, and its paired standard error.
    """
    scales, shifts = sorted({1.0, 1.25, 1.5, 2.0, 3.0, guidance}), (3.0, 12.0)
    plan: list[dict[str, Any]] = [{"guidance": g, "steps": n} for g in scales for n in (10, 20, 40)]
    plan += [{"guidance": guidance, "steps": n, "shift": s} for n in (10, 20) for s in shifts]
    if smoke:
        plan = [{"guidance": guidance, "steps": n} for n in (2, 3)]
    table: list[dict[str, Any]] = []
    first: dict[float, Any] = {}
    for how in plan:
        marks = sampler.judge(texts, **how)
        right = flux.atoms_right(marks)
        gain = right - first.setdefault(how["guidance"], right)
        error = float(gain.std() / len(gain) ** 0.5)
        table.append({**how, **flux.shares(marks), "gain": round(float(gain.mean()), 4), "gain_se": round(error, 4)})
        log("table  " + flux.row(table[-1]))
    return table


def compare_with_stock(folder: Path, sampler: flux.Sampler, texts: list[str], guidance: float) -> float:
    """Draw with the stock pipeline from the same noise; return the share of pixel values that differ by more than 2."""
    from diffusers import Flux2Pipeline

    pipe = Flux2Pipeline.from_pretrained(folder).to(sampler.tokens.device)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn((len(texts), flux.POSITIONS, 32), generator=torch.Generator().manual_seed(5))
    latents = noise.transpose(1, 2).reshape(len(texts), 32, build.GRID, build.GRID)
    call = build.call_arguments(guidance_scale=guidance)
    stock = np.stack([np.asarray(i) for i in pipe(prompt=texts, latents=latents, **call).images])
    ours = sampler.draw(texts, guidance=guidance, seed=5)
    return float((np.abs(stock.astype(int) - ours.astype(int)) > 2).mean())


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    engine.add_common_arguments(parser)
    parser.add_argument("--vae", type=Path, default=None, help="folder of the trained VAE (default: OUT/vae)")
    parser.add_argument("--init", type=Path, default=None, help="pipeline folder to go on from")
    parser.add_argument("--phases", default="".join(PHASES), help="which phases, such as 3 to go on from --init")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--prompts", type=int, default=256, help="validation prompts of every evaluation")
    parser.add_argument(
        "--guidance", type=float, default=build.GUIDANCE_SCALE, help="default written to cast_model.json"
    )
    for name in ("count", "relation", "colour", "shape"):
        parser.add_argument(f"--{name}-noise", type=float, default=getattr(CaptionNoise(), name))
    args = parser.parse_args()
    if args.smoke:
        args.batch = 4
    return args


def main() -> None:
    """Train the phases, save, reload with the stock classes and evaluate."""
    args = arguments()
    device = engine.prepare(args)
    minutes = 8.0 if args.minutes is None else args.minutes
    with Workers(args.workers) as workers:
        trainer = Trainer(args, device, workers)
        train = {"1": trainer.match_captions, "2": trainer.distil_guidance, "3": trainer.distil_steps}
        chosen = {phase: share for phase, share in PHASES.items() if phase in args.phases}
        for phase, share in chosen.items():
            train[phase](minutes * share / sum(chosen.values()))
        sampler = flux.Sampler.load(args.out / "flux2", device, workers)
        figures = trainer.figures
        sheet = trainer.texts[: 8 if args.smoke else 64]
        flux.contact_sheet(sampler.draw(sheet, guidance=args.guidance), sheet, args.out / "samples.png")
        figures["differs_from_stock"] = compare_with_stock(args.out / "flux2", sampler, sheet[:8], args.guidance)
        log(f"share of pixel values that differ from the stock pipeline's: {figures['differs_from_stock']:.5f}")
        texts = prompts.split("validation", 8 if args.smoke else 2048, 7)
        figures["table"] = final_table(sampler, texts, args.guidance, smoke=args.smoke)
    engine.write_json(args.out / "base.json", figures)
    card.write_flux2(args.out)
    engine.publish(args.out / "flux2", args.publish)


if __name__ == "__main__":
    main()
