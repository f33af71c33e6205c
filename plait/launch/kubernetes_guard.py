"""Looking after a run's pods from inside of them, so that a lost node needs nobody outside: the first two
pods, which are on different nodes, give up pods of lost nodes, where their service account may."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from plait.core.base.errors import LaunchError
from plait.launch.watch import say

LOOK = 5.0
"""Seconds between two looks at what was watched."""
GUARDS = 2
"""How many pods look."""


@contextmanager
def guarded(run: str, index: int) -> Iterator[None]:
    """Inside the block the pods of the run of this name are looked after, by a thread. index: of this pod."""
    ending = threading.Event()
    if index < GUARDS:
        threading.Thread(target=_guard, args=(run, ending), name="guard", daemon=True).start()
    try:
        yield
    finally:
        ending.set()


def _guard(run: str, ending: threading.Event) -> None:
    """Until the block ends, or as soon as it turns out that this pod may not."""
    from plait.launch.kubernetes_api import Away, KubernetesNamespace
    from plait.launch.kubernetes_fence import Fence
    from plait.launch.kubernetes_manifests import RUN
    from plait.launch.kubernetes_watch import Objects

    try:
        cluster = KubernetesNamespace()
        fence = Fence(cluster, say)
        with Objects(cluster, "Pod", f"{RUN}={run}") as pods:
            while not ending.wait(LOOK):
                try:
                    fence.look(pods.now())
                except Away:
                    continue
    except LaunchError:  # no rights, or no server that this pod knows: who follows the run looks after it
        return
