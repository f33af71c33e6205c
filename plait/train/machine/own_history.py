"""The history of a run that no launcher of Plait's keeps, as under torchrun: rank 0 does, as far as it knows.

What a launcher tells from all ranks is told from what rank 0 says of itself, and its end is the start's. Of
a failure elsewhere it tells what came to it, such as a connection that is gone. If it is killed it tells
nothing, and the next start says that this one was cut off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv
from plait.core.job.plan import CHANGED, Plan
from plait.core.runs.history import History
from plait.core.runs.progress import Progress
from plait.train.machine.control import Control


def kept(run: Callable[[], int], folder: Path, plan: Plan, rank: RankEnv, control: Control) -> int:
    """What ``run`` returns or raises, as the start's line in the run's ``attempts.jsonl``."""
    history = History(folder)

    def look() -> None:
        progress.heard(0, control.step, time.monotonic(), control.writing())
        if control and not progress.stopping:
            progress.asked("a signal")

    def attempt(_: Progress) -> int:
        try:
            status = run()
        except SystemExit as ended:  # asked to stop before there was anything to save
            progress.stopping = True
            return ended.code if isinstance(ended.code, int) else 1
        look()
        return status

    progress = Progress(1, stepped=lambda one: history.goes_on(one, _say))
    hosts = (this_host(),) if rank.local_world_size == rank.world_size else ()
    changed = plan.notes.get(CHANGED, "")
    history.begin_again(rank.world_size, hosts, plan.key, again=rank.attempt > 0, changed=changed)
    control.always(look)
    return history.attempt(attempt, progress)


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"plait: {text}", file=sys.stderr, flush=True)
