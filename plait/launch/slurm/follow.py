"""Follow a Slurm job from outside: its state, its log, and a stop that reaches it in any state.

=====================  ====================================================================================
a job that             is stopped by
=====================  ====================================================================================
waits, or returns to   scancel; also if the job returned to the queue after the request to stop
the queue
runs ranks             a signal to its launcher: ranks save and end
is suspended           the stop file (below), once it resumes: Slurm would kill it without a chance to save
runs its first lines   a stop file in the run's folder, which every start of the job checks first
of shell, or starts
is not reachable: the  the same file, which the launcher checks while ranks run
controller is away
=====================  ====================================================================================

A job that waits for a node of its rank table that is down or drained stops requesting that node: it
asks for the table's other nodes, and Slurm chooses a replacement.

A job that a node could not start is released. Slurm drains such a node, requeues the job, and holds
it until an operator acts. That happens if a prolog fails and, since Slurm 24.11, if remains of the
job's last start are still on the node: a step that could not report its end to an absent controller
retries after a minute.
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
from plait.launch.run_folder import give_up_hosts, request_stop
from plait.launch.slurm import commands as slurm
from plait.launch.slurm.commands import GONE, WAITING, SlurmJobState, SubmittedSlurmJob
from plait.launch.slurm.job import next_job
from plait.launch.watch import catching_signals, say

LOG_POLL_SECONDS = 0.5
"""Seconds between two reads of the log."""
NOT_STARTED = "launch_failed_requeued_held"
"""Slurm's reason for a job that it holds because a node could not start it."""
RELEASES = 3
"""How often in a row a job that Slurm holds for ``NOT_STARTED`` is released: each time another node
is drained, and the job may be at fault."""


def follow(submitted: SubmittedSlurmJob) -> int:
    """Copy a job's log to standard output until the job ends; return its exit status.

    The first Ctrl-C (or SIGTERM, SIGHUP) lets ranks save and end; a job that waits, or returns to
    the queue meanwhile, is cancelled. The second signal cancels the job at once. An unavailable
    controller ends nothing: it is queried again. Raises LaunchError for a job that Slurm has
    forgotten, and at the second Ctrl-C if the controller does not answer.
    """
    with catching_signals() as signals:
        return _Following(submitted, signals).to_the_end()


class _Following:
    """The follower's state of a job."""

    def __init__(self, submitted: SubmittedSlurmJob, signals: deque[int]) -> None:
        self.submitted, self.signals, self.job = submitted, signals, submitted.job
        self.log = _Tail(submitted.log, sys.stdout.buffer, submitted.written)
        self.stops = 0
        """How often the user asked to stop the job: 1 to save and end, 2 at once."""
        self._said = ("", "")
        self._away = False
        self._told = False
        """True if the job's launcher was signalled to save and end."""
        self._warned = False
        """True if the user was warned that a suspended job cannot save."""
        self._gone: set[str] = set()
        """Hosts of the rank table that the job does not wait for any more."""
        self._released, self._read = 0, 0
        """How often the job was released since it last wrote to its log, and the log's size
        then."""

    def to_the_end(self) -> int:
        """Follow the job, and the jobs that continue its run; return the last job's exit status."""
        while True:
            now = self._to_its_end()
            if now.name not in ("COMPLETED", "FAILED", "CANCELLED"):
                say(f"Slurm job {self.job} ended as {now.name.lower()}")
            if not self._follows():
                return now.status or (0 if now.name == "COMPLETED" else 1)

    def _follows(self) -> bool:
        """Return True if another job of the chain continues the run; from then on, follow that job.
        A job that has ended counts only if it had started: then it has submitted its own successor.
        """
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
            request_stop(folder, following)
        return True

    def _to_its_end(self) -> SlurmJobState:
        """Follow one job until it ends; return its last state."""
        while (now := self._look(self.job)) is None or now.going:
            self.log.copy()
            if now is not None:
                self._say(now)
            self._stop(now)
            self._wait(now)
        self.log.copy()
        return now

    def _wait(self, now: SlurmJobState | None) -> None:
        """Wait until the controller may be queried again. now: the job's last known state."""
        end = time.monotonic() + slurm.LOOK
        while time.monotonic() < end and not self.signals:
            time.sleep(min(LOG_POLL_SECONDS, slurm.LOOK))
            self.log.copy()
        if self.signals:  # by the last known state: the controller is not queried earlier
            self._stop(now)

    def _look(self, job: str) -> SlurmJobState | None:
        """Return a job's state; None while the controller is unavailable."""
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
        kept = " A file in the run's folder asks it to stop." if self.stops else ""
        return LaunchError(
            f"{error} Job {self.job} is no longer followed.{kept} If it goes on, its output is in "
            f"{self.submitted.log}, and scancel {self.job} ends it."
        )

    def _stop(self, now: SlurmJobState | None) -> None:
        """Deliver the user's stop requests as far as they have not arrived. now: the job's last
        known state."""
        while self.signals:
            self.signals.popleft()
            self.stops += 1
            if self.stops == 1 and self.submitted.folder:
                request_stop(self.submitted.folder, self.job)
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
            self._told = True  # once only: a second signal would count as a second request
            signal_launcher(self.job, self.submitted.folder)

    def _say(self, now: SlurmJobState) -> None:
        if (now.name, now.reason) != self._said and now.name in (*WAITING, "RUNNING"):
            say(describe_state(now, self.job))
            self._said = (now.name, now.reason)
        if self.submitted.hosts and now.name in WAITING and "ReqNodeNotAvail" in now.reason:
            self._let_go()
        if now.name == "PENDING" and now.reason == NOT_STARTED and not (self.stops or self.signals):
            self._release()

    def _release(self) -> None:
        """Release the job that Slurm holds because a node could not start it, at most ``RELEASES``
        times in a row."""
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
        """Make the job stop waiting for lost hosts of its rank table."""
        hosts, folder = self.submitted.hosts, self.submitted.folder
        lost = slurm.nodes_down(hosts) - self._gone
        if not lost or not folder:
            return
        self._gone |= lost
        try:
            give_up_hosts(folder, self.job, sorted(self._gone))  # first: the job's next start has to know
            slurm.release_hosts(self.job, hosts, self._gone)
        except (LaunchError, OSError) as error:
            say(
                f"the job's rank table asks for {fold(sorted(lost))}, and it gets no others ({error}): cancel it "
                "(Ctrl-C), and have the run go on with another table (--rank-table)"
            )
        else:
            say(f"{fold(sorted(lost))} of the rank table is lost: another node takes its place")


def signal_launcher(job: str, folder: Path | None) -> None:
    """Signal the launcher of a running job, so that its ranks save and end. folder: of the run;
    None: no note for a launcher that cannot be signalled yet."""
    if folder:
        request_stop(folder, job, signalled=True)
    try:  # to the launcher alone: otherwise every node would forward the signal
        slurm.command("scancel", "--batch", f"--signal={signal.SIGINT.value}", job)
    except LaunchError:
        if folder:
            request_stop(folder, job)


def describe_state(now: SlurmJobState, job: str) -> str:
    """Return the message about a job's state, with the reason of its wait or its nodes."""
    why = f" ({now.reason.replace('_', ' ')})" if now.reason not in ("", "None") else ""
    on = f" on {fold(now.nodes)}" if now.nodes else ""
    return f"Slurm job {job} is {now.name.lower()}{why}{on}"


class _Tail:
    """Copier of a growing file, which may not exist yet, to ``sink``."""

    def __init__(self, path: Path, sink: BinaryIO, read: int = 0) -> None:
        self.path, self.sink, self.read = path, sink, read

    def copy(self) -> None:
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self.read)
            content = file.read()
            self.read += len(content)
            self.sink.write(content)
            self.sink.flush()
