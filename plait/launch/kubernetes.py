"""Runs in pods, from outside: sending one to a cluster, showing what it prints, ending it.

A run needs nobody who follows it. Who does, frees the nodes that are lost of their pods
(``kubernetes_fence``)."""

from __future__ import annotations

import re
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Literal

from plait.core.base.errors import LaunchError, PlaitError
from plait.core.runs.lock import RunLock
from plait.launch.kubernetes_api import Away, KubernetesNamespace, NotThere
from plait.launch.kubernetes_fence import Fence
from plait.launch.kubernetes_manifests import HOSTNAME, RUN, Object, PodRun
from plait.launch.kubernetes_objects import (
    container_of,
    ending,
    failed,
    last_words,
    lives,
    newest,
    over,
    waiting,
    why_failed,
)
from plait.launch.kubernetes_renewal import WORTH, Backoff, successor
from plait.launch.kubernetes_watch import Objects, PodLog
from plait.launch.watch import catching_signals, say

LOOK = 0.5
"""Seconds between two looks at a run."""
LONGEST = 60.0
"""Seconds at most between two tries to reach a server that is away."""
STOPPING = 5.0
"""The same where the run is to be told to end."""
SETTLING = 20.0
"""Seconds that pod 0 may take to end once its Job has."""
HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerError")
"""Why a container waits that will not start by waiting."""


def new_name(name: str) -> str:
    """A name for a run's objects: what DNS allows of ``name``, and something that no other run has.

    >>> re.fullmatch(r"plait-my-run-2-[a-z0-9]{6}", new_name("My run_2")) is not None
    True
    """
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:30].strip("-")
    return "-".join(filter(None, ("plait", allowed, secrets.token_hex(3))))


def submit(cluster: KubernetesNamespace, run: PodRun) -> None:
    """Make all objects of a run; if one is refused, none is left, or what may be left is named."""
    owner = cluster.create(run.workload())
    try:
        for one in run.belongings(owner):
            cluster.create(one)
    except BaseException:
        try:
            cluster.delete(run.kind, run.name)
        except LaunchError as error:
            say(f"{error} To remove what may be left: {removal(cluster, run)}")
        raise


def hostnames(cluster: KubernetesNamespace, hosts: Sequence[str]) -> dict[str, str]:
    """What nodes are called by the label that schedulers go by, where that is not their name. Of nodes that
    may not be seen their names are taken."""
    found = dict[str, str]()
    with suppress(LaunchError):
        for node in cluster.list("Node")[0]:
            name = node["metadata"]["name"]
            label = node["metadata"].get("labels", {}).get(HOSTNAME, name)
            if name in hosts and label != name:
                found[name] = label
    return found


def removal(cluster: KubernetesNamespace, run: PodRun) -> str:
    """The command that ends a run."""
    return f"kubectl -n {cluster.namespace} delete {run.kind.lower()} {run.name}"


class Failed(LaunchError):
    """The run has ended, and not well; it stays in the cluster for a while, to be looked at."""


class Hopeless(LaunchError):
    """The run cannot go on, and is to be ended."""


@contextmanager
def heeding(cluster: KubernetesNamespace) -> Iterator[deque[int]]:
    """The user's signals, in a queue; a server that is away is not waited for where one has come."""
    with catching_signals() as signals:
        cluster.interrupted = signals
        try:
            yield signals
        finally:
            cluster.interrupted = ()


def unsent(cluster: KubernetesNamespace, run: PodRun, signals: deque[int]) -> int:
    """The exit status of a run that was sent and that nobody follows; one that was told to end meanwhile is
    removed."""
    if not signals:
        return 0
    cluster.interrupted = ()
    cluster.delete(run.kind, run.name, wait_for_pods=True)
    return 128 + signals[0]


def follow(
    cluster: KubernetesNamespace, run: PodRun, *, lock: RunLock | None = None, signals: deque[int] | None = None
) -> int:  # fmt: skip
    """Show what rank 0 prints, free nodes that are lost of their pods, and return the run's exit status.

    The first Ctrl-C (or SIGTERM, SIGHUP) lets ranks save and end, the second ends them at once; nothing stays
    in the cluster then. A server that is away ends nothing: it is asked again, ever less often. Whatever else
    goes wrong here leaves the run alone too, unless it cannot go on. signals: those that the caller catches.
    """
    with heeding(cluster) if signals is None else nullcontext(signals) as caught:
        while isinstance(ended := _follow_one(cluster, run, lock, caught), PodRun):
            run = ended
        return ended


def _follow_one(
    cluster: KubernetesNamespace, run: PodRun, lock: RunLock | None, signals: deque[int]
) -> int | PodRun:  # fmt: skip
    """The run's exit status, or the Job that has taken this one's place."""
    with (
        Objects(cluster, "Pod", f"{RUN}={run.name}") as pods,
        Objects(cluster, run.kind, f"{RUN}={run.name}") as workloads,
        PodLog(cluster, sys.stdout.buffer) as log,
    ):
        watching = _FollowedRun(cluster, run, pods, workloads, log, lock)
        try:
            return watching.to_the_end(signals)
        except Hopeless:
            with suppress(LaunchError):
                cluster.delete(run.kind, run.name)
            raise
        except (NotThere, Failed):
            raise
        except LaunchError as error:
            raise LaunchError(f"{error} {watching.goes_on}") from None


class _FollowedRun:
    """A run that is followed."""

    def __init__(
        self, cluster: KubernetesNamespace, run: PodRun, pods: Objects, workloads: Objects, log: PodLog,
        lock: RunLock | None,
    ) -> None:  # fmt: skip
        self.cluster, self.run, self.pods, self.workloads = cluster, run, pods, workloads
        self.log, self.lock = log, lock
        self.fence, self.backoff = Fence(cluster, say), Backoff(run)
        self.next: PodRun | None = None
        self.stopped = 0
        self._said = ""
        self._waiting: dict[str, float] = {}
        self._away = 0
        self._to_do: Literal["", "stop", "kill"] = ""

    @property
    def goes_on(self) -> str:
        """What becomes of a run that nobody follows."""
        return (
            f"The run {self.run.name} is no longer followed. It goes on; its logs are in {self.run.folder / 'logs'}, "
            f"as pods see it, and {removal(self.cluster, self.run)} ends it. Sent again, it goes on from its last "
            "checkpoint."
        )

    def to_the_end(self, signals: deque[int]) -> int | PodRun:
        """The run's exit status, or what has taken its place."""
        while True:
            try:
                while signals:
                    self._asked_to_stop(signals.popleft())
                self._stop()
                status = self.look()
                self._back()
                if status is not None:
                    return status
                time.sleep(LOOK)
            except Away as away:
                if signals and self.stopped:
                    raise LaunchError(f"{away} The run could not be told to end.") from None
                self._wait(away, signals)

    def _back(self) -> None:
        if self._away:
            say("Kubernetes answers again")
        self._away = 0

    def _wait(self, away: Away, signals: deque[int]) -> None:
        """Until the server is asked again; not for long where somebody has pressed Ctrl-C."""
        if not self._away:
            say(f"{away} The run goes on without us; asking again (Ctrl-C twice to leave it)")
        longest = STOPPING if self._to_do else LONGEST
        end = time.monotonic() + min(longest, LOOK * 2.0 ** min(self._away, 10))
        self._away += 1
        while time.monotonic() < end and not signals:
            time.sleep(0.05)

    def look(self) -> int | PodRun | None:
        """One look; the exit status, or the next Job of the run, once it has one."""
        if self.lock:
            self.lock.check()
        pods = self.pods.now()
        if head := newest(pods):
            self.log.follow(head)
        found = self.workloads.now()
        if not self.workloads.seen:
            return None
        if not found:
            if self.next and not self.stopped:
                return self.next
            if not self.stopped:
                raise NotThere(f"The run {self.run.name} was deleted by somebody else.")
            if any(lives(pod) for pod in pods):  # they have their grace
                self.fence.look(pods)
                return None
            return self._last(pods, well=False)
        (workload,) = found
        if (ended := ending(workload)) is not None:
            if self.next and not ended:  # its place is taken
                self.cluster.delete(self.run.kind, self.run.name)
                return None
            if self.next:
                self.cluster.delete(self.next.kind, self.next.name)
            return self._last(self._settled(), well=ended)
        self.fence.look(pods)
        if self.stopped:
            return None
        if self.next or self.backoff.left(pods, self.pods.gone()) > WORTH:
            self._renew(workload)
        if self.next:
            return None
        self._tell(pods, queued=bool(workload["spec"].get("suspend")))
        self._judge(pods)
        return None

    def _renew(self, workload: Object) -> None:
        """Have another Job take the place of this one, which lets its pods wait. Done again after a server
        was away."""
        if self.next is None:
            following = successor(self.run)
            try:
                submit(self.cluster, following)
            except Away:
                raise
            except LaunchError as error:
                self.backoff.give_up()
                say(f"{self.run.name} waits for minutes before it makes failed pods again. {error}")
                return
            self.next = following
            say(
                f"{self.run.name} would wait for minutes before it makes failed pods again: {following.name} takes its "
                f"place; to end it: {removal(self.cluster, following)}"
            )
        if "deletionTimestamp" not in workload["metadata"]:
            self.cluster.delete(self.run.kind, self.run.name, wait_for_pods=True)

    def _settled(self) -> list[Object]:
        """All pods, once pod 0 has had its last words: another pod may have ended the Job before."""
        deadline = time.monotonic() + SETTLING
        while True:
            pods = self.pods.now()
            head = newest(pods)
            if head is None or not lives(head) or not container_of(head) or time.monotonic() > deadline:
                return pods
            time.sleep(LOOK)

    def _asked_to_stop(self, number: int) -> None:
        """With grace at first, then at once."""
        if self.stopped:
            self._to_do = "kill"
            say("ending all ranks at once; what was not saved is lost")
        else:
            self.stopped, self._to_do = number, "stop"
            name = signal.Signals(number).name
            say(f"{name}: ranks have {self.run.settings.grace} s to save the run (Ctrl-C to end it at once)")

    def _stop(self) -> None:
        """Tell the cluster, until it has heard."""
        if self._to_do == "kill":
            for pod in self.pods.now():
                self.cluster.delete("Pod", pod["metadata"]["name"], grace=0)
        if self._to_do:
            self.cluster.delete(self.run.kind, self.run.name, wait_for_pods=self._to_do == "stop")
            if self.next:
                self.cluster.delete(self.next.kind, self.next.name)
        self._to_do = ""

    def _last(self, pods: Sequence[Object], *, well: bool) -> int:
        """The run's exit status, by pod 0's last words; raises its error if that was not seen in its log."""
        head = newest([*pods, *self.pods.gone()])
        said, shown = last_words(head), self.log.finish()
        if head:  # one that ended before it was followed
            self.log.follow(head)
            shown = self.log.finish()
        if self.stopped:
            return 128 + self.stopped if said.get("status") is None or said["status"] > 128 else said["status"]
        if well:
            return 0
        message = said.get("message", "")
        if message not in shown:
            error = PlaitError(message)
            error.exit_status = said["status"]
            raise error
        if said.get("status"):
            return said["status"]
        why = "; ".join(dict.fromkeys(map(why_failed, (pod for pod in pods if failed(pod)))))
        raise Failed(f"The run {self.run.name} has failed{f': {why}' if why else ''}.")

    def _tell(self, pods: Sequence[Object], *, queued: bool) -> None:
        """Say what has changed."""
        running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        reasons = [why for pod in pods if not over(pod) and (why := waiting(pod))]
        why = f"; {reasons[0]}" if reasons else ""
        if queued:
            why = f"; it waits in the queue {self.run.settings.kueue_queue}"
        elif running < self.run.nodes and not any(pod.get("status", {}).get("phase") == "Pending" for pod in pods):
            return  # some have ended already
        now = f"{self.run.name}: {running} of {self.run.nodes} pods run{why}"
        if now != self._said:
            say(now)
            self._said = now

    def _judge(self, pods: Sequence[Object]) -> None:
        """Raise Hopeless for a pod that does not start: a wrong image, or too long a wait."""
        for pod in pods:
            reason = container_of(pod).get("state", {}).get("waiting", {})
            if pod.get("status", {}).get("phase") != "Pending" or not pod["spec"].get("nodeName"):
                continue  # a queue may take as long as it likes
            name = pod["metadata"]["name"]
            since = self._waiting.setdefault(pod["metadata"]["uid"], time.monotonic())
            waited = time.monotonic() - since
            if reason.get("reason") in HOPELESS or waited > self.run.settings.wait:
                why = f"{reason.get('reason', 'no reason given')}. {reason.get('message', '')}".strip()
                raise Hopeless(f"Pod {name} does not start, and the run was ended: {why}")
