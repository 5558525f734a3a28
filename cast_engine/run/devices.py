"""Which CUDA device a worker process gets."""

from __future__ import annotations

import os

VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_environments(workers: int, *asked: str) -> tuple[dict[str, str], ...]:
    """Return one environment per CUDA device, for worker processes to take in turn.

    Each worker then sees one device only and calls it its first.

    Args:
        workers: worker processes of the stage.
        asked: the ``device`` fields of what a worker loads.

    Returns:
        Nothing to set when there is one worker or at most one device, when all is on the CPU, and when the job names
        a device by number: that choice stands.
    """
    if workers < 2 or not set(asked) <= {"auto", "cuda", "cpu"} or set(asked) <= {"cpu"}:
        return ()
    devices = visible_devices()
    return tuple({VISIBLE: device} for device in devices) if len(devices) > 1 else ()


def visible_devices() -> list[str]:
    """Return the CUDA devices of this process, as ``CUDA_VISIBLE_DEVICES`` names them.

    Stages that load models have imported torch by now, and its count takes up no memory on any device.
    """
    import torch

    count = torch.cuda.device_count()
    named = [name for part in os.environ.get(VISIBLE, "").split(",") if (name := part.strip())]
    return named[:count] or [str(i) for i in range(count)]
