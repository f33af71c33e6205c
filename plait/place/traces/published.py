"""Published traces of GPU clusters that are CSV tables, each known by its columns.

=============  ===========================================================================================
acme           Shanghai AI Laboratory (Hu et al., NSDI'24): one file a cluster, jobs of language models.
               ``gpu_num`` is of the whole job; users stand for the groups, of which it has no others
helios         SenseTime (Hu et al., SC'21): one file a cluster. ``gpu_num`` is of the whole job
alibaba-spot   Alibaba (cluster-trace-v2026-spot-gpu, ``job_info_df``). ``gpu_request`` and
               ``cpu_request`` are of one worker. Spot jobs may be preempted
alibaba-openb  Alibaba (Weng et al., ATC'23; cluster-trace-gpu-v2023): pods that share GPUs. ``num_gpu``
               counts GPUs, ``gpu_milli`` is the share of one that a pod asks for; the quality of service
               stands for the group. Best-effort pods (``BE``) may be preempted
alibaba-pai    Alibaba (Weng et al., NSDI'22; cluster-trace-gpu-v2020, ``pai_task_table``): a row is a task
               of ``inst_num`` instances, each of which asks for ``plan_gpu`` percent of a GPU. It counts as
               submitted when it started. Alibaba keeps the line of column names in a file of its own; it
               has to stand above the rows
=============  ===========================================================================================

Passed over: rows that are no jobs, by reason: without a duration or GPUs, never started, never ended, pods
that are there at the very end of the trace (they ran on after it); columns that no form names. Refused:
nothing more than ``build`` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from plait.place.traces.table import Trace, TraceColumns, TraceForm, build
from plait.place.traces.times import pandas, seconds

PAI_HEADER = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type"
"""Alibaba's line of column names."""


def _there(frame: Any, **columns: str) -> dict[str, str]:
    """Of columns that not every file has, those that are there, by field."""
    return {name: column for name, column in columns.items() if column in frame}


def _numbers(frame: Any, *names: str) -> list[Any]:
    return [pandas().to_numeric(frame[name], errors="coerce") for name in names]


def _acme(frame: Any, path: Path) -> Trace:
    return build(
        frame,
        TraceColumns(
            submit="submit_time",
            start="start_time",
            end="end_time" if "end_time" in frame else None,
            duration="duration",
            gpus="gpu_num",
            id="job_id",
            numbers=_there(
                frame, nodes="node_num", cpus="cpu_num", memory="mem_per_pod_GB", shared_memory="shared_mem_per_pod"
            ),
            categories={"group": "user", "type": "type"},
        ),
        TraceForm(name=path.name, schema="acme", form="s"),
    )


def _helios(frame: Any, path: Path) -> Trace:
    return build(
        frame,
        TraceColumns(
            submit="submit_time",
            start="start_time",
            end="end_time",
            duration="duration",
            gpus="gpu_num",
            id="job_id",
            numbers={"cpus": "cpu_num"} | _there(frame, nodes="node_num"),
            categories={"group": "vc", "user": "user"},
        ),
        TraceForm(name=path.name, schema="helios", form="s"),
    )


def _spot(frame: Any, path: Path) -> Trace:
    gpus, workers = _numbers(frame, "gpu_request", "worker_num")
    kind = frame["job_type"].astype("string").str.lower()
    return build(
        frame,
        TraceColumns(
            submit="submit_time",
            duration="duration",
            gpus=gpus * workers,
            id="job_name",
            numbers={"nodes": "worker_num"} | _there(frame, cpus="cpu_request"),
            categories={"group": "organization", "queue": "job_type"} | _there(frame, type="gpu_model"),
            preemptible=kind.str.contains("spot").fillna(value=False).to_numpy(),
        ),
        TraceForm(name=path.name, schema="alibaba-spot", form="s"),
    )


def _openb(frame: Any, path: Path) -> Trace:
    ended = seconds(frame["deletion_time"]).values
    asked, milli = _numbers(frame, "num_gpu", "gpu_milli")
    over = ended == np.nanmax(ended) if np.isfinite(ended).any() else np.zeros(len(frame), bool)
    return build(
        frame,
        TraceColumns(
            submit="creation_time",
            start="scheduled_time",
            end="deletion_time",
            gpus=asked.where((asked != 1) | (milli <= 0) | (milli >= 1000), milli / 1000),
            id="name",
            numbers={"cpus": "cpu_milli", "memory": "memory_mib", "gpu_share": "gpu_milli"},
            categories={"group": "qos", "type": "gpu_spec"},
            preemptible=(frame["qos"] == "BE").to_numpy(),
        ),
        TraceForm(name=path.name, schema="alibaba-openb"),
        never={"never started": frame["scheduled_time"].isna(), "still there at the end": over},
    )


def _pai(frame: Any, path: Path) -> Trace:
    percent, instances = _numbers(frame, "plan_gpu", "inst_num")
    return build(
        frame,
        TraceColumns(
            submit="start_time",
            end="end_time",
            gpus=(percent / 100 * instances).mask(frame["plan_gpu"].isna(), 0.0),
            id="job_name",
            numbers=_there(frame, cpus="plan_cpu", memory="plan_mem"),
            categories={"type": "task_name"} | _there(frame, queue="gpu_type"),
        ),
        TraceForm(
            name=path.name,
            schema="alibaba-pai",
            how=(
                "'plan_gpu' is read as percent of a GPU for each of 'inst_num' instances",
                "tasks count as submitted when they started, since the trace does not say",
            ),
        ),
        never={"never started": frame["start_time"].isna(), "never ended": frame["end_time"].isna()},
    )


Reader = Callable[[Any, Path], Trace]
_COLUMNS: Mapping[Reader, str] = {
    _openb: "name cpu_milli memory_mib num_gpu gpu_milli qos creation_time deletion_time scheduled_time",
    _spot: "job_name organization gpu_request worker_num submit_time duration job_type",
    _helios: "job_id user vc gpu_num cpu_num state submit_time start_time end_time duration",
    _acme: "job_id user gpu_num cpu_num type state submit_time start_time duration",
    _pai: "job_name task_name inst_num status start_time end_time plan_gpu",
}
SCHEMAS = tuple((frozenset(names.split()), reader) for reader, names in _COLUMNS.items())
"""The columns by which a table is known, and who reads it. Any other table is read by its columns' names."""
