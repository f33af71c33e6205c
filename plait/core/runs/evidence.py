"""What is known of every rank when a run hangs, and what follows from it.

`Evidence` is one rank's: its last calls (from its ring), its process as the system sees it, its stack, whom
it reaches. Nobody has to answer for it: a rank that was killed, is stopped or holds the interpreter's lock
has evidence too. `Verdict` is what ``plait.diagnose.hang`` makes of all of them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import DOCUMENT, read_table
from plait.core.base.errors import DataError, JobError
from plait.core.base.files import replacing
from plait.core.base.numbers import shown
from plait.core.record.ring import NOBODY, Record, RecordKind, RingGroup

VERSION = 1
FILE = "hang.json"
"""Where a run's folder keeps both."""

FIRST, LAST = 4.0, 0.9
"""Times the deadline of calls that a rank may take for one thing that it does for the first time, but no more
than this share of the time after which the others' calls fail: then it is too late to ask."""
STACKS: int | None = signal.SIGRTMIN + 3 if sys.platform == "linux" else None
"""On this signal a rank prints its threads' stacks; None where there are no such signals."""

State = Literal["runs", "stopped", "ended", "unknown"]
"""Of a process."""
Thread = Literal["waits", "works", "silent", "unknown"]
"""Of the thread that trains: it waits for other ranks; it does something else; something in its process keeps
Python from running, so that it cannot answer."""
Cause = Literal["none", "crashed", "stopped", "host code", "missing", "cut off", "mismatch", "deadlock", "unknown"]
"""missing: a rank did not come to a call, and nobody tells why."""


class CallSequence(NamedTuple):
    """What has a sequence of calls of its own: a group's collectives, or its messages from one rank to
    another."""

    group: RingGroup
    source: int = NOBODY
    target: int = NOBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective or a message on one rank. Times: ns of its host's monotonic clock, 0 if still to come.

    sequence: in its channel, from 0 on. signature: of what the members of the group must agree on; 0 if not
    known. bytes: of the larger tensor, or of the message. name: the op of the schedule that it belongs to.
    """

    channel: CallSequence
    sequence: int
    verb: str
    dtype: str = ""
    bytes: int = 0
    signature: int = 0
    name: str = ""
    step: int = NOBODY
    enqueued: int = 0
    ended: int = 0
    failed: bool = False

    @property
    def over(self) -> bool:
        """Whether it has done what it was to do."""
        return bool(self.ended) and not self.failed

    @property
    def signs(self) -> tuple[str, str, int]:
        """What must be equal on all that take part."""
        return self.verb, self.dtype, self.signature or self.bytes

    def __str__(self) -> str:
        group, verb = self.channel.group, self.verb.replace("_", "-")
        what = f"{verb} {self.sequence}"
        if self.channel.source >= 0:
            what = f"message {self.sequence} from rank {self.channel.source} to rank {self.channel.target}"
        return f"{what} of {spoken_group(group)}" + (f" ({self.name})" if self.name else "")

    @staticmethod
    def of(record: Record, rank: int) -> Call | None:
        """What a ring's record says of a call; None if it is about something else."""
        if record.group is None or record.kind not in (RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE):
            return None
        ends = {RecordKind.SEND: (rank, record.peer), RecordKind.RECEIVE: (record.peer, rank)}.get(
            record.kind, (NOBODY, NOBODY)
        )
        return Call(
            channel=CallSequence(record.group, *ends), sequence=record.sequence, verb=record.verb, dtype=record.dtype,
            bytes=record.bytes, signature=record.signature, name=record.name.text, step=record.step,
            enqueued=record.enqueued, ended=record.ended, failed=record.failed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a rank. at: when its calls were read, on the clock of their times.

    recorded: whether its ring could be read. status: of its process that has ended, -N for signal N; None if
    not known. ended_at: when the launcher saw that, in seconds, to tell the first. patient: what it does may
    rightly take very long; first: it does that for the first time since it was started. calls: oldest first:
    what is open, and the last few of every channel. stack: of the thread that trains, innermost last. error:
    what it said in the end. reached, missed: ranks that its host could and could not reach.

    moved, longest: as in ``ring_progress.RingProgress``, whose ``at`` moved is. computes: it is inside a
    piece of work and takes a processor's time for it.
    """

    rank: int
    host: str = ""
    state: State = "unknown"
    status: int | None = None
    ended_at: float = 0.0
    thread: Thread = "unknown"
    doing: str = ""
    step: int = NOBODY
    patient: bool = False
    recorded: bool = True
    at: int = 0
    calls: tuple[Call, ...] = ()
    stack: tuple[str, ...] = ()
    error: str = ""
    reached: tuple[int, ...] = ()
    missed: tuple[int, ...] = ()
    first: bool = False
    moved: int = 0
    longest: float = 0.0
    computes: bool = False

    @property
    def still(self) -> float | None:
        """Seconds since it began or ended anything by itself; None if that is not known."""
        return (self.at - self.moved) / 1e9 if self.moved else None


@dataclass(frozen=True, kw_only=True)
class WaitLink:
    """A link of the chain: who waits for whom, in which call."""

    ranks: tuple[int, ...]
    call: str
    on: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why a run hangs. ranks, hosts: at fault; with a tie, one of the candidates. why: a paragraph for
    people. differs: the property in which the calls of a mismatch differ. chain: from waiting ranks to the
    cause, or the circle. also: further faults that do not follow from this one."""

    cause: Cause
    why: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    differs: str = ""
    chain: tuple[WaitLink, ...] = ()
    also: tuple[Verdict, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether it names a cause."""
        return self.cause not in ("none", "unknown")

    @property
    def heading(self) -> str:
        """What to call it, in a few words."""
        return {"none": "No hang", "unknown": "A hang; its cause is not known"}.get(self.cause, f"A hang: {self.cause}")


def spoken_ranks(ranks: Iterable[int]) -> str:
    """
    >>> spoken_ranks([4, 0, 1, 2, 7])
    'ranks 0-2, 4 and 7'
    >>> spoken_ranks([3])
    'rank 3'
    """
    numbers = sorted(set(ranks))
    parts = _runs(numbers)
    return ("rank " if len(numbers) == 1 else "ranks ") + listed(parts)


def spoken_group(group: RingGroup) -> str:
    """
    >>> spoken_group(RingGroup((0, 1, 2, 3), 0, "dp"))
    'dp group 0-3'
    >>> spoken_group(RingGroup((1, 9, 17, 25), 2, "dp"))
    'dp group 1-25 by 8#2'
    """
    label = f"{group.label} " if group.label else ""
    parts = _runs(sorted(group.ranks))
    shown = parts if len(parts) <= 8 else [*parts[:7], "..."]
    return f"{label}group {','.join(shown)}" + (f"#{group.ordinal}" if group.ordinal else "")


def listed(parts: Sequence[str]) -> str:
    """``a, b and c``; of very many, the first and how many more."""
    if len(parts) > 8:
        parts = [*parts[:7], f"{len(parts) - 7} more"]
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _runs(numbers: Sequence[int]) -> list[str]:
    """Neighbouring numbers written as one: ``0-2``; evenly spaced ones too."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return [f"{numbers[0]}-{numbers[-1]} by {steps.pop()}"]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]


# ---- the file ----


def write_hang(folder: Path, verdict: Verdict, evidence: Sequence[Evidence]) -> None:
    """Keep both in a run's folder. Raises OSError."""
    content = {
        "version": VERSION,
        "verdict": asdict(verdict),
        "evidence": [evidence_values(one) for one in evidence],
    }
    with replacing(folder / FILE, parents=False) as path:
        path.write_text(json.dumps(content) + "\n")


def read_hang(path: Path) -> tuple[Verdict, list[Evidence]]:
    """Both. Raises DataError for a file that is missing, damaged or of another version."""
    try:
        content = read_table(path, DOCUMENT)
        if content.get("version") != VERSION:
            raise DataError(f"{path} is of version {shown(content.get('version'))}; this Plait reads version {VERSION}")
        return decode(Verdict, content["verdict"]), [evidence_of(one) for one in content["evidence"]]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, JobError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def evidence_values(one: Evidence) -> dict[str, Any]:
    """As plain values, for JSON."""
    values = {name: getattr(one, name) for name in Evidence.__dataclass_fields__}
    return values | {"calls": [asdict(call) | {"channel": _channel_values(call.channel)} for call in one.calls]}


def evidence_of(values: dict[str, Any]) -> Evidence:
    """What ``evidence_values`` made plain. Raises JobError, TypeError,
    KeyError or ValueError for something else."""
    calls = [call | {"channel": _channel_of(call["channel"])} for call in values["calls"]]
    return decode(Evidence, values | {"calls": calls})


def _channel_values(channel: CallSequence) -> list[Any]:
    return [channel.group.ranks, channel.group.ordinal, channel.group.label, channel.source, channel.target]


def _channel_of(values: list[Any]) -> dict[str, Any]:
    ranks, ordinal, label, source, target = values
    group = {"ranks": ranks, "ordinal": ordinal, "label": label}
    return {"group": group, "source": source, "target": target}
