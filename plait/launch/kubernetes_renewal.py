"""A new Job in place of one whose controller waits too long before it makes a failed pod again.

A Job waits 10 s after a failed pod, then 20, 40, ... 360 s, and starts anew only when a pod succeeds, which
those of a training never do until its end
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-backoff-failure-policy). So the seventh
node that a run loses, weeks after the first, would cost six minutes. Who follows the run makes another Job of
it as soon as a failed pod would wait longer than that takes; its controller has counted nothing yet.

The run is in the cluster at every moment: the new Job is sent before the old one is deleted. No rank trains
then, since a pod is missing; what the old pods still do is fenced (``core.runs.epoch``), and the new first
pod takes the run's lock over, as a later start of the same run. For it stays the same: its name in the folder
is that of the first Job, and the starts that bring nothing are counted on. Jobs in a queue of Kueue's are
left alone, since another could be admitted in between; JobSets have no such waits."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from plait.launch.kubernetes_manifests import Object, PodRun
from plait.launch.kubernetes_objects import failed, over, uid

FIRST, LONGEST = 10.0, 360.0
"""Seconds that a Job waits after the first failed pod, and at most."""
WORTH = 45.0
"""Seconds of waiting that are longer than it takes to begin a new Job."""


def successor(run: PodRun) -> PodRun:
    """The same run in a Job of another name."""
    name = f"{run.name.rpartition('-')[0]}-{secrets.token_hex(3)}"
    return replace(run, name=name, origin=run.origin or run.name)


class Backoff:
    """What a Job's controller waits for, as far as it can be seen from outside."""

    def __init__(self, run: PodRun) -> None:
        self._nodes = run.nodes
        self._counts = run.kind == "Job" and not run.settings.kueue_queue and run.settings.max_restarts > 0
        self._failed = set[str]()
        self._last = 0.0

    def give_up(self) -> None:
        """No other Job may be made."""
        self._counts = False

    def left(self, pods: Sequence[Object], gone: Iterable[Object]) -> float:
        """Seconds until the pods that are missing are made; 0 if none is, or none waits. gone: those that
        were deleted."""
        ended = [*(pod for pod in pods if failed(pod)), *(pod for pod in gone if not _succeeded(pod))]
        if new := {uid(pod) for pod in ended} - self._failed:
            self._failed |= new
            self._last = time.monotonic()
        missing = sum(not over(pod) for pod in pods) < self._nodes
        if not (self._counts and missing and self._failed):
            return 0.0
        # an exponent of a run that lasts for months would be no float
        wait = min(LONGEST, FIRST * 2.0 ** min(len(self._failed) - 1, 30))
        return max(0.0, self._last + wait - time.monotonic())


def _succeeded(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") == "Succeeded"
