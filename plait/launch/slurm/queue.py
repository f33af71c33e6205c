"""Slurm's queue for admission, and admission's actions on jobs that opted in: hold, start, send
back.

Facts are read with ``scontrol show``. Admission's decision on a job is kept in the job's
AdminComment, in Slurm's own state, where the next admission process finds it.

===========  ===========================================================================================
known        jobs of one partition or QOS that wait, held by their users (``sbatch --hold``) or not held;
             words of their comments: ``jct=90m``, ``priority=5``, ``preemptible``
passed over  jobs of other partitions; jobs that an administrator holds; job arrays, which are one record
             for many jobs; jobs that wait for other jobs or for a time; jobs whose name or comment has
             lines that look like Slurm's fields
===========  ===========================================================================================

A record of ``scontrol show`` begins at the left margin, with one or several fields per line; free
text (comments, paths) has a line of its own. A job's name and comment are printed as the user wrote
them, newlines included (tested on Slurm 22.05), so they may look like fields, or like another job's
record. Therefore ``squeue``, which prints numbers alone, lists the jobs; a job that seems to have
several records is queried alone; and a record in which a user's lines pass for Slurm's is rejected.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from plait.core.base.errors import LaunchError
from plait.core.topology.hostlist import expand, fold
from plait.formats.slurm.lines import resources
from plait.launch.live_queue import (
    YES,
    AdmissionRecord,
    AdmissionTerms,
    LiveQueue,
    QueuedJob,
    QueueView,
    ReservedNodes,
    seconds_of,
    whole,
)  # fmt: skip
from plait.launch.slurm.commands import WAITING, command

STATES: dict[str, Literal["running", "ending"]] = {"RUNNING": "running", "COMPLETING": "ending"}
MINUTE = 60.0
"""Seconds per unit of Slurm's time limits, which are whole minutes."""
_UNUSABLE = re.compile(r"DOWN|DRAIN|FAIL|MAINT|COMPLETING|NOT_RESPONDING|POWER|UNKNOWN|REBOOT|FUTURE|INVAL")
_GPUS = re.compile(r"gres[:/]gpu(?:[:/][\w.+-]*[A-Za-z_][\w.+-]*)?[:=](\d+)")


@dataclass(frozen=True)
class SlurmQueue(LiveQueue):
    """The jobs of a partition or QOS, and reservations by name."""

    partition: str
    qos: str
    reservations: tuple[str, ...]

    @property
    def closing_seconds(self) -> float:
        """One minute, the shortest time limit that Slurm accepts."""
        return MINUTE

    def look(self) -> QueueView:
        """Return a snapshot of the queue. Raises LaunchError if Slurm does not answer, or has no
        such partition or reservation."""
        nodes = _node_names(self.partition)
        found = [one for one in records("node", "-d") if one["NodeName"] in nodes]
        counts = {_gpus_of_node(one) for one in found}
        size = counts.pop() if len(counts) == 1 and 0 not in counts else 1
        used = {one["NodeName"]: _used(one, size) for one in found}
        known = [_reservation(one) for one in records("reservation") if one.get("ReservationName") in self.reservations]
        if missing := set(self.reservations) - {one.name for one in known}:
            name = min(missing)
            fix = f"Make it with plait reserve RANK_TABLE --name {name}, and name it with --reservation."
            raise LaunchError(f"Slurm has no reservation '{name}'. {fix}")
        jobs: list[QueuedJob] = []
        told, unclear = job_records(self.partition, self.qos)
        passed = dict.fromkeys(unclear, "its name or comment has lines that look like Slurm's own")
        for one in told:
            if (self.partition and one.get("Partition") != self.partition) or (self.qos and one.get("QOS") != self.qos):
                continue
            if (why := _not_ours(one)) and one.get("JobState") in WAITING:
                passed[one["JobId"]] = why
            else:
                jobs.append(_job(one, size))
        return QueueView(jobs=tuple(jobs), used=used, size=size, reservations=tuple(known), passed=passed)

    def hold(self, job: QueuedJob) -> None:
        """Hold a waiting job as its user would, so that it does not start."""
        command("scontrol", "uhold", job.name)
        if job.mark:
            self.restore(job)

    def start(self, job: QueuedJob, how: AdmissionTerms) -> None:
        """Let a held job start on these nodes. In a zone, the job's time limit ends before the zone
        is due: only then does Slurm start it there. The mark is written first: if this process is
        killed before the release, the job stays held and is decided again."""
        mark = AdmissionRecord(
            submit=job.submit, at=how.now, until=how.until, limit=job.own_limit, zones=tuple(how.zones)
        )
        minutes = min(_minutes(mark.limit), (how.until - how.now) // MINUTE)
        told = [f"TimeLimit={int(minutes)}"] if how.until < inf else []
        _update(job, f"ReqNodeList={fold(how.nodes)}", *told, mark=mark)
        command("scontrol", "release", job.name)

    def settle(self, job: QueuedJob) -> None:
        """Extend the limit of a job that started in a zone until the minute after the zone is due:
        the limit at the start had to end up to a minute earlier."""
        assert job.mark
        minutes = min(_minutes(job.mark.limit), ceil((job.mark.until - job.start) / MINUTE) + 1)
        if minutes > _minutes(job.limit):
            command("scontrol", "update", f"JobId={job.name}", f"TimeLimit={int(minutes)}")

    def send_back(self, job: QueuedJob) -> None:
        """Stop a running job and requeue it, held, at its former position."""
        _update(job, mark=AdmissionRecord(submit=job.submit, at=job.start, limit=job.own_limit))
        command("scontrol", "requeuehold", job.name)

    def restore(self, job: QueuedJob) -> None:
        """Restore the submitted time limit and nodes of a job that waits again."""
        told = "ReqNodeList=", f"TimeLimit={job.own_limit}"
        _update(job, *told, mark=AdmissionRecord(submit=job.submit, limit=job.own_limit))

    def job_changed(self, error: Exception) -> bool:
        words = "Invalid job id", "already finished", "Job is pending", "no longer pending", "already completing"
        return any(word in str(error) for word in words)


def _update(job: QueuedJob, *values: str, mark: AdmissionRecord) -> None:
    command("scontrol", "update", f"JobId={job.name}", *values, f"AdminComment={mark.text()}")


# ---- reading ----


def _node_names(partition: str) -> set[str]:
    known = records("partition")
    if not partition:
        return {name for one in known for name in _expanded(one.get("Nodes", ""))}
    own = next((one for one in known if one.get("PartitionName") == partition), None)
    if own is None:
        raise LaunchError(f"Slurm has no partition '{partition}'. Name one of sinfo's with --partition.")
    return set(_expanded(own.get("Nodes", "")))


def _expanded(text: str) -> list[str]:
    return [] if text in ("", "(null)") else expand(text)


def _gpus_of_node(one: Mapping[str, str]) -> int:
    return sum(found.number for found in resources(one.get("Gres", ""))[0] if found.name == "gpu")


def _used(one: Mapping[str, str], size: int) -> int:
    """Return the GPUs in use on a node. one: Slurm's record of it. size: GPUs of a node, all of
    which count if the node takes no jobs, or if GPUs are not counted and the node has any job."""
    if _UNUSABLE.search(one.get("State", "")) or (size == 1 and one.get("CPUAlloc", "0") != "0"):
        return size
    used = sum(found.number for found in resources(one.get("GresUsed", ""))[0] if found.name == "gpu")
    return min(size, used)


def _reservation(one: Mapping[str, str]) -> ReservedNodes:
    return ReservedNodes(
        name=one["ReservationName"], nodes=frozenset(_expanded(one.get("Nodes", ""))), start=float(one["StartTime"]),
        end=float(one["EndTime"]),
    )  # fmt: skip


def _not_ours(one: Mapping[str, str]) -> str:
    """Return why a waiting job of the partition is left alone; empty if admission decides on it.
    one: Slurm's record of the job."""
    if "ArrayJobId" in one:
        return "it is an array of jobs"
    if AdmissionRecord.read(one.get("AdminComment", "")):
        return ""
    if one.get("Reason") in ("JobHeldAdmin", "BadConstraints"):
        return f"Slurm says {one['Reason']}"
    asks = any(one.get(key, "(null)") != "(null)" for key in ("ReqNodeList", "ExcNodeList", "Features"))
    return "it asks for certain nodes" if asks else ""


def _job(one: Mapping[str, str], size: int) -> QueuedJob:
    words = one.get("Comment", "").replace(",", " ").split()
    told = {key: value for key, _, value in (word.partition("=") for word in words)}
    state = one.get("JobState", "")
    limit, mark = one.get("TimeLimit", "UNLIMITED"), AdmissionRecord.read(one.get("AdminComment", ""))
    own_limit = mark.limit if mark else limit
    known = seconds_of(told.get("jct", ""), -1.0)
    return QueuedJob(
        name=one["JobId"], state="waiting" if state in WAITING else STATES.get(state, "over"),
        held=one.get("Priority") == "0" or one.get("Reason", "").startswith("JobHeld"),
        ready=one.get("Dependency", "(null)") == "(null)" and _time(one.get("EligibleTime")) <= time.time(),
        submit=mark.submit if mark else _time(one.get("SubmitTime")), start=_time(one.get("StartTime")), limit=limit,
        gpus=max(1, _requested_gpus(one, size)), nodes=tuple(_expanded(one.get("NodeList", ""))),
        requested_nodes=tuple(_expanded(one.get("ReqNodeList", ""))),
        priority=whole(told.get("priority", ""), -whole(one.get("Nice", ""), 0)),
        preemptible=told.get("preemptible", "no").lower() in YES,
        jct=known if known >= 0 else _minutes(own_limit) * MINUTE, has_jct=known >= 0, known=_known(one), mark=mark,
    )  # fmt: skip


def _known(one: Mapping[str, str]) -> dict[str, str]:
    """Return a job's properties by the names of job traces (``user``, ``group``, ...). one: Slurm's
    record of the job."""
    fields = {"group": "Account", "queue": "Partition", "cpus": "NumCPUs", "nodes": "NumNodes"}
    found = {name: one.get(key, "").partition("-")[0] for name, key in fields.items()}
    found["user"] = one.get("UserId", "").partition("(")[0]
    return {name: value for name, value in found.items() if value not in ("", "(null)")}


def _requested_gpus(one: Mapping[str, str], size: int) -> int:
    """Return the GPUs that a job requests; a job that requests none counts as using whole nodes.
    one: Slurm's record of the job. size: GPUs of a node."""
    nodes = whole(one.get("NumNodes", "").partition("-")[0], 1)
    per_node, in_all = _GPUS.search(one.get("TresPerNode", "")), _GPUS.search(one.get("TresPerJob", ""))
    if size == 1 or not (per_node or in_all):
        return nodes * size
    return int(in_all[1]) if in_all else int(per_node[1]) * nodes if per_node else 0


def _time(text: str | None) -> float:
    return float(text) if text and text.isdecimal() else 0.0


def _minutes(limit: str) -> float:
    """Return the minutes of a time limit in Slurm's format: D-HH:MM:SS, HH:MM:SS; inf for
    UNLIMITED."""
    if not re.fullmatch(r"(?:\d+-)?\d+:\d+:\d+", limit):
        return inf
    days, _, clock = limit.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


FREE_TEXT = ("AdminComment", "Comment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Extra",
             "Reason", "OS", "Power", "Container")  # fmt: skip


def records(what: str, *options: str) -> list[dict[str, str]]:
    """Return Slurm's records (``scontrol show WHAT``) of all nodes, partitions or reservations,
    whose names only operators choose, each as a dictionary."""
    return [found for block in _blocks(_shown(what, options=options)) if (found := _fields(block))]


def job_records(partition: str, qos: str) -> tuple[list[dict[str, str]], list[str]]:
    """Return (Slurm's records of all jobs of a partition or QOS, numbers of jobs whose record
    cannot be told from text that their user wrote)."""
    chosen = [f"--partition={partition}"] * bool(partition) + [f"--qos={qos}"] * bool(qos)
    listed = command("squeue", "--noheader", "--states=all", "--format=%A", *chosen).split()
    blocks = defaultdict[str, list[list[str]]](list)
    for block in _blocks(_shown("job")):
        blocks[_number(block)].append(block)
    found, unclear = list[dict[str, str]](), list[str]()
    for number in dict.fromkeys(listed):
        mine = blocks[number]
        if len(mine) > 1:  # another job's text may imitate its record; queried alone, it has one record
            mine = list[list[str]]()
            with suppress(LaunchError):  # the job has gone
                mine = _blocks(_shown("job", number))
        if len(mine) > 1 or any(not _sound(block) for block in mine):
            unclear.append(number)
        else:
            found += map(_fields, mine)
    return found, unclear


def _shown(what: str, *names: str, options: Sequence[str] = ()) -> str:
    return command("env", "SLURM_TIME_FORMAT=%s", "scontrol", *options, "show", what, *names)


def _blocks(text: str) -> list[list[str]]:
    """Return the lines of each record; lines before the first record are dropped."""
    found = list[list[str]]()
    for line in text.splitlines():
        if line and not line[0].isspace():
            found.append([])
        if found and line.strip():
            found[-1].append(line)
    return found


def _number(block: Sequence[str]) -> str:
    """Return the job number of a record."""
    return block[0].split()[0].partition("=")[2]


def _sound(block: Sequence[str]) -> bool:
    """Return True if a job's record can be trusted: it has UserId once and in Slurm's position.
    AdminComment, a field that decides about the job, must not follow the comment, which may have
    forged it."""
    keys = [line.strip().partition("=")[0] for line in block]
    comment = keys.index("Comment") if "Comment" in keys else len(keys)
    return keys[1:2] == ["UserId"] and keys.count("UserId") == 1 and "AdminComment" not in keys[comment:]


def _fields(block: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in block:
        key, _, rest = line.strip().partition("=")
        if not rest:
            continue
        if key in FREE_TEXT and line[0].isspace():
            found.setdefault(key, rest.strip())
            continue
        for word in line.partition(" JobName=")[0].split():
            name, equals, value = word.partition("=")
            if equals:
                found.setdefault(name, value)
    return found
