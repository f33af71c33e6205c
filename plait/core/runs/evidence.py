"""Evidence about every rank of a run that hangs, and the verdict on its cause.

`Evidence` describes one rank: its last calls (from its ring), its process as the system sees it,
its stack, and the ranks that it reaches. It needs no cooperation: a rank that was killed, is
stopped or holds the interpreter lock has evidence too. ``plait.diagnose.verdicts.hang`` makes a
`Verdict` from the evidence of all ranks.
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
from plait.core.record.ring import UNSET, Record, RecordKind, Ring, RingGroup

VERSION = 1
FILE = "hang.json"
"""The file in a run's folder with the verdict and the evidence."""

FIRST, LAST = 4.0, 0.9
"""Limits of a rank's first activity of a kind. It may take ``FIRST`` times the deadline of calls,
but at most the share ``LAST`` of the time after which other ranks' calls fail. After that it is too
late to query the ranks."""
STACKS: int | None = signal.SIGRTMIN + 3 if sys.platform == "linux" else None
"""The signal on which a rank prints its threads' stacks; None on systems without real-time
signals."""

State = Literal["runs", "stopped", "ended", "unknown"]
"""The state of a process."""
Thread = Literal["waits", "works", "silent", "unknown"]
"""The state of the training thread. waits: for other ranks. works: anything else. silent: something
in its process blocks the interpreter, so that no thread can answer."""
Cause = Literal["none", "crashed", "stopped", "host code", "missing", "cut off", "mismatch", "deadlock", "unknown"]
"""The cause of a hang. missing: a rank did not enter a call, for an unknown reason."""


class CallSequence(NamedTuple):
    """A channel with its own sequence of calls: a group's collectives, or its messages from one
    rank to another."""

    group: RingGroup
    source: int = UNSET
    target: int = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective or a message on one rank. Times: ns of its host's monotonic clock, 0 if not
    reached yet.

    sequence: index in its channel, from 0 on. signature: of the properties that members of the
    group must agree on; 0 if unknown. bytes: of the larger tensor, or of the message. name: the op
    of the schedule that makes the call.
    """

    channel: CallSequence
    sequence: int
    verb: str
    dtype: str = ""
    bytes: int = 0
    signature: int = 0
    name: str = ""
    step: int = UNSET
    enqueued: int = 0
    ended: int = 0
    failed: bool = False

    @property
    def over(self) -> bool:
        """True if the call has ended successfully."""
        return bool(self.ended) and not self.failed

    @property
    def signs(self) -> tuple[str, str, int]:
        """The properties that must be equal on all participants."""
        return self.verb, self.dtype, self.signature or self.bytes

    def __str__(self) -> str:
        group, verb = self.channel.group, self.verb.replace("_", "-")
        what = f"{verb} {self.sequence}"
        if self.channel.source >= 0:
            what = f"message {self.sequence} from rank {self.channel.source} to rank {self.channel.target}"
        return f"{what} of {spoken_group(group)}" + (f" ({self.name})" if self.name else "")

    @staticmethod
    def of(record: Record, rank: int) -> Call | None:
        """Return the call of a ring's record; None if the record is no call."""
        if record.group is None or record.kind not in (RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE):
            return None
        ends = {RecordKind.SEND: (rank, record.peer), RecordKind.RECEIVE: (record.peer, rank)}.get(
            record.kind, (UNSET, UNSET)
        )
        return Call(
            channel=CallSequence(record.group, *ends), sequence=record.sequence, verb=record.verb, dtype=record.dtype,
            bytes=record.bytes, signature=record.signature, name=record.name.text, step=record.step,
            enqueued=record.enqueued, ended=record.ended, failed=record.failed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence about a rank. at: when its calls were read, in ns of their clock.

    recorded: True if its ring could be read. status: exit status of its process, -N for signal N;
    None if unknown. ended_at: when the launcher noticed the end, in seconds, to find the first end.
    doing: its current activity. patient: True if the activity may take very long. first: True if it
    is the first of its kind since the rank's start. calls: all open calls and the last few of every
    channel, oldest first. stack: of the training thread, innermost frame last. error: its final
    error message. reached, missed: ranks that its host could and could not reach.

    moved, longest: ``at`` and ``longest`` of ``ring_progress.RingProgress``. computes: True if it
    is inside its own work and uses CPU time for it.
    """

    rank: int
    host: str = ""
    state: State = "unknown"
    status: int | None = None
    ended_at: float = 0.0
    thread: Thread = "unknown"
    doing: str = ""
    step: int = UNSET
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
        """The seconds since the rank last started or ended an op by itself; None if unknown."""
        return (self.at - self.moved) / 1e9 if self.moved else None


@dataclass(frozen=True, kw_only=True)
class WaitLink:
    """A link of the chain of waits: ``ranks`` wait in ``call`` for the ranks ``on``."""

    ranks: tuple[int, ...]
    call: str
    on: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on the cause of a hang. ranks, hosts: at fault; with a tie, one of the
    candidates. why: a paragraph for people. differs: the property in which the calls of a mismatch
    differ. chain: from waiting ranks to the cause, or a cycle. also: further faults that do not
    follow from this one."""

    cause: Cause
    why: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    differs: str = ""
    chain: tuple[WaitLink, ...] = ()
    also: tuple[Verdict, ...] = ()

    @property
    def certain(self) -> bool:
        """True if the verdict names a cause."""
        return self.cause not in ("none", "unknown")

    @property
    def heading(self) -> str:
        """The verdict's title, a few words."""
        return {"none": "No hang", "unknown": "A hang; its cause is not known"}.get(self.cause, f"A hang: {self.cause}")


def spoken_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, with ranges.

    >>> spoken_ranks([4, 0, 1, 2, 7])
    'ranks 0-2, 4 and 7'
    >>> spoken_ranks([3])
    'rank 3'
    """
    numbers = sorted(set(ranks))
    parts = _runs(numbers)
    return ("rank " if len(numbers) == 1 else "ranks ") + listed(parts)


def spoken_group(group: RingGroup) -> str:
    """Return a group's label and ranks as text, with ranges.

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
    """Return ``a, b and c``; if there are more than eight parts, the first seven and the number of
    further ones."""
    if len(parts) > 8:
        parts = [*parts[:7], f"{len(parts) - 7} more"]
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _runs(numbers: Sequence[int]) -> list[str]:
    """Return sorted numbers as texts: consecutive and evenly spaced ones as one range (``0-2``)."""
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
    """Write verdict and evidence to a run's folder. Raises OSError."""
    content = {
        "version": VERSION,
        "verdict": asdict(verdict),
        "evidence": [evidence_values(one) for one in evidence],
    }
    with replacing(folder / FILE, parents=False) as path:
        path.write_text(json.dumps(content) + "\n")


def read_hang(path: Path) -> tuple[Verdict, list[Evidence]]:
    """Return the verdict and the evidence in a file. Raises DataError if it is missing, damaged or
    of another version."""
    try:
        content = read_table(path, DOCUMENT)
        if content.get("version") != VERSION:
            raise DataError(f"{path} is of version {shown(content.get('version'))}; this Plait reads version {VERSION}")
        return decode(Verdict, content["verdict"]), [evidence_of(one) for one in content["evidence"]]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, JobError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def evidence_values(evidence: Evidence) -> dict[str, Any]:
    """Return evidence as plain values, for JSON."""
    values = {name: getattr(evidence, name) for name in Evidence.__dataclass_fields__}
    return values | {"calls": [asdict(call) | {"channel": _channel_values(call.channel)} for call in evidence.calls]}


def evidence_of(values: dict[str, Any]) -> Evidence:
    """Return the evidence from the values of ``evidence_values``. Raises JobError, TypeError,
    KeyError or ValueError for anything else."""
    calls = [call | {"channel": _channel_of(call["channel"])} for call in values["calls"]]
    return decode(Evidence, values | {"calls": calls})


def _channel_values(channel: CallSequence) -> list[Any]:
    return [channel.group.ranks, channel.group.ordinal, channel.group.label, channel.source, channel.target]


def _channel_of(values: list[Any]) -> dict[str, Any]:
    ranks, ordinal, label, source, target = values
    group = {"ranks": ranks, "ordinal": ordinal, "label": label}
    return {"group": group, "source": source, "target": target}


RINGS = "rings"
"""The folder of a run's rings."""
KEPT = 4
"""Number of ended calls of each channel that are kept, for comparison with the calls that other
ranks began."""
CALLS = (RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE)


def ring_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's ring in a run's folder."""
    return folder / RINGS / f"rank-{rank:05d}.ring"


def calls_of(ring: Ring) -> tuple[Call, ...]:
    """Return the last calls of a rank, oldest first: all open calls and the last ``KEPT`` ended
    calls of each channel."""
    import numpy as np

    table = ring.table
    rows = np.flatnonzero(np.isin(table["kind"], CALLS))
    if not len(rows):
        return ()
    calls = table[rows]
    fields = [calls[name].astype(np.int64) for name in ("peer", "kind", "group")]
    order = np.lexsort(fields)  # stable: keeps the order of starts within a channel
    new = np.any([np.diff(field[order], prepend=field[order[0]] - 1) != 0 for field in fields], axis=0)
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(order))
    over = calls["ended"][order] > 0
    after = np.append(np.cumsum(over[::-1])[::-1], 0)  # number of ended calls from each position on
    kept = ~over | (after[:-1] - np.repeat(after[ends], ends - starts) <= KEPT)
    found = ring.records(np.sort(rows[order[kept]]))
    return tuple(call for record in found if (call := Call.of(record, ring.rank)))


def waited_since(calls: tuple[Call, ...]) -> int:
    """Return the start of a rank's longest wait, in ns: the start of a channel's first open call,
    or the end of the previous call if later; 0 if no call is open."""
    first: dict[tuple[int, int, int], Call] = {}
    last: dict[tuple[int, int, int], int] = {}
    for call in calls:
        key = (id(call.channel.group), call.channel.source, call.channel.target)
        if call.over:
            last[key] = max(last.get(key, 0), call.ended)
        elif key not in first or call.sequence < first[key].sequence:
            first[key] = call
    return min((max(call.enqueued, last.get(key, 0)) for key, call in first.items()), default=0)
