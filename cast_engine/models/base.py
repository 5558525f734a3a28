"""What rollouts, evaluation and training need of an image model, whatever its architecture.

A model works on packed latents ``[B, P, C]``: P positions in row-major order over the latent grid, C channels each.
Every position stands for one square of the image, so a map over the image and a map over positions are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

PromptEmbeds = dict[str, "Tensor"]
"""What the text encoder gives for one prompt, without a batch dimension. FLUX.2: ``{"prompt_embeds": [T, D]}``."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of an image and of its packed latents."""

    height: int
    width: int
    grid_h: int
    grid_w: int
    channels: int

    @property
    def positions(self) -> int:
        """Number of latent positions P."""
        return self.grid_h * self.grid_w

    @property
    def elements(self) -> int:
        """Number of latent values N = P x C, which the clip range of the objective refers to."""
        return self.positions * self.channels


@dataclass(frozen=True)
class ModelDefaults:
    """How a checkpoint is meant to be sampled: ``cast_model.json``, else the defaults of the stock pipeline."""

    num_steps: int
    height: int
    width: int
    guidance: float
    max_sequence_length: int
    text_encoder_out_layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """Which model this is.

    Attributes:
        name: Last part of the folder's path.
        path: The checkpoint's folder.
        sha256: Fingerprint of all that turns embeds and noise into an image: denoiser, VAE and scheduler.
        encoder_sha256: Fingerprint of all that turns a prompt into embeds, the encoder's dtype included.
        defaults: How the checkpoint is meant to be sampled.
        guidance_embeds: Whether the denoiser takes the guidance scale as an input.
    """

    name: str
    path: Path
    sha256: str
    encoder_sha256: str
    defaults: ModelDefaults
    guidance_embeds: bool


@dataclass(frozen=True)
class Condition:
    """What a batch is conditioned on; only the model that made it reads the tensors."""

    size: int
    tensors: dict[str, Tensor] = field(repr=False)


class ImageModel(Protocol):
    """A text-to-image flow-matching model in three phases: encode prompts, draw latents, decode them.

    ``x = (1 - sigma) x0 + sigma noise`` and the velocity is ``noise - x0``. Classifier-free guidance, where a model
    needs it, happens inside :meth:`velocity`, so that rollout, replay and evaluation cannot differ in it.
    """

    device: torch.device
    dtype: torch.dtype
    transformer: nn.Module | None
    lora_targets: str

    @property
    def info(self) -> ModelInfo:
        """Names, fingerprints and defaults; read from the folder, no weights are loaded."""
        ...

    def lora_blocks(self) -> list[str]:
        """Return the names of the blocks of the denoiser, each of which must carry an adapter."""
        ...

    def resolve_guidance(self, guidance: float | None) -> float:
        """Return the guidance to use and record; UserError when the checkpoint cannot use the one asked for."""
        ...

    def geometry(self, height: int | None = None, width: int | None = None) -> Geometry:
        """Return the latent sizes for an image size (``None``: the default); UserError for an impossible one."""
        ...

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        """Return the scheduler's noise levels, float32 ``[num_steps + 1]`` on the CPU, the last one 0."""
        ...

    def load_text_encoder(self) -> None:
        """Load what :meth:`encode` needs; refused while the denoiser is loaded."""
        ...

    def free_text_encoder(self) -> None:
        """Drop the text encoder."""
        ...

    def load_denoiser(self) -> None:
        """Load the denoiser; the text encoder is dropped first."""
        ...

    def free_denoiser(self) -> None:
        """Drop the denoiser."""
        ...

    def load_vae(self) -> None:
        """Load what :meth:`decode` needs."""
        ...

    def encode(self, prompts: Sequence[str]) -> list[PromptEmbeds]:
        """Return the embeds of each prompt, on the CPU; an embed does not depend on its neighbours in the list."""
        ...

    def condition(
        self, embeds: Sequence[PromptEmbeds], geometry: Geometry, device: torch.device | None = None
    ) -> Condition:
        """Stack embeds into the condition of a batch, one entry per image."""
        ...

    def initial_noise(self, seed: int, geometry: Geometry) -> Tensor:
        """Return the noise that the stock pipeline would start from with this seed: float32 ``[P, C]`` on the CPU."""
        ...

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor) -> Tensor:
        """Return the velocity, float32 ``[B, P, C]``.

        Args:
            latents: ``[B, P, C]``, any float dtype.
            sigma: Noise level of each image, ``[B]`` in 0..1.
            condition: From :meth:`condition`, of size B.
            guidance: Guidance scale of each image, ``[B]``.
        """
        ...

    def decode(self, latents: Tensor, geometry: Geometry) -> NDArray[np.uint8]:
        """Return the images of packed latents ``[B, P, C]`` as uint8 ``[B, H, W, 3]``."""
        ...
