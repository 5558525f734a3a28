"""What a sample holds, stage by stage: member names, and for tensors their dtype and symbolic shape.

Symbols: P latent positions (tokens), C channels per position, w window steps, N denoising steps, K atoms,
gh x gw the judge's map grid, T text tokens, D text channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
"""Readers accept this version and the one before; anything else is refused with what to run."""


class Status(StrEnum):
    """What became of a planned sample."""

    OK = "ok"
    FAILED = "failed"
    NONFINITE = "nonfinite"
    SKIPPED_PARENT = "skipped_parent"


@dataclass(frozen=True)
class TensorField:
    """A tensor inside a ``.safetensors`` member."""

    dtypes: tuple[str, ...]
    shape: tuple[str, ...]


ROLLOUT_TENSORS = {
    "latents": TensorField(("float32", "bfloat16"), ("w+1", "P", "C")),  # x at each window step, and after the last
    "final_latent": TensorField(("float32", "bfloat16"), ("P", "C")),  # x_0, packed and normalised as the model sees it
    "steps": TensorField(("int64",), ("w",)),  # index of each window step in the sigma table
    "sigmas": TensorField(("float32",), ("N+1",)),  # the whole table; the last entry is 0
    "logp_old": TensorField(("float32",), ("w", "P")),  # mean over channels, from the stored latents
}
SCORE_TENSORS = {
    "scores": TensorField(("float32",), ("K",)),  # probability of the expected answer; NaN = missing
    "maps": TensorField(("float16",), ("K", "gh", "gw")),  # answer-row attention, mean one over the image tokens
    "mass": TensorField(("float32",), ("K",)),  # share of the attention row that lies on image tokens
    "neutral": TensorField(("float16",), ("gh", "gw")),  # the same for a neutral question, mean one
}
ADVANTAGE_TENSORS = {
    "weight": TensorField(("float32",), ("P",)),  # W, the signed weight per latent position
    "advantage": TensorField(("float32",), ("K",)),  # A per atom (credit rules without atoms: one entry)
}


@dataclass(frozen=True)
class Stage:
    """A kind of dataset: its members (suffix without the leading dot), sorted."""

    name: str
    members: tuple[str, ...]
    tensors: dict[str, TensorField] | None = None


STAGES = {
    s.name: s
    for s in (
        Stage("prompts", ("prompt.json",)),
        Stage("csg", ("graph.json",)),
        Stage("rollout", ("image.png", "meta.json", "rollout.safetensors"), ROLLOUT_TENSORS),
        Stage("score", ("meta.json", "score.safetensors"), SCORE_TENSORS),
        Stage("advantages", ("advantage.safetensors", "meta.json"), ADVANTAGE_TENSORS),
        Stage("evaluate", ("image.png", "meta.json")),
    )
}


class _Meta(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class RolloutMeta(_Meta):
    """How one image was drawn; with the model and the embed it is enough to draw it again."""

    key: str
    prompt_id: str
    prompt: str
    round: int
    member: int
    seed: int  # of the member; its step noise follows from it, see cast_engine.numerics.noise
    initial_seed: int  # of the initial noise, for torch's generator; equal to `seed` unless the group shares it
    guidance: float
    height: int
    width: int
    num_steps: int
    dynamics: str
    noise_level: float
    window_start: int
    window_length: int
    adapter_sha256: str  # "" = the bare base model
    model_sha256: str
    embed_sha256: str


class ScoreMeta(_Meta):
    """Who answered, and what: per atom in the graph's order."""

    key: str
    prompt_id: str
    judge: str
    model_sha256: str
    mode: str
    atom_ids: tuple[str, ...]
    kinds: tuple[str, ...]
    questions: tuple[str, ...]
    expected: tuple[str, ...]
    answers: tuple[str, ...] = ()  # most likely answer, for the report


class AdvantageMeta(_Meta):
    """How W was made."""

    key: str
    prompt_id: str
    credit: str
    atom_ids: tuple[str, ...]
    scale: float  # c_K as used
    counters: dict[str, int] = Field(default_factory=dict)


class EvaluateMeta(_Meta):
    """One held-out image and its verdicts: per atom in the graph's order."""

    key: str
    prompt_id: str
    prompt: str
    member: int
    seed: int
    atom_ids: tuple[str, ...]
    kinds: tuple[str, ...]
    scores: tuple[float | None, ...]
    counted: tuple[int | None, ...] = ()  # predicted count per atom (None for other kinds)
    expected: tuple[str, ...] = ()


class SampleKey(NamedTuple):
    """The parts of a sample's key."""

    prompt_id: str
    round: int
    member: int


def split_key(key: str) -> SampleKey:
    """Take a sample's key apart (the inverse of :func:`sample_key`)."""
    prompt_id, round_, member = key.split("-")
    return SampleKey(prompt_id, int(round_), int(member))


def sample_key(prompt_id: str, round_: int, member: int) -> str:
    """Return ``<prompt_id>-<round:04d>-<member:04d>``: lower case, no dot, no slash."""
    return f"{prompt_id}-{round_:04d}-{member:04d}"
