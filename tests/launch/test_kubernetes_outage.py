"""A run on Kubernetes whose server is away or refuses: how often it is asked, what is left behind."""

from __future__ import annotations

import signal
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from plait.core.base.errors import LaunchError
from plait.core.runs.lock import RunLock
from plait.launch.kubernetes_api import Away
from tests.support.kubernetes.scene import Scene

TIER = "unit"


class Outage:
    """The server is away so many times."""

    def __init__(self, scene: Scene, times: int) -> None:
        self.times = times
        scene.cluster.before = self

    def __call__(self, verb: str, kind: str, name: str) -> None:
        if self.times:
            self.times -= 1
            raise Away("no answer.")


def test_a_server_that_is_away_is_asked_ever_less_often(scene: Scene) -> None:
    scene.phase("Running", "Running")
    outage = Outage(scene, 9)
    waits, asked = list[float](), list[float]()
    scene.then = [lambda: None] * 10_000

    def noted(verb: str, kind: str, name: str) -> None:
        asked.append(scene.now)
        if not outage.times:
            scene.ends("Complete")
        outage(verb, kind, name)

    scene.cluster.before = noted
    scene.phase("Succeeded", "Succeeded")
    assert scene.follow() == 0
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits[:9] == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60], abs=0.06)
    assert scene.said == [
        "no answer. The run goes on without us; asking again (Ctrl-C twice to leave it)", "Kubernetes answers again",
    ]  # fmt: skip


def test_every_outage_begins_with_short_waits(scene: Scene) -> None:
    scene.phase("Running", "Running")
    outage = Outage(scene, 2)
    scene.then = [lambda: None] * 1000
    asked = list[float]()

    def noted(verb: str, kind: str, name: str) -> None:
        asked.append(scene.now)
        if len(asked) == 3:
            outage.times = 0
        if len(asked) == 4:
            outage.times = 1
        if len(asked) == 6:
            scene.ends("Complete")
            scene.phase("Succeeded", "Succeeded")
        outage(verb, kind, name)

    scene.cluster.before = noted
    assert scene.follow() == 0
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits[:5] == pytest.approx([0.5, 1.0, 0.5, 0.5, 0.5], abs=0.06)
    assert sum("asking again" in one for one in scene.said) == 2
    assert scene.said.count("Kubernetes answers again") == 2


def test_a_signal_ends_the_wait_for_a_server(scene: Scene) -> None:
    outage = Outage(scene, 3)
    scene.then = [lambda: None, lambda: scene.signals.append(signal.SIGTERM)] + [lambda: None] * 1000
    outage.times = 99

    def back() -> None:
        outage.times = 0

    scene.then[40] = back
    scene.phase("Succeeded", "Succeeded")
    assert scene.follow() == 128 + signal.SIGTERM
    assert scene.deleted() == [("Job", "plait-test", None, True)]


def test_a_first_signal_that_comes_while_the_server_is_asked_is_kept(scene: Scene) -> None:
    def away(verb: str, kind: str, name: str) -> None:
        if not scene.signals and not scene.said:
            scene.signals.append(signal.SIGTERM)
            raise Away("no answer.")

    scene.cluster.before = away
    scene.phase("Succeeded", "Succeeded")
    assert scene.follow() == 128 + signal.SIGTERM
    assert scene.deleted() == [("Job", "plait-test", None, True)]


def test_a_second_signal_leaves_a_run_that_cannot_be_told(scene: Scene) -> None:
    """It comes while the server is asked."""

    def away(verb: str, kind: str, name: str) -> None:
        if verb == "delete":
            scene.signals.append(signal.SIGINT)
        raise Away("no answer.")

    scene.cluster.before = away
    scene.then = [lambda: scene.signals.append(signal.SIGINT)]
    with pytest.raises(LaunchError) as left:
        scene.follow()
    assert str(left.value) == (
        "no answer. The run could not be told to end. The run plait-test is no longer followed. It goes on; its logs "
        "are in /data/x/logs, as pods see it, and kubectl -n ml delete job plait-test ends it. Sent again, it goes on "
        "from its last checkpoint."
    )


def test_whatever_else_goes_wrong_leaves_the_run_and_says_so(scene: Scene) -> None:
    scene.raised = LaunchError("pods is forbidden.")
    with pytest.raises(LaunchError, match=r"^pods is forbidden\. The run plait-test is no longer followed\."):
        scene.follow()
    assert not scene.deleted() and scene.cluster.interrupted == ()


def test_a_lock_that_is_lost_ends_the_following(scene: Scene) -> None:
    def lost() -> None:
        raise LaunchError("another launcher has the run.")

    with pytest.raises(LaunchError, match="another launcher has the run"):
        scene.follow(lock=cast("RunLock", SimpleNamespace(check=lost)))
