"""Slurm's queue as admission sees it, and what admission does to jobs that opted in: hold, start, send back.

Facts are read with ``scontrol show`` (``plait.launch.slurm_records``). What was decided of a job is kept in
its AdminComment, in Slurm's own state: whoever looks next finds it there.

===========  ===========================================================================================
known        jobs of one partition or QOS that wait, held by their users (``sbatch --hold``) or not held;
             words of their comments: ``jct=90m``, ``priority=5``, ``preemptible``
passed over  jobs of other partitions; jobs that an administrator holds; arrays of jobs, which are one
             record for many; jobs that wait for others or for a time; jobs whose name or comment has lines
             that look like fields of Slurm's
===========  ===========================================================================================
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from plait.core.base.errors import LaunchError
from plait.core.topology.hostlist import expand, fold
from plait.core.topology.slurm_lines import resources
from plait.launch.live_queue import (
    YES,
    LetIn,
    LiveQueue,
    Mark,
    QueuedJob,
    QueueView,
    ReservedNodes,
    seconds_of,
    whole,
)  # fmt: skip
from plait.launch.slurm import WAITING, command
from plait.launch.slurm_records import job_records, records

STATES: dict[str, Literal["running", "ending"]] = {"RUNNING": "running", "COMPLETING": "ending"}
MINUTE = 60.0
"""Slurm counts time limits in whole minutes."""
_UNUSABLE = re.compile(r"DOWN|DRAIN|FAIL|MAINT|COMPLETING|NOT_RESPONDING|POWER|UNKNOWN|REBOOT|FUTURE|INVAL")
_GPUS = re.compile(r"gres[:/]gpu(?:[:/][\w.+-]*[A-Za-z_][\w.+-]*)?[:=](\d+)")


@dataclass(frozen=True)
class SlurmQueue(LiveQueue):
    """Jobs of a partition or QOS beside reservations, by name."""

    partition: str
    qos: str
    reservations: tuple[str, ...]

    @property
    def closes(self) -> float:
        """A minute: no shorter limit can be given."""
        return MINUTE

    def look(self) -> QueueView:
        return look(self.partition, self.qos, self.reservations)

    def hold(self, job: QueuedJob) -> None:
        hold(job)

    def start(self, job: QueuedJob, how: LetIn) -> None:
        start(job, how)

    def settle(self, job: QueuedJob) -> None:
        settle(job)

    def send_back(self, job: QueuedJob) -> None:
        send_back(job)

    def restore(self, job: QueuedJob) -> None:
        restore(job)

    def gone(self, error: Exception) -> bool:
        words = "Invalid job id", "already finished", "Job is pending", "no longer pending", "already completing"
        return any(word in str(error) for word in words)


def look(partition: str, qos: str, reservations: Sequence[str]) -> QueueView:
    """The queue now. Raises LaunchError where Slurm does not answer, or knows no such partition or
    reservation."""
    nodes = _node_names(partition)
    found = [one for one in records("node", "-d") if one["NodeName"] in nodes]
    counts = {_gpus_of_node(one) for one in found}
    size = counts.pop() if len(counts) == 1 and 0 not in counts else 1
    used = {one["NodeName"]: _used(one, size) for one in found}
    known = [_reservation(one) for one in records("reservation") if one.get("ReservationName") in reservations]
    if missing := set(reservations) - {one.name for one in known}:
        name = min(missing)
        raise LaunchError(
            f"Slurm has no reservation '{name}'. Make it with plait reserve RANK_TABLE --name {name}, and name it with "
            "--reservation."
        )
    jobs: list[QueuedJob] = []
    told, unclear = job_records(partition, qos)
    passed = dict.fromkeys(unclear, "its name or comment has lines that look like Slurm's own")
    for one in told:
        if (partition and one.get("Partition") != partition) or (qos and one.get("QOS") != qos):
            continue
        if (why := _not_ours(one)) and one.get("JobState") in WAITING:
            passed[one["JobId"]] = why
        else:
            jobs.append(_job(one, size))
    return QueueView(jobs=tuple(jobs), used=used, size=size, reservations=tuple(known), passed=passed)


# ---- what admission does ----


def hold(job: QueuedJob) -> None:
    """Keep a waiting job from starting, as if its user had."""
    command("scontrol", "uhold", job.name)
    if job.mark:
        restore(job)


def start(job: QueuedJob, how: LetIn) -> None:
    """Let a held job start on these nodes. In a zone its time limit ends before the zone is due: Slurm starts
    it there for that reason alone. The mark is written first: whoever is killed between the two leaves a job
    that is held, and is decided anew."""
    mark = Mark(submit=job.submit, at=how.now, until=how.until, limit=job.own_limit, zones=tuple(how.zones))
    minutes = min(_minutes(mark.limit), (how.until - how.now) // MINUTE)
    told = [f"TimeLimit={int(minutes)}"] if how.until < inf else []
    _update(job, f"ReqNodeList={fold(how.nodes)}", *told, mark=mark)
    command("scontrol", "release", job.name)


def settle(job: QueuedJob) -> None:
    """Let a job that has started in a zone run until the zone is due, to the minute after: its limit had
    to end before, by up to a minute."""
    assert job.mark
    minutes = min(_minutes(job.mark.limit), ceil((job.mark.until - job.start) / MINUTE) + 1)
    if minutes > _minutes(job.limit):
        command("scontrol", "update", f"JobId={job.name}", f"TimeLimit={int(minutes)}")


def send_back(job: QueuedJob) -> None:
    """Stop a running job and put it back into the queue, held, at the place that it had."""
    _update(job, mark=Mark(submit=job.submit, at=job.start, limit=job.own_limit))
    command("scontrol", "requeuehold", job.name)


def restore(job: QueuedJob) -> None:
    """Give a job that waits again the limit and the nodes that it was submitted with."""
    told = "ReqNodeList=", f"TimeLimit={job.own_limit}"
    _update(job, *told, mark=Mark(submit=job.submit, limit=job.own_limit))


def _update(job: QueuedJob, *values: str, mark: Mark) -> None:
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
    """GPUs in use; all where the node takes no jobs, or no GPUs are counted and it has any job."""
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
    """Why a waiting job of the partition is left alone; empty for others."""
    if "ArrayJobId" in one:
        return "it is an array of jobs"
    if Mark.read(one.get("AdminComment", "")):
        return ""
    if one.get("Reason") in ("JobHeldAdmin", "BadConstraints"):
        return f"Slurm says {one['Reason']}"
    asks = any(one.get(key, "(null)") != "(null)" for key in ("ReqNodeList", "ExcNodeList", "Features"))
    return "it asks for certain nodes" if asks else ""


def _job(one: Mapping[str, str], size: int) -> QueuedJob:
    words = one.get("Comment", "").replace(",", " ").split()
    told = {key: value for key, _, value in (word.partition("=") for word in words)}
    state = one.get("JobState", "")
    limit, mark = one.get("TimeLimit", "UNLIMITED"), Mark.read(one.get("AdminComment", ""))
    own_limit = mark.limit if mark else limit
    known = seconds_of(told.get("jct", ""), -1.0)
    return QueuedJob(
        name=one["JobId"], state="waiting" if state in WAITING else STATES.get(state, "over"),
        held=one.get("Priority") == "0" or one.get("Reason", "").startswith("JobHeld"),
        ready=one.get("Dependency", "(null)") == "(null)" and _time(one.get("EligibleTime")) <= time.time(),
        submit=mark.submit if mark else _time(one.get("SubmitTime")), start=_time(one.get("StartTime")), limit=limit,
        gpus=max(1, _asked(one, size)), nodes=tuple(_expanded(one.get("NodeList", ""))),
        asked=tuple(_expanded(one.get("ReqNodeList", ""))),
        priority=whole(told.get("priority", ""), -whole(one.get("Nice", ""), 0)),
        preemptible=told.get("preemptible", "no").lower() in YES,
        jct=known if known >= 0 else _minutes(own_limit) * MINUTE, told=known >= 0, known=_known(one), mark=mark,
    )  # fmt: skip


def _known(one: Mapping[str, str]) -> dict[str, str]:
    """By the names that traces have."""
    fields = {"group": "Account", "queue": "Partition", "cpus": "NumCPUs", "nodes": "NumNodes"}
    found = {name: one.get(key, "").partition("-")[0] for name, key in fields.items()}
    found["user"] = one.get("UserId", "").partition("(")[0]
    return {name: value for name, value in found.items() if value not in ("", "(null)")}


def _asked(one: Mapping[str, str], size: int) -> int:
    """GPUs that a job asks for; one of no GPUs counts as having its nodes whole."""
    nodes = whole(one.get("NumNodes", "").partition("-")[0], 1)
    per_node, in_all = _GPUS.search(one.get("TresPerNode", "")), _GPUS.search(one.get("TresPerJob", ""))
    if size == 1 or not (per_node or in_all):
        return nodes * size
    return int(in_all[1]) if in_all else int(per_node[1]) * nodes if per_node else 0


def _time(text: str | None) -> float:
    return float(text) if text and text.isdecimal() else 0.0


def _minutes(limit: str) -> float:
    """Of a time limit as Slurm prints it: D-HH:MM:SS, HH:MM:SS, UNLIMITED."""
    if not re.fullmatch(r"(?:\d+-)?\d+:\d+:\d+", limit):
        return inf
    days, _, clock = limit.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60
