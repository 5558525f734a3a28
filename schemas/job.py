"""What a job file may say. One model per section; every field has its default and its meaning here.

Fields marked ``execution()`` change speed or place, never a number on purpose: they stay out of the config hash.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.graph import AtomKind

Credit = Literal["cast", "scalar", "per-atom", "spatial", "shuffled"]
Dynamics = Literal["flow_sde", "dance_sde", "cps"]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def execution(default: Any, **kwargs: Any) -> Any:
    """Declare a field that says how a job is run; it is left out of the config hash."""
    return Field(default, json_schema_extra={"execution": True}, **kwargs)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def semantic(self) -> dict[str, Any]:
        """Return the fields that decide the numbers, as plain JSON values."""
        out: dict[str, Any] = {}
        for name, info in type(self).model_fields.items():
            extra = info.json_schema_extra
            if isinstance(extra, dict) and extra.get("execution"):
                continue
            value = getattr(self, name)
            out[name] = value.semantic() if isinstance(value, _Section) else json.loads(json.dumps(value))
        return out


def config_hash(semantic: dict[str, Any]) -> str:
    """Return the sha256 (hex) of a semantic config in canonical JSON."""
    return hashlib.sha256(json.dumps(semantic, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ModelConfig(_Section):
    """The image model. ``None`` means: as ``cast_model.json`` beside ``model_index.json`` says."""

    path: str = "tinyworld:flux2"
    """A diffusers folder, or ``tinyworld:flux2`` for the one that ships with the package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    height: int | None = Field(None, ge=8)
    width: int | None = Field(None, ge=8)
    guidance: float | None = Field(None, ge=0)
    device: str = execution("auto")
    """``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""


class PromptsConfig(_Section):
    """Where prompts come from: a ``.txt`` / ``.jsonl`` file, or a split of the tiny world."""

    train: str = "tinyworld:train"
    train_count: int | None = Field(None, ge=1)
    """Use the first N prompts; required for ``tinyworld:`` splits that are generated without end."""
    evaluate: str = "tinyworld:test"
    evaluate_count: int | None = Field(256, ge=1)


class WindowConfig(_Section):
    """The SDE steps, ``start .. start + length - 1``; all other steps are ODE steps."""

    start: int = Field(1, ge=0)
    length: int = Field(3, ge=1)


class RolloutConfig(_Section):
    """Sampling of the training images."""

    prompts_per_round: int = Field(8, ge=1)
    group_size: int = Field(8, ge=2)
    num_steps: int | None = Field(None, ge=2)
    initial_noise: Literal["member", "shared"] = "member"
    """``member``: every image starts from noise of its own (Flow-GRPO). ``shared``: a group starts from the same noise
    (DanceGRPO, MixGRPO), so that its images differ by the exploration in the window alone, and so do their rewards."""
    dynamics: Dynamics = "flow_sde"
    noise_level: float = Field(0.7, ge=0)
    """At most 1 for ``cps``; 0 draws without noise, which cannot be trained on."""
    window: WindowConfig = WindowConfig()
    latent_dtype: Literal["float32", "bfloat16"] = "float32"
    shard_groups: int = Field(4, ge=1)
    """Whole groups per shard."""
    batch_size: int = execution(32, ge=1)
    workers: int = execution(1, ge=1)
    threads: int | None = execution(None, ge=1)
    python: str | None = execution(None)
    """Interpreter for this stage, when its packages need one of their own."""

    @model_validator(mode="after")
    def _noise_of_cps(self) -> RolloutConfig:
        if self.dynamics == "cps" and self.noise_level > 1:
            raise ValueError(f"noise_level must be 0 to 1 for cps, not {self.noise_level:g}")
        return self


class ScoreConfig(_Section):
    """The judge that gives the reward and the maps."""

    judge: str = "hf"
    """``hf`` (transformers), ``exact`` (the tiny world's verifier) or ``package.module:Class``."""
    model: str = "tinyworld:judge"
    dtype: Literal["float32", "bfloat16"] = "float32"
    mode: Literal["dedup", "geneval2"] = "dedup"
    rows: Literal["answer", "predict"] = "answer"
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1)
    """Decoder layers whose attention is read; ``None``: those from 40% to 80% of the depth."""
    max_bad_frac: float = Field(0.01, ge=0, le=1)
    """Share of failed samples, or of missing scores, above which any stage ends with exit code 3."""
    batch_size: int = execution(16, ge=1)
    workers: int = execution(1, ge=1)
    threads: int | None = execution(None, ge=1)
    device: str = execution("auto")
    python: str | None = execution(None)


class AdvantageConfig(_Section):
    """From atom scores and attention rows to the signed weight W per latent position."""

    credit: Credit = "cast"
    map_blend: float = Field(0.5, ge=0, le=1)
    """λ: 0 is per-atom credit without maps, 1 the bare map."""
    absent: Literal["found", "as_is"] = "found"
    """Where the blame goes for a thing that the judge does not find: on everything it does find (``found``), so that
    presence and absence reward and blame alike what is drawn; or wherever its attention fell (``as_is``). A judge that
    looks everywhere for what is missing blames the background, and the policy learns to fill it."""
    blur: bool = True
    neutral: bool = True
    """Divide by the map of a neutral question, which carries the attention sinks."""
    percentile_cap: float | None = Field(99.5, gt=0, le=100)
    map_max: float | None = Field(None, gt=1)
    kind_weights: dict[AtomKind, NotNegative] = Field(default_factory=dict)
    """w_k by kind of atom, times the atom's own weight; kinds that are not named have 1. Counting is where drawing more
    of everything is punished: a larger weight there keeps a policy from it."""
    scale: Literal["sum", "rsqrt", "mean", "match"] = "rsqrt"
    """c_K in W = c_K Σ_k w_k A_k M_k."""
    min_atom_std: float = Field(0.02, ge=0)
    advantage_clip: float = Field(5.0, gt=0)
    weight_clip: float | None = Field(None, gt=0)
    dependency: Literal["none", "gate"] = "none"
    python: str | None = execution(None)


class LoraConfig(_Section):
    """The adapter."""

    rank: int = Field(64, ge=1)
    alpha: float = Field(128, gt=0)
    init: Literal["gaussian", "default"] = "gaussian"
    dropout: float = 0.0
    targets: str | None = None
    """Regular expression over module names; ``None``: the model's own list, every block."""

    @model_validator(mode="after")
    def _no_dropout(self) -> LoraConfig:
        if self.dropout != 0.0:
            raise ValueError("dropout must be 0: the policy that is trained would differ from the one that drew")
        return self


class TrainConfig(_Section):
    """One round of updates."""

    objective: Literal["policy"] = "policy"
    lora: LoraConfig = LoraConfig()
    updates_per_round: int = Field(4, ge=1)
    epochs_per_round: int = Field(1, ge=1)
    learning_rate: float = Field(3e-4, gt=0)
    warmup_updates: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay over the updates of the whole run."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(1e-4, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    ratio: Literal["image", "position"] = "image"
    ratio_center: bool = True
    clip_range: float | None = Field(None, gt=0)
    """ε; ``None``: 1e-4·sqrt(65536 / N), N = positions × channels."""
    ratio_tolerance: float = Field(1e-5, gt=0)
    """Largest |log-ratio| allowed before the first update of a round: of an image, and with a float32 model of every
    position, whatever the dtype of the stored latents."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    max_grad_norm_ratio: float = Field(1e4, gt=1)
    """Stop when the gradient norm exceeds this multiple of the run's median."""
    max_log_ratio: float = Field(1.0, gt=0)
    """Stop when an image's |log-ratio| exceeds this."""
    max_adapter_ratio: float = Field(1.0, gt=0)
    """Stop when the adapter changes the weights by more than this multiple of their own norm."""
    keep: int = execution(2, ge=1)
    """Newest rounds of a run folder that can be trained on from. Older ones lose the optimizer's moments and keep
    adapter, moving average, metrics and state, so nothing else changes. With 1 a damaged newest round cannot be made
    again."""
    batch_size: int = execution(16, ge=1)
    """Images per forward pass; gradients are accumulated to the update's images."""
    gradient_checkpointing: bool = execution(False)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    checkpoint_seconds: float = execution(60.0, ge=0)
    """Inside a round, save after an update when so much time has passed since the last save."""
    threads: int | None = execution(None, ge=1)
    python: str | None = execution(None)


class EvaluateConfig(_Section):
    """Held-out evaluation: ODE, fixed noise, a judge that never gave a reward."""

    judge: str = "exact"
    """As for ``score``. ``exact`` has no weights: model, dtype and device below are not used then."""
    model: str = "tinyworld:judge"
    """Another one than that of ``score``, or the judge that gives the reward reports the gain too (warned of)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    every: int | None = Field(None, ge=1)
    """Also evaluate after every so many rounds (the last round always is)."""
    double_steps: bool = True
    """Also draw the untrained model at twice the steps."""
    images_per_prompt: int = Field(1, ge=1)
    """More images per held-out prompt narrow the spread of every figure."""
    seed: int = Field(1_000_003, ge=0)
    shard_prompts: int = Field(64, ge=1)
    """Prompts per shard, each with all its images."""
    batch_size: int = execution(32, ge=1)
    workers: int = execution(1, ge=1)
    threads: int | None = execution(None, ge=1)
    device: str = execution("auto")
    """Of the judge; ``model.device`` is where images are drawn."""
    python: str | None = execution(None)

    def semantic(self) -> dict[str, Any]:
        """Return the fields that decide the numbers; the exact judge has no model."""
        unused = {"model", "dtype"} if self.judge == "exact" else set()
        return {name: value for name, value in super().semantic().items() if name not in unused}


class ReportConfig(_Section):
    """What the report shows."""

    images: int = execution(24, ge=0)
    maps: int = execution(8, ge=0)


class JobConfig(_Section):
    """A whole job: rounds of rollout, score, build-advantages and training, between held-out evaluations."""

    name: str = Field("tiny", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    seed: int = Field(0, ge=0)
    rounds: int = Field(32, ge=1)
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    rollout: RolloutConfig = RolloutConfig()
    score: ScoreConfig = ScoreConfig()
    advantages: AdvantageConfig = AdvantageConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    report: ReportConfig = execution(ReportConfig())
    out: str | None = execution(None)
    """Run folder; ``None``: ``runs/NAME``."""

    @model_validator(mode="after")
    def _whole_updates(self) -> JobConfig:
        images = self.rollout.prompts_per_round * self.rollout.group_size
        if images % self.train.updates_per_round:
            raise ValueError(
                f"rollout.prompts_per_round x rollout.group_size = {images} is not a multiple of "
                f"train.updates_per_round = {self.train.updates_per_round}"
            )
        return self
