"""``plait train``: from a job file to a trained model, on this machine or on an emulated cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

WORKER = "plait.train.worker"


def train(
    job: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings that replace the file's, such as train.steps=100.")] = None,
    on: Annotated[
        str, typer.Option(help="Where: local, or lab:HOSTSxRANKS@RATE for an emulated cluster, such as lab:2x1@1gbit.")
    ] = "local",
    check: Annotated[bool, typer.Option("--check", help="Only check the job.")] = False,
) -> None:
    """Train; the same command resumes a run that was stopped or killed."""
    from plait.core.job import Job

    settings = Job.read(job, overrides or [])
    folder = Path(settings.run.folder) / (settings.run.name or job.stem)
    if check:
        typer.echo(f"{job} is a valid job; it would run in {folder}")
        return
    raise typer.Exit(_run(settings, folder, on))


def _run(job: object, folder: Path, on: str) -> int:
    from plait.core.env import chosen_port
    from plait.core.errors import JobError, LaunchError
    from plait.core.files import replacing
    from plait.core.job import Job
    from plait.launch.local import local_start, run_ranks

    assert isinstance(job, Job)
    world = job.strategy.tp
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "job.toml") as path:
            path.write_text(job.to_toml())
    except OSError as error:
        raise LaunchError(
            f"the run folder {folder} cannot be written: {error.strerror or error}. Choose another with run.folder=FOLDER."
        ) from None
    argv = [sys.executable, "-m", WORKER, str(folder)]
    if on == "local":
        return run_ranks(local_start(argv, world, port=chosen_port()), world, folder / "logs")
    kind, _, where = on.partition(":")
    if kind != "lab":
        raise JobError(f"'{on}' is no place to run", key="--on", fix="Use local, or lab:HOSTSxRANKS@RATE such as lab:2x1@1gbit")
    from plait.lab import Lab, LabSpec

    spec = LabSpec.parse(where)
    if spec.world_size != world:
        raise JobError(
            f"{where} has {spec.world_size} ranks, the job needs {world}", key="--on", fix="Change one of the two, or set strategy.tp"
        )
    with Lab(spec, command=argv) as lab:
        return run_ranks(lambda rank, out, err: lab.popen(rank, argv, stdout=out, stderr=err), world, folder / "logs")
