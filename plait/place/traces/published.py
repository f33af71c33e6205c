"""Published traces of GPU clusters: CSV tables, each known by its columns, and Philly's JSON log.

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

from plait.core.base.errors import DataError
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


PHILLY_KEYS = {"jobid", "submitted_time", "attempts"}
NONE = ("", "None", None)


def is_philly(value: Any) -> bool:
    """Whether a JSON value looks like Philly's log."""
    return isinstance(value, list) and (not value or (isinstance(value[0], dict) and set(value[0]) >= PHILLY_KEYS))


def read_philly(value: Any, path: Path) -> Trace:
    """The jobs of Microsoft's Philly (Jeon et al., ATC'19): ``cluster_job_log``, a JSON list of jobs with
    their attempts. A job lasts from the first start to the last end, on as many GPUs as its attempts were
    given. Where these differ it counts as the most, for as long as makes its GPU time right. Both are said.

    ===========  =================================================================================
    known        jobid, submitted_time, vc, user, status, attempts (start_time, end_time, detail:
                 gpus)
    passed over  jobs that never started or never ended, by reason; other keys
    refused      entries without these keys; attempts, details or GPUs that are no lists
    ===========  =================================================================================
    """
    rows = [_row(number, job, path) for number, job in enumerate(value)]
    columns = ("id", "submit", "start", "end", "gpus", "group", "user", "attempts")
    frame = pandas().DataFrame(rows, columns=list(columns))
    frame["took"], how = _took(frame)
    return build(
        frame,
        TraceColumns(
            submit="submit",
            start="start",
            end="end",
            duration="took",
            gpus="gpus",
            id="id",
            categories={"group": "group", "user": "user"},
        ),
        TraceForm(name=path.name, schema="philly-json", how=how),
        never={"never started": frame["start"].isna(), "never ended": frame["end"].isna()},
        units={"duration": "s"},
    )


def _took(jobs: Any) -> tuple[Any, tuple[str, ...]]:
    """Seconds of every job on its GPUs, and what had to be decided of jobs with several attempts."""
    took = pandas().Series(seconds(jobs["end"]).values - seconds(jobs["start"]).values, index=jobs.index)
    several = jobs["attempts"].map(len) > 1
    uneven = several & jobs["attempts"].map(lambda each: len({gpus for *_, gpus in each}) > 1)
    if uneven.any():
        parts = jobs.loc[uneven, "attempts"].explode()
        each = pandas().DataFrame(parts.tolist(), columns=["start", "end", "gpus"], index=parts.index)
        spent = (seconds(each["end"]).values - seconds(each["start"]).values) * each["gpus"]
        took[uneven] = spent.groupby(level=0).sum(min_count=1) / jobs.loc[uneven, "gpus"]
    said = {
        "several attempts on as many GPUs, which last from the first start to the last end": several & ~uneven,
        "attempts on different numbers of GPUs, which count as the most, for their GPU time": uneven,
    }
    return took, tuple(f"jobs with {what}: {count}" for what, which in said.items() if (count := int(which.sum())))


def _row(number: int, job: Any, path: Path) -> tuple[Any, ...]:
    if not isinstance(job, dict) or not set(job) >= PHILLY_KEYS:
        raise DataError(f"{path}: entry {number} is no job of a Philly log: it lacks {', '.join(sorted(PHILLY_KEYS))}.")
    where = f"{path}: entry {number}"
    attempts = [one for one in _list(job["attempts"], f"{where}: attempts") if isinstance(one, dict)]
    starts = [one["start_time"] for one in attempts if isinstance(one.get("start_time"), str)]
    ends = [one["end_time"] for one in attempts if isinstance(one.get("end_time"), str)]
    unfinished = bool(attempts) and attempts[-1].get("end_time") in NONE
    each = [
        (one.get("start_time"), one.get("end_time"), count)
        for one in attempts
        if (count := _gpus(one, where)) and isinstance(one.get("start_time"), str)
    ]
    return (
        job["jobid"],
        job["submitted_time"],
        min((one for one in starts if one not in NONE), default=None),
        None if unfinished else max((one for one in ends if one not in NONE), default=None),
        max((count for *_, count in each), default=None),
        job.get("vc"),
        job.get("user"),
        each,
    )


def _gpus(attempt: dict[str, Any], where: str) -> int:
    """GPUs over the nodes that an attempt ran on; one that is listed twice is one."""
    nodes = [node for node in _list(attempt.get("detail"), f"{where}: detail") if isinstance(node, dict)]
    named = (node.get("ip", number) for number, node in enumerate(nodes))
    gpus = (_list(node.get("gpus"), f"{where}: gpus") for node in nodes)
    return len({(str(node), str(gpu)) for node, each in zip(named, gpus, strict=True) for gpu in each})


def _list(value: Any, where: str) -> list[Any]:
    """A list; nothing is an empty one. Raises DataError for anything else."""
    if not isinstance(value, (list, type(None))):
        raise DataError(f"{where}: {type(value).__name__} is no list, as Philly's log has there.")
    return value or []
