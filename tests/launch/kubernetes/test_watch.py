"""A run's pods, and the log of the first of them, as a cluster that is made up tells."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes import objects as kubernetes_watch
from plait.launch.kubernetes.api import KubernetesNamespace, NotFound, StreamBroken, Unavailable
from plait.launch.kubernetes.objects import Objects, PodLog
from tests.support.lab import wait_until

TIER = "unit"


def pod(name: str, phase: str = "Running", uid: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid or name}, "status": {"phase": phase}}


class Made:
    """A cluster. lists, watches: what each question is answered with, or raises; after the last one
    it waits until the test is over. logs: likewise."""

    def __init__(self) -> None:
        self.lists, self.watches, self.logs = list[Any](), list[Any](), list[Any]()
        self.since, self.over = list[str](), threading.Event()

    def _next(self, answers: list[Any]) -> Any:
        if not answers:
            self.over.wait()
            raise StreamBroken("the test is over")
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    def list(self, kind: str, labels: str) -> tuple[list[Any], str]:
        assert (kind, labels) == ("Pod", "run=gpt")
        return self._next(self.lists), "7"

    def watch(self, kind: str, labels: str, version: str, seconds: int) -> Iterator[tuple[str, Any]]:
        assert (labels, version, seconds) == ("run=gpt", "7", kubernetes_watch.WATCH)
        for one in self._next(self.watches):
            if isinstance(one, Exception):
                raise one
            yield one

    def follow_log(self, name: str, since: str = "") -> Iterator[bytes]:
        self.since.append(since)
        for one in self._next(self.logs):
            if isinstance(one, Exception):
                raise one
            yield one


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.setattr(kubernetes_watch, "PAUSE", 0.0)
    monkeypatch.setattr(kubernetes_watch, "LONGEST", 0.01)
    made = Made()
    yield made
    made.over.set()


def until(condition: Callable[[], object]) -> None:
    wait_until(condition, "it never comes", seconds=60)


def there(objects: Objects, name: str) -> bool:
    try:
        return any(one["metadata"]["name"] == name for one in objects.now())
    except Unavailable:
        return False


def test_who_asks_is_told_that_the_server_is_away(cluster: Made) -> None:
    cluster.lists = [[pod("a")], Unavailable("no answer."), [pod("b")]]
    cluster.watches = [[StreamBroken("broken")]]
    with Objects(cast("KubernetesNamespace", cluster), "Pod", "run=gpt") as pods:
        until(lambda: not cluster.lists or not there(pods, "a"))
        until(lambda: there(pods, "b"))


def test_pods_are_kept_up_to_date_across_connections_that_break(cluster: Made) -> None:
    cluster.lists = [
        [pod("a"), pod("b"), pod("c")],
        Unavailable("gone"),
        StreamBroken("broken"),
        [pod("a", "Failed"), pod("e")],
    ]
    cluster.watches = [
        [
            ("MODIFIED", pod("a", "Succeeded")),
            ("DELETED", pod("b", "Failed")),
            ("ADDED", pod("d")),
            StreamBroken("broken"),
        ],
    ]
    with Objects(cast("KubernetesNamespace", cluster), "Pod", "run=gpt") as pods:
        until(lambda: not cluster.lists and pods.listed and there(pods, "e"))
        assert {one["metadata"]["name"]: one["status"]["phase"] for one in pods.now()} == {
            "a": "Failed",
            "e": "Running",
        }
        gone = {one["metadata"]["name"]: one["status"]["phase"] for one in pods.gone()}
    assert gone == {"b": "Failed", "c": "Running", "d": "Running"}


def test_what_a_watch_tells_is_there_at_once(cluster: Made) -> None:
    cluster.lists = [[pod("a")]]
    told = threading.Event()

    def watch() -> Iterator[tuple[str, Any]]:
        yield "MODIFIED", pod("a", "Failed")
        yield "DELETED", pod("x")  # that nobody had seen
        told.set()
        cluster.over.wait()

    cluster.watches = [watch()]
    with Objects(cast("KubernetesNamespace", cluster), "Pod", "run=gpt") as pods:
        told.wait()
        assert [one["status"]["phase"] for one in pods.now()] == ["Failed"]
        assert [one["metadata"]["name"] for one in pods.gone()] == ["x"]


def test_pods_that_may_not_be_seen_are_an_error_to_who_asks(cluster: Made) -> None:
    cluster.lists = [LaunchError("pods is forbidden")]
    with (
        Objects(cast("KubernetesNamespace", cluster), "Pod", "run=gpt") as pods,
        pytest.raises(LaunchError, match="pods is forbidden"),
    ):
        until(lambda: pods.now() and False)


def test_a_log_goes_on_where_it_broke_and_shows_no_line_twice(cluster: Made) -> None:
    first = datetime.now(UTC) - timedelta(seconds=100)
    stamps = [(first + timedelta(seconds=at)).isoformat().replace("+00:00", "Z").encode() for at in range(3)]
    cluster.logs = [
        [stamps[0] + b" one", stamps[1] + b" two", StreamBroken("broken")],
        [stamps[0] + b" one", stamps[1] + b" two", stamps[2] + b" three"],
    ]
    sink = io.BytesIO()
    with PodLog(cast("KubernetesNamespace", cluster), sink) as log:
        log.follow(pod("a"))
        assert log.finish(60) == "one\ntwo\nthree\n"
    assert sink.getvalue() == b"one\ntwo\nthree\n"
    before, since = cluster.since
    assert before == "" and 100 <= int(since) <= 160


@pytest.mark.parametrize(
    "why", [StreamBroken("", 400), StreamBroken("", 404), LaunchError("no"), NotFound("no")], ids=str
)
def test_a_log_that_is_not_there_is_asked_for_once(cluster: Made, why: Exception) -> None:
    cluster.logs = [[b"2026-01-01T00:00:00Z one", why], [b"2026-01-02T00:00:00Z two"]]
    with PodLog(cast("KubernetesNamespace", cluster), io.BytesIO()) as log:
        log.follow(pod("a"))
        assert log.finish(60) == "one\n"
    assert len(cluster.since) == 1


def test_pods_are_followed_once_they_began_one_after_the_other(cluster: Made) -> None:
    cluster.logs = [[b"2026-01-01T00:00:00Z one"], [b"2026-01-01T00:00:00Z two"]]
    with PodLog(cast("KubernetesNamespace", cluster), io.BytesIO()) as log:
        log.follow(pod("a", "Pending"))
        log.follow({"metadata": {"name": "a", "uid": "a"}})
        assert log.finish(60) == "" and cluster.since == []
        log.follow(pod("a"))
        assert log.finish(60) == "one\n"
        log.follow(pod("a", "Succeeded"))
        assert log.finish(60) == "one\n"
        log.follow(pod("a", "Failed", uid="another"))
        assert log.finish(60) == "one\ntwo\n"


def test_a_pod_is_not_followed_beside_another(cluster: Made) -> None:
    shown = threading.Event()

    def lines() -> Iterator[bytes]:
        yield b"2026-01-01T00:00:00Z one"
        shown.set()
        cluster.over.wait()

    cluster.logs = [lines(), [b"2026-01-01T00:00:00Z two"]]
    with PodLog(cast("KubernetesNamespace", cluster), io.BytesIO()) as log:
        log.follow(pod("a"))
        shown.wait()
        log.follow(pod("b"))
        assert len(cluster.since) == 1
        assert log.finish(0.0) == "one\n"


def test_of_a_long_log_the_end_is_kept_and_nobody_has_to_look(cluster: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "KEPT_LOG_BYTES", 6)
    cluster.logs = [[b"2026-01-01T00:00:00Z " + word for word in (b"one",)], [b"x"]]
    sink = io.BytesIO()
    sink.close()
    with PodLog(cast("KubernetesNamespace", cluster), sink) as log:
        cluster.logs = [[b"2026-01-01T00:00:00Z one", b"2026-01-01T00:00:01Z three"]]
        log.follow(pod("a"))
        assert log.finish(60) == "three\n"


def test_pods_are_watched_no_longer_than_they_are_asked_for(cluster: Made) -> None:
    cluster.lists = [[pod("a")]]
    taken, go = threading.Event(), threading.Event()

    def watch() -> Iterator[tuple[str, Any]]:
        taken.set()
        go.wait()
        yield "MODIFIED", pod("a", "Failed")
        pytest.fail("somebody watches on")

    cluster.watches = [watch()]
    with Objects(cast("KubernetesNamespace", cluster), "Pod", "run=gpt") as pods:
        taken.wait()
    go.set()
    until(lambda: not any(thread.name == "Pod" for thread in threading.enumerate()))
    assert [one["status"]["phase"] for one in pods.now()] == ["Failed"]
    assert cluster.lists == [] and cluster.watches == []


def test_a_line_without_a_time_is_shown_until_one_has_come(cluster: Made) -> None:
    cluster.logs = [[b"2026-01-01T00:00:02Z two", b"2026-01-01T00:00:02Z two", b"2026-01-01T00:00:01Z one",
                     b"2026-01-01T00:00:03Z ", b"2026-01-01T00:00:04Z \xff three words"]]  # fmt: skip
    sink = io.BytesIO()
    with PodLog(cast("KubernetesNamespace", cluster), sink) as log:
        log.follow(pod("a"))
        assert log.finish(60) == "two\n\n\N{REPLACEMENT CHARACTER} three words\n"
    assert sink.getvalue() == b"two\n\n\xff three words\n"
