"""``cast-train``: one round of updates from the command line, the same on disk as inside ``cast-engine run``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cast_engine.errors import UserError, handle_errors, help_end, quiet_hang_up, wait_politely

if TYPE_CHECKING:
    from schemas.job import JobConfig
    from trainer.session import RoundSummary

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

EXAMPLE = (
    "cd runs/tiny/rounds",
    "cast-train 0000/rollout 0000/advantages --out 0000/train",
    "cast-train 0001/rollout 0001/advantages --out 0001/train --from 0000/train",
)


def _folder(name: str, text: str, default: str | bool = False) -> Any:
    return typer.Option(name, metavar="FOLDER", help=text, show_default=default)


@app.command(epilog=help_end(*EXAMPLE))
@handle_errors()
def train(
    rollout: Annotated[Path, typer.Argument(metavar="ROLLOUT", help="Sealed dataset of `cast-engine rollout`.")],
    advantages: Annotated[
        Path,
        typer.Argument(metavar="ADVANTAGES", help="Sealed dataset of `cast-engine build-advantages`, made from it."),
    ],
    out: Annotated[Path, _folder("--out", "Checkpoint to write.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Job file (YAML).",
            show_default="the job of the run folder that holds ROLLOUT, else all defaults",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one field of the job. Repeatable.")
    ] = None,
    start: Annotated[
        Path | None, _folder("--from", "Checkpoint of the round before; needed from round 1 on.", "none")
    ] = None,
    init_adapter: Annotated[
        Path | None,
        typer.Option(
            "--init-adapter",
            metavar="FILE",
            help="Adapter to begin the first round with (diffusers format).",
            show_default="a fresh one, which changes nothing",
        ),
    ] = None,
    round_: Annotated[
        int | None,
        typer.Option("--round", metavar="N", min=0, help="Index of the round, from 0.", show_default="the rollout's"),
    ] = None,
    embeds: Annotated[
        Path | None, _folder("--embeds", "Embeds of the prompts.", "`embeds` of the run folder that holds ROLLOUT")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan of the updates, and stop.")] = False,
) -> None:
    """Train the adapter for one round, on a rollout and the weights made from it.

    Killed at any moment, the same command goes on; of a round that is done it does nothing. The checkpoint holds the
    adapter (diffusers format), its moving average, the optimizer and what it was made from.
    """
    job = _job(config, overrides or [], rollout, out)
    folder = embeds or _embeds_of_run(rollout)
    which = _round_of(rollout) if round_ is None else round_
    if dry_run:
        _plan(job, rollout, advantages, which)
        return
    summary = _train(job, rollout, advantages, folder, out, which, start, init_adapter)
    typer.echo(describe(summary))


def main() -> None:
    """Entry point of ``cast-train``."""
    wait_politely()
    with quiet_hang_up():
        app()


def describe(summary: RoundSummary) -> str:
    """Return the closing line of a round."""
    state = summary.state
    line = f"{summary.checkpoint}: adapter {state.adapter_sha256[:12]} after update {state.update}"
    if not summary.seconds:
        gone = f"; {', '.join(sorted(summary.removed))} was removed (train.keep)" if summary.removed else ""
        return f"{line}; finished before, nothing to do{gone}"
    last = summary.rows[-1]
    dropped = "".join(f"; {count} images {reason}" for reason, count in summary.dropped.items())
    return (
        f"{line}; {summary.images} images{dropped}; |log-ratio| at the start {state.start_ratio['image']:.2g}; "
        f"clip share {last['clip_share_positive']:.3f} (W > 0) {last['clip_share_negative']:.3f} (W < 0); "
        f"gradient norm {last['grad_norm']:.3g}; {summary.seconds:.1f} s"
    )


def _train(
    job: JobConfig,
    rollout: Path,
    advantages: Path,
    embeds: Path,
    out: Path,
    round_: int,
    start: Path | None,
    init_adapter: Path | None,
) -> RoundSummary:
    from accelerate import Accelerator

    from cast_engine.models.load import load_image_model, torch_device
    from trainer.loop import train_round

    wanted = torch_device(job.model.device)
    accelerator = Accelerator(cpu=wanted.type == "cpu")
    # under a launcher every process has a device of its own; alone, the job's choice stands
    device = accelerator.device if accelerator.num_processes > 1 else wanted
    with _stop_on_signal() as stop:
        return train_round(
            job,
            model=load_image_model(job.model.path, dtype=job.model.dtype, device=device),
            rollout=rollout,
            advantages=advantages,
            embeds=embeds,
            out=out,
            round_=round_,
            start=start,
            init_adapter=init_adapter,
            accelerator=accelerator,
            stop=stop,
        )


def _plan(job: JobConfig, rollout: Path, advantages: Path, round_: int) -> None:
    from trainer.data import open_round, plan_updates

    def none(_: object) -> dict[str, object]:
        raise AssertionError("a dry run reads no embeds")

    config = job.train
    data = open_round(rollout, advantages, none)  # type: ignore[arg-type]
    plan = plan_updates(
        data.groups,
        seed=job.seed,
        round_=round_,
        epochs=config.epochs_per_round,
        updates=config.updates_per_round,
    )
    sizes = sorted({len(keys) for keys in plan})
    passes = sum(len(keys) for keys in plan) * len(data.steps)
    typer.echo(
        f"round {round_}: {len(data.keys)} images in {len(data.groups)} groups, window steps {list(data.steps)}; "
        f"{len(plan)} updates of {' or '.join(map(str, sizes))} images, {passes} forward and backward passes; "
        f"adapter {data.meta.adapter_sha256[:12] or 'none'}; dropped {sum(data.dropped.values())}"
    )


def _round_of(rollout: Path) -> int:
    """Return the round that a dataset's keys name."""
    from cast_engine.store import Dataset

    key = Dataset.open(rollout).plan[0].keys[0]
    return int(key.split("-")[1])


def _job(config: Path | None, overrides: list[str], rollout: Path, out: Path) -> JobConfig:
    """Read the job; inside a run folder there is only that folder's own."""
    from cast_engine.jobfile import differences, load_job, read_run

    run = _run_of(rollout) / "run.json"
    if not run.is_file():
        return load_job(config, overrides)
    own = read_run(run)
    job = load_job(config, overrides, base=own if config is None else None)
    found = differences(own.semantic(), job.semantic())
    if found and out.absolute().is_relative_to(run.parent):
        key, (old, new) = next(iter(found.items()))
        raise UserError(
            f"{key} is {new!r}",
            where=str(out),
            expected=f"{old!r}, as the run was started",
            do="leave out --config and --set, or write to an --out outside the run folder",
        )
    return job


def _run_of(rollout: Path) -> Path:
    """Return where the run folder of a rollout is, if it lies in one (rounds/0000/rollout)."""
    return rollout.absolute().parent.parent.parent


def _embeds_of_run(rollout: Path) -> Path:
    """Return the embeds beside a rollout inside a run folder (rounds/0000/rollout -> embeds)."""
    folder = _run_of(rollout) / "embeds"
    if not folder.is_dir():
        raise UserError("no embeds found", where=str(folder), do="name their folder with --embeds")
    return folder


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM and SIGUSR1 (Slurm's warning), so that training saves and ends after the update it is in."""
    seen: list[int] = []
    signals = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda found, _: seen.append(found)) for number in signals}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
