"""Runs in pods, from outside: submit a run to a cluster, show its output, end it.

A run needs no follower. A follower also deletes the pods of lost nodes (``lost.LostPods``)."""

from __future__ import annotations

import re
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from plait.core.base.errors import LaunchError, PlaitError
from plait.formats.kubernetes.manifests import HOSTNAME, RUN, Object, PodRun
from plait.launch.kubernetes.api import KubernetesNamespace, NotFound, Unavailable
from plait.launch.kubernetes.lost import RENEWAL_BACKOFF, Backoff, LostPods, successor
from plait.launch.kubernetes.objects import (
    Objects,
    PodLog,
    container_of,
    ending,
    failed,
    is_active,
    last_words,
    newest,
    over,
    waiting,
    why_failed,
)
from plait.launch.watch import catching_signals, say

LOOK = 0.5
"""Seconds between two polls of a run."""
LONGEST = 60.0
"""The longest pause between two attempts to reach an unavailable server, seconds."""
STOPPING = 5.0
"""The longest pause in seconds between two attempts to reach an unavailable server, once the run is
to be stopped."""
SETTLING = 20.0
"""Seconds that pod 0 may take to end after its Job."""
HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerError")
"""Reasons of a waiting container for which waiting does not help."""


def new_name(name: str) -> str:
    """Return a unique name for a run's objects: the characters of ``name`` that DNS allows, and a
    random suffix.

    >>> re.fullmatch(r"plait-my-run-2-[a-z0-9]{6}", new_name("My run_2")) is not None
    True
    """
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:30].strip("-")
    return "-".join(filter(None, ("plait", allowed, secrets.token_hex(3))))


def submit(cluster: KubernetesNamespace, run: PodRun) -> None:
    """Create all objects of a run in the cluster. If one is refused, delete them again, or print
    the command that does; then raise the LaunchError of the refusal."""
    owner = cluster.create(run.workload())
    try:
        for one in run.owned_objects(owner):
            cluster.create(one)
    except BaseException:
        try:
            cluster.delete(run.kind, run.name)
        except LaunchError as error:
            say(f"{error} To remove what may be left: {removal(cluster, run)}")
        raise


def hostnames(cluster: KubernetesNamespace, hosts: Sequence[str]) -> dict[str, str]:
    """Return the nodes' values of the hostname label that schedulers use, where they differ from
    the node names. Nodes that may not be listed are left out."""
    found = dict[str, str]()
    with suppress(LaunchError):
        for node in cluster.list("Node")[0]:
            name = node["metadata"]["name"]
            label = node["metadata"].get("labels", {}).get(HOSTNAME, name)
            if name in hosts and label != name:
                found[name] = label
    return found


def removal(cluster: KubernetesNamespace, run: PodRun) -> str:
    """Return the kubectl command that ends a run."""
    return f"kubectl -n {cluster.namespace} delete {run.kind.lower()} {run.name}"


class Failed(LaunchError):
    """Error for a run that has failed; its objects stay in the cluster for a while, for
    inspection."""


class Hopeless(LaunchError):
    """Error for a run that cannot go on in the cluster, and has to be ended."""


@contextmanager
def queueing_signals(cluster: KubernetesNamespace) -> Generator[deque[int]]:
    """Yield a queue of the user's signals; while it holds one, an unavailable server is not waited
    for."""
    with catching_signals() as signals:
        cluster.interrupted = signals
        try:
            yield signals
        finally:
            cluster.interrupted = ()


def unfollowed_status(cluster: KubernetesNamespace, run: PodRun, signals: deque[int]) -> int:
    """Return the exit status of a submitted run without a follower; if a signal came meanwhile,
    delete the run."""
    if not signals:
        return 0
    cluster.interrupted = ()
    cluster.delete(run.kind, run.name, wait_for_pods=True)
    return 128 + signals[0]


def follow(cluster: KubernetesNamespace, run: PodRun, signals: deque[int]) -> int:
    """Show rank 0's output, delete the pods of lost nodes, and return the run's exit status.

    The first Ctrl-C (or SIGTERM, SIGHUP) lets ranks save and end, the second ends them at once;
    then nothing stays in the cluster. An unavailable server ends nothing: it is polled again, ever
    less often. Any other error here leaves the run alone too, unless the run cannot go on. signals:
    the queue of ``queueing_signals``.
    """
    while isinstance(ended := _follow_one(cluster, run, signals), PodRun):
        run = ended
    return ended


def _follow_one(cluster: KubernetesNamespace, run: PodRun, signals: deque[int]) -> int | PodRun:
    """Follow one Job; return the run's exit status, or the run's next Job."""
    with (
        Objects(cluster, "Pod", f"{RUN}={run.name}") as pods,
        Objects(cluster, run.kind, f"{RUN}={run.name}") as workloads,
        PodLog(cluster, sys.stdout.buffer) as log,
    ):
        watching = _FollowedRun(cluster, run, pods, workloads, log)
        try:
            return watching.to_the_end(signals)
        except Hopeless:
            with suppress(LaunchError):
                cluster.delete(run.kind, run.name)
            raise
        except (NotFound, Failed):
            raise
        except LaunchError as error:
            raise LaunchError(f"{error} {watching.goes_on}") from None


class _FollowedRun:
    """The follower's state of a run."""

    def __init__(
        self, cluster: KubernetesNamespace, run: PodRun, pods: Objects, workloads: Objects, log: PodLog
    ) -> None:
        self.cluster, self.run, self.pods, self.workloads, self.log = cluster, run, pods, workloads, log
        self.fence, self.backoff = LostPods(cluster, say), Backoff(run)
        self.next: PodRun | None = None
        self.stopped = 0
        self._said = ""
        self._waiting: dict[str, float] = {}
        self._away = 0
        self._to_do: Literal["", "stop", "kill"] = ""

    @property
    def goes_on(self) -> str:
        """The sentences that say how a run continues without a follower, and how to end it."""
        return (
            f"The run {self.run.name} is no longer followed. It goes on; its logs are in {self.run.folder / 'logs'}, "
            f"as pods see it, and {removal(self.cluster, self.run)} ends it. Sent again, it goes on from its last "
            "checkpoint."
        )

    def to_the_end(self, signals: deque[int]) -> int | PodRun:
        """Follow the Job until it ends; return the run's exit status, or the run's next Job."""
        while True:
            try:
                while signals:
                    self._note_stop(signals.popleft())
                self._stop()
                status = self.look()
                self._back()
                if status is not None:
                    return status
                time.sleep(LOOK)
            except Unavailable as away:
                if signals and self.stopped:
                    raise LaunchError(f"{away} The request to end did not reach the run.") from None
                self._wait(away, signals)

    def _back(self) -> None:
        if self._away:
            say("Kubernetes answers again")
        self._away = 0

    def _wait(self, away: Unavailable, signals: deque[int]) -> None:
        """Wait before the next attempt to reach the server; a signal ends the wait."""
        if not self._away:
            say(f"{away} The run goes on without us; asking again (Ctrl-C twice to stop asking)")
        longest = STOPPING if self._to_do else LONGEST
        end = time.monotonic() + min(longest, LOOK * 2.0 ** min(self._away, 10))
        self._away += 1
        while time.monotonic() < end and not signals:
            time.sleep(0.05)

    def look(self) -> int | PodRun | None:
        """Poll the cluster once; return the run's exit status, or the run's next Job, or None while
        the Job goes on. Raises Hopeless if a pod cannot start, NotFound if somebody else deleted
        the run."""
        pods = self.pods.now()
        if head := newest(pods):
            self.log.follow(head)
        found = self.workloads.now()
        if not self.workloads.listed:
            return None
        if not found:
            if self.next and not self.stopped:
                return self.next
            if not self.stopped:
                raise NotFound(f"The run {self.run.name} was deleted by somebody else.")
            if any(is_active(pod) for pod in pods):  # its pods have their grace period to end
                self.fence.look(pods)
                return None
            return self._last(pods, well=False)
        (workload,) = found
        if (ended := ending(workload)) is not None:
            if self.next and not ended:  # the next Job has replaced it
                self.cluster.delete(self.run.kind, self.run.name)
                return None
            if self.next:
                self.cluster.delete(self.next.kind, self.next.name)
            return self._last(self._settled(), well=ended)
        self.fence.look(pods)
        if self.stopped:
            return None
        if self.next or self.backoff.left(pods, self.pods.gone()) > RENEWAL_BACKOFF:
            self._renew(workload)
        if self.next:
            return None
        self._report(pods, queued=bool(workload["spec"].get("suspend")))
        self._judge(pods)
        return None

    def _renew(self, workload: Object) -> None:
        """Submit a new Job of the run in place of this one, whose backoff delays its pods. Called
        again after the server was unavailable."""
        if self.next is None:
            following = successor(self.run)
            try:
                submit(self.cluster, following)
            except Unavailable:
                raise
            except LaunchError as error:
                self.backoff.give_up()
                say(f"{self.run.name} waits for minutes before it recreates failed pods. {error}")
                return
            self.next = following
            say(
                f"{self.run.name} would wait for minutes before it recreates failed pods: {following.name} takes its "
                f"place; to end it: {removal(self.cluster, following)}"
            )
        if "deletionTimestamp" not in workload["metadata"]:
            self.cluster.delete(self.run.kind, self.run.name, wait_for_pods=True)

    def _settled(self) -> list[Object]:
        """Return all pods, once pod 0 has written its termination message or ``SETTLING`` seconds
        have passed: another pod may have ended the Job before."""
        deadline = time.monotonic() + SETTLING
        while True:
            pods = self.pods.now()
            head = newest(pods)
            if head is None or not is_active(head) or not container_of(head) or time.monotonic() > deadline:
                return pods
            time.sleep(LOOK)

    def _note_stop(self, number: int) -> None:
        """Note a signal: the first stops the run gracefully, the second at once."""
        if self.stopped:
            self._to_do = "kill"
            say("ending all ranks at once; what was not saved is lost")
        else:
            self.stopped, self._to_do = number, "stop"
            name = signal.Signals(number).name
            say(f"{name}: ranks have {self.run.settings.grace} s to save the run (Ctrl-C to end it at once)")

    def _stop(self) -> None:
        """Delete the run's objects as noted by ``_note_stop``; repeated until the server accepts
        it."""
        if self._to_do == "kill":
            for pod in self.pods.now():
                self.cluster.delete("Pod", pod["metadata"]["name"], grace=0)
        if self._to_do:
            self.cluster.delete(self.run.kind, self.run.name, wait_for_pods=self._to_do == "stop")
            if self.next:
                self.cluster.delete(self.next.kind, self.next.name)
        self._to_do = ""

    def _last(self, pods: Sequence[Object], *, well: bool) -> int:
        """Return the run's exit status from pod 0's termination message; raise the message's error
        if the log did not show it."""
        head = newest([*pods, *self.pods.gone()])
        said, shown = last_words(head), self.log.finish()
        if head:  # pod 0 may have ended before its log was followed
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

    def _report(self, pods: Sequence[Object], *, queued: bool) -> None:
        """Print the run's state if it has changed."""
        running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        reasons = [why for pod in pods if not over(pod) and (why := waiting(pod))]
        why = f"; {reasons[0]}" if reasons else ""
        if queued:
            why = f"; it waits in the queue {self.run.settings.kueue_queue}"
        elif running < self.run.nodes and not any(pod.get("status", {}).get("phase") == "Pending" for pod in pods):
            return  # some pods have ended already
        now = f"{self.run.name}: {running} of {self.run.nodes} pods run{why}"
        if now != self._said:
            say(now)
            self._said = now

    def _judge(self, pods: Sequence[Object]) -> None:
        """Raise Hopeless for a pod that does not start: its image is wrong, or it waits too
        long."""
        for pod in pods:
            reason = container_of(pod).get("state", {}).get("waiting", {})
            if pod.get("status", {}).get("phase") != "Pending" or not pod["spec"].get("nodeName"):
                continue  # the wait in a queue has no limit
            name = pod["metadata"]["name"]
            since = self._waiting.setdefault(pod["metadata"]["uid"], time.monotonic())
            waited = time.monotonic() - since
            if reason.get("reason") in HOPELESS or waited > self.run.settings.wait:
                why = f"{reason.get('reason', 'no reason given')}. {reason.get('message', '')}".strip()
                raise Hopeless(f"Pod {name} does not start, and the run was ended: {why}")
