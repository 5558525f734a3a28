"""The learning rate as a function of the update counter of the whole run."""

from __future__ import annotations

import math

from schemas.job import TrainConfig


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """Return the learning rate of one update.

    Args:
        config: Peak rate, warm-up, decay.
        update: Updates made before this one, from 0.
        total: Updates of the whole run.

    Returns:
        A linear rise to the peak over ``warmup_updates``, then the peak ("constant"), or a fall that would reach 0
        right after the last update.
    """
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    share = min(1.0, (update - config.warmup_updates) / max(1, total - config.warmup_updates))
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - share)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))
    return config.learning_rate
