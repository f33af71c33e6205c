"""A run on Kubernetes whose server is away or refuses: how often it is asked, what is left
behind."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes.api import Unavailable
from plait.launch.kubernetes.follow import queueing_signals
from tests.support.kubernetes.in_memory import InMemory
from tests.support.kubernetes.scene import Scene

TIER = "unit"


def test_a_server_that_is_away_is_asked_ever_less_often(scene: Scene) -> None:
    """And every outage begins with short waits."""
    scene.phase("Running", "Running")
    scene.then = [None] * 10_000
    asked, away = list[float](), iter([*[True] * 9, False, True, False])

    def answer(verb: str, kind: str, name: str) -> None:
        asked.append(scene.now)
        if (gone := next(away, None)) is None:
            scene.ends("Complete")
            scene.phase("Succeeded", "Succeeded")
        elif gone:
            raise Unavailable("no answer.")

    scene.cluster.before = answer
    assert scene.follow() == 0
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits[:12] == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60, 0.5, 0.5, 0.5], abs=0.06)
    lost = "no answer. The run goes on without us; asking again (Ctrl-C twice to stop asking)"
    again = "Kubernetes answers again"
    assert [one for one in scene.said if one in (lost, again)] == [lost, again] * 2


def test_a_signal_ends_the_wait_for_a_server(scene: Scene) -> None:
    asked = list[None]()

    def away(verb: str, kind: str, name: str) -> None:
        asked.append(None)
        if len(asked) == 2:
            scene.signals.append(signal.SIGTERM)
        if len(asked) < 6:
            raise Unavailable("no answer.")

    scene.cluster.before = away
    scene.then = [None] * 1000
    scene.phase("Succeeded", "Succeeded")
    assert scene.follow() == 128 + signal.SIGTERM
    assert scene.deleted() == [("Job", "plait-test", None, True)]


def test_a_first_signal_that_comes_while_the_server_is_asked_is_kept(scene: Scene) -> None:
    def away(verb: str, kind: str, name: str) -> None:
        if not scene.signals and not scene.said:
            scene.signals.append(signal.SIGTERM)
            raise Unavailable("no answer.")

    scene.cluster.before = away
    scene.phase("Succeeded", "Succeeded")
    assert scene.follow() == 128 + signal.SIGTERM
    assert scene.deleted() == [("Job", "plait-test", None, True)]


def test_a_second_signal_leaves_a_run_that_cannot_be_told(scene: Scene) -> None:
    """It comes while the server is asked."""

    def away(verb: str, kind: str, name: str) -> None:
        if verb == "delete":
            scene.signals.append(signal.SIGINT)
        raise Unavailable("no answer.")

    scene.cluster.before = away
    scene.then = [lambda: scene.signals.append(signal.SIGINT)]
    with pytest.raises(LaunchError) as left:
        scene.follow()
    assert str(left.value) == (
        "no answer. The request to end did not reach the run. The run plait-test is no longer followed. It goes on; "
        "its logs are in /data/x/logs, as pods see it, and kubectl -n ml delete job plait-test ends it. Sent again, it "
        "goes on from its last checkpoint."
    )


def test_whatever_else_goes_wrong_leaves_the_run_and_says_so(scene: Scene) -> None:
    scene.raised = LaunchError("pods is forbidden.")
    with pytest.raises(LaunchError, match=r"^pods is forbidden\. The run plait-test is no longer followed\."):
        scene.follow()
    assert not scene.deleted()


def test_a_server_that_is_away_is_not_waited_for_where_a_signal_has_come() -> None:
    cluster = InMemory()
    with queueing_signals(cluster.api) as signals:
        assert cluster.interrupted is signals
    assert cluster.interrupted == ()
