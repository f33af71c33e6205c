"""Traces that benchmarks read: those of ``plait queue``, and Alibaba's pods that share GPUs.

Of these (cluster-trace-gpu-v2023, openb; Weng et al., ATC 2023) ``num_gpu`` counts GPUs, ``gpu_milli`` is the
share of one that a pod asks for; the quality of service stands for the group. Best-effort pods (``BE``) may
be preempted. Pods that are there at the very end of the trace ran on after it, and are no jobs.
"""

from __future__ import annotations

from pathlib import Path

from plait.core.base.errors import JobError
from plait.formats.job_traces.read import parse_columns, read_trace
from plait.formats.job_traces.table import Trace, build, pandas, seconds

OPENB = {"submit": "creation_time", "start": "scheduled_time", "end": "deletion_time", "gpus": "num_gpu", "id": "name",
         "cpus": "cpu_milli", "memory": "memory_mib", "group": "qos", "type": "gpu_spec"}  # fmt: skip


def read(file: Path, columns: str | None = None) -> Trace:
    """The jobs of a trace, by the columns given where it has such, else by its own form."""
    if file.suffix != ".json":
        table = pandas().read_csv(file)
        if {*OPENB.values(), "gpu_milli"} <= set(table.columns):
            return read_openb(table, file.name)
    if columns is not None:
        try:
            return read_trace(file, "csv", parse_columns(columns))
        except JobError:
            pass
    return read_trace(file)


def read_openb(table: object, name: str) -> Trace:
    """The jobs of Alibaba's table of pods."""
    frame = pandas().DataFrame({key: table[column] for key, column in OPENB.items()})  # type: ignore[index]
    milli = pandas().to_numeric(table["gpu_milli"], errors="coerce")  # type: ignore[index]
    whole = (frame["gpus"] != 1) | (milli <= 0) | (milli >= 1000)
    ended = seconds(frame["end"])
    never = {"never started": frame["start"].isna(), "still there at the end": ended == frame["end"].max()}
    frame = frame.assign(gpus=frame["gpus"].where(whole, milli / 1000), preemptible=frame["group"] == "BE")
    return build(frame, name, "alibaba-openb", never=never)
