"""The updates of one round.

Data parallel without a wrapper: each process takes every n-th image of an update, and the adapter's gradients are
summed over processes before the step. The loss of an update is a sum over its images divided by their number, so
neither ``batch_size`` nor the number of processes changes an update beyond float rounding.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cast_engine.errors import CastError, Interrupted
from cast_engine.models.base import ImageModel
from schemas.job import TrainConfig
from trainer import checkpoint
from trainer.adapter import Adapter, prepare
from trainer.checkpoint import ADAPTER, EMA, METRICS, OPTIMIZER, Content, TrainState
from trainer.data import RoundData, plan_updates
from trainer.ema import Ema
from trainer.guards import Guards
from trainer.metrics import Row, UpdateStats, norm, read_rows
from trainer.origin import RoundPaths
from trainer.processes import Processes
from trainer.replay import NOISE_LIMIT, Replayer
from trainer.schedule import learning_rate

KEPT_NORMS = 1000
SAMPLE = 8
"""Images, from all over the round, that are replayed before the first update."""


@dataclass(frozen=True)
class RoundSummary:
    """What a round did.

    Attributes:
        checkpoint: The directory.
        state: Its state.
        rows: Metrics, one per update.
        images: Images trained on per epoch.
        dropped: Images left out, by reason.
        elements: N, latent values per image.
        clip_range: ε.
        resumed_at: Updates that an earlier call had made already.
        seconds: Wall time of this call.
        removed: Files of an old round that are gone (``train.keep``).
    """

    checkpoint: Path
    state: TrainState
    rows: list[Row]
    images: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    elements: int = 0
    clip_range: float = 0.0
    resumed_at: int = 0
    seconds: float = 0.0
    removed: frozenset[str] = frozenset()


class Session:
    """The updates of one round."""

    def __init__(
        self,
        model: ImageModel,
        config: TrainConfig,
        paths: RoundPaths,
        first: TrainState,
        data: RoundData,
        processes: Processes,
        log: Callable[[str], None],
    ) -> None:
        self.config, self.data, self.processes, self.log = config, data, processes, log
        self.out, self.partial = paths.out, paths.partial
        self.name = f"round {first.round}"
        folder, self.state = self._last_saved(first)
        self.resumed_at = self.state.round_update
        self.rows: list[Row] = read_rows(folder / METRICS) if folder is not None and self.resumed_at else []
        source = folder or paths.start
        file = source / ADAPTER if source is not None else paths.init_adapter
        self.adapter: Adapter = prepare(model, config.lora, seed=first.seed, file=file)
        self.optimizer = self._optimizer(source)
        self.ema = self._ema(source)
        self.replayer = Replayer(model, data, config)
        intact = f"{paths.start} is intact" if paths.start else "no checkpoint was written"
        self.guards = Guards(config, self.name, intact, list(self.state.gradient_norms))
        self.plan = plan_updates(
            data.groups,
            seed=first.seed,
            round_=first.round,
            epochs=config.epochs_per_round,
            updates=config.updates_per_round,
        )
        self.saved_at = time.monotonic()

    # ---- where to start -------------------------------------------------------------------------------------------

    def _last_saved(self, first: TrainState) -> tuple[Path | None, TrainState]:
        """Return the newest whole checkpoint inside this round with its state, or (None, first)."""
        if self.partial.is_dir():
            for folder in sorted((p for p in self.partial.iterdir() if p.name.isdigit()), reverse=True):
                try:
                    state = checkpoint.read_state(folder)
                    checkpoint.verify_files(folder, state)
                except CastError:
                    continue
                if state.inputs() == first.inputs():
                    return folder, state
        return None, first

    def _optimizer(self, source: Path | None) -> torch.optim.AdamW:
        config, parameters = self.config, self.adapter.parameters
        optimizer = torch.optim.AdamW(
            list(parameters.values()),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        if source is not None:
            checkpoint.load_optimizer(source / OPTIMIZER, parameters, optimizer, self.state.update)
        return optimizer

    def _ema(self, source: Path | None) -> Ema | None:
        if self.config.ema_decay is None:
            return None
        shadow = None
        if source is not None and (source / EMA).exists():
            shadow = checkpoint.load_adapter(source / EMA, self.adapter.parameters)
        return Ema(self.adapter.parameters, self.config.ema_decay, shadow)

    # ---- updates --------------------------------------------------------------------------------------------------

    def run(self, stop: Callable[[], bool], advance: Callable[[int], None]) -> None:
        """Make the updates that are left."""
        if self.resumed_at:
            self.log(f"{self.name}: goes on after update {self.resumed_at} of {len(self.plan)}")
            advance(sum(len(keys) for keys in self.plan[: self.resumed_at]))
        else:
            self._check_start()
        for index in range(self.resumed_at, len(self.plan)):
            self._update(index)
            advance(len(self.plan[index]))
            if index + 1 == len(self.plan):
                return
            due = time.monotonic() - self.saved_at >= self.config.checkpoint_seconds
            ends, saves = self.processes.any(stop(), due)
            if ends or saves:
                self._save_partial()
            if ends:
                raise Interrupted(f"{self.name}: stopped after update {index + 1}; run the same command again")

    def _check_start(self) -> None:
        """Replay a sample of the round with the policy that drew it."""
        keys = self.data.keys
        sample = keys[:: max(1, len(keys) // SAMPLE)][:SAMPLE]
        own = sample[self.processes.index :: self.processes.count]
        found = [torch.zeros(3, device=self.replayer.model.device)]
        found += [self.replayer.start_figures(self.data.load(chunk)) for chunk in _chunks(own, self.config.batch_size)]
        largest = self.processes.gather(torch.stack(found).amax(dim=0)).view(-1, 3).amax(dim=0)
        image, position, noise = largest.tolist()
        self._record_start(image, position)
        if not noise <= NOISE_LIMIT:
            raise self.guards.stop(
                "noise",
                f"noise drawn again from the recorded seeds misses the stored steps by {noise:.2g} std",
                "the rollouts come from another version of PyTorch or of this program",
            )
        self.log(
            f"{self.name}: {len(keys)} images, {len(self.plan)} updates, "
            f"|log-ratio| before the first: image {image:.2g}, position {position:.2g} "
            f"(limit {self.config.ratio_tolerance:g}), clip range {self.replayer.clip_range:.2g} "
            f"for {self.replayer.geometry.elements} elements"
        )

    def _record_start(self, image: float, position: float) -> None:
        """Hold the on-policy figures to the limit and keep the largest of them."""
        self.guards.check_start(image, position, exact=self.replayer.exact)
        old = self.state.start_ratio
        largest = {"image": max(old.get("image", 0.0), image), "position": max(old.get("position", 0.0), position)}
        self.state = self.state.model_copy(update={"start_ratio": largest})

    def _update(self, index: int) -> None:
        began, config, parameters = time.monotonic(), self.config, list(self.adapter.parameters.values())
        number, keys = self.state.update + 1, self.plan[index]
        self.optimizer.zero_grad(set_to_none=True)
        row = self._accumulate(keys)
        self.processes.sum_gradients(parameters)
        if index == 0:  # nothing has moved yet: these log-ratios are on-policy too
            self._record_start(row["log_ratio_max"], row["position_log_ratio_max"])
        self.guards.check_loss(number, row["loss"], row["log_ratio_max"])
        rate = learning_rate(config, self.state.update, self.state.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        length = float(torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip))
        self.guards.check_gradient(number, length)
        self.optimizer.step()
        change = self.adapter.change()
        self.guards.check_adapter(number, change)
        if self.ema is not None:
            self.ema.update(self.adapter.parameters)
        self.state = self.state.model_copy(
            update={
                "update": number,
                "round_update": index + 1,
                "gradient_norms": tuple(self.guards.norms[-KEPT_NORMS:]),
            }
        )
        head = {"round": self.state.round, "update": number, "round_update": index + 1, "images": len(keys)}
        tail = {"learning_rate": rate, "grad_norm": length, "adapter_norm": norm(parameters), "adapter_ratio": change}
        self.rows.append(head | row | tail | {"seconds": round(time.monotonic() - began, 4)})

    def _accumulate(self, keys: Sequence[str]) -> Row:
        """Add up the gradient of the mean loss of an update's images; each window step is a forward pass of its own."""
        stats, steps = UpdateStats(self.replayer.model.device), len(self.data.steps)
        for chunk in _chunks(keys[self.processes.index :: self.processes.count], self.config.batch_size):
            placed = self.replayer.place(self.data.load(chunk))
            for j in range(steps):
                loss, position = self.replayer.loss(placed, j)
                (loss.per_image.sum() / (len(keys) * steps)).backward()  # type: ignore[no-untyped-call]
                stats.add(loss, position, placed.weight)
        return stats.collect(self.processes.gather)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def finish(self, began: float) -> RoundSummary:
        """Write the round's checkpoint and say what was done since ``began``."""
        state = self._save(self.out)
        return RoundSummary(
            self.out,
            state,
            self.rows,
            images=len(self.data.keys),
            dropped=self.data.dropped,
            elements=self.replayer.geometry.elements,
            clip_range=self.replayer.clip_range,
            resumed_at=self.resumed_at,
            seconds=time.monotonic() - began,
        )

    def _save_partial(self) -> None:
        folder = self.partial / f"{self.state.round_update:06d}"
        self._save(folder)
        if self.processes.main:
            for older in self.partial.iterdir():
                if older != folder:
                    shutil.rmtree(older)
        self.saved_at = time.monotonic()

    def _save(self, folder: Path) -> TrainState:
        shadow = None if self.ema is None else self.ema.shadow
        content = Content(self.adapter.transformer, self.adapter.parameters, self.optimizer, shadow, self.rows)
        if self.processes.main:
            if folder.exists():  # only ever a partial one that did not hold
                shutil.rmtree(folder)
            checkpoint.save(folder, self.state, content)
        self.processes.wait()
        return checkpoint.read_state(folder)


def _chunks(keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for at in range(0, len(keys), size):
        yield keys[at : at + size]
