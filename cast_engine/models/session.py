"""A loaded image model with its embeds and the adapter of the moment: what rollout and evaluation share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cast_engine.models import lora
from cast_engine.models.embeds import EmbedCache, RecentEmbeds, fill
from cast_engine.models.load import load_image_model, torch_dtype
from cast_engine.models.sampling import sample
from schemas.graph import Prompt
from schemas.job import Dynamics, ModelConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class SessionSpec:
    """How to make a session in another process."""

    model: ModelConfig
    embeds: Path


@dataclass(frozen=True)
class DrawRequest:
    """A batch of images to draw; an empty window draws without exploration."""

    prompt_ids: Sequence[str]
    seeds: Sequence[int]
    num_steps: int
    initial_seeds: Sequence[int] | None = None
    window: Sequence[int] = ()
    dynamics: Dynamics = "flow_sde"
    noise_level: float = 0.0
    latent_dtype: str = "float32"


@dataclass(frozen=True)
class Drawn:
    """Images and what is stored of their trajectories, on the CPU (see ``sampling.Trajectory`` for shapes)."""

    images: NDArray[np.uint8]  # [B, H, W, 3]
    latents: Tensor
    final: Tensor
    logp_old: Tensor
    steps: Tensor
    sigmas: Tensor


class ImageSession:
    """Loads each part of the model when it is first needed.

    Attributes:
        spec: how another process makes the same session.
        model: the image model.
        geometry: sizes of its images and latents.
        guidance: as used and recorded.
        adapter_sha256: of the adapter that draws; "" for the bare model.
        embeds: of prompts, from disk or from memory.
    """

    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec
        self.model = load_image_model(spec.model.path, dtype=spec.model.dtype, device=spec.model.device)
        self.geometry = self.model.geometry(spec.model.height, spec.model.width)
        self.guidance = self.model.resolve_guidance(spec.model.guidance)
        self.adapter_sha256 = ""
        self._cache = EmbedCache(spec.embeds, self.model.info.encoder_sha256)
        self.embeds = RecentEmbeds(self._cache)
        self._adapter: Path | None = None
        self._in_place = False

    def identity(self) -> dict[str, Any]:
        """Return what of model, settings and adapter decides an image; it belongs in the config of what is drawn."""
        return {
            "model": self.spec.model.semantic(),
            "guidance": self.guidance,
            "model_sha256": self.model.info.sha256,
            "encoder_sha256": self.model.info.encoder_sha256,
            "adapter_sha256": self.adapter_sha256,
        }

    def not_encoded(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts that have no embed yet."""
        return self._cache.missing(prompts)

    def encode(self, prompts: Sequence[Prompt], advance: Callable[[int], None]) -> None:
        """Encode the prompts that have no embed yet, then drop the text encoder; ``advance`` counts them."""
        fill(self.model, self._cache, prompts, advance)

    def embed_sha256(self, prompt_id: str) -> str:
        """Return the hash of a prompt's embed (DatasetError if there is none)."""
        return self._cache.sha256(prompt_id)

    def use_adapter(self, adapter: Path | None) -> None:
        """Draw with this adapter file from now on, or with the bare model (None); it is read when it is needed.

        Call it again after anybody else has touched the model's adapter.

        Raises:
            UserError: no such file.
        """
        self.adapter_sha256 = "" if adapter is None else lora.adapter_sha256(adapter)
        self._adapter, self._in_place = adapter, False

    def check_targets(self, targets: str) -> None:
        """Refuse targets of an adapter that match nothing or leave a block without one (UserError)."""
        self.model.load_denoiser()
        assert self.model.transformer is not None, "load_denoiser was called"
        lora.census(self.model.transformer, targets, self.model.lora_blocks())

    def draw(self, request: DrawRequest) -> Drawn:
        """Draw and decode a batch of images with the adapter in use.

        Raises:
            DatasetError: a prompt has no embed.
            UserError: the window does not fit the steps.
        """
        self._prepare()
        drawn = sample(
            self.model,
            [self.embeds.get(p) for p in request.prompt_ids],
            request.seeds,
            initial_seeds=request.initial_seeds,
            sigmas=self.model.sigmas(request.num_steps, self.geometry),
            geometry=self.geometry,
            guidance=self.guidance,
            window=request.window,
            dynamics=request.dynamics,
            noise_level=request.noise_level,
            latent_dtype=torch_dtype(request.latent_dtype),
        )
        images = self.model.decode(drawn.final, self.geometry)
        return Drawn(images, drawn.latents, drawn.final, drawn.logp_old, drawn.steps, drawn.sigmas)

    def _prepare(self) -> None:
        self.model.load_denoiser()
        self.model.load_vae()
        transformer = self.model.transformer
        assert transformer is not None, "load_denoiser was called"
        if self._in_place:
            return
        if self._adapter is None:
            lora.remove_lora(transformer)
        else:
            lora.load_lora(transformer, self._adapter)
        self._in_place = True
