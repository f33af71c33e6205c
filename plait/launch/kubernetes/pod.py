"""A run inside its pods: pod 0 launches, every pod runs an agent.

    python -m plait.api.in_cluster          in a pod of ``plait train --on kubernetes``

Failed ranks are restarted in the existing pods; a pod fails only with its node, or for good. So one
failure is one failed pod, and its Job's backoff does not grow faster. Agents outlive pod 0: they
wait for its replacement. A pod's exit status decides about the run: 0, it has ended well; 93, it
would only fail the same way again; any other status, the pod is to be recreated.
"""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from plait.core.base import programs
from plait.core.base.cluster_env import PodEnv, take_agent, task_number
from plait.core.base.env import inherited
from plait.core.base.errors import LaunchError, PlacementError, PlaitError, RankFailure
from plait.core.base.process import command_of
from plait.core.job.plan import CHANGED, Plan
from plait.core.runs.history import History, newest_checkpoint
from plait.core.runs.lock import RunLock
from plait.core.runs.progress import Progress
from plait.core.topology.hostlist import expand
from plait.core.topology.rank_table import NAME, RankTable
from plait.formats.kubernetes.manifests import TOPOLOGY
from plait.launch.hang import HangDetection
from plait.launch.local import agent
from plait.launch.local.agents import Agents, Rendezvous
from plait.launch.local.supervisor import backoff
from plait.launch.run_folder import DO_NOT_RETRY, keep_plan, last_job, starts_in_vain, write_run
from plait.launch.slurm.nodes import GrantedNodes
from plait.launch.watch import RunGuard, catching_signals, say, watched

Suspects = Callable[[Plan, Path], HangDetection | None]
PodOrder = Callable[[Plan, GrantedNodes, Path], tuple[Sequence[str], str]]
"""A function that returns the best order of nodes for a plan, by the topology in a file, and a
sentence that explains it. It raises PlaitError if there is none."""
AGENT = command_of(programs.AGENT)
RETRY_STATUSES = (1, 128 + signal.SIGTERM)
"""Exit statuses of a run after which another start on other nodes may succeed."""
GUARDS = 2
"""The number of pods that delete pods of lost nodes, so that no follower is needed: the first two,
on different nodes, if their service account may."""
GUARD_LOOK = 5.0
"""Seconds between two checks for pods of lost nodes."""


def main(suspicion: Suspects = lambda plan, folder: None, order: PodOrder | None = None) -> int:
    """Run this pod's part; return its exit status. suspicion: creates the hang detection of a
    plan's ranks. order: orders the nodes if there is no rank table."""
    with catching_signals() as signals:  # a container's first process ignores signals by default
        pod = PodEnv.read()
        said = json.loads((pod.files / "run.json").read_text())
        launcher = None if task_number() else _Launcher(pod, said, signals, suspicion, order)
        told = "" if launcher else take_agent()
        # Its thread reads the environment: no variable may be removed meanwhile.
        with guarded(said["name"], task_number()):
            return launcher.run() if launcher else agent.main(patience=said["wait"], again=True, credentials=told)


class _Ended(NamedTuple):
    """The end of an attempt. status: the run's exit status. message: its error, if any. pods: the
    exit status of all pods; None if ranks are restarted in them."""

    status: int
    message: str
    pods: int | None


class _Launcher:
    """The launcher of a run, in pod 0. said: the contents of the run's ``run.json``. word: the
    secret that agents know."""

    def __init__(
        self, pod: PodEnv, settings: dict[str, Any], signals: deque[int], suspicion: Suspects, order: PodOrder | None
    ) -> None:
        self.pod, self.said, self.signals, self.suspicion, self.order = pod, settings, signals, suspicion, order
        self.folder, self.world = Path(settings["folder"]), int(settings["world_size"])
        self.word = take_agent().rpartition(" ")[2]
        self.table = _table(pod, settings["nodes"], self.world)
        self.plan: Plan | None = None
        self.lock: RunLock | None = None
        self._stopped = False
        """True if this pod itself was asked to end (by a signal)."""
        self._began = False
        self._vain = 0

    def run(self) -> int:
        """Launch the run until it has ended, or this pod has to; return the pod's exit status."""
        packed = self.pod.files / "plan.json.gz"
        ended = _Ended(1, "", 1)
        with ExitStack() as held:
            try:
                if packed.is_file():
                    plan = Plan.from_json(gzip.decompress(packed.read_bytes()).decode(), packed.name)
                    self.lock = held.enter_context(RunLock(self.folder))
                    self.plan = write_run(plan.continued(self.folder / "plan.json"), self.folder)
                while (ended := self._attempt()).pods is None:
                    self._wait()
            except PlaitError as error:
                ended = self._over(error.exit_status, str(error))
        with suppress(OSError):  # Kubernetes keeps 4096 bytes
            self.pod.ended.write_text(json.dumps({"status": ended.status, "message": ended.message[-2000:]}))
        assert ended.pods is not None
        return ended.pods

    def _over(self, status: int, message: str) -> _Ended:
        print(f"plait: {message}", file=sys.stderr, flush=True)
        return _Ended(status, message, _for_pods(status))

    def _wait(self) -> None:
        wait = backoff(self._vain)
        say(f"starting again in {wait:.0f} s in the pods that are there, from step {newest_checkpoint(self.folder)}")
        end = time.monotonic() + wait
        while time.monotonic() < end and not self.signals:
            time.sleep(0.05)

    def _attempt(self) -> _Ended:
        """Run one attempt; a training run's start is recorded in its history."""
        before, ended = newest_checkpoint(self.folder), list[_Ended]()
        with ExitStack() as held:
            held.callback(lambda: self._hang_up(ended))
            try:
                status, message = self._noted(held), ""
            except PlaitError as error:
                status, message = error.exit_status, str(error)
                print(f"plait: {message}", file=sys.stderr, flush=True)
            ended.append(_Ended(status, message, self._becomes(status, before)))
        return ended[0]

    def _becomes(self, status: int, before: int) -> int | None:
        """Return the exit status of all pods after an attempt that ended with ``status``; None if
        ranks are restarted in the same pods. before: step of the newest checkpoint when the attempt
        began."""
        self._stopped = self._stopped or bool(self.signals)
        pods = _for_pods(status)
        if pods not in RETRY_STATUSES or self.plan is None:
            return pods
        most = self.said["restarts"]
        if not self._stopped and most == 0:
            return DO_NOT_RETRY
        self._vain = starts_in_vain(self.folder, self.pod.run, before)
        if self._vain > most and not self._stopped:
            many = "A start" if self._vain == 1 else f"{self._vain} starts in a row"
            print(f"plait: {many} ended without a new checkpoint; the run is given up", file=sys.stderr)
            return DO_NOT_RETRY
        return pods if self._stopped else None

    def _noted(self, held: ExitStack) -> int:
        if self.plan is None:
            return self._start(held, Progress(self.world), None)
        plan, history = self.plan, History(self.folder)
        keep_plan(plan, self.folder)
        self._history = history
        again = self._began or last_job(self.folder) == self.pod.run
        changed, self._began = plan.notes.get(CHANGED, ""), True
        history.begin_again(self.world, self.table.hosts, plan.key, again=again, changed=changed)

        def run(progress: Progress) -> int:
            return self._start(held, progress, self.suspicion(plan, self.folder))

        return history.attempt(run, Progress(self.world, stepped=lambda one: history.record_restart(one, say)))

    def _start(self, held: ExitStack, progress: Progress, suspicion: HangDetection | None) -> int:
        """Start all ranks and watch them until they end; return the run's status."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.table.write(self.folder / NAME)
        logs = self.folder / "logs"
        with _passing():  # the port may be taken if pods use their node's network
            agents = Agents(
                self.table, self.said["argv"], logs,
                Rendezvous(host=self.pod.address, port=self.said["port"], word=self.word, patience=self.said["wait"]),
                seat=self._seated,
            )  # fmt: skip
        self._agents = held.enter_context(agents)
        self._own = subprocess.Popen(
            AGENT, env=inherited() | agents.variables, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            with _passing():  # a missing pod may come up on another node
                ranks = agents.ranks(self._check_agents)
        except _Stopped as stopped:
            progress.stopping = True
            return stopped.status
        guard = RunGuard(lock=self.lock, suspicion=suspicion, progress=progress)
        sources, signals = list(agents.agents.values()), _Noting(self.signals, self._note_stop)
        timeout = self.said["timeout"]
        return watched(ranks, logs, guard=guard, timeout=timeout, sources=sources, signals=signals)

    _agents: Agents | None = None
    _own: subprocess.Popen[bytes] | None = None
    _history: History | None = None

    def _note_stop(self) -> None:
        self._stopped = True

    def _seated(self, hosts: Sequence[str]) -> RankTable:
        """Return the rank table of the hosts that have registered, and write it: ranks compare
        their placement with it."""
        self.table = (
            self._ordered(hosts) if (self.pod.files / TOPOLOGY).is_file() else with_replacements(self.table, hosts)
        )
        self.table.write(self.folder / NAME)
        if self._history:
            self._history.moved(self.table.hosts)
        return self.table

    def _ordered(self, hosts: Sequence[str]) -> RankTable:
        """Return a rank table of the registered hosts in the order that placing found, or else by
        pod index."""
        table = with_replacements(RankTable(tuple(hosts), self.table.ranks_per_node), hosts)
        if self.order and self.plan and len(hosts) > 1:
            granted = GrantedNodes(tuple(hosts), len(hosts), table.ranks_per_node)
            try:
                best, said = self.order(self.plan, granted, self.pod.files / TOPOLOGY)
                say(said)
                return RankTable(tuple(best), table.ranks_per_node, self.plan.key)
            except PlaitError as error:
                say(f"nodes are used in the order of their pod indices, because the placer found no order: {error}")
        return table

    def _check_agents(self) -> None:
        if self.signals:
            self._stopped = True
            raise _Stopped(self.signals[0])
        if self._own and self._own.poll() is not None:
            raise LaunchError("the first pod's own agent has ended; its output above says why.")

    def _hang_up(self, ended: Sequence[_Ended]) -> None:
        """Disconnect the agents: with the final status if the run has ended, so that they end;
        otherwise they wait for the next launcher."""
        agents, own, self._agents, self._own = self._agents, self._own, None, None
        pods = ended[0].pods if ended else 1
        if agents and pods is not None and pods not in RETRY_STATUSES:
            agents.done(pods)  # otherwise they wait for another launcher, in this pod or its replacement
        if agents:
            agents.__exit__(None, None, None)
        if own:
            try:
                own.wait(15)
            except subprocess.TimeoutExpired:
                own.kill()
                own.wait()


class _Noting(deque[int]):
    """A queue of other pods' signals, preceded by this pod's own. Taking an own signal calls
    ``note``: only own signals ask this pod to end."""

    def __init__(self, own: deque[int], note: Callable[[], None]) -> None:
        super().__init__()
        self._own, self._note = own, note

    def __bool__(self) -> bool:
        return bool(self._own) or len(self) > 0

    def popleft(self) -> int:
        """Remove and return the next signal."""
        if self._own:
            self._note()
            return self._own.popleft()
        return super().popleft()


def with_replacements(table: RankTable, hosts: Sequence[str]) -> RankTable:
    """Return the rank table with hosts that have registered in place of those that have not. hosts:
    the registered ones. Raises PlacementError if two pods are on one host.

    >>> with_replacements(RankTable(("a", "b", "c"), 1), ["c", "x", "a"]).hosts
    ('a', 'x', 'c')
    """
    others = iter(sorted(host for host in hosts if host not in table.hosts))
    there = set(hosts)
    if len(there) < len(hosts):
        twice = sorted({host for host in hosts if list(hosts).count(host) > 1})
        raise PlacementError(f"Several pods of the run are on {', '.join(twice)}; a node has one of each run.")
    moved = [(host, host if host in there else next(others)) for host in table.hosts]
    for old, new in moved:
        if old != new:
            say(f"{new} takes the place of {old}")
    return RankTable(tuple(new for _, new in moved), table.ranks_per_node, table.plan)


def _for_pods(status: int) -> int:
    """Return the pods' exit status for a run that ended with ``status``."""
    return status if status == 0 or status in RETRY_STATUSES else DO_NOT_RETRY


@contextmanager
def _passing() -> Generator[None]:
    """Turn a LaunchError inside the block into RankFailure: it is no mistake of the user, and may
    not recur at the next start."""
    try:
        yield
    except LaunchError as error:
        raise RankFailure(str(error)) from None


class _Stopped(Exception):
    """Error for a signal that came before ranks were started. status: 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def _table(pod: PodEnv, nodes: int, world_size: int) -> RankTable:
    """Return the rank table of the hosts in the pod's environment, else of the pods by index."""
    hosts = expand(pod.hosts) if pod.hosts else [f"{pod.run}-{number}" for number in range(nodes)]
    return RankTable(tuple(hosts), world_size // nodes)


@contextmanager
def guarded(run: str, index: int) -> Generator[None]:
    """Delete pods of lost nodes of the run called ``run``, by a thread, while the block runs; only
    in pods whose ``index`` is below ``GUARDS``."""
    ending = threading.Event()
    if index < GUARDS:
        threading.Thread(target=_guard, args=(run, ending), name="guard", daemon=True).start()
    try:
        yield
    finally:
        ending.set()


def _guard(run: str, ending: threading.Event) -> None:
    """Delete pods of lost nodes until ``ending`` is set or a request is refused."""
    from plait.formats.kubernetes.manifests import RUN
    from plait.launch.kubernetes.api import KubernetesNamespace, Unavailable
    from plait.launch.kubernetes.lost import LostPods
    from plait.launch.kubernetes.objects import Objects

    try:
        cluster = KubernetesNamespace()
        fence = LostPods(cluster, say)
        with Objects(cluster, "Pod", f"{RUN}={run}") as pods:
            while not ending.wait(GUARD_LOOK):
                try:
                    fence.look(pods.now())
                except Unavailable:
                    continue
    except LaunchError:  # no permission, or no known server: the run's follower watches instead
        return
