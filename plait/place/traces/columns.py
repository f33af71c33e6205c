"""Any table of jobs: columns by a mapping, or by the names that such tables usually have.

===========  =====================================================================================
known        the fields of ``USUAL``; units of times in a column's name or behind it; GPUs in percent
             or thousandths, by the column's name or behind it (``gpus=plan_gpu:percent``)
passed over  rows without usable numbers, by reason (``Trace.dropped``); other columns. Said are
             priorities that are no numbers, words that are neither yes nor no, numbers of jobs
             that several rows have
refused      columns that are not there or twice, fields that no job has, units that are none, a
             table without a submission, GPUs and a duration or an end
===========  =====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.core.base.errors import JobError, nearest
from plait.place.traces.table import Trace, TraceColumns, TraceForm, build
from plait.place.traces.times import ORDERS, UNITS, pandas, unit_of, without_unit

USUAL = {
    "submit": ("submit_time", "submitted_time", "submit", "submission_time", "timestamp", "creation_time", "arrival",
               "arrival_time"),
    "duration": ("duration", "run_time", "runtime", "duration_s", "elapsed"),
    "start": ("start_time", "start", "scheduled_time"),
    "end": ("end_time", "end", "finish_time", "deletion_time"),
    "gpus": ("num_gpus", "num_gpu", "gpu_num", "gpus", "n_gpus", "gpu_request"),
    "group": ("vc", "cluster", "group", "organization", "department", "project", "account"),
    "queue": ("queue", "partition"),
    "user": ("user", "user_id", "username"),
    "cpus": ("num_cpus", "cpu_num", "cpus", "num_cpu"),
    "memory": ("memory", "mem", "memory_gb"),
    "nodes": ("num_nodes", "node_num", "nodes"),
    "type": ("type", "job_type", "workload"),
    "id": ("job_id", "jobid", "id", "name", "job_name"),
    "instances": ("num_inst", "inst_num", "num_instances", "instances", "num_workers", "worker_num", "workers",
                  "replicas"),
    "preemptible": ("preemptible",),
    "priority": ("priority", "job_priority", "prio"),
}  # fmt: skip
"""What a job has, and what columns that hold it are called."""
YES, NO = ("1", "1.0", "true", "yes", "y", "t"), ("0", "0.0", "false", "no", "n", "f", "")
NUMBERS, CATEGORIES = ("cpus", "memory", "nodes"), ("group", "queue", "user", "type")
PARTS = {"percent": 0.01, "milli": 0.001, "whole": 1.0}
"""Units of GPUs, in GPUs."""
_OF_GPUS = re.compile(r"(?P<percent>^plan_gpu$|percent|pct|%)|(?P<milli>milli)", re.IGNORECASE)
"""What a column's name says of its unit; ``plan_gpu`` is that of Alibaba's PAI."""
TIMES = ("submit", "start", "end", "duration")
"""Fields whose column may be given with a unit: duration=took:min."""
FEW_NAMES = 5
"""Cells that a message names."""
_FEW = 5
"""Rows below which nothing is concluded from their numbers."""


def parse_columns(text: str) -> dict[str, str]:
    """``submit=submit_time,gpus=num_gpu`` as a mapping.

    >>> parse_columns("submit=when, gpus=n")
    {'submit': 'when', 'gpus': 'n'}
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not column:
            raise JobError(f"'{part.strip()}' is no FIELD=COLUMN", key="--columns", fix=_EXAMPLE)
        if key not in USUAL:
            raise JobError(
                f"'{key}' is nothing that a job has{nearest(key, USUAL)}",
                key="--columns",
                fix=f"Fields are {', '.join(USUAL)}",
            )
        if key in found:
            raise JobError(f"'{key}' is given twice", key="--columns", fix=_EXAMPLE)
        found[key] = column
    return found


LONGEST_NAMES = 1000
"""Letters of the names of columns in a message."""
_EXAMPLE = "Write for example --columns submit=submit_time,duration=duration,gpus=num_gpu,group=cluster"


def read(frame: Any, path: Path, columns: Mapping[str, str] | None) -> Trace:
    """The jobs of any table; columns: by field, else found by their usual names."""
    there = [str(name) for name in frame.columns]
    chosen, units = _with_units(columns, there) if columns is not None else (guess(there), {})
    missing = [column for column in chosen.values() if column not in there]
    if missing:
        raise JobError(
            f"there is no column {', '.join(repr(name) for name in missing)}{nearest(missing[0], there)}",
            file=str(path),
            key="--columns",
            fix=f"Its columns are {', '.join(there)}",
        )
    lacking = [field for field in ("submit", "gpus") if field not in chosen]
    if not {"duration", "end"} & set(chosen):
        lacking.append("duration (or end)")
    if lacking:
        names = ", ".join(there)
        names = names if len(names) <= LONGEST_NAMES else f"{names[:LONGEST_NAMES]} and more"
        raise JobError(
            f"no column is known to hold {', '.join(lacking)}; its columns are {names}",
            file=str(path),
            fix=_EXAMPLE,
        )
    for column in chosen.values():
        if f"{column}.1" in there:  # so pandas calls the second of that name
            problem = f"two columns are called {column!r}, or one of them {column + '.1'!r}"
            raise JobError(problem, file=str(path), fix="Give the one that is meant another name")
    gpus, how = _gpus(frame[chosen["gpus"]], units.pop("gpus", ""))
    each, said = _instances(frame, chosen)
    return build(
        frame,
        TraceColumns(
            submit=chosen["submit"],
            gpus=gpus * each,
            duration=chosen.get("duration"),
            start=chosen.get("start"),
            end=chosen.get("end"),
            id=chosen.get("id"),
            numbers={name: chosen[name] for name in NUMBERS if name in chosen},
            categories={name: chosen[name] for name in CATEGORIES if name in chosen},
            preemptible=_words(frame[chosen["preemptible"]]).isin(YES) if "preemptible" in chosen else None,
            priority=chosen.get("priority"),
        ),
        TraceForm(name=path.name, schema="columns", how=(*how, *said, *_odd_cells(frame, chosen))),
        units=units,
    )


def guess(there: list[str]) -> dict[str, str]:
    """Which column holds what, by its name.

    >>> guess(["timestamp", "duration_min", "num_gpus", "gpu_time", "cluster"])
    {'submit': 'timestamp', 'duration': 'duration_min', 'gpus': 'num_gpus', 'group': 'cluster'}
    """
    lower = {name.lower(): name for name in reversed(there)}
    times = {without_unit(name)[0].lower(): name for name in reversed(there)} | lower
    found = {
        field: next((known[name] for name in names if name in known), None)
        for field, names in USUAL.items()
        for known in (times if field in TIMES else lower,)
        if field != "instances"  # whether GPUs are of each of them no name says
    }
    return {field: column for field, column in found.items() if column is not None}


def _with_units(columns: Mapping[str, str], there: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Columns by field, and their units. A column may have a colon in its own name."""
    chosen, units = dict(columns), dict[str, str]()
    for field, column in columns.items():
        name, _, word = column.rpartition(":")
        if field not in (*TIMES, "gpus") or column in there or name not in there:
            continue
        known = tuple(PARTS) if field == "gpus" else (*UNITS, *(() if field == "duration" else ORDERS))
        unit = word.lower() if field == "gpus" else unit_of(word)
        if unit not in known:
            problem = f"'{word}' is no unit of {field}{nearest(word, known)}"
            raise JobError(problem, key="--columns", fix=f"Units are {', '.join(known)}")
        chosen[field], units[field] = name, unit
    return chosen, units


def _gpus(column: Any, unit: str) -> tuple[Any, tuple[str, ...]]:
    """GPUs of every row, and what had to be decided. unit: as the user says, else as the name says."""
    numbers = pandas().to_numeric(column, errors="coerce")
    name = str(column.name)
    if not unit and (found := _OF_GPUS.search(name)):
        unit = str(found.lastgroup)
        said = "percent" if unit == "percent" else "thousandths"
        return numbers * PARTS[unit], (f"'{name}' is read as {said} of a GPU, by its name (GPUs: '{name}:whole')",)
    if unit:
        return numbers * PARTS[unit], ()
    asked = numbers[numbers > 0]
    if len(asked) >= _FEW and (asked % 5 == 0).all() and asked.max() >= 100:
        return numbers, (f"'{name}' is taken as whole GPUs, though all are multiples of 5 (percent: '{name}:percent')",)
    return numbers, ()


def _instances(frame: Any, chosen: Mapping[str, str]) -> tuple[Any, Iterator[str]]:
    """Instances of every row that GPUs count for, and what is said where a column counts some that do not."""
    if column := chosen.get("instances"):
        return pandas().to_numeric(frame[column], errors="coerce"), iter(())
    names = (name for name in frame.columns if str(name).lower() in USUAL["instances"] and name not in chosen.values())
    several = (name for name in names if (pandas().to_numeric(frame[name], errors="coerce") > 1).any())
    said = f"'{chosen['gpus']}' is taken as the GPUs of a whole job, though '{{0}}' counts several instances of some "
    return 1, (said.format(name) + f"(GPUs of each: --columns with instances={name})" for name in several)


def _odd_cells(frame: Any, chosen: Mapping[str, str]) -> Iterator[str]:
    """What is said of cells that are no priority, neither yes nor no, or a job's number once more."""
    if column := chosen.get("priority"):
        odd = frame[column][pandas().to_numeric(frame[column], errors="coerce").isna() & frame[column].notna()]
        yield from _said(column, odd, "no number, and count as 0")
    if column := chosen.get("preemptible"):
        odd = frame[column][frame[column].notna() & ~_words(frame[column]).isin((*YES, *NO))]
        yield from _said(column, odd, "neither yes nor no, and count as no")
    if column := chosen.get("id"):
        odd = frame[column][frame[column].notna() & frame[column].duplicated()]
        yield from _said(column, odd, "those of a row above; each row is a job")


def _said(column: str, odd: Any, what: str) -> Iterator[str]:
    if len(odd):
        names = [str(each) for each in odd.unique()]
        rest = f" and {len(names) - FEW_NAMES} more" if len(names) > FEW_NAMES else ""
        yield f"cells of '{column}' that are {what}: {len(odd)} ({', '.join(names[:FEW_NAMES])}{rest})"


def _words(column: Any) -> Any:
    return column.astype("string").str.strip().str.lower()
