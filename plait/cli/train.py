"""``plait train``: from a job file to a trained model, on this machine or on an emulated cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plait.core.job import Job
    from plait.core.pipeline_plan import PipelinePlan
    from plait.lab import LabSpec

WORKER = "plait.train.worker"
LOCAL_RATE = (
    1e10  # bytes per second between ranks of one machine: only its ratio to latencies matters, and only to chunk sizes
)


def train(
    job: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that replace the file's, such as train.steps=100.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="Where: local, or lab:HOSTSxRANKS@RATE for an emulated cluster, such as lab:2x1@1gbit.")
    ] = "local",
    check: Annotated[bool, typer.Option("--check", help="Only check the job and that its files are there.")] = False,
) -> None:
    """Train; the same command resumes a run that was stopped or killed."""
    from plait.core.job import Job

    settings = Job.read(job, overrides or [])
    folder = Path(settings.run.folder) / (settings.run.name or job.stem)
    pipeline = _pipeline(settings, on)
    _check_files(settings, folder)
    if check:
        typer.echo(f"{job} is a valid job; it would run in {folder}")
        return
    raise typer.Exit(_run(settings, folder, on, pipeline))


def _check_files(job: Job, folder: Path) -> None:
    """Refuse at once what the ranks would refuse, seconds later: data or a tokenizer that is not there, a
    folder of another job's run."""
    from plait.core.plan import Plan
    from plait.train.data.sources import find_files
    from plait.train.data.tokenizer import load_tokenizer

    load_tokenizer(job.data.tokenizer)
    find_files(job.data.sources, job.data.pattern, leave_out=folder / "corpus")
    if (folder / "plan.json").is_file():
        Plan.of_job(folder / "plan.json", job.fingerprint)


def _pipeline(job: Job, on: str) -> PipelinePlan | None:
    """The plan of the job's pipeline, if it has one: schedule, meshes, how tensors go from one to the
    next."""
    if not job.pipelined:
        return None
    from plait.core.schedules import Shape, find_schedule
    from plait.core.settings import ITEMSIZE
    from plait.plan.pipeline import plan_pipeline
    from plait.plan.reshard_cost import Fabric, even_hosts

    asked = job.strategy
    count = job.num_micro_batches
    # Slack that the job leaves open is measured when the ranks have started; until then it is eager-1f1b's.
    slack = (2,) * (asked.pp - 1) if job.measures_slack else asked.slack
    schedule, _ = find_schedule(
        asked.schedule, Shape(ranks=asked.pp, micro_batches=count, chunks=asked.virtual_stages, slack=slack)
    )
    lab = _lab_spec(on)
    hosts = even_hosts(job.world_size, lab.ranks_per_host if lab else job.world_size)
    rate = lab.rate / 8 if lab and lab.rate else LOCAL_RATE
    return plan_pipeline(
        job.model_spec(vocab=1),
        schedule,
        job.degrees,
        Fabric(hosts=hosts, rate=rate),
        micro_batch=job.micro_batch,
        num_micro_batches=count,
        sequence=job.data.sequence_length,
        itemsize=ITEMSIZE[job.train.precision],
        sequence_parallel=job.base_strategy.sequence_parallel,
        stage_layers=asked.stage_layers,
        shardings=[job.sharding(dp * asked.cp) for dp, _ in job.degrees],
        sequence_cut=job.sequence_cut,
    )


def _lab_spec(on: str) -> LabSpec | None:
    """The emulated cluster to run on; None for this machine itself."""
    from plait.core.errors import JobError

    if on == "local":
        return None
    kind, _, where = on.partition(":")
    if kind != "lab":
        raise JobError(
            f"'{on}' is no place to run", key="--on", fix="Use local, or lab:HOSTSxRANKS@RATE such as lab:2x1@1gbit"
        )
    from plait.lab import LabSpec

    return LabSpec.parse(where)


def _run(job: Job, folder: Path, on: str, pipeline: PipelinePlan | None) -> int:
    from plait.core.env import chosen_port
    from plait.core.errors import JobError, LaunchError
    from plait.core.files import replacing
    from plait.launch.local import local_start, run_ranks

    world = job.world_size
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "job.toml") as path:
            path.write_text(job.to_toml())
        if pipeline:
            pipeline.write(folder / "pipeline.json")
    except OSError as error:
        raise LaunchError(
            f"the run folder {folder} cannot be written: {error.strerror or error}. "
            "Choose another with run.folder=FOLDER."
        ) from None
    argv = [sys.executable, "-m", WORKER, str(folder)]
    spec = _lab_spec(on)
    if spec is None:
        return run_ranks(local_start(argv, world, port=chosen_port()), world, folder / "logs")
    if spec.world_size != world:
        raise JobError(
            f"{on} has {spec.world_size} ranks, the job needs {world}",
            key="--on",
            fix="Change one of the two, or strategy.tp, dp, pp",
        )
    from plait.lab import Lab

    with Lab(spec, command=argv) as lab:
        return run_ranks(lambda rank, out, err: lab.popen(rank, argv, stdout=out, stderr=err), world, folder / "logs")
