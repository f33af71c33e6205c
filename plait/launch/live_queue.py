"""A cluster's queue for admission, whatever manages the cluster; and the actions on jobs that opted
in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol

_MARK = re.compile(
    r"plait-admit submit=(?P<submit>\d+) at=(?P<at>\d+) until=(?P<until>\d+|never) limit=(?P<limit>\S+) "
    r"zones=(?P<zones>\S*)"
)
_LENGTH = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s?)?")
YES = ("", "yes", "true", "y", "t", "1")
MOST = 1 << 31
"""The largest number accepted from users in an option of a job, such as its priority; larger
numbers are clipped to it."""


@dataclass(frozen=True, kw_only=True)
class AdmissionRecord:
    """Admission's record of a job, stored in the cluster manager. submit: the time of the first
    submission, which a requeue may reset. at: when the job was admitted; 0 while it waits. until:
    when the first zone that it entered is due; inf outside zones. limit: the job's original time
    limit. zones: names of the entered zones. Times in seconds since 1970."""

    submit: float
    at: float = 0.0
    until: float = inf
    limit: str = "UNLIMITED"
    zones: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the record as one line of text."""
        until = "never" if self.until == inf else str(int(self.until))
        when = f"submit={int(self.submit)} at={int(self.at)} until={until}"
        return f"plait-admit {when} limit={self.limit} zones={','.join(self.zones)}"

    @staticmethod
    def read(text: str) -> AdmissionRecord | None:
        """Parse a record; None if the text holds none."""
        found = _MARK.search(text)
        if not found:
            return None
        until = inf if found["until"] == "never" else float(found["until"])
        zones = tuple(name for name in found["zones"].split(",") if name)
        return AdmissionRecord(
            submit=float(found["submit"]), at=float(found["at"]), until=until, limit=found["limit"], zones=zones
        )


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that opted in to admission. held: True if it may not start until it is admitted. ready:
    True if it waits for no other job and no time. submit, start: seconds since 1970. gpus: on all
    its nodes (nodes, if nodes have no GPUs). nodes: where the job runs. requested_nodes: where it
    is to run. limit: its time limit in the manager's notation. jct: estimated run time in seconds.
    has_jct: True if the user gave ``jct``. known: further properties, such as group, user and
    queue. parts: names of its pods, if it has several parts."""

    name: str
    state: Literal["waiting", "running", "ending", "over"]
    held: bool
    ready: bool
    submit: float
    start: float = 0.0
    limit: str = "UNLIMITED"
    gpus: int = 1
    nodes: tuple[str, ...] = ()
    requested_nodes: tuple[str, ...] = ()
    priority: int = 0
    preemptible: bool = False
    jct: float = inf
    has_jct: bool = False
    known: Mapping[str, str] = field(default_factory=dict[str, str])
    mark: AdmissionRecord | None = None
    parts: tuple[str, ...] = ()

    @property
    def own_limit(self) -> str:
        """The time limit with which the job was submitted, in the manager's notation."""
        return self.mark.limit if self.mark else self.limit


@dataclass(frozen=True, kw_only=True)
class ReservedNodes:
    """Nodes reserved from ``start`` to ``end``, seconds since 1970."""

    name: str
    nodes: frozenset[str]
    start: float
    end: float = inf


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """A snapshot of a cluster's queue. jobs: the jobs that opted in. passed: those left alone, with
    the reason. used, size: GPUs in use on every node, and GPUs per node; size is 1 if nodes have no
    GPUs."""

    jobs: tuple[QueuedJob, ...]
    used: dict[str, int]
    size: int
    reservations: tuple[ReservedNodes, ...]
    passed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class AdmissionTerms:
    """The terms of a job's start. gpus: on each of its nodes. zones: the zones that the job enters.
    until: when the first of them is due; inf outside zones. now: the present time. Times in seconds
    since 1970."""

    nodes: Sequence[str]
    gpus: Sequence[int]
    zones: Sequence[str]
    until: float
    now: float


class LiveQueue(Protocol):
    """The queue of a cluster manager."""

    @property
    def closing_seconds(self) -> float:
        """Seconds before a reservation's start in which no job may enter its nodes."""
        ...

    def look(self) -> QueueView:
        """Return a snapshot of the queue. Raises LaunchError if the manager does not answer, or a
        named object does not exist."""
        ...

    def hold(self, job: QueuedJob) -> None:
        """Hold a waiting job, so that it does not start."""
        ...

    def start(self, job: QueuedJob, how: AdmissionTerms) -> None:
        """Let a held job start; in a zone, the job ends by itself when the zone is due."""
        ...

    def settle(self, job: QueuedJob) -> None:
        """Correct the time limit of a running job that was admitted to a zone, so that it lasts
        until the zone is due."""
        ...

    def send_back(self, job: QueuedJob) -> None:
        """Stop a running job and requeue it, held, at its former position."""
        ...

    def restore(self, job: QueuedJob) -> None:
        """Restore the submitted time limit and nodes of a job that is held again."""
        ...

    def job_changed(self, error: Exception) -> bool:
        """Return True if ``error``, a manager's refusal, means that the job has ended or changed
        meanwhile."""
        ...


def seconds_of(text: str, default: float) -> float:
    """Return the seconds of a duration such as ``90m``, ``1d12h`` or ``600``; ``default`` if the
    text is no duration.

    >>> seconds_of("1h30m", 0.0), seconds_of("600", 0.0), seconds_of("soon", 7.0), seconds_of("", 7.0)
    (5400.0, 600.0, 7.0, 7.0)
    """
    found = _LENGTH.fullmatch(text)
    if not text or not found:
        return default
    return float(sum(int(part or 0) * unit for part, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True)))


def whole(text: str, default: int) -> int:
    """Return a whole number, clipped to ±``MOST``; ``default`` if the text is none."""
    try:
        return max(-MOST, min(int(text), MOST))
    except ValueError:
        return default
