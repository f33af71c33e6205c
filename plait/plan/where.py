"""The cluster that a job is planned for: a preset, a file, or this machine; with what was measured there."""

from __future__ import annotations

from pathlib import Path

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
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
        cluster = Cluster.read(Path(section.file)) if section.file else Cluster.preset(section.preset)
        return with_profile(cluster, profile) if profile else cluster
    except JobError as error:
        raise error if error.file or profile is None else error.in_file(str(section.profile)) from None
