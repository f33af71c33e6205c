"""The cluster that a job is planned for: a preset, a file, or this machine; with what was measured there, or
elsewhere."""

from __future__ import annotations

from pathlib import Path

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.mfu import dense_peak
from plait.core.cluster.plausible import check_units, device_models, unit_remarks
from plait.core.cluster.profile import Profile
from plait.core.job.spec import Job
from plait.plan.profiled import here, with_profile
from plait.plan.this_machine import this_machine


def find_cluster(job: Job) -> Cluster:
    """What ``[cluster]`` names, its constants fitted to the profile if it names one. Raises JobError for what
    cannot be read, or was measured on something else."""
    section = job.cluster
    profile = Profile.read(Path(section.profile)) if section.profile else None
    try:
        if section.file is None and section.preset == "here" and profile is not None:
            return here(profile)
        if section.file is None and section.preset == "here":
            return this_machine(job)
        cluster = read_cluster(Path(section.file)) if section.file else Cluster.preset(section.preset)
        return with_profile(cluster, profile) if profile else cluster
    except JobError as error:
        raise error if error.file or profile is None else error.in_file(str(section.profile)) from None


def read_cluster(file: Path) -> Cluster:
    """A user's cluster. Raises JobError naming file and key, also for what must be a slip of units."""
    cluster = Cluster.read(file)
    try:
        check_units(cluster)
    except JobError as error:
        raise error.in_file(str(file)) from None
    return cluster


def unlike_devices(one: str, other: str) -> bool:
    """Whether two names are surely of different models.

    >>> unlike_devices("NVIDIA H100 80GB HBM3", "A100-SXM4-80GB"), unlike_devices("NVIDIA H100", "H100 SXM")
    (True, False)
    """
    first, second = (device_models(name) for name in (one, other))
    return bool(first and second and not first & second)


def other_device(job: Job, cluster: Cluster) -> str:
    """A line of warning; empty where both are alike, or nobody can tell."""
    section = job.cluster
    if not section.profile or (section.file is None and section.preset == "here"):
        return ""
    measured = Profile.read(Path(section.profile)).machine.device
    if not unlike_devices(measured, cluster.device.name):
        return ""
    return (
        f"{section.profile}: cluster.profile was measured on {measured}, and {cluster.name} has "
        f"{cluster.device.name}: predictions mix the two. Measure there, or name another cluster."
    )


def stated_peak(job: Job, cluster: Cluster) -> str:
    """A sentence on an MFU that is of another peak than the cluster's; empty where it is of that."""
    stated, known = job.run.peak_flops, dense_peak(cluster.device, job.train.precision)
    if stated in (None, known):
        return ""
    other = f", not the {known:.4g} of {cluster.device.name}" if known else ""
    return f"MFU is of run.peak_flops = {stated:.4g} FLOP/s a device{other}; above 100% it is not shown"


def stood_for(job: Job, cluster: Cluster) -> str:
    """What is to be said of a precision that the device lacks and another format is priced for. Empty if
    nothing is."""
    precision, device = job.train.precision, cluster.device
    other = device.stands_for.get(precision)
    lacked = precision.removesuffix("-mixed")
    return f"{device.name} has no {lacked}: train.precision={precision} is priced as {other}" if other else ""


def unusual_values(job: Job, cluster: Cluster) -> list[str]:
    """Sentences on values of the job's cluster file that are unlike those of shipped clusters."""
    return [f"{job.cluster.file}: {one}" for one in unit_remarks(cluster)] if job.cluster.file else []
