"""A cluster's queue as admission sees it, whatever manages the cluster; what it can do to jobs that opted
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
"""Of numbers that users write: greater ones are this."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What was decided of a job, as the cluster manager keeps it beside the job. submit: when it was
    submitted first, which may be counted anew where it is sent back. at: when it was let in; 0 while it
    waits. until: when the first zone that it entered is due, inf outside; limit: the time limit that it
    had; zones: names of those."""

    submit: float
    at: float = 0.0
    until: float = inf
    limit: str = "UNLIMITED"
    zones: tuple[str, ...] = ()

    def text(self) -> str:
        """One line."""
        until = "never" if self.until == inf else str(int(self.until))
        when = f"submit={int(self.submit)} at={int(self.at)} until={until}"
        return f"plait-admit {when} limit={self.limit} zones={','.join(self.zones)}"

    @staticmethod
    def read(text: str) -> Mark | None:
        """None for a text that is somebody else's."""
        found = _MARK.search(text)
        if not found:
            return None
        until = inf if found["until"] == "never" else float(found["until"])
        zones = tuple(name for name in found["zones"].split(",") if name)
        return Mark(
            submit=float(found["submit"]), at=float(found["at"]), until=until, limit=found["limit"], zones=zones
        )


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that opted in. held: whether it may not start until it is let in; ready: whether it waits for
    no other job and no time. gpus: of all its nodes (nodes where nodes have none). nodes: where it runs;
    asked: where it is to run. limit: its time limit, as the manager writes it. jct: seconds that it is
    believed to run. parts: names of what it consists of, where that is several."""

    name: str
    state: Literal["waiting", "running", "ending", "over"]
    held: bool
    ready: bool
    submit: float
    start: float = 0.0
    limit: str = "UNLIMITED"
    gpus: int = 1
    nodes: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    priority: int = 0
    preemptible: bool = False
    jct: float = inf
    told: bool = False
    known: Mapping[str, str] = field(default_factory=dict[str, str])
    mark: Mark | None = None
    parts: tuple[str, ...] = ()

    @property
    def own_limit(self) -> str:
        """The time limit that it was submitted with."""
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
    """What a cluster manager says at one moment. jobs: those that opted in; passed: others of them that are
    left alone, by why. used, size: GPUs in use on every node, and GPUs of a node; 1 where nodes have none."""

    jobs: tuple[QueuedJob, ...]
    used: dict[str, int]
    size: int
    reservations: tuple[ReservedNodes, ...]
    passed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class LetIn:
    """How a job starts. gpus: of each of its nodes. zones: those that it enters; until: when the first of
    them is due, inf outside; now: seconds since 1970."""

    nodes: Sequence[str]
    gpus: Sequence[int]
    zones: Sequence[str]
    until: float
    now: float


class LiveQueue(Protocol):
    """A cluster manager's queue."""

    @property
    def closes(self) -> float:
        """Seconds before a reservation begins from which on nobody enters."""
        ...

    def look(self) -> QueueView:
        """The queue now. Raises LaunchError where nobody answers, or what was named is not there."""
        ...

    def hold(self, job: QueuedJob) -> None:
        """Keep a job from starting that waits and is not held."""
        ...

    def start(self, job: QueuedJob, how: LetIn) -> None:
        """Let a held job start; in a zone it ends when that is due, by itself."""
        ...

    def settle(self, job: QueuedJob) -> None:
        """Put the limit of a job right that runs in a zone."""
        ...

    def send_back(self, job: QueuedJob) -> None:
        """Stop a running job and put it back into the queue, held, at the place that it had."""
        ...

    def restore(self, job: QueuedJob) -> None:
        """Give a job that is held again what it was submitted with."""
        ...

    def gone(self, error: Exception) -> bool:
        """Whether a refusal means that the job has ended or changed meanwhile."""
        ...


def seconds_of(text: str, other: float) -> float:
    """Of ``90m``, ``1d12h``, ``600``; ``other`` for what is none.

    >>> seconds_of("1h30m", 0.0), seconds_of("600", 0.0), seconds_of("soon", 7.0), seconds_of("", 7.0)
    (5400.0, 600.0, 7.0, 7.0)
    """
    found = _LENGTH.fullmatch(text)
    if not text or not found:
        return other
    return float(sum(int(part or 0) * unit for part, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True)))


def whole(text: str, other: int) -> int:
    """A whole number of at most ``MOST``, or ``other``."""
    try:
        return max(-MOST, min(int(text), MOST))
    except ValueError:
        return other
