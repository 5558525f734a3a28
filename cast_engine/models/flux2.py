"""FLUX.2 on the stock diffusers classes.

Everything that decides a number is read from the checkpoint or done by the pipeline's own code.
"""

# ruff: noqa: SLF001 (the pipeline's own helpers, so that its layout cannot drift from ours)

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cast_engine.errors import UserError
from cast_engine.models.base import Condition, Geometry, ModelDefaults, ModelInfo, PromptEmbeds
from cast_engine.models.checkpoint import Component, defaults, fingerprint, open_checkpoint, weight_files
from cast_engine.numerics import noise

log = logging.getLogger(__name__)

COMPONENTS = {
    "transformer": ("Flux2Transformer2DModel",),
    "vae": ("AutoencoderKLFlux2",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
    "text_encoder": (),
    "tokenizer": (),
}
STOCK = ModelDefaults(
    num_steps=50, height=1024, width=1024, guidance=4.0, max_sequence_length=512, text_encoder_out_layers=(10, 20, 30)
)
"""Defaults of ``Flux2Pipeline.__call__``."""

PATCH = 2
"""The pipeline folds 2 x 2 latent pixels into one token."""
DECODE_PIXELS = 4 * 1024 * 1024
"""Images are decoded in runs of at most this many pixels (at least one image), which bounds the memory."""


class Flux2Model:
    """FLUX.2 behind :class:`cast_engine.models.base.ImageModel`."""

    lora_targets = (
        r"transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|(ff|ff_context)\.(linear_in|linear_out))"
        r"|single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
    )

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self.path, self.dtype, self.device = path, dtype, device
        self.checkpoint = open_checkpoint(path, COMPONENTS)
        self.transformer: nn.Module | None = None
        self.events: list[str] = []
        self._encoder: Any = None  # Flux2Pipeline with text encoder and tokenizer only
        self._decoder: Any = None  # Flux2Pipeline with the VAE only
        for name in ("transformer", "vae", "text_encoder"):
            weight_files(self.checkpoint.components[name].folder)

    # ---- what the folder says -------------------------------------------------------------------------------------

    @cached_property
    def info(self) -> ModelInfo:
        """Names, fingerprints and defaults; read from the folder, no weights are loaded."""
        from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

        chosen = defaults(self.path, STOCK)
        folder = {name: c.folder for name, c in self.checkpoint.components.items()}
        recipe = f"{chosen.max_sequence_length} {chosen.text_encoder_out_layers} {self.dtype} {SYSTEM_MESSAGE}"
        return ModelInfo(
            name=self.path.name,
            path=self.path,
            sha256=fingerprint([folder["transformer"], folder["vae"], folder["scheduler"]]),
            encoder_sha256=fingerprint([folder["text_encoder"], folder["tokenizer"]], [recipe]),
            defaults=chosen,
            guidance_embeds=bool(self._setting("transformer", "guidance_embeds", True)),
        )

    def _setting(self, component: str, key: str, default: Any) -> Any:
        return self.checkpoint.config(component).get(key, default)

    def lora_blocks(self) -> list[str]:
        """Return the names of the blocks of the denoiser, each of which must carry an adapter."""
        double, single = (
            self._setting("transformer", "num_layers", 8),
            self._setting("transformer", "num_single_layers", 48),
        )
        names = [f"transformer_blocks.{i}" for i in range(double)]
        return names + [f"single_transformer_blocks.{i}" for i in range(single)]

    def resolve_guidance(self, guidance: float | None) -> float:
        """Return the guidance to use and record.

        Raises:
            UserError: A guidance was asked for and the checkpoint has no input for it (stock would ignore it silently).
        """
        default = self.info.defaults.guidance
        if guidance is None or guidance == default:
            return default
        if not self.info.guidance_embeds:
            raise UserError(
                f"guidance {guidance}, but the model takes none",
                where=str(self.path),
                expected="guidance_embeds: true in transformer/config.json",
                do="leave model.guidance out",
            )
        return guidance

    def geometry(self, height: int | None = None, width: int | None = None) -> Geometry:
        """Return the latent sizes for an image size.

        Raises:
            UserError: The size is not a multiple of the token's edge (stock would round it down).
        """
        height = self.info.defaults.height if height is None else height
        width = self.info.defaults.width if width is None else width
        stages = self._setting("vae", "block_out_channels", (128, 256, 512, 512))
        edge = 2 ** (len(stages) - 1) * PATCH
        if height % edge or width % edge or min(height, width) < edge:
            near = [max(edge, round(v / edge) * edge) for v in (height, width)]
            raise UserError(
                f"size {height}x{width}", expected=f"multiples of {edge}", do=f"the nearest is {near[0]}x{near[1]}"
            )
        channels = int(self._setting("transformer", "in_channels", 128))
        if channels != PATCH**2 * self._setting("vae", "latent_channels", 32):
            raise UserError(
                f"transformer in_channels {channels}", where=str(self.path), expected="4 x the VAE's latent_channels"
            )
        return Geometry(height, width, height // edge, width // edge, channels)

    @cached_property
    def _scheduler(self) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(self.checkpoint.components["scheduler"].folder)
        for key in ("stochastic_sampling", "invert_sigmas"):
            if scheduler.config[key]:
                raise UserError(f"scheduler with {key}", where=str(self.path), expected="a plain Euler scheduler")
        return scheduler

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        """Return the noise levels exactly as the stock pipeline sets them, with its shift by image size and steps."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu, retrieve_timesteps

        scheduler = self._scheduler
        own = getattr(scheduler.config, "use_flow_sigmas", False)
        levels = None if own else np.linspace(1.0, 1 / num_steps, num_steps)
        mu = compute_empirical_mu(image_seq_len=geometry.positions, num_steps=num_steps)
        retrieve_timesteps(scheduler, num_steps, "cpu", sigmas=levels, mu=mu)
        return cast("Tensor", scheduler.sigmas.clone())

    # ---- loading and freeing --------------------------------------------------------------------------------------

    def load_text_encoder(self) -> None:
        """Load text encoder and tokenizer; refused while the denoiser is loaded."""
        if self._encoder is not None:
            return
        if self.transformer is not None:
            raise RuntimeError("free the denoiser before loading the text encoder")
        import transformers

        parts = self.checkpoint.components
        encoder = self._load(parts["text_encoder"], transformers)
        tokenizer = _class_of(parts["tokenizer"], transformers).from_pretrained(parts["tokenizer"].folder)
        self._encoder = _pipeline(text_encoder=encoder, tokenizer=tokenizer)

    def free_text_encoder(self) -> None:
        """Drop the text encoder and hand its memory back."""
        if self._encoder is not None:
            self._encoder = None
            self._freed("text_encoder")

    def load_denoiser(self) -> None:
        """Load the transformer; the text encoder is dropped first."""
        if self.transformer is not None:
            return
        self.free_text_encoder()
        import diffusers

        self.transformer = cast("nn.Module", self._load(self.checkpoint.components["transformer"], diffusers))

    def free_denoiser(self) -> None:
        """Drop the transformer, adapters included."""
        if self.transformer is not None:
            self.transformer = None
            self._freed("transformer")

    def load_vae(self) -> None:
        """Load the VAE."""
        if self._decoder is None:
            import diffusers

            # channels_last would be a third faster on a CPU, but some pixels would no longer be the stock pipeline's
            self._decoder = _pipeline(vae=self._load(self.checkpoint.components["vae"], diffusers))

    def _load(self, component: Component, library: Any) -> Any:
        cls = _class_of(component, library)
        try:
            with _no_progress_bars():
                model, report = cls.from_pretrained(
                    component.folder,
                    dtype=self.dtype,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except (OSError, ValueError, RuntimeError) as exc:
            raise UserError(f"weights do not load ({_first_line(exc)})", where=str(component.folder)) from exc
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise UserError(f"{len(missing)} tensors are missing, first {missing[0]}", where=str(component.folder))
        self._event(f"load {component.name}")
        return model.eval().requires_grad_(False).to(self.device)

    def _freed(self, name: str) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._event(f"free {name}")

    def _event(self, text: str) -> None:
        self.events.append(text)
        log.info("%s: %s", self.path.name, text)

    # ---- the three phases -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> list[PromptEmbeds]:
        """Return the embeds of each prompt, on the CPU, in the encoder's dtype.

        One prompt at a time: the embed, and with it the hash that samples record, does not depend on the other prompts.

        Raises:
            UserError: A prompt is longer than ``max_sequence_length`` (stock would cut its end off silently).
        """
        if self._encoder is None:
            raise RuntimeError("load the text encoder first")
        chosen, out = self.info.defaults, []
        for prompt in prompts:
            self._check_length(prompt)
            embeds, _ = self._encoder.encode_prompt(
                prompt=[prompt],
                device=self.device,
                max_sequence_length=chosen.max_sequence_length,
                text_encoder_out_layers=chosen.text_encoder_out_layers,
            )
            out.append({"prompt_embeds": embeds[0].contiguous().cpu()})
        return out

    def _check_length(self, prompt: str) -> None:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        messages = format_input(prompts=[prompt], system_message=self._encoder.system_message)
        ids = self._encoder.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][0]
        limit = self.info.defaults.max_sequence_length
        if len(ids) > limit:
            raise UserError(
                f"prompt of {len(ids)} tokens with its template: {prompt[:60]!r}",
                expected=f"at most {limit}",
                do="shorten it or raise max_sequence_length in cast_model.json",
            )

    def condition(
        self, embeds: Sequence[PromptEmbeds], geometry: Geometry, device: torch.device | None = None
    ) -> Condition:
        """Stack embeds into the condition of a batch, with the position ids of text and image tokens."""
        device = self.device if device is None else device
        text = torch.stack([e["prompt_embeds"] for e in embeds]).to(device=device, dtype=self.dtype)
        stock = _stock()
        grid = torch.empty(1, 0, geometry.grid_h, geometry.grid_w)
        tensors = {
            "prompt_embeds": text,
            # one copy for the whole batch: the transformer reads the first row only
            "text_ids": stock._prepare_text_ids(text[:1])[0].to(device),
            "image_ids": stock._prepare_latent_ids(grid)[0].to(device),
        }
        return Condition(len(embeds), tensors)

    def initial_noise(self, seed: int, geometry: Geometry) -> Tensor:
        """Return the noise the stock pipeline starts from with ``torch.Generator().manual_seed(seed)``, ``[P, C]``."""
        grid = noise.initial(seed, (1, geometry.channels, geometry.grid_h, geometry.grid_w))
        return cast("Tensor", _stock()._pack_latents(grid)[0].contiguous())

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor) -> Tensor:
        """Return the velocity, float32 ``[B, P, C]``; see :meth:`ImageModel.velocity`."""
        if self.transformer is None:
            raise RuntimeError("load the denoiser first")
        # Stock hands over timesteps rounded to the latents' dtype and divides them again; so do we, to the last bit.
        scale = self._scheduler.config.num_train_timesteps
        timestep = (sigma.to(latents.device, torch.float32) * scale).to(self.dtype) / 1000
        out = self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=timestep,
            guidance=guidance.to(latents.device, torch.float32) if self.info.guidance_embeds else None,
            encoder_hidden_states=condition.tensors["prompt_embeds"],
            txt_ids=condition.tensors["text_ids"],
            img_ids=condition.tensors["image_ids"],
            return_dict=False,
        )[0]
        return cast("Tensor", out.float())

    @torch.no_grad()
    def decode(self, latents: Tensor, geometry: Geometry) -> NDArray[np.uint8]:
        """Return the images of packed latents ``[B, P, C]`` as uint8 ``[B, H, W, 3]``."""
        if self._decoder is None:
            raise RuntimeError("load the VAE first")
        run = max(1, DECODE_PIXELS // (geometry.height * geometry.width))
        return np.concatenate([self._decode(part, geometry) for part in torch.split(latents, run)])

    def _decode(self, latents: Tensor, geometry: Geometry) -> NDArray[np.uint8]:
        pipe, vae = self._decoder, self._decoder.vae
        latents = latents.to(self.device, torch.float32)
        ids = pipe._prepare_latent_ids(latents.new_empty(len(latents), 0, geometry.grid_h, geometry.grid_w))
        grid = pipe._unpack_latents_with_ids(latents, ids.to(self.device))
        mean = vae.bn.running_mean.view(1, -1, 1, 1).float()
        std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1).float() + vae.config.batch_norm_eps)
        pixels = vae.decode(pipe._unpatchify_latents(grid * std + mean).to(vae.dtype), return_dict=False)[0]
        images = pipe.image_processor.postprocess(pixels, output_type="pil")
        return np.stack([np.asarray(image, dtype=np.uint8) for image in images])


def _stock() -> Any:
    from diffusers import Flux2Pipeline

    return Flux2Pipeline


def _pipeline(**parts: Any) -> Any:
    names = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
    return _stock()(**{name: parts.get(name) for name in names})


def _class_of(component: Component, library: Any) -> Any:
    cls = getattr(library, component.class_name, None)
    if component.library != library.__name__ or cls is None:
        raise UserError(
            f"class {component.library}.{component.class_name}",
            where=str(component.folder),
            expected=f"a class of the installed {library.__name__} {library.__version__}",
        )
    return cls


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    import diffusers.utils.logging
    import transformers.utils.logging

    modules = [m for m in (diffusers.utils.logging, transformers.utils.logging) if m.is_progress_bar_enabled()]
    for module in modules:
        module.disable_progress_bar()
    try:
        yield
    finally:
        for module in modules:
            module.enable_progress_bar()


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0][:200]
