"""The processes that share an update, under ``accelerate launch`` or alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cast_engine.errors import UserError
from cast_engine.store.lock import hold

if TYPE_CHECKING:
    from accelerate import Accelerator


class Processes:
    """Which process this is, and what they do together; without an accelerator there is one."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.accelerator = accelerator
        self.count: int = accelerator.num_processes if accelerator else 1
        self.index: int = accelerator.process_index if accelerator else 0

    @property
    def main(self) -> bool:
        """Whether this process writes."""
        return self.index == 0

    @contextmanager
    def alone(self, out: Path) -> Iterator[None]:
        """Keep other commands from writing a checkpoint directory inside a ``with`` block.

        Raises:
            UserError: Another command on this machine is at it. A killed one no longer is.
        """
        target = out.resolve()
        with ExitStack() as stack:
            held = not self.main or stack.enter_context(hold(target.parent / f".{target.name}.lock"))
            (busy,) = self.any(not held)
            if busy:
                raise UserError("another process is training it", where=str(out), do="wait for it, or stop it")
            yield

    def gather(self, vector: Tensor) -> Tensor:
        """Return the vectors of all processes, one after the other."""
        if self.accelerator is None or self.count == 1:
            return vector
        return cast("Tensor", self.accelerator.gather(vector))

    def any(self, *flags: bool) -> list[bool]:
        """Return which of the flags any process has set, so that all of them do the same next."""
        if self.accelerator is None or self.count == 1:
            return list(flags)
        own = torch.tensor(flags, dtype=torch.int32, device=self.accelerator.device)
        return self.gather(own).view(self.count, -1).amax(dim=0).bool().tolist()

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add up the gradients of all processes, in one message; a missing gradient counts as zero."""
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.accelerator is None or self.count == 1:
            return
        flat = torch.cat([cast("Tensor", p.grad).flatten() for p in parameters])
        total = cast("Tensor", self.accelerator.reduce(flat, "sum"))
        parts = torch.split(total, [p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view_as(p)

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()
