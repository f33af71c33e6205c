"""SenseTime's Helios (Hu et al., SC'21): one CSV a cluster.

===========  =====================================================================================
known        the columns of ``COLUMNS``, node_num; ``gpu_num`` is of the whole job
passed over  rows without a duration or GPUs, by reason; other columns
refused      nothing more than ``read`` refuses
===========  =====================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.place.traces.table import Trace, build

COLUMNS = frozenset(
    ("job_id", "user", "vc", "gpu_num", "cpu_num", "state", "submit_time", "start_time", "end_time", "duration")
)


def read(frame: Any, path: Path) -> Trace:
    """The jobs of a table of this form."""
    return build(
        frame,
        name=path.name,
        schema="helios",
        submit="submit_time",
        start="start_time",
        end="end_time",
        duration="duration",
        form="s",
        gpus="gpu_num",
        id="job_id",
        numbers={"cpus": "cpu_num"} | ({"nodes": "node_num"} if "node_num" in frame else {}),
        categories={"group": "vc", "user": "user"},
    )
