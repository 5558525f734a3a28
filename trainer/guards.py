"""Limits that stop training before it destroys the images (reward hacking shows late, these show early)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from cast_engine.errors import GuardError
from schemas.job import TrainConfig

WARM = 3
"""Updates with a gradient before the run's median is trusted."""


class TrainingStopped(GuardError):
    """A guard stopped training; ``reason`` is the name of the guard."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}: {message}")


@dataclass
class Guards:
    """Checks of one run of updates.

    Attributes:
        config: Limits.
        where: Start of every message, such as ``"round 3"``.
        intact: What can be gone back to, for the message.
        norms: Gradient norms of the run so far, the oldest first.
    """

    config: TrainConfig
    where: str
    intact: str
    norms: list[float] = field(default_factory=list)

    def stop(self, reason: str, found: str, do: str) -> TrainingStopped:
        """Return the error that names the guard, what it saw and what is still good."""
        return TrainingStopped(reason, f"{self.where}: {found}; {do}; {self.intact}")

    def check_start(self, image: float, position: float, *, exact: bool) -> None:
        """Refuse a round whose replay does not reproduce the rollout's log-probs.

        Args:
            image: Largest |log-ratio| of an image at one step.
            position: Largest |log-ratio| of a single position.
            exact: Whether the model is float32, so that single positions are held to the limit too. In bfloat16 another
                batch shape may round one position's log-prob by more, and only the image's mean is held.

        Raises:
            TrainingStopped: Above ``ratio_tolerance``, or not a number.
        """
        limit = self.config.ratio_tolerance
        gated = (image, position) if exact else (image,)
        if all(value <= limit for value in gated) and not math.isnan(position):
            return
        raise self.stop(
            "off-policy start",
            f"before the first update the log-ratio is {image:.3g} for an image and {position:.3g} for a position, "
            f"the limit (train.ratio_tolerance) is {limit:.3g}",
            "the rollouts must come from this model, adapter, dtype and kernel choice",
        )

    def check_loss(self, update: int, loss: float, log_ratio: float) -> None:
        """Stop on a loss that is no number or an image whose |log-ratio| passes ``max_log_ratio``."""
        if not math.isfinite(loss) or math.isnan(log_ratio):
            raise self.stop("non-finite loss", f"update {update}: loss {loss}", "lower train.learning_rate")
        if log_ratio > self.config.max_log_ratio:
            raise self.stop(
                "log-ratio",
                f"update {update}: |log-ratio| {log_ratio:.3g}, the limit (train.max_log_ratio) is "
                f"{self.config.max_log_ratio:g}",
                "lower train.learning_rate or train.updates_per_round",
            )

    def check_gradient(self, update: int, norm: float) -> None:
        """Stop on a gradient that is no number or far above the run's median; keep its norm."""
        if not math.isfinite(norm):
            raise self.stop("non-finite gradient", f"update {update}: norm {norm}", "lower train.learning_rate")
        known = [n for n in self.norms if n > 0]
        if len(known) >= WARM:
            median = statistics.median(known)
            if norm > self.config.max_grad_norm_ratio * median:
                raise self.stop(
                    "gradient norm",
                    f"update {update}: norm {norm:.3g} is above train.max_grad_norm_ratio "
                    f"{self.config.max_grad_norm_ratio:g} x the median {median:.3g}",
                    "lower train.learning_rate",
                )
        self.norms.append(norm)

    def check_adapter(self, update: int, ratio: float) -> None:
        """Stop when the adapter changes the weights by more than ``max_adapter_ratio`` of their own norm."""
        if not ratio <= self.config.max_adapter_ratio:
            raise self.stop(
                "adapter norm",
                f"update {update}: the adapter's change of the weights is {ratio:.3g} x their norm, the limit "
                f"(train.max_adapter_ratio) is {self.config.max_adapter_ratio:g}",
                "lower train.learning_rate",
            )


def worst(values: Sequence[float]) -> float:
    """Return the largest value, NaN if any is NaN (``max`` would hide it), 0 for none."""
    if any(math.isnan(v) for v in values):
        return math.nan
    return max(values, default=0.0)
