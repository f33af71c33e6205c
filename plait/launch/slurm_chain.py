"""Jobs that follow each other (``slurm.chain``): each submits the next at its start, which waits for its
end, and takes it back if the run is over. So a run goes on also where its job is lost with its node, or may
not be requeued."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import cast

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import LaunchError
from plait.core.base.files import replacing
from plait.core.runs.lock import EXPIRES, RunLock
from plait.launch import slurm
from plait.launch.watch import say

FILE = "chain.json"
NAME = "chain"
"""What starts in vain of all its jobs are counted under."""


def next_job(folder: Path, job: str) -> str:
    """The job that follows ``job``, also if that one has begun; empty if there is none."""
    jobs = _jobs(folder)
    return dict(pairwise(jobs)).get(job, "")


def cancelled_before(folder: Path, job: str) -> bool:
    """Whether the job that ``job`` follows was cancelled by somebody, so that the run is to end."""
    jobs = _jobs(folder)
    with suppress(LaunchError):
        if jobs[-1:] == [job] and len(jobs) > 1:
            return slurm.state(jobs[-2]).name == "CANCELLED"
    return False


def _jobs(folder: Path) -> list[str]:
    """The chain so far, in its order. All of it is kept: who follows a job may look for the next one when
    that has begun already, and has submitted one of its own. A file that is damaged tells of none."""
    with suppress(OSError, ValueError):
        if isinstance(jobs := read_table(folder / FILE).get("jobs"), list):
            return [str(one) for one in cast("list[object]", jobs)]
    return []


def begin_next(folder: Path, job: str) -> None:
    """Submit the job that follows. Raises LaunchError."""
    following = slurm.sbatch(folder.absolute() / slurm.SCRIPT, f"--dependency=afterany:{job}")
    before = _jobs(folder)
    jobs = [*before[: before.index(job)], job, following] if job in before else [job, following]
    with replacing(folder / FILE) as draft:
        draft.write_text(json.dumps({"jobs": jobs}) + "\n")
    say(f"Slurm job {following} goes on when this one has ended")


def take_back(folder: Path, job: str) -> None:
    """The run is over: nothing follows."""
    if following := next_job(folder, job):
        with suppress(LaunchError):
            slurm.command("scancel", following)


@contextmanager
def lock_in_turn(folder: Path) -> Iterator[RunLock]:
    """The run's lock, once that of the job before is dead: one that was killed could not give it back."""
    until = time.monotonic() + EXPIRES + 10.0
    with ExitStack() as held:
        while True:
            try:
                lock = held.enter_context(RunLock(folder))
                break
            except LaunchError:
                if time.monotonic() > until:
                    raise
                time.sleep(1.0)
        yield lock
