"""Reader of cluster job traces (``read_trace``) in a few named forms.

======  ==============================================================================================
csv     a table with column names from ``COLUMNS`` or from the user
philly  Microsoft (Jeon et al., ATC'19): ``cluster_job_log``, a JSON list of jobs (below)
helios  SenseTime (Hu et al., SC'21): one file per cluster. ``gpu_num`` is the whole job's
acme    Shanghai AI Laboratory (Hu et al., NSDI'24): one file per cluster, jobs of language models.
        Users serve as groups, because the trace has no groups
spot    Alibaba (cluster-trace-v2026-spot-gpu, ``job_info_df``). ``gpu_request`` and ``cpu_request`` are
        one worker's. Spot jobs may be preempted
pai     Alibaba (Weng et al., NSDI'22; cluster-trace-gpu-v2020, ``pai_task_table``): a row is a task of
        ``inst_num`` instances, each of which requests ``plan_gpu`` percent of a GPU. The start time
        counts as submission time. Alibaba keeps the header line in a file of its own; it must be
        added above the rows
======  ==============================================================================================

Without a named form, a file with every column of a published form has that form. Files may be
packed by gzip, bzip2 or xz. Ignored: rows that are no jobs, counted by reason (``Trace.dropped``);
columns that no form names. Refused: a table without a header line, or with rows of more cells than
the header; more rows or bytes than a replay can use; lines of more than one MiB.

Microsoft's Philly log (Jeon et al., ATC'19): ``cluster_job_log``, a JSON list of jobs with their
attempts.

A job lasts from the first start to the last end, on its attempts' number of GPUs. If the attempts'
numbers differ, the largest counts, with a duration that keeps the GPU time. Both cases are
reported.

===========  =================================================================================
read         jobid, submitted_time, vc, user, attempts (start_time, end_time, detail: ip, gpus)
ignored      jobs that never started or never ended, by reason; other keys
refused      entries without these keys; attempts, details or GPUs that are no lists
===========  =================================================================================
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import Most, is_list, is_table, open_unpacked, parse_json, read_unpacked
from plait.core.base.errors import DataError, JobError, nearest
from plait.core.base.files import reason_of
from plait.core.base.process import uncollected
from plait.formats.job_traces.table import Trace, build, pandas, seconds

MOST_VALUES = 6_000_000
KEYS = ("attempts", "jobid", "submitted_time")
ATTEMPTED = ("id", "submit", "start", "end", "gpus", "group", "user", "attempts")


def read_philly(file: Path, size: int) -> Trace:
    """Return the jobs of a Philly log of at most ``size`` bytes. Raises DataError naming the
    entry."""
    try:
        jobs = parse_json(read_unpacked(file, size), most=MOST_VALUES)
    except (ValueError, OSError) as error:
        problem = f"{file} is no readable JSON: {reason_of(error)}"
        advice = "A Philly log is one list, [JOB, JOB, ...]: jq -s . makes one of jobs in lines"
        raise DataError(f"{problem}. {advice}.") from None
    if not is_list(jobs) or (jobs and not _is_job(jobs[0])):
        problem = f"a list of jobs with {', '.join(KEYS)} is expected"
        raise DataError(f"{file} is no Philly log: {problem}. Other traces are CSV.")
    frame = pandas().DataFrame([_row(job, f"{file}: entry {at}") for at, job in enumerate(jobs)], columns=[*ATTEMPTED])
    frame["duration"], how = _took(frame)
    never = {"never started": frame["start"].isna(), "never ended": frame["end"].isna()}
    return build(frame, file.name, "philly-json", how, never)


def _is_job(value: Any) -> bool:
    return is_table(value) and value.keys() >= set(KEYS)


def _took(jobs: Any) -> tuple[Any, tuple[str, ...]]:
    """Return (running time of every job in seconds, notes on how jobs with several attempts are
    counted)."""
    took = pandas().Series(seconds(jobs["end"]) - seconds(jobs["start"]), index=jobs.index)
    several = jobs["attempts"].map(len) > 1

    def differ(attempts: Sequence[tuple[Any, ...]]) -> bool:
        return len({gpus for *_, gpus in attempts}) > 1

    uneven = several & jobs["attempts"].map(differ)
    if uneven.any():
        parts = jobs.loc[uneven, "attempts"].explode()
        each = pandas().DataFrame(parts.tolist(), columns=["start", "end", "gpus"], index=parts.index)
        spent = (seconds(each["end"]) - seconds(each["start"])) * each["gpus"]
        took[uneven] = spent.groupby(level=0).sum(min_count=1) / jobs.loc[uneven, "gpus"]
    said = {
        "several attempts on as many GPUs, which last from the first start to the last end": several & ~uneven,
        "attempts on different numbers of GPUs, which count as the most, for their GPU time": uneven,
    }
    return took, tuple(f"jobs with {what}: {count}" for what, which in said.items() if (count := int(which.sum())))


def _row(job: Any, where: str) -> tuple[Any, ...]:
    if not _is_job(job):
        raise DataError(f"{where} is no job of a Philly log: it lacks {', '.join(KEYS)}.")
    attempts = [
        (_time(one, "start_time"), _time(one, "end_time"), _gpus(one, where))
        for one in _list(job["attempts"], f"{where}: attempts")
        if is_table(one)
    ]
    starts, ends = [start for start, _, _ in attempts if start], [end for _, end, _ in attempts if end]
    each = [(start, end, count) for start, end, count in attempts if count and start]
    ended = bool(ends) and attempts[-1][1] is not None
    return (
        job["jobid"], job["submitted_time"], min(starts, default=None), max(ends) if ended else None,
        max((count for *_, count in each), default=None), job.get("vc"), job.get("user"), each,
    )  # fmt: skip


def _time(attempt: dict[str, Any], key: str) -> str | None:
    value = attempt.get(key)
    return value if isinstance(value, str) and value not in ("", "None") else None


def _gpus(attempt: dict[str, Any], where: str) -> int:
    """Return the number of distinct GPUs over the nodes of an attempt."""
    nodes = [node for node in _list(attempt.get("detail"), f"{where}: detail") if is_table(node)]
    named = (node.get("ip", number) for number, node in enumerate(nodes))
    gpus = (_list(node.get("gpus"), f"{where}: gpus") for node in nodes)
    return len({(str(node), str(gpu)) for node, each in zip(named, gpus, strict=True) for gpu in each})


def _list(value: Any, where: str) -> list[Any]:
    """Return a list; an empty list for None. Raises DataError for any other value."""
    if value is not None and not is_list(value):
        raise DataError(f"{where}: {type(value).__name__} is no list, as Philly's log has there.")
    return value or []


MOST = Most(size=256 << 20)
"""Limits of a trace file: at most 256 MiB unpacked."""
MOST_ROWS, MOST_COLUMNS = 2_000_000, 500
COLUMNS = {
    "submit": ("submit", "submit_time"),
    "duration": ("duration", "duration_s"),
    "start": ("start", "start_time"),
    "end": ("end", "end_time"),
    "gpus": ("gpus", "num_gpu", "num_gpus"),
    "group": ("group", "cluster"),
    "queue": ("queue",),
    "user": ("user",),
    "type": ("type",),
    "cpus": ("cpus", "num_cpus"),
    "memory": ("memory",),
    "nodes": ("nodes", "num_nodes"),
    "instances": ("instances",),
    "id": ("id", "job_id"),
    "preemptible": ("preemptible",),
    "priority": ("priority",),
}
"""Column names of a table by field of a job. Times are seconds or ISO 8601 dates, durations
seconds. GPUs are the whole job's, or each instance's if the table has a column of instances."""
_EXAMPLE = "Write for example columns=submit=submit_time,duration=duration,gpus=num_gpu,group=cluster"
_NUMBER = re.compile(r"\s*[-+]?[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TraceForm:
    """A published form of tables.

    schema: the form's name in results. columns: by field. optional: columns that some files lack.
    marks: further columns that identify the form. whole: the value of ``gpus`` for one whole GPU.
    empty: the value of an empty cell of ``gpus``. never: reasons why a row is no job, with the
    field that is empty in this case. assumptions: Plait's decisions where the form is ambiguous.
    """

    schema: str
    columns: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict[str, str])
    marks: Sequence[str] = ()
    whole: float = 1.0
    empty: float = float("nan")
    never: Mapping[str, str] = field(default_factory=dict[str, str])
    assumptions: tuple[str, ...] = ()

    def matches(self, names: Sequence[str]) -> bool:
        """Return True if a table's column names include all columns of the form."""
        return {*self.columns.values(), *self.marks} <= set(names)


FORMS = {
    "spot": TraceForm(
        schema="alibaba-spot",
        columns={"submit": "submit_time", "duration": "duration", "gpus": "gpu_request", "instances": "worker_num",
                 "nodes": "worker_num", "group": "organization", "queue": "job_type", "preemptible": "job_type",
                 "id": "job_name"},
        optional={"cpus": "cpu_request", "type": "gpu_model"},
    ),
    "helios": TraceForm(
        schema="helios",
        columns={"submit": "submit_time", "start": "start_time", "end": "end_time", "duration": "duration",
                 "gpus": "gpu_num", "cpus": "cpu_num", "group": "vc", "user": "user", "id": "job_id"},
        optional={"nodes": "node_num"}, marks=("state",),
    ),
    "acme": TraceForm(
        schema="acme",
        columns={"submit": "submit_time", "start": "start_time", "duration": "duration", "gpus": "gpu_num",
                 "cpus": "cpu_num", "group": "user", "type": "type", "id": "job_id"},
        optional={"end": "end_time", "nodes": "node_num", "memory": "mem_per_pod_GB"}, marks=("state",),
    ),
    "pai": TraceForm(
        schema="alibaba-pai",
        columns={"submit": "start_time", "end": "end_time", "gpus": "plan_gpu", "instances": "inst_num",
                 "type": "task_name", "id": "job_name"},
        optional={"cpus": "plan_cpu", "memory": "plan_mem", "queue": "gpu_type"}, marks=("status",),
        whole=100.0, empty=0.0,
        never={"never started": "submit", "never ended": "end"},
        assumptions=("'plan_gpu' is read as percent of a GPU for each of 'inst_num' instances",
             "tasks count as submitted when they started, since the trace does not say"),
    ),
}  # fmt: skip
NAMES = ("csv", "philly", *FORMS)
PAI_HEADER = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type"
"""The header line of Alibaba's table."""


def parse_columns(text: str) -> dict[str, str]:
    """Return ``submit=submit_time,gpus=num_gpu`` as a mapping. Raises JobError for wrong or
    repeated fields.

    >>> parse_columns("submit=when, gpus=n")
    {'submit': 'when', 'gpus': 'n'}
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        key, _, column = (word.strip() for word in part.partition("="))
        if not column:
            raise JobError(f"'{part.strip()}' is no FIELD=COLUMN", key="columns", fix=_EXAMPLE)
        if key not in COLUMNS:
            problem = f"'{key}' is not a field of a job{nearest(key, COLUMNS)}"
            raise JobError(problem, key="columns", fix=f"Fields are {', '.join(COLUMNS)}")
        if key in found:
            raise JobError(f"'{key}' is given twice", key="columns", fix=_EXAMPLE)
        found[key] = column
    return found


@uncollected()
def read_trace(path: str | Path, form: str = "", columns: Mapping[str, str] | None = None) -> Trace:
    """Return the jobs of a file. form: one of ``NAMES``; "" detects the form. columns: the table's
    column names by field. Raises DataError for a file that cannot be read, and JobError for missing
    columns."""
    file = Path(path)
    if form and form not in NAMES:
        problem = f"there is no form '{form}'{nearest(form, NAMES)}"
        raise JobError(problem, key="format", fix=f"Use one of {', '.join(NAMES)}")
    if not file.exists():
        raise DataError(f"{file}: there is no such file.")
    if not file.is_file():  # a pipe can be read only once, and the header is read first
        raise DataError(f"{file} is no regular file: a trace is read several times. Write it to a file first.")
    if form == "philly" or (not form and columns is None and ".json" in map(str.lower, file.suffixes)):
        return read_philly(file, MOST.size)
    try:
        return _read_table(file, form, columns)
    except pandas().errors.ParserWarning:
        problem = "rows have more cells than the first line has names of columns. Name all of them."
        raise DataError(f"{file}: {problem}") from None
    except (ValueError, OSError, csv.Error, pandas().errors.ParserError) as error:
        raise DataError(f"{file} is no readable table: {' '.join(reason_of(error).split())}") from None


def _read_table(file: Path, form: str, columns: Mapping[str, str] | None) -> Trace:
    names = _header(file)
    if columns is None and not form:
        form = next((name for name, one in FORMS.items() if one.matches(names)), "")
    known = FORMS.get(form) or TraceForm(schema="columns", columns={})
    chosen = _chosen(known, names, columns, file)
    with open_unpacked(file, MOST) as stream, warnings.catch_warnings():
        warnings.simplefilter("error", pandas().errors.ParserWarning)  # more cells than the header has
        told = pandas().read_csv(stream, low_memory=False, skipinitialspace=True, nrows=MOST_ROWS + 1, index_col=False)
    if len(told) > MOST_ROWS:
        raise DataError(f"{file} has more than {MOST_ROWS:,} rows, the most that is read. Give a part of it.")
    frame = pandas().DataFrame({key: told[column] for key, column in chosen.items()})
    never = {reason: frame[key].isna() for reason, key in known.never.items()}
    gpus = pandas().to_numeric(frame["gpus"], errors="coerce").mask(frame["gpus"].isna(), known.empty) / known.whole
    if "instances" in frame:
        gpus *= pandas().to_numeric(frame["instances"], errors="coerce")
    return build(frame.assign(gpus=gpus), file.name, known.schema, known.assumptions, never)


def _header(file: Path) -> list[str]:
    """Return the column names. Raises DataError if the first line is a job."""
    with open_unpacked(file, MOST) as stream:
        start = stream.read(MOST.line)
    line = next((line for line in start.splitlines() if line.strip()), b"").decode("utf-8-sig")
    if not line:
        raise DataError(f"{file} is empty: it has not even a line of column names.")
    if len(line) >= MOST.line:
        raise DataError(f"{file} has a line of more than {MOST.line:,} bytes.")
    names = next(csv.reader([line], skipinitialspace=True))
    if len(names) > MOST_COLUMNS:
        raise DataError(f"{file} has {len(names)} columns; at most {MOST_COLUMNS} are read.")
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    if len(numbers) > 1:
        example = PAI_HEADER if len(names) == len(PAI_HEADER.split(",")) else "submit_time,duration,num_gpus"
        problem = f"the first line is a job, not the names of columns ('{numbers[0].strip()}' is none)"
        raise DataError(f"{file}: {problem}. Write them above it, such as {example}")
    return names


def _chosen(form: TraceForm, names: list[str], columns: Mapping[str, str] | None, file: Path) -> dict[str, str]:
    """Return a table's columns by field: the user's, else the form's. Raises JobError for missing
    columns."""
    if columns is not None:
        chosen = dict(columns)
    elif form.columns:
        chosen = {**form.columns, **{key: column for key, column in form.optional.items() if column in names}}
    else:
        chosen = {key: column for key, known in COLUMNS.items() for column in known[::-1] if column in names}
    there = ", ".join(names)[:1000]
    if missing := [column for column in chosen.values() if column not in names]:
        problem = f"there is no column {', '.join(map(repr, missing))}{nearest(missing[0], names)}"
        key = "format" if columns is None else "columns"
        raise JobError(problem, file=str(file), key=key, fix=f"Its columns are {there}")
    lacking = [key for key in ("submit", "gpus") if key not in chosen]
    lacking += [] if {"duration", "end"} & set(chosen) else ["duration (or end)"]
    if lacking:
        problem = f"no column is known to hold {', '.join(lacking)}"
        problem += f"; its columns, which commas separate, are {there}"
        raise JobError(problem, file=str(file), fix=_EXAMPLE)
    for column in chosen.values():
        if names.count(column) > 1:
            raise JobError(f"two columns are called {column!r}", file=str(file), fix="Give one of them another name")
    return chosen
