"""The writer of ``attempts.jsonl`` during a run. It serves all ways of starting ranks: by Plait's
supervisor repeatedly, by a launcher for every start of a cluster manager's job, or by torchrun with
rank 0 as writer."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import parse_table
from plait.core.base.errors import RankFailure
from plait.core.runs.attempts import FILE, UNREADABLE, Attempt, Epoch, cut_off, read_attempts, set_aside, write_attempts
from plait.core.runs.evidence import FILE as HANG
from plait.core.runs.progress import Progress

KEPT = 3
"""The number of failed attempts whose logs are kept."""
TERMINAL = "terminal.log"
"""The file, in the folder of the ranks' logs, with the lines that rank 0 prints for people in all
attempts."""
LAST_LINES = 1 << 16
"""Number of bytes at the end of ``metrics.jsonl`` that are searched for its last line."""


class History:
    """The attempts of the run in ``folder``, kept up to date in its file. If the folder cannot be
    written, only the history is lost."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.epoch, self._warned = folder, Epoch(folder), False
        metrics, at = folder / "metrics.jsonl", None
        with suppress(OSError):
            at = metrics.stat().st_mtime
        known = max(newest_checkpoint(folder), _last_logged(metrics)) or -1
        unreadable: list[bytes] = []
        self.attempts = cut_off(read_attempts(folder, unreadable), step=known, at=at)
        if unreadable:
            many = f"{len(unreadable)} line{'s' * (len(unreadable) > 1)} of {FILE} cannot be read"
            with suppress(OSError):
                set_aside(folder, unreadable)
                print(f"plait: warning: {many}; set aside in {UNREADABLE}", file=sys.stderr, flush=True)

    @property
    def last(self) -> Attempt:
        """The current attempt."""
        return self.attempts[-1]

    def begin(self, world: int, hosts: Sequence[str], plan: str, *, changed: str = "", wait: float | None = None) -> \
            None:  # fmt: skip
        """Add a new attempt; writes of the previous attempt are refused from now on. plan: its
        hash. changed: the changes since the previous attempt. wait: seconds since the end of that
        attempt."""
        self.epoch = Epoch.begin(self.folder)
        number = 1 + max((one.attempt for one in self.attempts), default=0)
        self.attempts.append(
            Attempt(attempt=number, started=time.time(), world=world, hosts=tuple(hosts), plan=plan,
                    changed=changed, wait_seconds=wait)
        )  # fmt: skip
        self._write()

    def moved(self, hosts: Sequence[str]) -> None:
        """Set the current attempt's hosts, if they differ from those at its start."""
        if tuple(hosts) != self.last.hosts:
            self.attempts[-1] = replace(self.last, hosts=tuple(hosts))
            self._write()

    def begin_again(self, world: int, hosts: Sequence[str], plan: str, *, again: bool, changed: str = "") -> None:
        """Add a new attempt in another process than the previous one, and keep the logs of that
        one. again: True if this start is a restart after a failure, so that the time since then,
        queueing included, counts as waiting. changed: the changes by the caller of the first
        start."""
        before = self.last if self.attempts and self.last.outcome in ("failed", "cut off") else None
        if before:
            self.put_aside(self.folder / "logs")
        ended = before.ended if before and again else None
        self.begin(
            world,
            hosts,
            plan,
            changed="" if again else changed,
            wait=None if ended is None else rounded(max(0.0, time.time() - ended)),
        )

    def put_aside(self, logs: Path) -> Path:
        """Move the logs and the verdict of the last attempt to a folder, before the next attempt
        overwrites them; return that folder."""
        kept = logs / f"attempt-{self.last.attempt}"
        with suppress(OSError):
            kept.mkdir(exist_ok=True)
            for log in logs.glob("rank-*.log"):
                log.rename(kept / log.name)
            if (self.folder / HANG).is_file():
                (self.folder / HANG).rename(kept / HANG)
            folders = [path for path in logs.glob("attempt-*") if path.name[8:].isdigit()]
            for old in sorted(folders, key=lambda path: int(path.name[8:]))[:-KEPT]:
                shutil.rmtree(old)
        return kept

    def attempt(self, run: Callable[[Progress], int], progress: Progress) -> int:
        """Return the result of ``run``, or raise its error, and record its outcome. progress:
        updated by ``run``. A request to end is recorded at once: whoever sent it may not wait for
        the end."""

        def record_stop_request(by: str) -> None:
            after = f" after step {progress.step}" if progress.step >= 0 else ""
            self._note(progress, why=f"It was asked to end ({by}){after}.")

        progress.on_stop_request = record_stop_request
        try:
            status = run(progress)
        except BaseException as error:
            failure = error if isinstance(error, RankFailure) else RankFailure(str(error), cause=type(error).__name__)
            unnoticed = rounded(progress.unnoticed(time.monotonic()))
            self._note(progress, outcome="failed", ended=time.time(), cause=failure.cause or "unknown",
                       why=str(failure), ranks=failure.ranks, detection_seconds=unnoticed)  # fmt: skip
            raise
        stopped = progress.stopping and status
        told: dict[str, Any] = {"outcome": "stopped" if stopped else "finished", "ended": time.time(), "why": ""}
        if progress.start >= 0:  # the last messages may be missing, but the final checkpoint has the step
            step = max(progress.step, newest_checkpoint(self.folder))
            told |= {"step": step, "steps": step - progress.start}
        self._note(progress, **told)
        return status

    def record_restart(self, progress: Progress, say: Callable[[str], None]) -> None:
        """Record the first step, and pass a line to ``say`` about the time that the restart took;
        no line for a first attempt."""
        self._note(progress)
        now, *earlier = reversed(self.attempts)
        if now.wait_seconds is None or not earlier:  # this launcher's first attempt
            return
        failed = earlier[0]
        lost = failed.step - now.resumed
        again = f", {lost} step{'s are' if lost > 1 else ' is'} done again" if lost > 0 else ""
        if now.resumed < failed.writing < failed.step:
            again += f" (the checkpoint of step {failed.writing} was still being written)"
        noticed = failed.detection_seconds
        parts = [
            "Time of the failure unknown" if noticed is None else f"Failure noticed within {noticed:.1f} s",
            f"until ranks were started {now.wait_seconds:.1f} s",
            f"until they trained {now.restart_seconds or 0.0:.1f} s",
            f"first new step {now.first_step_seconds or 0.0:.2f} s",
        ]
        say(f"the run goes on from step {now.resumed}{again}. {'; '.join(parts)}")

    def _note(self, progress: Progress, **more: Any) -> None:
        """Update the current attempt in the history's file from ``progress``. more: further fields
        of the attempt."""
        trained, stepped = progress.training, progress.first_step
        self.attempts[-1] = replace(
            self.last,
            **{
                "resumed": progress.start, "step": progress.step, "steps": progress.steps,
                "writing": progress.writing,
                "restart_seconds": rounded(trained - progress.began) if trained else None,
                "first_step_seconds": rounded(stepped - trained) if stepped and trained else None,
                **more,
            },
        )  # fmt: skip
        self._write()

    def _write(self) -> None:
        if self.epoch.over:  # the process that took over the run keeps its history
            return
        try:
            write_attempts(self.folder, self.attempts)
        except OSError as error:
            if not self._warned and self.folder.is_dir():
                print(f"plait: warning: {FILE} cannot be written ({error.strerror}); the outcome of this attempt "
                      "may be missing there", file=sys.stderr, flush=True)  # fmt: skip
                self._warned = True


def last_metrics(metrics: Path) -> dict[str, Any]:
    """Return the last complete line of a run's metrics; empty if there is none or it cannot be
    read."""
    with suppress(OSError, ValueError):
        if not metrics.is_file():  # False for a pipe, too, which may never begin
            return {}
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - LAST_LINES))
            line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return parse_table(line)
    return {}


def _last_logged(metrics: Path) -> int:
    """Return the last step in a run's metrics; 0 if there is none."""
    step = last_metrics(metrics).get("step")
    return step if isinstance(step, int) else 0


def newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none or the folder cannot be read."""
    names = list[str]()
    with suppress(OSError):
        names = [name.rpartition("-")[2] for name in os.listdir(folder / "checkpoints") if name.startswith("step-")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def rounded(seconds: float) -> float:
    """Return seconds rounded to milliseconds."""
    return round(seconds, 3)
