"""Following a Slurm job from outside: its state, its log, and a stop that is not lost, whatever the job is
doing.

=====================  ====================================================================================
a job that             is stopped by
=====================  ====================================================================================
waits, or goes back    scancel; also when it has come back after the stop was asked for
into the queue
runs ranks             a signal to its launcher: ranks save and end
is suspended           the same file, once it goes on: Slurm kills what is suspended without a chance to save
runs its first lines   the stop's file in the run's folder, which every start of the job looks for first
of shell, or starts
is told by nobody,     the same file, which the launcher looks for while ranks run
the controller is away
=====================  ====================================================================================

A job that waits for a node of its rank table that is down, or drained, is let go from it: it asks for the
others of the table, and Slurm gives it another in the lost one's place.

A job that a node could not start is released: Slurm drains that node, puts the job back, and holds it until
somebody looks. So it does where a prolog fails, and, since Slurm 24.11, where remains of the job's last start
are still on the node: a step that could not tell an absent controller of its end tries again after a minute.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from plait.core.base.errors import LaunchError
from plait.core.topology.hostlist import fold
from plait.launch import slurm
from plait.launch.run_folder import ask_to_stop, give_up_hosts
from plait.launch.slurm import GONE, WAITING, SlurmJobState, SubmittedSlurmJob
from plait.launch.slurm_chain import next_job
from plait.launch.watch import catching_signals, say

GLANCE = 0.5
"""Seconds between two looks at the log."""
NOT_STARTED = "launch_failed_requeued_held"
"""Why Slurm holds a job that a node could not start."""
RELEASES = 3
"""How often in a row such a job is released. Each time another node is drained, and the job may be at
fault."""


def follow(submitted: SubmittedSlurmJob) -> int:
    """Copy a job's log to standard output until the job ends; returns its exit status.

    The first Ctrl-C (or SIGTERM, SIGHUP) lets its ranks save and end; a job that waits, or goes back into
    the queue meanwhile, is cancelled. The second one cancels it at once. A controller that is away ends
    nothing: it is asked again. Raises LaunchError for a job that Slurm has forgotten, and at the second
    Ctrl-C where the controller does not answer."""
    with catching_signals() as signals:
        return _Following(submitted, signals).to_the_end()


class _Following:
    """A job that is followed."""

    def __init__(self, submitted: SubmittedSlurmJob, signals: deque[int]) -> None:
        self.submitted, self.signals, self.job = submitted, signals, submitted.job
        self.log = _Tail(submitted.log, sys.stdout.buffer, submitted.written)
        self.stops = 0
        """How often it was to be stopped."""
        self._said = ("", "")
        self._away = False
        self._told = False
        """Whether the launcher was told to stop."""
        self._warned = False
        """Whether it was said that a suspended job cannot save."""
        self._gone: set[str] = set()
        """Hosts of the rank table that the job is not to wait for."""
        self._released, self._read = 0, 0
        """How often the job was released, without a word from it, and how much of its log there was."""

    def to_the_end(self) -> int:
        """The exit status of the job, or of the last of those that follow each other."""
        while True:
            now = self._to_its_end()
            if now.name not in ("COMPLETED", "FAILED", "CANCELLED"):
                say(f"Slurm job {self.job} ended as {now.name.lower()}")
            if not self._follows():
                return now.status or (0 if now.name == "COMPLETED" else 1)

    def _follows(self) -> bool:
        """Whether another job goes on with the run, which is followed from now on. One that has ended did
        only if it has begun: it has submitted the next one then."""
        folder = self.submitted.folder
        following = next_job(folder, self.job) if folder else ""
        if not following or not folder:
            return False
        while (now := self._look(following)) is None:
            self._wait(None)
        if not now.going and not next_job(folder, following):
            return False
        log = self.submitted.log.with_name(self.submitted.log.name.replace(self.job, following))
        self.submitted = self.submitted._replace(job=following, log=log)
        self.job, self._said, self._told, self._gone = following, ("", ""), False, set()
        self._released = self._read = 0
        self.log = _Tail(log, sys.stdout.buffer)
        if self.stops:
            ask_to_stop(folder, following)
        return True

    def _to_its_end(self) -> SlurmJobState:
        """The job's last state."""
        while (now := self._look(self.job)) is None or now.going:
            self.log.copy()
            if now is not None:
                self._say(now)
            self._stop(now)
            self._wait(now)
        self.log.copy()
        return now

    def _wait(self, now: SlurmJobState | None) -> None:
        """Until the controller may be asked again. now: the job, as it was seen last."""
        end = time.monotonic() + slurm.LOOK
        while time.monotonic() < end and not self.signals:
            time.sleep(min(GLANCE, slurm.LOOK))
            self.log.copy()
        if self.signals:  # by what is known of it: the controller is asked no sooner
            self._stop(now)

    def _look(self, job: str) -> SlurmJobState | None:
        """A job's state; None as long as the controller is away."""
        try:
            now = slurm.state(job)
        except LaunchError as error:
            if GONE in str(error) or (self.stops and self.signals):
                raise self._lost(error) from None
            if not self._away:
                say(f"Slurm does not answer ({error}); the job goes on, and Slurm is asked again")
            self._away = True
            return None
        if self._away:
            say("Slurm answers again")
        self._away = False
        return now

    def _lost(self, error: LaunchError) -> LaunchError:
        kept = " It is told to stop by a file in the run's folder." if self.stops else ""
        return LaunchError(
            f"{error} Job {self.job} is no longer followed.{kept} If it goes on, its output is in "
            f"{self.submitted.log}, and scancel {self.job} ends it."
        )

    def _stop(self, now: SlurmJobState | None) -> None:
        """Pass on what was asked for, as far as it has not arrived. now: the job, as it was seen last."""
        while self.signals:
            self.signals.popleft()
            self.stops += 1
            if self.stops == 1 and self.submitted.folder:
                ask_to_stop(self.submitted.folder, self.job)
        if not self.stops:
            return
        if now and now.name == "SUSPENDED" and self.stops == 1 and not self._warned:
            self._warned = True
            say("the job is suspended: it saves and ends as soon as it goes on (Ctrl-C to cancel it unsaved)")
        if self.stops > 1 or (now and now.name in WAITING):
            try:
                slurm.command("scancel", self.job)
            except LaunchError as error:
                if self.stops > 1:
                    raise self._lost(error) from None
        elif now and now.name == "RUNNING" and not self._told:
            self._told = True  # by the file, if not by the signal: two would be taken for a second wish
            tell_launcher(self.job, self.submitted.folder)

    def _say(self, now: SlurmJobState) -> None:
        if (now.name, now.reason) != self._said and now.name in (*WAITING, "RUNNING"):
            say(told(now, self.job))
            self._said = (now.name, now.reason)
        if self.submitted.hosts and now.name in WAITING and "ReqNodeNotAvail" in now.reason:
            self._let_go()
        if now.name == "PENDING" and now.reason == NOT_STARTED and not (self.stops or self.signals):
            self._release()

    def _release(self) -> None:
        """Have the job go on that Slurm holds, as often as makes sense."""
        if self.log.read > self._read:
            self._released, self._read = 0, self.log.read
        self._released += 1
        if self._released > RELEASES + 1:
            return
        by_hand = f"see sinfo -R, then scontrol release {self.job}, or cancel it (Ctrl-C)"
        if self._released > RELEASES:
            say(f"{RELEASES} nodes in a row could not start the job, and Slurm holds it: {by_hand}")
            return
        try:
            slurm.command("scontrol", "release", self.job)
        except LaunchError as error:
            say(f"a node could not start the job, and Slurm holds it ({error}): {by_hand}")
        else:
            say("a node could not start the job, and Slurm held it: it is released, for other nodes")

    def _let_go(self) -> None:
        """Have the job wait for no host of its rank table that is lost."""
        hosts, folder = self.submitted.hosts, self.submitted.folder
        lost = slurm.nodes_down(hosts) - self._gone
        if not lost or not folder:
            return
        self._gone |= lost
        try:
            give_up_hosts(folder, self.job, sorted(self._gone))  # first: whoever starts is to know
            slurm.let_go(self.job, hosts, self._gone)
        except (LaunchError, OSError) as error:
            say(
                f"the job's rank table asks for {fold(sorted(lost))}, and it gets no others ({error}): cancel it "
                "(Ctrl-C), and have the run go on with another table (--rank-table)"
            )
        else:
            say(f"{fold(sorted(lost))} of the rank table is lost: another node takes its place")


def tell_launcher(job: str, folder: Path | None) -> None:
    """Ask the ranks of a job that runs to save and end."""
    if folder:
        ask_to_stop(folder, job, signalled=True)
    try:  # to the launcher alone: every node would send it on
        slurm.command("scancel", "--batch", f"--signal={signal.SIGINT.value}", job)
    except LaunchError:
        if folder:
            ask_to_stop(folder, job)


def told(now: SlurmJobState, job: str) -> str:
    """What a job waits for, or where it runs."""
    why = f" ({now.reason.replace('_', ' ')})" if now.reason not in ("", "None") else ""
    on = f" on {fold(now.nodes)}" if now.nodes else ""
    return f"Slurm job {job} is {now.name.lower()}{why}{on}"


class _Tail:
    """A file that grows, and may not be there yet."""

    def __init__(self, path: Path, sink: BinaryIO, read: int = 0) -> None:
        self.path, self.sink, self.read = path, sink, read

    def copy(self) -> None:
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self.read)
            content = file.read()
            self.read += len(content)
            self.sink.write(content)
            self.sink.flush()
