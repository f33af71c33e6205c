"""Shanghai AI Laboratory's Acme (Hu et al., NSDI'24): one CSV a cluster, jobs of large language models.

===========  =====================================================================================
known        the columns of ``COLUMNS`` and ``NUMBERS``; ``gpu_num`` is of the whole job
passed over  rows without a duration or GPUs, by reason; other columns
refused      nothing more than ``read`` refuses
===========  =====================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.place.traces.table import Trace, build

COLUMNS = frozenset(("job_id", "user", "gpu_num", "cpu_num", "type", "state", "submit_time", "start_time", "duration"))
NUMBERS = {"nodes": "node_num", "cpus": "cpu_num", "memory": "mem_per_pod_GB", "shared_memory": "shared_mem_per_pod"}


def read(frame: Any, path: Path) -> Trace:
    """The jobs of a table of this form. Its users stand for the groups: it has no others."""
    return build(
        frame,
        name=path.name,
        schema="acme",
        submit="submit_time",
        start="start_time",
        end="end_time" if "end_time" in frame else None,
        duration="duration",
        form="s",
        gpus="gpu_num",
        id="job_id",
        numbers={name: column for name, column in NUMBERS.items() if column in frame},
        categories={"group": "user", "type": "type"},
    )
