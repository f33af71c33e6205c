"""Alibaba's spot and high-priority jobs (clusterdata, cluster-trace-v2026-spot-gpu, ``job_info_df``).

``gpu_request`` and ``cpu_request`` are of one worker. Spot jobs may be preempted.

===========  =====================================================================================
known        the columns of ``COLUMNS``, cpu_request, gpu_model
passed over  rows without a duration or GPUs, by reason; other columns
refused      nothing more than ``read`` refuses
===========  =====================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.place.traces.table import Trace, build
from plait.place.traces.times import pandas

COLUMNS = frozenset(("job_name", "organization", "gpu_request", "worker_num", "submit_time", "duration", "job_type"))


def read(frame: Any, path: Path) -> Trace:
    """The jobs of a table of this form."""
    pd = pandas()
    workers = pd.to_numeric(frame["worker_num"], errors="coerce")
    return build(
        frame,
        name=path.name,
        schema="alibaba-spot",
        submit="submit_time",
        duration="duration",
        form="s",
        gpus=pd.to_numeric(frame["gpu_request"], errors="coerce") * workers,
        id="job_name",
        numbers={"nodes": "worker_num"} | ({"cpus": "cpu_request"} if "cpu_request" in frame else {}),
        categories={"group": "organization", "queue": "job_type"}
        | ({"type": "gpu_model"} if "gpu_model" in frame else {}),
        preemptible=frame["job_type"].astype("string").str.lower().str.contains("spot").fillna(value=False).to_numpy(),
    )
