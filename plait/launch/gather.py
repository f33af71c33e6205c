"""Collecting what is known of every rank of a run, from outside: rings, what ranks say of themselves, and
what this machine's kernel says of their processes. No rank has to answer."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import NamedTuple

from plait.core.base.process import boot_id, process_since, process_state
from plait.core.record.ring import Header, read_rings
from plait.core.record.ring_hosts import host_names
from plait.core.record.ring_progress import moved
from plait.core.runs.evidence import STACKS, Evidence, State
from plait.core.runs.parts import RankAnswer, read_parts
from plait.core.runs.ring_calls import RINGS, calls_of

FRAMES = 12
"""Lines of a stack that are kept."""
BUSY = 0.01
"""Share of a processor that is work: a thread that waits or sleeps takes less, one that computes beside a
hundred others as much."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a launcher has seen of a rank. pid: if it is on this machine. doing to writing: as in its last
    ``Beat``. said: how it explained its end."""

    state: State
    pid: int | None = None
    status: int | None = None
    ended_at: float = 0.0
    doing: str = ""
    step: int = -1
    patient: bool = False
    first: bool = False
    writing: int = 0
    said: str = ""


class Gathered(NamedTuple):
    """problems: what could not be read, in words."""

    evidence: list[Evidence]
    problems: list[str]
    headers: dict[int, Header]


def gather(folder: Path, seen: Mapping[int, Seen] | None = None, *, world: int = 0) -> Gathered:
    """Evidence of every rank of the run in ``folder``.

    seen: by the launcher of a run that goes on; without one, processes are looked up on this machine. world:
    how many ranks there are, if rings may be missing.
    """
    parts, problems = read_parts(folder), list[str]()
    found: dict[int, Evidence] = {}
    headers: dict[int, Header] = {}
    for ring in read_rings(folder / RINGS, problems):
        if (known := (seen or {}).get(ring.rank)) and known.pid not in (None, ring.header.pid):
            continue  # of an earlier start
        headers[ring.rank], now = ring.header, _now(ring.header)
        own = moved(ring, now)
        found[ring.rank] = Evidence(
            rank=ring.rank, at=now, calls=calls_of(ring), step=ring.header.step,
            moved=own.at, longest=own.longest, computes=own.inside,
        )  # fmt: skip
    hosts = host_names(headers)
    world = max([world, *(header.world for header in headers.values())])
    answers = any(parts.get(rank, None) and parts[rank].token == header.token for rank, header in headers.items())
    evidence = [
        _of(
            found.get(rank) or Evidence(rank=rank, recorded=False), headers.get(rank), parts.get(rank),
            (seen or {}).get(rank), host=hosts.get(rank, ""), answers=answers,
        )
        for rank in range(world)
    ]  # fmt: skip
    return Gathered(evidence, problems, headers)


def _of(base: Evidence, header: Header | None, part: RankAnswer | None, seen: Seen | None, *, host: str,
        answers: bool) -> Evidence:  # fmt: skip
    """answers: whether any rank has answered, so that one that has not is silent."""
    one = replace(base, host=host)
    if header and part and part.token == header.token:
        one = replace(one, thread=part.thread, doing=part.doing, patient=part.patient, stack=part.stack[-FRAMES:],
                      step=part.step, reached=part.reached, missed=part.missed, first=part.first,
                      computes=one.computes and part.busy > BUSY)  # fmt: skip
    elif answers:
        one = replace(one, thread="silent")
    if seen is not None:
        doing, step = (one.doing or seen.doing), max(one.step, seen.step)
        one = replace(one, state=seen.state, status=seen.status, ended_at=seen.ended_at, error=seen.said,
                      doing=doing, step=step, patient=one.patient or seen.patient,
                      first=one.first or seen.first)  # fmt: skip
        return _with_kernel(one, seen.pid)
    state, status = _process(header) if header else ("unknown", None)
    if state == "ended" and status is None:  # long ago: what it was at when the others asked is what counts
        state = "runs" if part else "unknown"
        at = max((call.enqueued for call in one.calls), default=0)
        one = replace(one, at=max(at, _then(header, part)))
    return _with_kernel(replace(one, state=state, status=status), header and header.pid)


def _with_kernel(one: Evidence, pid: int | None) -> Evidence:
    """With what the kernel says of a rank that is stopped on this machine, in place of a stack."""
    says = kernel_says(pid) if pid and one.state == "stopped" else ""
    return replace(one, stack=(says,)) if says else one


def _process(header: Header) -> tuple[State, int | None]:
    """A rank's process, if it is one of this machine; 0 if the rank ended in good order."""
    if header.closed:
        return "ended", 0
    try:
        if header.boot != boot_id():
            return "unknown", None
    except OSError:
        return "unknown", None
    state = process_since(header.pid, header.process_started)
    if state is None:
        return "ended", None
    return ("stopped" if state.stopped else "runs"), None


def _now(header: Header) -> int:
    """This moment on the clock of a ring's host; of another host's, by both walls."""
    try:
        if header.boot == boot_id():
            return time.monotonic_ns()
    except OSError:
        pass
    return header.monotonic + time.time_ns() - header.wall


def _then(header: Header | None, part: RankAnswer | None) -> int:
    """The moment of a rank's answer on its ring's clock."""
    return header.monotonic + part.wall - header.wall if header and part else 0


# ---- of ranks that do not answer ----


def print_stacks(pid: int) -> bool:
    """Have a rank's threads' stacks printed to its log, without its interpreter's help; whether it can."""
    if STACKS is None or not _signals(pid, "SigCgt:") >> (STACKS - 1) & 1:  # it would end the process
        return False
    with suppress(OSError):
        os.kill(pid, STACKS)
        return True
    return False


def deaf(pid: int) -> bool:
    """Whether the signal of ``print_stacks`` still waits to be taken though the process is not in line for a
    processor: the kernel lets no thread run that could take it."""
    state = process_state(pid)
    return bool(STACKS and _signals(pid, "SigPnd:", "ShdPnd:") >> (STACKS - 1) & 1) and state is not None \
        and state.letter != "R"  # fmt: skip


def _signals(pid: int, *sets: str) -> int:
    """The signals in sets that the kernel keeps of a process, as a mask."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except OSError:
        return 0
    return reduce(or_, (int(line[1], 16) for line in lines if line[0] in sets), 0)


def printed_stack(text: str) -> tuple[str, ...]:
    """The main thread's frames, innermost last, in what ``faulthandler`` has printed; the current thread
    where none is called so.

    >>> printed_stack('Current thread 0x7f (most recent call first):\\n  File "/a/b.py", line 3 in spin\\n')
    ('b.py:3 spin',)
    """
    blocks = text.split("hread 0x")
    frames = [_frames(block) for block in blocks]
    return next((found for found in reversed(frames) if found), ())[-FRAMES:]


def _frames(block: str) -> tuple[str, ...]:
    found: list[str] = []
    for line in block.splitlines():
        file, _, rest = line.strip().removeprefix('File "').partition('", line ')
        if rest and line.startswith('  File "'):
            number, _, function = rest.partition(" in ")
            found.append(f"{Path(file).name}:{number} {function}")
    return tuple(reversed(found))


MAIN = "its main thread is"
LETTERS = {
    "R": "running", "S": "sleeping", "D": "in the kernel, waiting for a device", "T": "stopped by a signal",
    "t": "stopped by a debugger", "F": "frozen with its control group", "Z": "ended",
}  # fmt: skip
"""States of a process (``ProcessState``) in words."""


def kernel_says(pid: int) -> str:
    """Where a process's main thread is, as the kernel has it; empty of one that is not there."""
    state = process_state(pid)
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    at = f" ({where})" if where not in ("", "0") else ""
    return f"{MAIN} {LETTERS.get(state.letter, state.letter)}{at}" if state else ""


_WAITS = re.compile(
    r"(background|flight|wire|lanes|device|distributed_c10d)\.py:\d+ (wait|settle|synchronize|all_\w+)$"
)


def by_stack(one: Evidence, stack: tuple[str, ...]) -> Evidence:
    """A rank that has not answered, by its stack, which came by a signal: one that waits for others, or
    imports, was only slow to answer.

    >>> by_stack(Evidence(rank=0), ("steps.py:9 run", "background.py:38 wait", "threading.py:9 wait")).thread
    'waits'
    """
    inner = [frame for frame in stack if not frame.startswith("threading.py:")][-1:]
    thread = "waits" if inner and _WAITS.search(inner[0]) else one.thread
    importing = any("importlib._bootstrap" in frame for frame in stack)
    return replace(one, stack=stack, thread=thread, patient=one.patient or importing)
