"""Starting the agent that collects what the ranks of a host record, beside the ranks and in a process of its
own, so that a rank that is killed takes nothing with it.

Whoever starts ranks starts it: ``plait train`` for this machine and for a lab, the node's agent under Slurm
and Kubernetes, and the first rank of a machine where none of these did (torchrun).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base import programs
from plait.core.base.codec.data import decode
from plait.core.base.errors import JobError, PlaitError, how_to_install
from plait.core.base.process import command_of, end_all, how_it_ended, process_state

if TYPE_CHECKING:
    from plait.core.job.settings import RunSection

LOGGERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The package that each of ``run.loggers`` needs."""
PATIENCE = 60.0
"""Seconds that it may take to write what is left when the ranks have ended."""
AGAIN, PAUSE = 3, 1.0
"""Times that an agent which was killed is followed by another, after so many seconds."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What is collected: the keys of a job's ``run`` section that agents need. They are handed over as JSON,
    because reading a plan takes longer than all else that an agent does at first."""

    timeline_steps: int
    timeline_sample: int
    metrics_port: int
    metrics_address: str
    loggers: tuple[str, ...]

    @staticmethod
    def of(run: RunSection) -> Collected:
        """As a job says."""
        return Collected(
            timeline_steps=run.timeline_steps, timeline_sample=run.timeline_sample, metrics_port=run.metrics_port,
            metrics_address=run.metrics_address, loggers=run.loggers,
        )  # fmt: skip

    @property
    def anything(self) -> bool:
        """Whether an agent has anything to do."""
        return bool(self.timeline_steps or self.metrics_port or self.loggers)

    def to_json(self) -> str:
        """In one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Collected:
        """What ``to_json`` has made."""
        return decode(Collected, json.loads(text))


@contextmanager
def collecting(folder: Path, first: int, count: int, *, is_rank: bool = False) -> Generator[None]:
    """What ranks ``first`` to ``first + count - 1`` of the run in ``folder`` record is collected while the
    block runs, and when it ends to the last record. is_rank: this process is one of them, and is not waited
    for if it fails.

    Raises JobError for a logger that is not installed here.
    """
    collected = Collected.of(_settings(folder))
    check_loggers(collected.loggers)
    if not collected.anything:
        yield
        return
    agent = CollectingAgent(lambda: start_agent(folder, first, count, collected))
    failed = True
    try:
        yield
        failed = False
    finally:
        agent.end(wait=not (failed and is_rank))


class CollectingAgent:
    """A process that ends when its standard input does; one that is killed before is followed by another,
    which goes on where it was. start: begins one.

    What it does is left undone, and said to be, if that happens more than ``AGAIN`` times, or if it ends by
    itself.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start, self._process, self._left = start, start(), AGAIN
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="agent", daemon=True)
        self._keeper.start()

    def end(self, *, wait: bool) -> None:
        """It is to finish. wait: until it has, for ``PATIENCE`` at most; of one that the kernel keeps from
        running, for a moment."""
        self._over.set()
        self._process.send_signal(signal.SIGCONT)  # one that somebody has stopped would be waited for
        self._close()  # which tells it, as our end would
        if not wait:
            return
        until = time.monotonic() + PATIENCE
        while self._keeper.is_alive() and time.monotonic() < until:
            self._keeper.join(PAUSE)
            if (state := process_state(self._process.pid)) and state.stopped:
                break
        if self._keeper.is_alive():
            _say("the timeline could not be written in time; what was not written yet is missing")
            self._left = 0
            end_all([self._process])

    def _keep(self) -> None:
        while (status := self._process.wait()) < 0 and self._left:
            self._left -= 1
            _say(f"warning: what collects the timeline {how_it_ended(status)}; another goes on")
            self._close()
            self._over.wait(PAUSE)
            try:
                self._process = self._start()
            except OSError as error:
                _say(f"the timeline ends here: what collects it cannot be started ({error.strerror})")
                return
            if self._over.is_set():
                self._close()
        if status and (status > 0 or not self._over.is_set()):
            _say(f"the timeline ends here: what collects it {how_it_ended(status)}")

    def _close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


def start_agent(folder: Path, first: int, count: int, collected: Collected) -> subprocess.Popen[bytes]:
    """The agent of these ranks, which ends when its standard input does."""
    return subprocess.Popen(
        command_of(programs.COLLECTOR, str(folder), str(first), str(count), collected.to_json()),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"plait: {text}", file=sys.stderr, flush=True)


def check_loggers(loggers: tuple[str, ...]) -> None:
    """Raise JobError, naming the package, for a logger that is not installed."""
    for name in loggers:
        if find_spec(LOGGERS[name]) is None:
            fix = f"Install it with: {how_to_install(LOGGERS[name])}, or leave it out of run.loggers"
            raise JobError(f"'{name}' needs the package {LOGGERS[name]}, which is not installed", key="run.loggers",
                           fix=fix)  # fmt: skip


def _settings(folder: Path) -> RunSection:
    from plait.core.job.plan import Plan
    from plait.core.job.settings import RunSection

    try:
        plan = Plan.read(folder / "plan.json")
    except PlaitError:
        return RunSection()
    return plan.job.run if plan.job else RunSection()
