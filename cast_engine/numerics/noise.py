"""Seeds and noise. Every draw follows from (run seed, round, prompt, member, step), never from how work was split.

Noise is drawn on the CPU in float32, one image at a time, so that neither the device nor the batch changes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor


def hash_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from any sequence of numbers and strings.

    Args:
        parts: What the seed depends on, in order; ``1`` and ``"1"`` are different parts.

    Returns:
        The first 8 bytes of sha256 over the parts as a JSON array, without the top bit: 0 <= seed < 2**63.
        PyTorch's CPU generator uses the lower 32 bits of a seed, so among n streams about n**2 / 2**33 pairs coincide.
    """
    digest = hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def member_seed(run_seed: int, round_: int, prompt_id: str, member: int) -> int:
    """Return the seed of one image of a group; its initial noise is drawn with it.

    Args:
        run_seed: The job's seed.
        round_: Round, from 0.
        prompt_id: Id of the prompt.
        member: Place of the image in its group, from 0.
    """
    return hash_seed("member", run_seed, round_, prompt_id, member)


def step_seed(seed: int, step: int) -> int:
    """Return the seed of one SDE step's noise.

    Args:
        seed: The image's ``member_seed``.
        step: Index of the step in the sigma table (not in the window), so that moving the window keeps the noise.
    """
    return hash_seed("step", seed, step)


def draw(seed: int, shape: Sequence[int]) -> Tensor:
    """Draw standard normal float32 noise of a shape on the CPU with a generator of its own."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def initial(seed: int, shape: Sequence[int]) -> Tensor:
    """Draw the noise an image starts from, as a stock pipeline with ``torch.Generator().manual_seed(seed)`` does.

    Args:
        seed: The image's ``member_seed``.
        shape: Shape of one image's noise, without a batch axis or with one of length 1.

    Returns:
        float32 on the CPU, in units of the latent's standard deviation.
    """
    return draw(seed, shape)


def step_noise(seed: int, step: int, shape: Sequence[int]) -> Tensor:
    """Draw z of one SDE step of one image.

    Args:
        seed: The image's ``member_seed``.
        step: Index of the step in the sigma table.
        shape: Shape of one image's latent, [P, C].

    Returns:
        z, float32 on the CPU; the step adds ``std * z`` to its mean.
    """
    return draw(step_seed(seed, step), shape)
