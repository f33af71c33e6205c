"""The cluster that a job is planned for: a preset, a file, or this machine; its constants may be
fitted to a profile.

If nothing was measured on this machine, it is described with one rank for each core, each as fast
as a core in the description of the lab. That is good enough to choose a strategy; a profile is
better.
"""

from __future__ import annotations

from pathlib import Path

from plait.core.base.errors import JobError
from plait.core.base.process import usable_cores
from plait.core.cluster.efficiency import Constant
from plait.core.cluster.hardware import Cluster, Hosts
from plait.core.cluster.mfu import dense_peak
from plait.core.cluster.plausible import check_units, device_models, unit_remarks
from plait.core.cluster.profile import Profile
from plait.core.job.spec import Job
from plait.plan.calibrate.profiled import cluster_from_profile, with_profile
from plait.plan.search.fits import check_device, gpus, room


def find_cluster(job: Job) -> Cluster:
    """Return the cluster that ``[cluster]`` names, with its constants fitted to the profile if
    there is one. Raises JobError if a file cannot be read, or if the profile was measured on
    something else."""
    section = job.cluster
    profile = Profile.read(Path(section.profile)) if section.profile else None
    try:
        if section.file is None and section.preset == "here" and profile is not None:
            return cluster_from_profile(profile)
        if section.file is None and section.preset == "here":
            return this_machine(job)
        cluster = read_cluster(Path(section.file)) if section.file else Cluster.preset(section.preset)
        return with_profile(cluster, profile) if profile else cluster
    except JobError as error:
        raise error if error.file or profile is None else error.in_file(str(section.profile)) from None


def read_cluster(file: Path) -> Cluster:
    """Return the cluster in a user's file. Raises JobError naming file and key if the file is
    invalid, or if a value is so extreme that its unit must be wrong."""
    cluster = Cluster.read(file)
    try:
        check_units(cluster)
    except JobError as error:
        raise error.in_file(str(file)) from None
    return cluster


def are_different_devices(left: str, right: str) -> bool:
    """True if the two names certainly are of different device models.

    >>> are_different_devices("NVIDIA H100 80GB HBM3", "A100-SXM4-80GB")
    True
    >>> are_different_devices("NVIDIA H100", "H100 SXM")
    False
    """
    first, second = (device_models(name) for name in (left, right))
    return bool(first and second and not first & second)


def describe_device_mismatch(job: Job, cluster: Cluster) -> str:
    """Return a warning if the profile was measured on another device model than the cluster's;
    empty if not, or if the names do not tell."""
    section = job.cluster
    if not section.profile or (section.file is None and section.preset == "here"):
        return ""
    measured = Profile.read(Path(section.profile)).machine.device
    if not are_different_devices(measured, cluster.device.name):
        return ""
    return (
        f"{section.profile}: cluster.profile was measured on {measured}, and {cluster.name} has "
        f"{cluster.device.name}: predictions mix the two. Measure there, or name another cluster."
    )


def describe_stated_peak(job: Job, cluster: Cluster) -> str:
    """Return a sentence if ``run.peak_flops``, to which MFU then refers, differs from the cluster's
    peak; empty if not."""
    stated, known = job.run.peak_flops, dense_peak(cluster.device, job.train.precision)
    if stated in (None, known):
        return ""
    other = f", not the {known:.4g} of {cluster.device.name}" if known else ""
    return f"MFU is of run.peak_flops = {stated:.4g} FLOP/s a device{other}; above 100% it is not shown"


def describe_substitute(job: Job, cluster: Cluster) -> str:
    """Return a sentence on a precision that the device lacks and that is priced as another format;
    empty if the device has it."""
    precision, device = job.train.precision, cluster.device
    other = device.stands_for.get(precision)
    lacked = precision.removesuffix("-mixed")
    return f"{device.name} has no {lacked}: train.precision={precision} is priced as {other}" if other else ""


def unusual_values(job: Job, cluster: Cluster) -> list[str]:
    """Return sentences on values of the job's cluster file that differ a lot from those of shipped
    clusters."""
    return [f"{job.cluster.file}: {one}" for one in unit_remarks(cluster)] if job.cluster.file else []


LIKE = "lab"
"""Preset that describes the cores of this machine."""


def ranks_here(device: str, *, on_cpu: int | None = None) -> int:
    """Return the number of ranks that this machine can run. ``device`` is as in ``run.device``: one
    rank for each GPU that is not shared, or else ``on_cpu``, by default one for each core."""
    return (len(gpus()) if device in ("auto", "cuda") else 0) or on_cpu or usable_cores()


def this_machine(job: Job) -> Cluster:
    """Return this machine as a cluster. Raises JobError if the job uses its GPUs, whose speed only
    a description or a profile tells."""
    found = gpus() if job.run.device != "cpu" else []
    check_device(job.run.device, 1, fix='Name the cluster that has them with cluster.preset=NAME, or use "cpu"')
    if found or job.run.device in ("cuda", "shared"):
        raise JobError(
            "is a machine whose GPUs are not described", key="cluster.preset",
            fix="Name the cluster that they belong to (plait plan lists them), or choose run.device = \"cpu\"",
        )  # fmt: skip
    ranks = job.cluster.ranks or (usable_cores() if job.leaves_ranks_open else job.world_size)
    return _like_the_lab("here", Hosts(ranks_per_host=ranks), hosts=1, device=job.run.device)


def emulated(job: Job, hosts: Hosts, number: int) -> Cluster:
    """Return ``number`` hosts of a lab, all of them emulated on this machine."""
    return _like_the_lab("lab", hosts, hosts=number, device=job.run.device)


def _like_the_lab(name: str, host_settings: Hosts, *, hosts: int, device: str) -> Cluster:
    lab, each = Cluster.preset(LIKE), host_settings.ranks_per_host
    there = room(device, each * hosts)
    free = there.total(each * hosts) / (each * hosts) if there else lab.device.memory.value
    memory = lab.device.memory.model_copy(update={"value": free, "source": "free on this machine, shared by all ranks"})
    crowd = max(1.0, each * hosts / usable_cores())
    peak = {precision: _shared(rate, crowd) for precision, rate in lab.device.peak.items()}
    memory_rate = _shared(lab.device.memory_rate, crowd)
    inner, outer = lab.tiers
    tiers = [inner.model_copy(update={"ranks": each if hosts > 1 else 0})]
    if hosts > 1:
        rate = outer.rate
        if host_settings.rank_rate:
            told = {"value": host_settings.rank_rate, "source": "a host's links, shared by its ranks"}
            rate = rate.model_copy(update=told)
        tiers.append(outer.model_copy(update={"ranks": 0, "rate": rate}))
    return lab.model_copy(
        update={
            "name": name,
            "ranks_per_node": each,
            "nodes": hosts,
            "crowd": crowd,
            "tiers": tuple(tiers),
            "device": lab.device.model_copy(update={"memory": memory, "peak": peak, "memory_rate": memory_rate}),
        }
    )


def _shared(rate: Constant, crowd: float) -> Constant:
    """Return a rank's part of a core's rate while ``crowd`` ranks compute on each core."""
    return rate.model_copy(update={"value": rate.value / crowd})
