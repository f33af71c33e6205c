"""``attempts.jsonl`` of a run while it goes on, whoever starts its ranks: Plait's supervisor again and again,
a cluster manager a launcher for every start of the job, or torchrun a rank 0."""

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
from plait.core.runs.attempts import FILE, UNREADABLE, Attempt, cut_off, read_attempts, set_aside, write_attempts
from plait.core.runs.epoch import Epoch
from plait.core.runs.evidence import FILE as HANG
from plait.core.runs.progress import Progress

KEPT = 3
"""Failed attempts whose logs are kept."""
TERMINAL = "terminal.log"
"""Beside the logs of ranks: what rank 0 prints for people, line by line, of all attempts."""
LAST_LINES = 1 << 16
"""Bytes of the end of ``metrics.jsonl`` that hold its last line."""


class History:
    """Of the run in ``folder``. A folder that cannot be written costs the history only."""

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
        """The one that is under way."""
        return self.attempts[-1]

    def begin(self, world: int, hosts: Sequence[str], plan: str, *, changed: str = "", wait: float | None = None) -> \
            None:  # fmt: skip
        """One more; what the one before writes from now on is refused. plan: its hash. changed, wait: what
        was changed since the one before, and seconds since that ended."""
        self.epoch = Epoch.begin(self.folder)
        number = 1 + max((one.attempt for one in self.attempts), default=0)
        self.attempts.append(
            Attempt(attempt=number, started=time.time(), world=world, hosts=tuple(hosts), plan=plan,
                    changed=changed, wait_seconds=wait)
        )  # fmt: skip
        self._write()

    def moved(self, hosts: Sequence[str]) -> None:
        """The attempt that is under way is on other hosts than was thought when it began."""
        if tuple(hosts) != self.last.hosts:
            self.attempts[-1] = replace(self.last, hosts=tuple(hosts))
            self._write()

    def begin_again(self, world: int, hosts: Sequence[str], plan: str, *, again: bool, changed: str = "") -> None:
        """One more, by another process than the one before, whose logs are kept. again: it was started
        because that one failed, so that it has waited since, in a queue, too. changed: by whoever started it
        first, in words."""
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
        """Keep the logs and the verdict of the last attempt, which the next would write over; where."""
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
        """What ``run`` returns or raises; how it went is written down. progress: of which it takes note. That
        it was asked to end is written at once: whoever asked may not wait until it does."""

        def asked(by: str) -> None:
            after = f" after step {progress.step}" if progress.step >= 0 else ""
            self._note(progress, why=f"It was asked to end ({by}){after}.")

        progress.when_asked = asked
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
        if progress.start >= 0:  # what ranks said last may not have reached us: the run is saved at its end
            step = max(progress.step, newest_checkpoint(self.folder))
            told |= {"step": step, "steps": step - progress.start}
        self._note(progress, **told)
        return status

    def goes_on(self, progress: Progress, say: Callable[[str], None]) -> None:
        """The first step is done: say what it took to come here again; nothing of a first attempt."""
        self._note(progress)
        now, *earlier = reversed(self.attempts)
        if now.wait_seconds is None or not earlier:  # the first of this launcher
            return
        failed = earlier[0]
        lost = failed.step - now.resumed
        again = f", {lost} step{'s are' if lost > 1 else ' is'} done again" if lost > 0 else ""
        if now.resumed < failed.writing < failed.step:
            again += f" (the checkpoint of step {failed.writing} was still being written)"
        noticed = failed.detection_seconds
        parts = [
            "When it failed is not known" if noticed is None else f"Failure noticed within {noticed:.1f} s",
            f"until ranks were started {now.wait_seconds:.1f} s",
            f"until they trained {now.restart_seconds or 0.0:.1f} s",
            f"first new step {now.first_step_seconds or 0.0:.2f} s",
        ]
        say(f"the run goes on from step {now.resumed}{again}. {'; '.join(parts)}")

    def _note(self, progress: Progress, **more: Any) -> None:
        """What is known of it now."""
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
        if self.epoch.over:  # who has taken the run over has the attempts that are to be kept
            return
        try:
            write_attempts(self.folder, self.attempts)
        except OSError as error:
            if not self._warned and self.folder.is_dir():
                print(f"plait: warning: {FILE} cannot be written ({error.strerror}); what comes of this attempt "
                      "may be missing there", file=sys.stderr, flush=True)  # fmt: skip
                self._warned = True


def last_metrics(metrics: Path) -> dict[str, Any]:
    """The last whole line of a run's metrics; empty if there is none, or none that can be read."""
    with suppress(OSError, ValueError):
        if not metrics.is_file():  # also of a pipe, which may never begin
            return {}
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - LAST_LINES))
            line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return parse_table(line)
    return {}


def _last_logged(metrics: Path) -> int:
    """The last step in a run's metrics; 0 if there is none."""
    step = last_metrics(metrics).get("step")
    return step if isinstance(step, int) else 0


def newest_checkpoint(folder: Path) -> int:
    """Its step; 0 if there is none, or none that a disk in trouble shows."""
    names = list[str]()
    with suppress(OSError):
        names = [name.rpartition("-")[2] for name in os.listdir(folder / "checkpoints") if name.startswith("step-")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def rounded(seconds: float) -> float:
    """To milliseconds."""
    return round(seconds, 3)
