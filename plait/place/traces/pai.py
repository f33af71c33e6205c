"""Alibaba's PAI (Weng et al., NSDI'22; clusterdata, cluster-trace-gpu-v2020): ``pai_task_table``.

A row is one task of a job, of ``inst_num`` instances. ``plan_gpu`` is what each instance asks for, in
percent of a GPU: 50 is half of one, 200 are two. The file says when a task started, not when it was
submitted. Alibaba keeps the line of column names in a file of its own; it has to stand above the rows.

===========  =====================================================================================
known        the columns of ``COLUMNS``, plan_cpu, plan_mem, gpu_type
passed over  tasks that never started or ended, or ask for no GPU, by reason; other columns
refused      nothing more than ``read`` refuses: rows without their header among it
===========  =====================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.place.traces.table import Trace, build
from plait.place.traces.times import pandas

COLUMNS = frozenset(("job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_gpu"))
HEADER = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type"
"""Alibaba's line of column names."""


def read(frame: Any, path: Path) -> Trace:
    """The tasks of a table of this form."""
    pd = pandas()
    percent, instances = (pd.to_numeric(frame[name], errors="coerce") for name in ("plan_gpu", "inst_num"))
    return build(
        frame,
        name=path.name,
        schema="alibaba-pai",
        submit="start_time",
        end="end_time",
        gpus=(percent / 100 * instances).mask(frame["plan_gpu"].isna(), 0.0),
        id="job_name",
        numbers={name: column for name, column in (("cpus", "plan_cpu"), ("memory", "plan_mem")) if column in frame},
        categories={"type": "task_name"} | ({"queue": "gpu_type"} if "gpu_type" in frame else {}),
        never={
            "never started": frame["start_time"].isna(),
            "never ended": frame["end_time"].isna(),
        },
        how=(
            "'plan_gpu' is read as percent of a GPU for each of 'inst_num' instances",
            "tasks count as submitted when they started, since the trace does not say",
        ),
    )
