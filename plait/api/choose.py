"""Choices before a run or a placement: the cluster of a job, and the values that it leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.core.base.passed_over import PassedOver
    from plait.core.cluster.hardware import Cluster
    from plait.core.job.place_settings import PlaceSection
    from plait.core.job.spec import Job
    from plait.lab import LabSpec


def the_cluster(job: Job, lab: LabSpec | None) -> Cluster:
    """The cluster that ``[cluster]`` names; a lab, if there is one, stands for this machine."""
    from plait.plan.this_machine import emulated
    from plait.plan.where import find_cluster

    if other := other_cluster(job):
        return other
    return emulated(job, lab.as_hosts, lab.hosts) if lab else find_cluster(job)


def other_cluster(job: Job) -> Cluster | None:
    """Return the cluster that ``[cluster]`` names; None where that is this machine. Raises JobError."""
    from plait.plan.where import find_cluster

    section = job.cluster
    return None if section.file is None and section.preset == "here" else find_cluster(job)


def planned(job: Job, vocab: int, lab: LabSpec | None) -> tuple[Job, str]:
    """The job with all open values chosen, but for those that timed steps close, and a sentence on the
    choice, empty if there was none. A run that has begun goes on as it was planned."""
    if not job.open:
        return job, ""
    if earlier := _earlier(job, lab):
        return earlier, f"as planned before: {told(earlier)}"
    from plait.core.base.text import in_seconds
    from plait.plan.answer import Planner

    planner = Planner(job, the_cluster(job, lab), vocab)
    planner.refuse_framework("trained")
    best = planner.chosen()
    where = f"{best.job.world_size:,} rank{'s' * (best.job.world_size > 1)} of {planner.cluster.name}"
    return best.job, f"planned for {where}: {told(best.job)}; a step is predicted to take {in_seconds(best.seconds)}"


def model_notes(job: Job) -> PassedOver:
    """Keys passed over in the ``config.json`` of the job's model; nothing without such a file, or if it lies
    in the folder of the weights, whose check counts them."""
    from plait.core.base.passed_over import PassedOver
    from plait.core.model.huggingface import read_config

    over, named = PassedOver(), job.model.get("huggingface")
    if isinstance(named, str) and named != job.train.init_from:
        read_config(Path(named), over)
    return over


def precision_note(job: Job) -> str:
    """What is to be said of a precision that a job leaves to its default, beside the type of the numbers in
    its model's ``config.json``. Empty if nothing is."""
    from plait.core.model.huggingface import number_type, read_values

    named = job.model.get("huggingface")
    if not isinstance(named, str) or "precision" in job.train.model_fields_set:
        return ""
    kind, precision = number_type(read_values(Path(named))), job.train.precision
    if kind in ("", "float32"):
        return ""
    return f"{named} has {kind}, and the job no train.precision, whose default is {precision}; bf16-mixed is 16 bits"


def unmodelled(job: Job) -> list[str]:
    """What a job asks for and no prediction has, in words."""
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
    """What is to be said of a [place] of which a prediction reads nothing, though its user may expect it to.
    Empty if nothing is."""
    if where.topology or not where.network:
        return ""
    return (
        "place.network is not used: it says what spreading over minipods costs, and without place.topology nobody "
        "knows where ranks lie"
    )


def vocabulary_note(job: Job, vocab: int) -> str:
    """What is to be said of a preset's vocabulary, of which the byte tokenizer gives ``vocab``. Empty if
    nothing is."""
    from plait.core.job.settings import BYTES

    if "preset" in job.model and "vocab" not in job.model and job.data.tokenizer == BYTES:
        spec = job.model_spec(vocab)
        return (
            f"the model has the vocabulary of {job.model['preset']}, {spec.vocab:,} tokens ({spec.num_parameters:,} "
            f"parameters), of which the byte tokenizer gives {vocab}; the others are never sampled. data.tokenizer "
            "names another one"
        )
    return ""


def told(job: Job) -> str:
    """A job's strategy in a line."""
    from plait.plan.asking import point_of
    from plait.plan.reasons import chosen

    return " ".join(f"{key}={value}" for key, value in chosen(job, point_of(job)).items())


def _earlier(job: Job, lab: LabSpec | None) -> Job | None:
    """The job as an earlier start of the run closed it, if it is the same job of as many ranks."""
    from plait.core.base.errors import JobError
    from plait.core.job.plan import Plan

    file: Path = job.run.path / "plan.json"
    if not file.is_file():
        return None
    try:
        old = Plan.read(file).job
    except JobError:  # said where the plan is needed
        return None
    if old is None:
        return None
    try:
        same = job.closed_like(old)
    except JobError:  # a rule forbids them together
        return None
    ranks = lab.world_size if lab else job.cluster.ranks
    return same if same.fingerprint == old.fingerprint and ranks in (0, same.world_size) else None
