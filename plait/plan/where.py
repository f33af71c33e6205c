"""The cluster that a job is planned for: a preset, a file, or this machine; with what was measured there."""

from __future__ import annotations

from pathlib import Path

from plait.core.cluster import Cluster
from plait.core.job import Job
from plait.plan.this_machine import this_machine


def find_cluster(job: Job) -> Cluster:
    """What ``[cluster]`` names. Raises JobError for what cannot be read."""
    section = job.cluster
    if section.file is None and section.preset == "here":
        return this_machine(job)
    return Cluster.read(Path(section.file)) if section.file else Cluster.preset(section.preset)
