"""What is logged of every update, collected over micro-batches, window steps and processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from cast_engine.errors import DatasetError
from trainer.objective import LossStats, PolicyLoss

Row = dict[str, Any]
"""One update as a line of ``metrics.jsonl``."""

MAXIMA = ("log_ratio_max", "position_log_ratio_max")
SUMS = (
    "loss",
    "ratios",
    "log_ratio_sum",
    "center_sum",
    "ratio_sum",
    "outside",
    "positive",
    "positive_clipped",
    "negative",
    "negative_clipped",
    "weight",
    "weight_square",
    "weight_count",
)


class UpdateStats:
    """Sums and maxima over one update; nothing is read from the device before :meth:`collect`."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: PolicyLoss, position: Tensor, weight: Tensor) -> None:
        """Add one forward pass.

        Args:
            loss: Of the pass.
            position: Log-ratio of each position, ``[B, P]``.
            weight: W, ``[B, P]``.
        """
        stats: LossStats = loss.stats
        wide = weight.double()
        own = {
            "loss": loss.per_image.sum(),
            "weight": wide.sum(),
            "weight_square": wide.square().sum(),
            "weight_count": torch.tensor(float(weight.numel()), device=weight.device),
        }
        self._sums += torch.stack([(own[n] if n in own else cast("Tensor", getattr(stats, n))).double() for n in SUMS])
        # torch.maximum keeps a NaN, which Python's max would lose
        highest = torch.stack([stats.log_ratio_max.double(), position.abs().amax().double()])
        self._maxima = torch.maximum(self._maxima, highest)

    def collect(self, gather: Callable[[Tensor], Tensor]) -> Row:
        """Return means and maxima by name; ``gather`` puts the vectors of all processes one after the other."""
        sums = gather(self._sums).view(-1, len(SUMS)).sum(dim=0).tolist()
        maxima = gather(self._maxima).view(-1, len(MAXIMA)).amax(dim=0).tolist()
        s = dict(zip(SUMS, sums, strict=True))

        def share(part: str, whole: str) -> float:
            return s[part] / s[whole] if s[whole] else 0.0

        mean = share("weight", "weight_count")
        return {
            "loss": share("loss", "ratios"),
            "log_ratio_mean": share("log_ratio_sum", "ratios"),
            "center_mean": share("center_sum", "ratios"),
            "ratio_mean": share("ratio_sum", "ratios"),
            **dict(zip(MAXIMA, maxima, strict=True)),
            "outside_share": share("outside", "ratios"),
            "clip_share_positive": share("positive_clipped", "positive"),
            "clip_share_negative": share("negative_clipped", "negative"),
            "weight_mean": mean,
            "weight_std": math.sqrt(max(0.0, share("weight_square", "weight_count") - mean**2)),
        }


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write ``metrics.jsonl``; values that are not finite become null."""
    path.write_text("".join(json.dumps(_plain(row)) + "\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    """Read ``metrics.jsonl``.

    Raises:
        DatasetError: It is missing or damaged.
    """
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        do = f"delete {path.parent} and run again: the round is trained again"
        raise DatasetError("missing or damaged", where=str(path), do=do) from error


def _plain(row: Mapping[str, Any]) -> Row:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


@torch.no_grad()
def norm(tensors: Iterable[Tensor]) -> float:
    """Return the l2 norm over all tensors together."""
    parts = [t.detach().double().square().sum() for t in tensors]
    return math.sqrt(float(torch.stack(parts).sum())) if parts else 0.0
