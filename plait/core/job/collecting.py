"""Start of the agent that collects the records of a host's ranks. The agent is a process of its
own, so that a killed rank loses no records.

``plait train`` starts the agent on this machine and in a lab; the node's agent starts it under
Slurm and Kubernetes. With any other launcher (torchrun) the first rank of a machine starts it.
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
"""Package that each logger of ``run.loggers`` needs."""
PATIENCE = 60.0
"""Seconds that the agent may take to write the remaining records when the ranks have ended."""
AGAIN, PAUSE = 3, 1.0
"""Most restarts of an agent that was killed, and the seconds before each restart."""


@dataclass(frozen=True, kw_only=True)
class CollectorSettings:
    """Keys of a job's ``run`` section that agents need. They are passed as JSON, because reading a
    plan takes longer than all other work at an agent's start."""

    timeline_steps: int
    timeline_sample: int
    metrics_port: int
    metrics_address: str
    loggers: tuple[str, ...]

    @staticmethod
    def of(run: RunSection) -> CollectorSettings:
        """Return the keys of a job's ``run`` section."""
        return CollectorSettings(
            timeline_steps=run.timeline_steps, timeline_sample=run.timeline_sample, metrics_port=run.metrics_port,
            metrics_address=run.metrics_address, loggers=run.loggers,
        )  # fmt: skip

    @property
    def anything(self) -> bool:
        """True if an agent has anything to do."""
        return bool(self.timeline_steps or self.metrics_port or self.loggers)

    def to_json(self) -> str:
        """Return the keys as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> CollectorSettings:
        """Return the keys that ``to_json`` has written."""
        return decode(CollectorSettings, json.loads(text))


@contextmanager
def collecting(folder: Path, first: int, count: int, *, is_rank: bool = False) -> Generator[None]:
    """Collect the records of ranks ``first`` to ``first + count - 1`` of the run in ``folder``
    while the block runs, and at its end up to the last record. is_rank: this process is one of
    these ranks, and does not wait for the agent if it fails.

    Raises JobError for a logger that is not installed here.
    """
    collected = CollectorSettings.of(_settings(folder))
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
    """A process that ends when its standard input is closed. If it is killed earlier, a new process
    goes on where it stopped. start: starts a process.

    After more than ``AGAIN`` restarts, or if the process ends by itself, records are no longer
    collected, and a message says so.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start, self._process, self._left = start, start(), AGAIN
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="agent", daemon=True)
        self._keeper.start()

    def end(self, *, wait: bool) -> None:
        """Close the agent's standard input. wait: until it has ended, ``PATIENCE`` seconds at most;
        an agent that cannot run, because it is stopped, only for a moment."""
        self._over.set()
        self._process.send_signal(signal.SIGCONT)  # a stopped agent would never end
        self._close()  # the agent ends at end of file, as it would after our exit
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
            _say(f"warning: the timeline collector {how_it_ended(status)}; a new one takes over")
            self._close()
            self._over.wait(PAUSE)
            try:
                self._process = self._start()
            except OSError as error:
                _say(f"the timeline ends here: its collector cannot be started ({error.strerror})")
                return
            if self._over.is_set():
                self._close()
        if status and (status > 0 or not self._over.is_set()):
            _say(f"the timeline ends here: its collector {how_it_ended(status)}")

    def _close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


def start_agent(folder: Path, first: int, count: int, collected: CollectorSettings) -> subprocess.Popen[bytes]:
    """Start the agent of these ranks, which ends when its standard input is closed."""
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
    return plan.settings.run if plan.settings else RunSection()
