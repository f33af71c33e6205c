"""Whether a profile was measured on another device than that of the cluster it is used for."""

from __future__ import annotations

import re
from pathlib import Path

from plait.core.cluster.hardware import Cluster
from plait.core.cluster.profile import Profile
from plait.core.job.spec import Job

_MODEL = re.compile(r"[A-Z]{1,3}\d{2,4}")
"""As in H100, GB200; of ``NVIDIA H100 80GB HBM3`` and ``H100-SXM5-80GB`` alike."""


def other_device(job: Job, cluster: Cluster) -> str:
    """A line of warning; empty where both are alike, or nobody can tell."""
    section = job.cluster
    if not section.profile or (section.file is None and section.preset == "here"):
        return ""
    measured = Profile.read(Path(section.profile)).machine.device
    models, wanted = (set(_MODEL.findall(name.upper())) for name in (measured, cluster.device.name))
    if not models or not wanted or models & wanted:
        return ""
    return (
        f"{section.profile}: cluster.profile was measured on {measured}, and {cluster.name} has "
        f"{cluster.device.name}: predictions mix the two. Measure there, or name another cluster."
    )
