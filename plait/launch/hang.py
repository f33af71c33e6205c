"""The launcher's part in diagnosing a hang: notice it, ask the ranks, collect the evidence, keep
the verdict.

The evidence of every rank is collected from outside: its ring, its own answer, and this machine's
kernel's state of its process. No rank has to answer. The verdict itself comes from the caller's
``localise``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from plait.core.base.process import boot_id, main_thread_seconds, process_since, process_state
from plait.core.record.ring import Header, read_rings
from plait.core.record.ring_progress import host_names, progress_of
from plait.core.runs.evidence import RINGS, STACKS, Evidence, State, Verdict, calls_of, write_hang
from plait.core.runs.rank_reports import RankReport, forget_hang, read_reports, reports_requested, request_reports

FRAMES = 12
"""The number of innermost stack frames that are kept."""
BUSY = 0.01
"""Share of a CPU from which a thread counts as busy: waiting or sleeping threads take less, and a
computing thread takes as much even with a hundred competitors."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The launcher's record of a rank. state: as in ``Evidence``. pid: None if the rank is on
    another machine. status: exit status; None while it runs. ended_at: seconds of the monotonic
    clock. doing, step, patient, first, writing: as in the rank's last ``Beat``. error: its error
    message when it ended."""

    state: State
    pid: int | None = None
    status: int | None = None
    ended_at: float = 0.0
    doing: str = ""
    step: int = -1
    patient: bool = False
    first: bool = False
    writing: int = 0
    error: str = ""


class GatheredEvidence(NamedTuple):
    """The collected evidence, by rank. problems: descriptions of the rings that could not be read.
    headers: of the readable rings, by rank."""

    evidence: list[Evidence]
    problems: list[str]
    headers: dict[int, Header]


def gather(folder: Path, launcher_view: Mapping[int, RankStatus] | None = None, *, world: int = 0) -> GatheredEvidence:
    """Return the evidence of every rank of the run in ``folder``. Ranks without a readable ring
    have evidence without calls.

    launcher_view: the launcher's records of a running run, by rank; None: processes are looked up
    on this machine. world: the number of ranks, in case rings are missing."""
    parts, problems = read_reports(folder), list[str]()
    found: dict[int, Evidence] = {}
    headers: dict[int, Header] = {}
    for ring in read_rings(folder / RINGS, problems):
        if (known := (launcher_view or {}).get(ring.rank)) and known.pid not in (None, ring.header.pid):
            continue  # a ring of an earlier start
        headers[ring.rank], now = ring.header, _now(ring.header)
        own = progress_of(ring, now)
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
            (launcher_view or {}).get(rank), host=hosts.get(rank, ""), answers=answers,
        )
        for rank in range(world)
    ]  # fmt: skip
    return GatheredEvidence(evidence, problems, headers)


def _of(base: Evidence, header: Header | None, part: RankReport | None, rank_status: RankStatus | None, *, host: str,
        answers: bool) -> Evidence:  # fmt: skip
    """Return ``base`` completed by a rank's answer, its process and its launcher record. answers:
    True if any rank has answered, so that a rank without an answer is silent."""
    one = replace(base, host=host)
    if header and part and part.token == header.token:
        one = replace(one, thread=part.thread, doing=part.doing, patient=part.patient, stack=part.stack[-FRAMES:],
                      step=part.step, reached=part.reached, missed=part.missed, first=part.first,
                      computes=one.computes and part.busy > BUSY)  # fmt: skip
    elif answers:
        one = replace(one, thread="silent")
    if rank_status is not None:
        doing, step = (one.doing or rank_status.doing), max(one.step, rank_status.step)
        one = replace(one, state=rank_status.state, status=rank_status.status,
                      ended_at=rank_status.ended_at, error=rank_status.error,
                      doing=doing, step=step, patient=one.patient or rank_status.patient,
                      first=one.first or rank_status.first)  # fmt: skip
        return _with_kernel(one, rank_status.pid)
    state, status = _process(header) if header else ("unknown", None)
    if state == "ended" and status is None:  # ended long ago: its state when its peers asked for answers counts
        state = "runs" if part else "unknown"
        at = max((call.enqueued for call in one.calls), default=0)
        one = replace(one, at=max(at, _then(header, part)))
    return _with_kernel(replace(one, state=state, status=status), header and header.pid)


def _with_kernel(evidence: Evidence, pid: int | None) -> Evidence:
    """Return the evidence with the kernel's state of the process in place of a Python stack, if the
    rank is stopped on this machine."""
    says = kernel_state(pid) if pid and evidence.state == "stopped" else ""
    return replace(evidence, stack=(says,)) if says else evidence


def _process(header: Header) -> tuple[State, int | None]:
    """Return the state of a rank's process, "unknown" on another machine, and its exit status: 0 if
    the rank ended in good order, None if unknown."""
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
    """Return the present time, in ns of the clock of a ring's host; another host's clock is derived
    from both wall clocks."""
    try:
        if header.boot == boot_id():
            return time.monotonic_ns()
    except OSError:
        pass
    return header.monotonic + time.time_ns() - header.wall


def _then(header: Header | None, part: RankReport | None) -> int:
    """Return the time of a rank's answer, in ns of its ring's clock; 0 if unknown."""
    return header.monotonic + part.wall - header.wall if header and part else 0


# ---- ranks that do not answer ----


def print_stacks(pid: int) -> bool:
    """Signal a rank to print its threads' stacks to its log, without its interpreter's help; return
    True if the signal was sent."""
    # Unhandled, the signal would end the process.
    if STACKS is None or not _signals(pid, "SigCgt:") >> (STACKS - 1) & 1:
        return False
    with suppress(OSError):
        os.kill(pid, STACKS)
        return True
    return False


def signal_pending(pid: int) -> bool:
    """Return True if the signal of ``print_stacks`` is still pending though the process is not
    runnable: the kernel lets no thread run that could handle it."""
    state = process_state(pid)
    return bool(STACKS and _signals(pid, "SigPnd:", "ShdPnd:") >> (STACKS - 1) & 1) and state is not None \
        and state.letter != "R"  # fmt: skip


def _signals(pid: int, *sets: str) -> int:
    """Return the signal mask of a process's ``sets`` in /proc/PID/status, such as ``SigCgt:``; 0 if
    the process is gone."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except OSError:
        return 0
    return reduce(int.__or__, (int(line[1], 16) for line in lines if line[0] in sets), 0)


def printed_stack(text: str) -> tuple[str, ...]:
    """Return the main thread's frames, innermost last, from text that ``faulthandler`` printed; the
    current thread's if none is named main.

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
"""Descriptions of process states (``ProcessState.letter``)."""


def kernel_state(pid: int) -> str:
    """Describe the state of a process's main thread by the kernel's records; empty if there is no
    such process."""
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


def by_stack(evidence: Evidence, stack: tuple[str, ...]) -> Evidence:
    """Return the evidence of an unanswering rank, updated by the stack that a signal made it print.
    A rank that waits for peers, or imports, was only slow to answer.

    >>> by_stack(Evidence(rank=0), ("steps.py:9 run", "background.py:38 wait", "threading.py:9 wait")).thread
    'waits'
    """
    inner = [frame for frame in stack if not frame.startswith("threading.py:")][-1:]
    thread = "waits" if inner and _WAITS.search(inner[0]) else evidence.thread
    importing = any("importlib._bootstrap" in frame for frame in stack)
    return replace(evidence, stack=stack, thread=thread, patient=evidence.patient or importing)


ANSWER_SECONDS = 3.0
"""Seconds to wait for answers: longer than a rank's watchdog needs to notice, and to try to reach
its peers."""
STACK_SECONDS = 1.0
"""Seconds to wait for a printed stack, at most."""
RETRY_SECONDS = 2.0
"""Seconds until the next attempt after a verdict that names no cause."""

Localise = Callable[[Sequence[Evidence]], Verdict]


@dataclass(frozen=True)
class LocalRank:
    """A rank's process on this machine, and a function that reads its log."""

    pid: int
    log: Callable[[], str]


class HangDetection:
    """Detector of a hang of one run. deadline: seconds without progress after which a rank is
    suspected. localise: returns the verdict on the evidence of all ranks.

    ``look`` is called repeatedly; it costs next to nothing until a rank is suspected."""

    def __init__(self, folder: Path, world: int, *, deadline: float, localise: Localise) -> None:
        self.folder, self.world, self.deadline, self.localise = folder, world, deadline, localise
        self._since: float | None = None
        self._next = 0.0
        forget_hang(folder)

    def look(self, rank_statuses: Callable[[], Mapping[int, RankStatus]],
         processes: Callable[[], Mapping[int, LocalRank]], *,
             silent: bool) -> Verdict | None:  # fmt: skip
        """Return a verdict that names a cause; None if no rank is suspected, or no cause is known
        yet. rank_statuses, processes: called for the launcher's records by rank, and for the ranks'
        processes on this machine. silent: True if a rank has sent nothing for the deadline."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + 0.5
        if self._since is None:
            if not silent and not reports_requested(self.folder):
                return None
            self._since = now
            with suppress(OSError):
                request_reports(self.folder)
        if now - self._since < ANSWER_SECONDS and not self._complete(rank_statuses()):
            return None
        verdict = self.explain(rank_statuses(), processes())
        if verdict.certain:
            return verdict
        self._next = now + RETRY_SECONDS
        if verdict.cause == "none":  # the run has gone on
            self.clear()
        return None

    def clear(self) -> None:
        """Forget the suspicion and its files: the run has gone on, or ended well."""
        forget_hang(self.folder)
        self._since = None

    def explain(self, rank_statuses: Mapping[int, RankStatus], processes: Mapping[int, LocalRank]) -> Verdict:
        """Return a verdict by the present evidence of all ranks; write it to the run's folder
        unless its cause is "none"."""
        gathered = gather(self.folder, rank_statuses, world=self.world)
        evidence = self._stacks(gathered.evidence, rank_statuses, processes)
        verdict = self.localise(evidence)
        if verdict.cause != "none":
            with suppress(OSError):  # a full disk is reported elsewhere
                write_hang(self.folder, verdict, evidence)
        return verdict

    def _complete(self, rank_statuses: Mapping[int, RankStatus]) -> bool:
        """Return True if all running ranks have given complete answers."""
        parts = read_reports(self.folder)
        running = [rank for rank, one in rank_statuses.items() if one.state == "runs"]
        return all(rank in parts and parts[rank].complete for rank in running)

    @staticmethod
    def _stacks(evidence: Sequence[Evidence], rank_statuses: Mapping[int, RankStatus],
         processes: Mapping[int, LocalRank]) -> \
            list[Evidence]:  # fmt: skip
        """Return the evidence with stacks of this machine's running ranks that have not answered,
        and whether they use the CPU. Ranks that the kernel keeps from running count as stopped."""
        mute = {one.rank for one in evidence if (one.state, one.thread) == ("runs", "silent")} & processes.keys()
        before: dict[int, int] = {}
        inside = {one.rank: main_thread_seconds(processes[one.rank].pid) for one in evidence
                  if one.rank in mute and one.computes}  # fmt: skip
        began = time.monotonic()
        for rank in mute:
            size = len(processes[rank].log())
            if print_stacks(processes[rank].pid):
                before[rank] = size
        stacks: dict[int, tuple[str, ...]] = {}
        end = time.monotonic() + STACK_SECONDS
        while (inside or before.keys() - stacks.keys()) and time.monotonic() < end:
            time.sleep(0.05)
            for rank in before.keys() - stacks.keys():
                if stack := printed_stack(processes[rank].log()[before[rank] :]):
                    stacks[rank] = stack
        stopped = {rank for rank in before.keys() - stacks.keys() if signal_pending(processes[rank].pid)}
        for rank in mute - stacks.keys():
            if says := kernel_state(processes[rank].pid):
                stacks[rank] = (says,)
        found = [by_stack(one, stacks[one.rank]) if one.rank in stacks else one for one in evidence]
        found = [replace(one, state="stopped") if one.rank in stopped else one for one in found]
        least = BUSY * (time.monotonic() - began)
        idle = {rank for rank, at in inside.items() if main_thread_seconds(processes[rank].pid) - at <= least}
        return [replace(one, computes=False) if one.rank in idle else one for one in found]
