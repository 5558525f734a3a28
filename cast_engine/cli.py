"""The `cast-engine` command: one thin function per command. Heavy imports live inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cast_engine.errors import FailuresError, UserError, handle_errors, quiet_hang_up

if TYPE_CHECKING:
    from cast_engine.pipeline import Pipeline
    from cast_engine.store import Dataset
    from schemas.job import JobConfig

app = typer.Typer(
    name="cast-engine",
    help="Make training data for CAST: rollouts, atom scores, attention maps and signed spatial advantages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JobFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Job file (YAML).", show_default="the run folder's, or defaults")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a field: key.path=value. Repeatable.")]
RunFolder = Annotated[Path | None, typer.Option("--run", "--out", help="Run folder.", show_default="runs/NAME")]
Round = Annotated[int, typer.Option("--round", min=0, help="Index of the round, from 0.")]
DatasetFolder = Annotated[Path, typer.Argument(help="Folder of a dataset, or a run folder.")]


def _pipeline(config: Path | None, overrides: list[str] | None, run: Path | None) -> Pipeline:
    """Open the run folder of a job; without a job file, for the job that the folder was made with."""
    from cast_engine.pipeline import Pipeline
    from cast_engine.run.runfile import lock_run

    job, root = _job(config, overrides, run)
    lock_run(root)
    return Pipeline(job, root)


def _job(config: Path | None, overrides: list[str] | None, run: Path | None) -> tuple[JobConfig, Path]:
    from cast_engine.jobfile import load_job
    from cast_engine.run.runfile import read_run

    if config is None and run is not None:
        return load_job(None, overrides or [], base=read_run(run / "run.json")), run
    job = load_job(config, overrides or [])
    return job, run or Path(job.out or f"runs/{job.name}")


@app.command()
@handle_errors()
def run(
    config: Annotated[Path, typer.Argument(help="Job file (YAML).")],
    overrides: Overrides = None,
    out: RunFolder = None,
) -> None:
    """Carry out all rounds of a job, start to finish; run again to go on after an interruption."""
    from cast_engine.pipeline import run_job
    from cast_engine.run.executor import stoppable
    from cast_engine.run.runfile import lock_run

    job, root = _job(config, overrides, out)
    lock_run(root)
    with stoppable():
        summary = run_job(job, root)
    _show(summary)


def _show(path: Path) -> None:
    from rich.console import Console

    from cast_engine.stages.summarise import read, summary_table, warnings_of

    summary = read(path)
    console = Console()
    console.print(summary_table(summary))
    for warning in warnings_of(summary):
        console.print(f"warning: {warning}", soft_wrap=True)
    images, updates = summary["images"], summary["updates"]
    console.print(f"{images} images, {updates} updates; report: {path.parent / 'report.html'}", soft_wrap=True)


@app.command()
@handle_errors()
def prompts(config: JobFile = None, overrides: Overrides = None, run: RunFolder = None) -> None:
    """Write down the prompts of both splits."""
    _pipeline(config, overrides, run).prompts()


@app.command()
@handle_errors()
def csg(
    config: JobFile = None,
    overrides: Overrides = None,
    run: RunFolder = None,
    show: Annotated[str | None, typer.Option("--show", metavar="PROMPT", help="Print one graph and stop.")] = None,
) -> None:
    """Decompose every prompt into its causal scene graph."""
    if show is not None:
        from cast_engine.graphs.grammar import parse
        from cast_engine.stages.csg import as_tree

        typer.echo(as_tree(parse(show)))
        return
    _pipeline(config, overrides, run).csg()


@app.command()
@handle_errors()
def embed(config: JobFile = None, overrides: Overrides = None, run: RunFolder = None) -> None:
    """Encode every prompt once."""
    _pipeline(config, overrides, run).embed()


@app.command()
@handle_errors()
def rollout(
    config: JobFile = None,
    overrides: Overrides = None,
    run: RunFolder = None,
    round_: Round = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the window and the plan, draw nothing.")] = False,
) -> None:
    """Draw the images of a round."""
    pipeline = _pipeline(config, overrides, run)
    if dry_run:
        typer.echo(pipeline.describe_rollout())
        return
    pipeline.rollout(round_)


@app.command()
@handle_errors()
def score(config: JobFile = None, overrides: Overrides = None, run: RunFolder = None, round_: Round = 0) -> None:
    """Score every atom of a round and read the judge's attention."""
    _pipeline(config, overrides, run).score(round_)


@app.command("build-advantages")
@handle_errors()
def build_advantages(
    config: JobFile = None, overrides: Overrides = None, run: RunFolder = None, round_: Round = 0
) -> None:
    """Turn scores and maps into one signed weight per latent position."""
    _pipeline(config, overrides, run).build_advantages(round_)


@app.command(hidden=True)
@handle_errors()
def train(config: JobFile = None, overrides: Overrides = None, run: RunFolder = None, round_: Round = 0) -> None:
    """Train one round inside a run folder (what `cast-train` does with its arguments spelled out)."""
    _pipeline(config, overrides, run).train(round_)


@app.command()
@handle_errors()
def evaluate(
    config: JobFile = None,
    overrides: Overrides = None,
    run: RunFolder = None,
    after: Annotated[int, typer.Option(min=0, help="Rounds of training behind the model; 0 is the bare one.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.", show_default="those of the job")] = None,
) -> None:
    """Draw the held-out prompts and judge them."""
    _pipeline(config, overrides, run).evaluate(after, steps)


@app.command()
@handle_errors()
def report(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Write summary.json (if the run is finished) and report.html of a run again."""
    from cast_engine.run.layout import RunLayout
    from cast_engine.run.runfile import read_run
    from cast_engine.stages import report as page
    from cast_engine.stages import summarise

    layout, job = RunLayout(run), read_run(run / "run.json")
    finished = summarise.is_finished(layout, job)
    if finished:
        summarise.write(layout, job)
    page.write(layout, job)
    if finished:
        _show(layout.summary)
    else:
        typer.echo(f"not finished, so there is no summary yet; report: {layout.report}")


@app.command()
@handle_errors()
def compare(runs: Annotated[list[Path], typer.Argument(help="Run folders that differ in their seed.")]) -> None:
    """Show several finished runs beside each other, with their mean."""
    from rich.console import Console

    from cast_engine.stages.summarise import comparison_table, read, warnings

    summaries = {str(r): read(r / "summary.json") for r in runs}
    console = Console()
    console.print(comparison_table(summaries))
    for warning in warnings(summaries):
        console.print(f"warning: {warning}", soft_wrap=True, markup=False, highlight=False)


@app.command()
@handle_errors()
def verify(
    folder: DatasetFolder,
    quarantine: Annotated[
        bool, typer.Option(help="Move damaged shards aside, so that the stage makes them again.")
    ] = False,
) -> None:
    """Hash every shard of a dataset (or of all datasets of a run) and walk it."""
    bad = 0
    for dataset in _datasets(folder):
        found = dataset.verify(quarantine=quarantine)
        typer.echo(f"{dataset.path}: {found}")
        for damage in found.damaged:
            typer.echo(f"  {damage.problem}")
        bad += not found.ok
    if bad:
        do = "run the stage again" if quarantine else "run with --quarantine, then the stage again"
        raise FailuresError(f"{folder}: {bad} datasets are damaged or not all there; {do}")


@app.command()
@handle_errors()
def status(folder: DatasetFolder) -> None:
    """Say what is done, open, failed and sealed, and why a guard stopped the training, if one did."""
    from cast_engine.run import stopped
    from cast_engine.run.layout import RunLayout

    for dataset in _datasets(folder):
        typer.echo(f"{dataset.path}: {dataset.status()}")
    if stop := stopped.read(RunLayout(folder)):
        typer.echo(f"{folder}: stopped by a guard in round {stop.round}: {stop.message}")


@app.command()
@handle_errors()
def seal(folder: DatasetFolder) -> None:
    """Verify a finished dataset once more and declare it whole."""
    for dataset in _datasets(folder):
        typer.echo(f"{dataset.path}: sealed as {dataset.seal()[:12]}")


def _datasets(folder: Path) -> list[Dataset]:
    from cast_engine.store import Dataset

    plans = [folder / "plan.json"] if (folder / "plan.json").exists() else sorted(folder.rglob("plan.json"))
    if not plans:
        raise UserError("no dataset in it", where=str(folder), expected="a dataset or a run folder")
    return [Dataset.open(p.parent) for p in plans]


def main() -> None:
    """Entry point of `cast-engine`."""
    with quiet_hang_up():
        app()
