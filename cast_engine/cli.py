"""The `cast-engine` command: one thin function per command. Heavy imports live inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cast_engine.errors import FailuresError, UserError, handle_errors, help_end, quiet_hang_up, wait_politely

if TYPE_CHECKING:
    from cast_engine.pipeline import Pipeline
    from cast_engine.store import Dataset
    from schemas.job import JobConfig

app = typer.Typer(
    name="cast-engine",
    help="""Reinforcement learning of text-to-image models that should draw what the prompt says.

    `run` does a whole job. The commands from `prompts` to `evaluate` do it in steps, each from folder to folder; after
    `build-advantages` comes `cast-train`. All fields of a job, their defaults and their meaning: schemas/job.py.""",
    epilog=help_end("cast-engine run jobs/tiny.yaml", "cast-engine COMMAND --help"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JobFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Job file (YAML).",
        show_default="that of the run folder, or all defaults",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one field of the job, such as train.learning_rate=1e-4. Repeatable."
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        "--out",
        metavar="FOLDER",
        help="Run folder: where all that is made lies.",
        show_default="the job's `out`, or runs/NAME with the job's `name`",
    ),
]
Round = Annotated[int, typer.Option("--round", metavar="N", min=0, help="Index of the round, from 0.")]
DatasetFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a dataset, or a run folder.")]


def _pipeline(config: Path | None, overrides: list[str] | None, run: Path | None) -> Pipeline:
    """Open the run folder of a job; without a job file, for the job that the folder was made with."""
    from cast_engine.pipeline import Pipeline
    from cast_engine.run.runfile import lock_run

    job, root = _job(config, overrides, run)
    lock_run(root)
    return Pipeline(job, root)


def _job(config: Path | None, overrides: list[str] | None, run: Path | None) -> tuple[JobConfig, Path]:
    from cast_engine.jobfile import load_job, read_run

    if config is None:
        if run is None:
            raise UserError("no job given", expected="--config FILE or --run FOLDER", do="name the job file or the run")
        return load_job(None, overrides or [], base=read_run(run / "run.json")), run
    job = load_job(config, overrides or [])
    return job, run or Path(job.out or f"runs/{job.name}")


@app.command(
    epilog=help_end(
        "cast-engine run jobs/tiny.yaml", "cast-engine run jobs/tiny.yaml --set seed=1 --out runs/tiny-seed1"
    )
)
@handle_errors()
def run(
    config: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).")],
    overrides: Overrides = None,
    out: RunFolder = None,
) -> None:
    """Carry out a whole job, or go on where it stopped.

    Evaluates the model, then rounds of rollout, score, build-advantages and training, then evaluates again; prints the
    table and writes summary.json and report.html. Killed at any moment, the same command goes on. A run folder belongs
    to one job: only fields that change no number (batch sizes, workers, devices) may be set otherwise later.
    """
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


@app.command(epilog=help_end("cast-engine prompts --config jobs/tiny.yaml --run runs/tiny"))
@handle_errors()
def prompts(config: JobFile = None, overrides: Overrides = None, run: RunFolder = None) -> None:
    """Write down the training and held-out prompts.

    The first step of a job that is carried out by hand; it makes the run folder.
    """
    _pipeline(config, overrides, run).prompts()


@app.command(
    epilog=help_end("cast-engine csg --run runs/tiny", "cast-engine csg --show 'two red circles above a cross'")
)
@handle_errors()
def csg(
    config: JobFile = None,
    overrides: Overrides = None,
    run: RunFolder = None,
    show: Annotated[
        str | None, typer.Option("--show", metavar="PROMPT", help="Print the graph of this prompt, and stop.")
    ] = None,
) -> None:
    """Turn every prompt into its causal scene graph."""
    if show is not None:
        from cast_engine.graphs.grammar import parse
        from cast_engine.stages.csg import as_tree

        typer.echo(as_tree(parse(show)))
        return
    _pipeline(config, overrides, run).csg()


@app.command(epilog=help_end("cast-engine embed --run runs/tiny"))
@handle_errors()
def embed(config: JobFile = None, overrides: Overrides = None, run: RunFolder = None) -> None:
    """Encode every prompt once with the text encoder."""
    _pipeline(config, overrides, run).embed()


@app.command(
    epilog=help_end("cast-engine rollout --run runs/tiny --round 0", "cast-engine rollout --run runs/tiny --dry-run")
)
@handle_errors()
def rollout(
    config: JobFile = None,
    overrides: Overrides = None,
    run: RunFolder = None,
    round_: Round = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, sigmas and noise per step; draw nothing.")
    ] = False,
) -> None:
    """Draw the training images of a round.

    Draws a group of images per prompt, exploring inside the window, with the adapter of the round before.
    """
    pipeline = _pipeline(config, overrides, run)
    if dry_run:
        typer.echo(pipeline.describe_rollout())
        return
    pipeline.rollout(round_)


@app.command(epilog=help_end("cast-engine score --run runs/tiny --round 0"))
@handle_errors()
def score(config: JobFile = None, overrides: Overrides = None, run: RunFolder = None, round_: Round = 0) -> None:
    """Judge the images of a round, atom by atom.

    Writes how probable the right answer to every question is, and where the judge looked.
    """
    _pipeline(config, overrides, run).score(round_)


@app.command("build-advantages", epilog=help_end("cast-engine build-advantages --run runs/tiny --round 0"))
@handle_errors()
def build_advantages(
    config: JobFile = None, overrides: Overrides = None, run: RunFolder = None, round_: Round = 0
) -> None:
    """Turn scores and maps into the signed weight of training.

    Writes one number per latent position of every image: above 0 training makes what was drawn there likelier.
    """
    _pipeline(config, overrides, run).build_advantages(round_)


@app.command(hidden=True, epilog=help_end("cast-engine train --run runs/tiny --round 0"))
@handle_errors()
def train(config: JobFile = None, overrides: Overrides = None, run: RunFolder = None, round_: Round = 0) -> None:
    """Train one round inside a run folder (what `cast-train` does with its arguments spelled out)."""
    _pipeline(config, overrides, run).train(round_)


@app.command(epilog=help_end("cast-engine evaluate --run runs/tiny", "cast-engine evaluate --run runs/tiny --after 28"))
@handle_errors()
def evaluate(
    config: JobFile = None,
    overrides: Overrides = None,
    run: RunFolder = None,
    after: Annotated[
        int, typer.Option(metavar="N", min=0, help="Evaluate the model after N rounds of training; 0: untrained.")
    ] = 0,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Denoising steps.", show_default="those of the job")
    ] = None,
) -> None:
    """Draw the held-out prompts and judge them.

    Draws without exploration, always from the same noise; the judge is one of its own (`evaluate.judge`).
    """
    _pipeline(config, overrides, run).evaluate(after, steps)


@app.command(epilog=help_end("cast-engine report runs/tiny"))
@handle_errors()
def report(run: Annotated[Path, typer.Argument(metavar="FOLDER", help="Run folder.")]) -> None:
    """Write report.html of a run again.

    Writes summary.json too if the run is finished, and prints its table.
    """
    from cast_engine.jobfile import read_run
    from cast_engine.run.layout import RunLayout
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


@app.command(epilog=help_end("cast-engine compare runs/tiny-seed0 runs/tiny-seed1 runs/tiny-seed2"))
@handle_errors()
def compare(runs: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Folders of finished runs.")]) -> None:
    """Show the tables of finished runs one below the other.

    Runs that differ in nothing but seed and name also get their mean.
    """
    from rich.console import Console

    from cast_engine.stages.summarise import comparison_tables, read, warnings

    summaries = {str(r): read(r / "summary.json") for r in runs}
    console = Console()
    for table in comparison_tables(summaries):
        console.print(table, end="\n\n")
    for warning in warnings(summaries):
        console.print(f"warning: {warning}", soft_wrap=True, markup=False, highlight=False)


@app.command(epilog=help_end("cast-engine verify runs/tiny"))
@handle_errors()
def verify(
    folder: DatasetFolder,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move damaged shards aside, so that their stage makes them again.")
    ] = False,
) -> None:
    """Check shards and checkpoints against their hashes.

    Takes one dataset, or a whole run. Exit code 3 if anything is damaged, or missing from a sealed dataset.
    """
    from cast_engine.pipeline import check_checkpoints

    bad = 0
    for dataset in _datasets(folder):
        found = dataset.verify(quarantine=quarantine)
        typer.echo(f"{dataset.path}: {found}")
        for damage in found.damaged:
            typer.echo(f"  {damage.problem}")
        bad += not found.ok
    broken = check_checkpoints(folder)
    for problem in broken:
        typer.echo(problem)
    if broken and not bad:
        raise FailuresError(f"{folder}: {len(broken)} checkpoints are damaged")
    if bad:
        do = "run the stage again" if quarantine else "run with --quarantine, then the stage again"
        raise FailuresError(f"{folder}: {bad} datasets are damaged or not all there; {do}")


@app.command(epilog=help_end("cast-engine status runs/tiny"))
@handle_errors()
def status(folder: DatasetFolder) -> None:
    """Say what is done, open, failed and sealed.

    Says also why a guard stopped the training, if one did. Reads no data: `verify` does.
    """
    from cast_engine.run import stopped
    from cast_engine.run.layout import RunLayout

    for dataset in _datasets(folder):
        typer.echo(f"{dataset.path}: {dataset.status()}")
    if stop := stopped.read(RunLayout(folder)):
        typer.echo(f"{folder}: stopped by a guard in round {stop.round}: {stop.message}")


@app.command(epilog=help_end("cast-engine seal runs/tiny/rounds/0000/score"))
@handle_errors()
def seal(folder: DatasetFolder) -> None:
    """Accept a dataset in which samples failed.

    Every shard must be there; it is verified once more and declared whole, so that the next stage may read it. Stages
    seal what they finish: this is for one that ended with exit code 3, more failures than allowed.
    """
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
    wait_politely()
    with quiet_hang_up():
        app()
