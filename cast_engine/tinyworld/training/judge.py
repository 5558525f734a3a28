"""Train the tiny judge: a Qwen3-VL that answers GenEval 2's questions about the tiny world's pictures.

    python -m cast_engine.tinyworld.training.judge --out OUT --minutes 8 [--samples-from OUT/flux2] [--init OUT/judge]

The answer is one token. The rows of a causal model after its last trained token mean nothing, but the credit maps are
read from the row of the appended answer; so the model is also trained to point after it has answered: the next token
is one of 64 place tokens, in proportion to the pixels of what was asked about (uniform if nothing is there). With
``--attention-weight`` the attention of those rows is supervised directly as well. Pictures: renderings (also through
the VAE, if there is one) with noise, blur and changes of colour, and samples of a base model, answers by the verifier.
Writes OUT/judge (a stock folder, float16) and OUT/judge.json.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from cast_engine.judges.attention import default_layers
from cast_engine.tinyworld import build
from cast_engine.tinyworld.training import card, engine, flux, judge_eval, questions
from cast_engine.tinyworld.training.dataset import Arrays, merged, scenes, to_pixels
from cast_engine.tinyworld.training.engine import log
from cast_engine.tinyworld.training.fast import JudgeCore, Layout
from cast_engine.tinyworld.training.questions import ATTRIBUTE, COUNT, NEUTRAL, OBJECT, RELATION, Facts, QuestionTable
from cast_engine.tinyworld.training.workers import Workers

SLOTS = (OBJECT, COUNT, COUNT, ATTRIBUTE, ATTRIBUTE, RELATION, RELATION, NEUTRAL)
"""Questions per picture and step."""
ROUND_TRIP = 0.4
"""Share of renderings that go through the VAE."""


def distort(pixels: Tensor) -> Tensor:
    """Change pictures [B, 3, 64, 64] in [-1, 1] a little: colour, sharpness, noise."""
    b, device = len(pixels), pixels.device

    def uniform(low: float, high: float, channels: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(b, channels, 1, 1, device=device)

    x = pixels * uniform(0.93, 1.07) * uniform(0.96, 1.04, 3) + uniform(-0.06, 0.06)
    blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    x = torch.lerp(x, blurred, uniform(0.0, 0.6) * (uniform(0.0, 1.0) < 0.5))
    return (x + uniform(0.0, 0.06) * torch.randn_like(x)).clamp(-1, 1)


@torch.no_grad()
def round_trip(vae: Any, images: Tensor, share: float, device: torch.device) -> None:
    """Put the first `share` of uint8 pictures through the VAE, with a little noise on the latents, in place."""
    stop = int(len(images) * share)
    for i in range(0, stop, 512):
        part = images[i : min(i + 512, stop)]
        tokens = flux.encode(vae, to_pixels(part.to(device)))
        scale = 0.15 * torch.rand(len(tokens), 1, 1, device=device)
        part.copy_(flux.decode(vae, tokens + scale * torch.randn_like(tokens)))


def base_samples(args: argparse.Namespace, device: torch.device, workers: Workers, split: str, count: int) -> Arrays:
    """Draw pictures of a split's specifications with a base model, at several guidances, and read off the facts."""
    from cast_engine.tinyworld import prompts

    sampler = flux.Sampler.load(args.samples_from, device, workers)
    chosen: prompts.Split = "train" if split == "train" else "validation"
    specs = prompts.sample_specs(np.random.default_rng([args.seed, 77]), chosen, count)
    texts = [prompts.text_of(s) for s in specs]
    images = []
    with engine.autocast(device):
        for i, guidance in enumerate((1.0, 1.5, 2.0, 3.0)):
            images.append(sampler.draw(texts[i::4], guidance=guidance, seed=args.seed + i, batch=1024))
    whole = np.concatenate(images)
    return {"images": whole, **facts_of(workers, whole)}


def facts_of(workers: Workers, images: np.ndarray[Any, Any]) -> Arrays:
    """Read off the facts of pictures in the worker processes."""
    found = workers.map(
        "cast_engine.tinyworld.training.pictures:facts", [(images[i : i + 512],) for i in range(0, len(images), 512)]
    )
    return {name: np.concatenate([f[name] for f in found]) for name in found[0]}


class Data:
    """All pictures and facts on the device: renderings first, then samples of a base model.

    Args:
        args: of the command line.
        device: where they live.
        workers: processes that draw and verify.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, workers: Workers) -> None:
        drawn = scenes(workers, "train", args.pictures, args.seed, args.cache)
        odd = merged(workers, max(8, args.pictures // 8), args.seed, args.cache)
        images = torch.from_numpy(np.concatenate([odd["images"], drawn["images"]])).to(device)
        parts = [Facts.of(odd, device), Facts.of(drawn, device)]
        vae = load_vae(args, device)
        if vae is not None:
            round_trip(vae, images[: len(odd["images"])], ROUND_TRIP, device)
            round_trip(vae, images[len(odd["images"]) :], ROUND_TRIP, device)
        self.rendered = len(images)
        if args.samples_from is not None:
            sampled = base_samples(args, device, workers, "train", args.samples)
            images = torch.cat([images, torch.from_numpy(sampled["images"]).to(device)])
            parts.append(Facts.of(sampled, device))
        self.images = images
        self.facts = Facts(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Facts)))
        self.share = args.samples_share if len(images) > self.rendered else 0.0
        log(f"{self.rendered} renderings and {len(images) - self.rendered} samples on {device}, VAE: {vae is not None}")

    def batch(self, n: int) -> tuple[Tensor, Facts]:
        """Draw distorted pictures and their facts."""
        device, total = self.images.device, len(self.images)
        chosen = (torch.rand(n, device=device) * self.rendered).long()
        if self.share > 0:
            other = self.rendered + (torch.rand(n, device=device) * (total - self.rendered)).long()
            chosen = torch.where(torch.rand(n, device=device) < self.share, other, chosen)
        chosen = chosen.clamp(max=total - 1)
        return distort(to_pixels(self.images[chosen])), self.facts.of_pictures(chosen)


def load_vae(args: argparse.Namespace, device: torch.device) -> Any:
    """Return the VAE of --vae, of OUT/vae or of --samples-from, or None."""
    from diffusers import AutoencoderKLFlux2

    options = [args.vae, args.out / "vae", args.samples_from and args.samples_from / "vae"]
    for folder in options:
        if folder is not None and (folder / "config.json").exists():
            return AutoencoderKLFlux2.from_pretrained(folder).to(device).eval().requires_grad_(False)
    return None


def load(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """Return the model to train, float32 on the device, and its tokenizer."""
    if args.init is None:
        model, tok = build.judge(args.seed)
    else:
        from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

        model = Qwen3VLForConditionalGeneration.from_pretrained(args.init, dtype=torch.float32)
        tok = AutoTokenizer.from_pretrained(args.init)
    return model.to(device).train(), tok


class Step:
    """One training step.

    Args:
        args: of the command line.
        core: the model on equal layouts.
        table: of the questions.
        data: pictures and facts.
        optimiser: for `core`.
    """

    def __init__(
        self, args: argparse.Namespace, core: JudgeCore, table: QuestionTable, data: Data, optimiser: engine.Optimiser
    ) -> None:
        self.args, self.core, self.table, self.data, self.optimiser = args, core, table, data, optimiser
        self.layers = default_layers(len(core.model.model.language_model.layers))
        # places, not a mask: indexing by a mask waits for the device, which a CUDA graph cannot
        self.counted = torch.tensor([i for i, k in enumerate(SLOTS) if k != NEUTRAL], device=data.images.device)

    def __call__(self) -> Tensor:
        """Update once; return answer loss, answer accuracy, pointing loss and attention loss."""
        pixels, facts = self.data.batch(self.args.batch)
        asked = questions.ask_all(facts, SLOTS)
        ids = questions.sequences(self.table, asked)
        weight = self.args.attention_weight
        with engine.autocast(pixels.device):
            hidden, maps = self.core(pixels, ids, self.layers if weight > 0 else ())
            at = self.table.answer[asked.question][..., None, None].expand(-1, -1, 1, hidden.shape[-1])
            answer = self.core.model.lm_head(hidden.gather(2, at - 1).squeeze(2)).float()
            place = self.core.model.lm_head(hidden.gather(2, at).squeeze(2)).float()
        target = self.table.words[asked.truth][:, self.counted]
        answer = answer[:, self.counted]
        answering = F.cross_entropy(answer.flatten(0, 1), target.flatten())
        place = place.log_softmax(-1)[..., self.table.cells]
        pointing = -(asked.share * place).sum(-1).mean()
        looking = self._looking(maps, asked) if weight > 0 else torch.zeros_like(pointing)
        self.optimiser.step(answering + self.args.pointing_weight * pointing + weight * looking)
        right = (answer.argmax(-1) == target).float().mean()
        return torch.stack([answering.detach(), right, pointing.detach(), looking.detach()])

    def _looking(self, maps: list[Tensor], asked: questions.Asked) -> Tensor:
        """Return the cross-entropy between where the answer rows look and where they should."""
        at = self.table.answer[asked.question][..., None, None].expand(-1, -1, 1, maps[0].shape[-1])
        rows = torch.stack(maps).mean(0).gather(2, at).squeeze(2)
        share = rows / rows.sum(-1, keepdim=True).clamp(min=1e-6)
        return -(asked.share * (share + 1e-4).log()).sum(-1).mean()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    engine.add_common_arguments(parser)
    parser.add_argument("--vae", type=Path, default=None, help="folder of a VAE (default: OUT/vae if it is there)")
    parser.add_argument("--init", type=Path, default=None, help="judge folder to go on from")
    parser.add_argument("--samples-from", type=Path, default=None, help="pipeline folder whose pictures are added")
    parser.add_argument("--samples", type=int, default=80_000, help="how many pictures it draws")
    parser.add_argument("--samples-share", type=float, default=0.35, help="share of a batch that are its pictures")
    parser.add_argument("--batch", type=int, default=128, help="pictures per step, eight questions each")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--pointing-weight", type=float, default=0.25)
    parser.add_argument("--attention-weight", type=float, default=0.0)
    args = parser.parse_args()
    if args.smoke:
        args.batch, args.samples = 2, 8
    return args


def main() -> None:
    """Train, evaluate and save."""
    args = arguments()
    device = engine.prepare(args)
    minutes = 8.0 if args.minutes is None else args.minutes
    model, tok = load(args, device)
    table = QuestionTable.of(tok, device)
    layout = Layout.of(table.ids.shape[1], len(SLOTS))
    core = JudgeCore(model, layout, table.head)
    judge_eval.check_equal(core, table, tok)
    with Workers(args.workers) as workers:
        held = judge_eval.held_out(args, device, workers)
        data = Data(args, device, workers)
    optimiser = engine.Optimiser([core], args.lr, weight_decay=0.02)
    average: Any = optimiser.averages[0]
    if engine.may_compile(args):
        core.compile_layers()

    def save() -> None:
        build.save_judge(average.model, tok, args.out / "judge")
        engine.publish(args.out / "judge", args.publish)

    def report(steps: int, values: Tensor, used: float) -> None:
        names = ("loss", "right", "pointing", "looking")
        log(f"judge {used:4.0%} step {steps}: " + flux.row(dict(zip(names, values.tolist(), strict=True))))
        judge_eval.report(average, table, held)
        save()

    runner = engine.Runner(Step(args, core, table, data, optimiser), device, args.engine)
    figures: dict[str, Any] = {"pictures": data.rendered, "samples": len(data.images) - data.rendered}
    before = engine.read_json(args.out / "judge.json") if args.init is not None else {}
    figures["earlier"] = [*before.get("earlier", []), *([before["training"]] if before else [])]
    figures |= {"attention_weight": args.attention_weight, "pointing_weight": args.pointing_weight}
    figures["training"] = engine.train(runner, optimiser, minutes, report=report)
    save()
    log(f"judge done: {figures['training']}")
    accuracy, pointing = judge_eval.report(average, table, held)
    figures |= {"accuracy": accuracy, "pointing": pointing}
    figures["differs_from_stock"] = judge_eval.reload(args.out / "judge", average, table)
    engine.write_json(args.out / "judge.json", figures)
    card.write_judge(args.out)
    engine.publish(args.out / "judge", args.publish)


if __name__ == "__main__":
    main()
