"""Choices before a run or a placement: the job's cluster, and the values that the job leaves
open."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base.errors import JobError

if TYPE_CHECKING:
    from plait.core.base.ignored_input import IgnoredInput
    from plait.core.cluster.hardware import Cluster
    from plait.core.job.cluster_settings import PlaceSection
    from plait.core.job.spec import Job
    from plait.lab import LabSpec


@contextmanager
def reading_job(file: Path) -> Generator[None]:
    """Context in which an error of a job file or a plan becomes the error that the file is another
    framework's, if it is: that error says what the file is, and which command reads it."""
    try:
        yield
    except JobError as error:
        from plait.plan.read_config import no_job_error  # slow to load

        raise no_job_error(file) or error from None


def cluster_of(job: Job, lab: LabSpec | None) -> Cluster:
    """Return the cluster that ``[cluster]`` names. lab: an emulated cluster that stands for this
    machine, if the job names this machine; None: the machine itself. Raises JobError."""
    from plait.plan.explain.job_cluster import emulated, find_cluster

    if other := other_cluster(job):
        return other
    return emulated(job, lab.as_hosts, lab.hosts) if lab else find_cluster(job)


def other_cluster(job: Job) -> Cluster | None:
    """Return the cluster that ``[cluster]`` names; None if it is this machine. Raises JobError."""
    from plait.plan.explain.job_cluster import find_cluster

    section = job.cluster
    return None if section.file is None and section.preset == "here" else find_cluster(job)


def close_job(job: Job, vocab: int, lab: LabSpec | None) -> tuple[Job, str]:
    """Return the job with its open values chosen, and a sentence on the choice, empty if no value
    was open. Values that timed steps choose stay open. A run that has begun keeps its earlier
    plan."""
    if not job.open:
        return job, ""
    if earlier := _earlier(job, lab):
        return earlier, f"as planned before: {strategy_line(earlier)}"
    from plait.core.base.text import in_seconds
    from plait.plan.answer import Planner

    planner = Planner(job, cluster_of(job, lab), vocab)
    planner.refuse_framework("trained")
    best = planner.chosen()
    where = f"{best.job.world_size:,} rank{'s' * (best.job.world_size > 1)} of {planner.cluster.name}"
    return (
        best.job,
        f"planned for {where}: {strategy_line(best.job)}; a step is predicted to take {in_seconds(best.seconds)}",
    )


def model_notes(job: Job) -> IgnoredInput:
    """Return the counts of keys that were ignored in the ``config.json`` of the job's model. Empty
    without such a file, or if the file lies in the weights' folder, whose own check counts its
    keys."""
    from plait.core.base.ignored_input import IgnoredInput
    from plait.core.model.huggingface import read_config

    over, named = IgnoredInput(), job.model.get("huggingface")
    if isinstance(named, str) and named != job.train.init_from:
        read_config(Path(named), over)
    return over


def precision_note(job: Job) -> str:
    """Return a remark if the job leaves its precision to the default although its model's
    ``config.json`` names a number type other than float32; else an empty string."""
    from plait.core.model.huggingface import number_type, read_values

    named = job.model.get("huggingface")
    if not isinstance(named, str) or "precision" in job.train.model_fields_set:
        return ""
    kind, precision = number_type(read_values(Path(named))), job.train.precision
    if kind in ("", "float32"):
        return ""
    return f"{named} has {kind}, and the job no train.precision, whose default is {precision}; bf16-mixed is 16 bits"


def unmodelled_notes(job: Job) -> list[str]:
    """Return sentences on the job's settings that predictions ignore."""
    found: list[str] = []
    if job.data.masks:
        found.append('data.documents = "mask": seconds are predicted for attention over whole sequences')
    if job.strategy.streams > 1:
        found.append(
            f"strategy.streams = {job.strategy.streams}: slices are counted one after the other, as on one stream, and "
            "what kernels of several slices gain by running at once is unknown"
        )
    if job.strategy.compile is True and job.plan.framework == "plait":
        found.append(
            "strategy.compile = true: seconds are those of a step that is not compiled; on one H200 a compiled one of "
            "a model of 1.2B parameters took 12% less"
        )
    return [f"Not modelled: {one}." for one in found]


def unplaced_note(where: PlaceSection) -> str:
    """Return a remark if predictions ignore ``place.network``, because [place] names no topology;
    else an empty string."""
    if where.topology or not where.network:
        return ""
    return (
        "place.network is not used: it says what spreading over minipods costs, and without place.topology the "
        "hosts of ranks are unknown"
    )


def vocabulary_note(job: Job, vocab: int) -> str:
    """Return a remark if the model has a preset's vocabulary and the byte tokenizer, which has only
    ``vocab`` tokens; else an empty string."""
    from plait.core.job.settings import BYTES

    if "preset" in job.model and "vocab" not in job.model and job.data.tokenizer == BYTES:
        spec = job.model_spec(vocab)
        return (
            f"the model has the vocabulary of {job.model['preset']}, {spec.vocab:,} tokens ({spec.num_parameters:,} "
            f"parameters), of which the byte tokenizer gives {vocab}; the others are never sampled. data.tokenizer "
            "names another one"
        )
    return ""


def strategy_line(job: Job) -> str:
    """Return the job's strategy in one line, in the words of the answer's table."""
    from plait.plan.explain.reasons import schedule_of, settings
    from plait.plan.search.request import point_of

    point = point_of(job)
    found = settings(point, schedule_of(job, point)).items()
    return ", ".join(f"{key} {value}" for key, value in found if value not in ("-", "none"))


def _earlier(job: Job, lab: LabSpec | None) -> Job | None:
    """Return the job with the values that an earlier start of the run chose, if it is the same job
    on as many ranks."""
    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan

    file: Path = job.run.path / "plan.json"
    if not file.is_file():
        return None
    try:
        old = Plan.read(file).job
    except JobError:  # reported where the plan is needed
        return None
    if old is None:
        return None
    try:
        same = job.with_choices_of(old)
    except JobError:  # a rule forbids the combination
        return None
    ranks = lab.world_size if lab else job.cluster.ranks
    return same if same.fingerprint == old.fingerprint and ranks in (0, same.world_size) else None
