"""A run inside of its pods: pod 0 launches, every pod is an agent.

    python -m plait.api.in_pod          in a pod of ``plait train --on kubernetes``

A pod's exit status says what becomes of the run: 0 that it has ended well, 93 that it would only end the same
way again, anything else that it is to be started again.
"""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from plait.core.base import programs
from plait.core.base.env import PodEnv, inherited, take_agent, task_number
from plait.core.base.errors import LaunchError, PlaitError, RankFailure
from plait.core.base.process import command_of
from plait.core.job.plan import CHANGED, Plan
from plait.core.runs.history import History, newest_checkpoint
from plait.core.runs.lock import RunLock
from plait.core.runs.progress import Progress
from plait.core.topology.hostlist import expand
from plait.core.topology.rank_table import NAME, RankTable
from plait.launch import agent
from plait.launch.agents import Agents, Rendezvous
from plait.launch.hang import Suspicion
from plait.launch.run_folder import DO_NOT_RETRY, last_job, starts_in_vain, write_run
from plait.launch.watch import RunGuard, catching_signals, say, watched

Suspects = Callable[[Plan, Path], Suspicion | None]
AGENT = command_of(programs.AGENT)
VAIN = 3
"""Starts in a row without a new checkpoint after which the run is given up."""
AGAIN = (1, 128 + signal.SIGTERM)
"""Exit statuses of a run that may end otherwise on other nodes."""


def main(suspicion: Suspects = lambda plan, folder: None) -> int:
    """Be this pod. suspicion: finds out why ranks of a plan hang."""
    with catching_signals() as early:  # the first process of a container has no other answer to them
        pod = PodEnv.read()
        said = json.loads((pod.files / "run.json").read_text())
        return agent.main(patience=said["wait"]) if task_number() else _launch(pod, said, early, suspicion)


def _launch(pod: PodEnv, said: dict[str, Any], early: deque[int], suspicion: Suspects) -> int:
    folder, packed = Path(said["folder"]), pod.files / "plan.json.gz"
    before = newest_checkpoint(folder)
    plan, message = None, ""
    try:
        if packed.is_file():
            plan = Plan.from_json(gzip.decompress(packed.read_bytes()).decode(), packed.name)
        with ExitStack() as held:
            lock = None
            if plan:
                lock = held.enter_context(RunLock(folder))
                plan = write_run(plan.continued(folder / "plan.json"), folder)
            status = _noted(pod, said, early, lock, plan, suspicion)
    except PlaitError as error:
        message, status = str(error), error.exit_status
        print(f"plait: {message}", file=sys.stderr, flush=True)
    ending = _for_pods(status)
    if ending in AGAIN and plan and starts_in_vain(folder, pod.run, before) >= VAIN:
        print(f"plait: {VAIN} starts in a row ended without a new checkpoint; the run is given up", file=sys.stderr)
        ending = DO_NOT_RETRY
    with suppress(OSError):
        pod.ended.write_text(json.dumps({"status": status, "message": message[-2000:]}))  # 4096 bytes are kept
    return ending


def _noted(
    pod: PodEnv, said: dict[str, Any], early: deque[int], lock: RunLock | None, plan: Plan | None, suspicion: Suspects
) -> int:  # fmt: skip
    """Run; if that is a training, this start goes into the history of the run."""
    folder, world = Path(said["folder"]), int(said["world_size"])
    if plan is None:
        return _run(pod, said, early, lock, Progress(world), None)
    history = History(folder)
    hosts = _table(pod, said["nodes"], world).hosts
    again, changed = last_job(folder) == pod.run, plan.notes.get(CHANGED, "")
    history.begin_again(world, hosts, plan.key, again=again, changed=changed)

    def run(progress: Progress) -> int:
        return _run(pod, said, early, lock, progress, suspicion(plan, folder))

    return history.attempt(run, Progress(world, stepped=lambda one: history.goes_on(one, say)))


def _run(
    pod: PodEnv, said: dict[str, Any], early: deque[int], lock: RunLock | None, progress: Progress,
    suspicion: Suspicion | None,
) -> int:  # fmt: skip
    """Start all ranks, and see them to their end."""
    folder = Path(said["folder"])
    table = _table(pod, said["nodes"], said["world_size"])
    folder.mkdir(parents=True, exist_ok=True)
    table.write(folder / NAME)
    logs = folder / "logs"
    with _passing():  # the port may be taken, where pods have the network of their node
        listening = Agents(
            table,
            said["argv"],
            logs,
            Rendezvous(
                host=pod.address, port=said["port"], word=take_agent().rpartition(" ")[2], patience=said["wait"]
            ),
            addresses={table.hosts[0]: said["head"]},
            numbered=True,
        )
    status = 1
    with listening as agents, ExitStack() as held:
        own = subprocess.Popen(
            AGENT, env=inherited() | agents.variables, stdin=subprocess.DEVNULL, start_new_session=True
        )

        def still() -> None:
            if early:
                raise _Stopped(early[0])
            if own.poll() is not None:
                raise LaunchError("the first pod's own agent has ended.")

        held.callback(lambda: _finish(own, agents, status))
        try:
            with _passing():  # a pod that does not come may come on another node
                ranks = agents.ranks(still)
            sources = list(agents.agents.values())
            status = watched(
                ranks,
                logs,
                guard=RunGuard(lock=lock, suspicion=suspicion, progress=progress),
                timeout=said["timeout"],
                sources=sources,
            )
        except _Stopped as stopped:
            status = stopped.status
        except PlaitError as error:
            status = error.exit_status
            raise
    return status


def _for_pods(status: int) -> int:
    """The exit status of pods whose run has ended with ``status``."""
    return status if status == 0 or status in AGAIN else DO_NOT_RETRY


@contextmanager
def _passing() -> Generator[None]:
    """What goes wrong here is no mistake of the user's, and may not go wrong in the next start."""
    try:
        yield
    except LaunchError as error:
        raise RankFailure(str(error)) from None


class _Stopped(Exception):
    """Asked to end before ranks were started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def _finish(own: subprocess.Popen[bytes], agents: Agents, status: int) -> None:
    agents.done(_for_pods(status))  # without it, agents end as failed: a pod that has succeeded is never started again
    agents.__exit__(None, None, None)
    try:
        own.wait(15)
    except subprocess.TimeoutExpired:
        own.kill()
        own.wait()


def _table(pod: PodEnv, nodes: int, world_size: int) -> RankTable:
    """The order that the launcher has bound pods in, else the pods by their numbers."""
    hosts = expand(pod.hosts) if pod.hosts else [f"{pod.run}-{number}" for number in range(nodes)]
    return RankTable(tuple(hosts), world_size // nodes)
