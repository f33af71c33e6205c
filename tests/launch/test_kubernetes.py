"""Following a run, look by look, on a cluster that answers at once: its end, signals, what is said of it."""

from __future__ import annotations

import json
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plait.core.base.errors import LaunchError, PlacementError, PlaitError
from plait.core.runs.lock import RunLock
from plait.core.topology.rank_table import RankTable
from plait.launch import kubernetes
from plait.launch.kubernetes import Failed, Hopeless, follow, new_name, removal, submit
from plait.launch.kubernetes_api import Away, NotThere
from plait.launch.kubernetes_manifests import CONTAINER, PodRun
from tests.support.kubernetes.in_memory import InMemory, a_run

TIER = "unit"

TABLE = RankTable(("n0", "n1"), ranks_per_node=1)


class Scene:
    """A run of two pods and who follows it. then: what happens at each sleep, one after the other; shown: the
    end of the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.cluster = InMemory(("n0", "n1", "n2"))
        self.run: PodRun = a_run(**settings)
        self.signals, self.said = deque[int](), list[str]()
        self.then, self.slept, self.now = list[Callable[[], Any]](), list[float](), 1000.0
        self.shown, self.followed, self.gone = "", list[str](), list[Any]()
        self.raised: Exception | None = None
        scene = self

        class Pods:
            def __init__(self, cluster: object, labels: str) -> None:
                assert labels == "plait.dev/run=plait-test"

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def now(self) -> list[Any]:
                if scene.raised:
                    raise scene.raised
                return scene.cluster.pods()

            def gone(self) -> list[Any]:
                return scene.gone

        class Log(Pods):
            def __init__(self, *_: object) -> None:
                pass

            def follow(self, pod: Any) -> None:
                scene.followed.append(pod["metadata"]["name"])

            def finish(self) -> str:
                return scene.shown

        @contextmanager
        def catching() -> Iterator[deque[int]]:
            yield self.signals

        monkeypatch.setattr(kubernetes, "Pods", Pods)
        monkeypatch.setattr(kubernetes, "PodLog", Log)
        monkeypatch.setattr(kubernetes, "catching_signals", catching)
        monkeypatch.setattr(kubernetes, "say", self.said.append)
        monkeypatch.setattr(kubernetes, "time", SimpleNamespace(sleep=self._sleep, monotonic=lambda: self.now))
        self.cluster.store.create({"kind": "Job", "metadata": {"name": self.run.name}, "spec": {}, "status": {}})
        for index in range(2):
            self.cluster.add_pod(self.run, index, nodeName=f"n{index}", schedulingGates=[])

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        assert self.then, "it goes on for ever"
        self.then.pop(0)()

    def follow(self, **options: Any) -> int:
        return follow(self.cluster.api, self.run, **options)

    def pod(self, index: int) -> Any:
        return self.cluster.store.get("Pod", f"plait-test-{index}")

    def phase(self, *phases: str) -> None:
        for index, phase in enumerate(phases):
            self.pod(index)["status"]["phase"] = phase

    def ends(self, kind: str, status: str = "True") -> None:
        self.cluster.store.get("Job", "plait-test")["status"]["conditions"] = [{"type": kind, "status": status}]

    def last_words(self, index: int = 0, message: str | None = None, **more: Any) -> None:
        """Of a container."""
        terminated = ({} if message is None else {"message": message}) | more
        other = {"name": "other", "state": {"terminated": {"message": '{"status": 77}'}}}
        self.pod(index)["status"]["containerStatuses"] = [
            other,
            {"name": CONTAINER, "state": {"terminated": terminated}},
        ]

    def deleted(self) -> list[tuple[Any, ...]]:
        return [one[1:] for one in self.cluster.done if one[0] == "delete"]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_names_are_what_dns_allows() -> None:
    assert new_name("_My run_2!").startswith("plait-my-run-2-")
    assert len(new_name("x" * 99)) == len("plait-") + 30 + 1 + 6
    assert new_name("x" * 29 + "-yz").count("-") == 2  # cut at the dash
    assert new_name("___").count("-") == 1
    assert new_name("a") != new_name("a")


def made(cluster: InMemory) -> list[str]:
    return [kind for verb, kind, *_ in cluster.done if verb == "create"]


def test_all_objects_of_a_run_are_made_the_workload_first() -> None:
    cluster, run = InMemory(), a_run()
    submit(cluster.api, run)
    assert made(cluster)[0] == "Job" and len(made(cluster)) == 1 + len(run.belongings())
    owner = cluster.store.get("Job", run.name)["metadata"]["uid"]
    for kind in made(cluster)[1:]:
        (one,) = cluster.store.of(kind)
        assert one["metadata"]["ownerReferences"][0]["uid"] == owner


@pytest.mark.parametrize("also", [False, True])
def test_what_is_refused_is_taken_back_or_named(monkeypatch: pytest.MonkeyPatch, also: bool) -> None:
    cluster, run, said = InMemory(), a_run(), list[str]()
    monkeypatch.setattr(kubernetes, "say", said.append)

    def refuse(verb: str, kind: str, name: str) -> None:
        if kind == "Secret" or (also and verb == "delete"):
            raise LaunchError(f"you may not {verb}.")

    cluster.before = refuse
    with pytest.raises(LaunchError, match="you may not create"):
        submit(cluster.api, run)
    assert (("Job", run.name) in cluster.store.objects) == also
    left = "you may not delete. To remove what may be left: kubectl -n ml delete job plait-test"
    assert said == ([left] if also else [])
    assert removal(cluster.api, run) == "kubectl -n ml delete job plait-test"


@pytest.mark.parametrize(("kind", "status"), [("Complete", 0), ("Completed", 0)])
def test_a_run_that_ends_well_has_status_0(scene: Scene, kind: str, status: int) -> None:
    scene.phase("Running", "Running")
    scene.then = [lambda: scene.ends("Suspended"), lambda: scene.ends(kind, "False"), lambda: scene.ends(kind)]
    scene.then += [lambda: scene.phase("Succeeded", "Succeeded")]
    scene.last_words(message="{}")
    scene.cluster.interrupted = [7]
    assert scene.follow() == status
    assert set(scene.slept) == {kubernetes.LOOK} and len(scene.slept) == 4
    assert not scene.deleted()
    assert scene.said == ["plait-test: 2 of 2 pods run"]
    assert scene.cluster.interrupted == ()
    assert set(scene.followed) == {"plait-test-0"}


def test_only_the_conditions_of_an_end_end_it_and_only_when_true(scene: Scene) -> None:
    scene.phase("Succeeded", "Succeeded")
    scene.then = [lambda: scene.ends("Suspended"), lambda: scene.ends("Failed", "False"), lambda: scene.ends("Failed")]
    with pytest.raises(Failed):
        scene.follow()
    assert len(scene.slept) == 3
    assert scene.followed.count("plait-test-0") >= 4  # from the first look on


def test_the_head_has_a_while_for_its_last_words(scene: Scene) -> None:
    """Another pod may have ended the Job before."""
    scene.phase("Running", "Succeeded")
    scene.ends("Complete")
    scene.last_words()
    scene.then = [lambda: None] * 100
    assert scene.follow() == 0
    assert kubernetes.SETTLING <= sum(scene.slept) <= kubernetes.SETTLING + 2 * kubernetes.LOOK


@pytest.mark.parametrize("change", [
    lambda scene: scene.phase("Failed"),
    lambda scene: scene.phase("Succeeded"),
    lambda scene: scene.pod(0)["status"].pop("containerStatuses"),
    lambda scene: scene.cluster.store.remove(scene.pod(0)),
])  # fmt: skip
def test_nobody_waits_for_a_head_that_says_no_more(scene: Scene, change: Callable[[Scene], None]) -> None:
    scene.phase("Running", "Running")
    scene.last_words()
    scene.ends("Complete")
    change(scene)
    assert scene.follow() == 0
    assert not scene.slept


def words(status: int, message: str = "") -> str:
    return json.dumps({"status": status, "message": message} if message else {"status": status})


def test_a_run_that_fails_has_its_heads_error_once(scene: Scene) -> None:
    scene.phase("Failed", "Failed")
    scene.ends("Failed")
    scene.last_words(message=words(3, "the data are gone"))
    with pytest.raises(PlaitError, match=r"^the data are gone$") as failed:
        scene.follow()
    assert failed.value.exit_status == 3
    scene.shown = "plait: the data are gone\n"
    assert scene.follow() == 3
    scene.last_words(message=words(4))
    assert scene.follow() == 4


@pytest.mark.parametrize("message", [None, "{}", "no JSON", "[1]", "7", words(0)])
def test_a_run_that_fails_without_words_is_told_by_its_pods(scene: Scene, message: str | None) -> None:
    scene.phase("Failed", "Failed")
    scene.ends("Failed")
    scene.last_words(0, message=message, exitCode=93, reason="Error")
    scene.last_words(1, exitCode=137)
    scene.pod(1)["status"]["reason"] = "Evicted"
    with pytest.raises(Failed) as failed:
        scene.follow()
    assert str(failed.value) == (
        "The run plait-test has failed: pod 0 on n0: status 93 (not started again) Error; pod 1 on n1: status 137 "
        "Evicted."
    )
    assert not scene.deleted()


def test_of_pods_only_those_that_failed_are_named(scene: Scene) -> None:
    scene.phase("Succeeded", "Failed")
    scene.last_words(1, exitCode=1)
    del scene.pod(1)["spec"]["nodeName"]
    scene.ends("Failed")
    with pytest.raises(Failed, match=r"^The run plait-test has failed: pod 1 on no node: status 1\.$"):
        scene.follow()
    scene.phase("Succeeded", "Succeeded")
    with pytest.raises(Failed, match=r"^The run plait-test has failed\.$"):
        scene.follow()


def test_the_newest_head_is_asked_also_one_that_is_gone(scene: Scene) -> None:
    scene.phase("Failed", "Failed")
    scene.last_words(message=words(3, "old"))
    scene.ends("Failed")
    newer = scene.cluster.add_pod(scene.run, 0, name="newer", phase="Failed")
    newer["status"]["containerStatuses"] = [{"name": CONTAINER, "state": {"terminated": {"message": words(5, "new")}}}]
    newer["metadata"]["creationTimestamp"] = "2999-01-01T00:00:00Z"
    with pytest.raises(PlaitError, match="new"):
        scene.follow()
    scene.cluster.store.remove(newer)
    scene.gone = [newer]
    scene.followed.clear()
    with pytest.raises(PlaitError, match="new"):
        scene.follow()
    assert scene.followed[-1] == "newer"  # its log may not have been seen
    for one in (newer, scene.pod(0)):  # made in the same second
        one["metadata"]["creationTimestamp"] = "2000-01-01T00:00:00Z"
    newer["status"]["startTime"], scene.pod(0)["status"]["startTime"] = "1", "2"
    with pytest.raises(PlaitError, match="old"):
        scene.follow()


def test_a_run_that_somebody_else_deletes_is_said_so(scene: Scene) -> None:
    scene.then = [lambda: scene.cluster.store.remove(scene.cluster.store.get("Job", "plait-test"))]
    with pytest.raises(NotThere, match=r"The run plait-test was deleted by somebody else\."):
        scene.follow()


def test_the_first_signal_ends_with_grace(scene: Scene) -> None:
    scene.phase("Running", "Running")

    def ended() -> None:
        scene.phase("Succeeded", "Succeeded")

    scene.then = [lambda: scene.signals.append(signal.SIGTERM), lambda: None, ended]
    assert scene.follow() == 128 + signal.SIGTERM
    assert scene.said[1:] == ["SIGTERM: ranks have 20 s to save the run (Ctrl-C to end it at once)"]
    assert scene.deleted() == [("Job", "plait-test", None, True)]  # told once
    assert len(scene.slept) == 3  # until the last pod is over


@pytest.mark.parametrize(
    ("message", "status"),
    [(words(0), 0), (words(3), 3), (words(128), 128), (words(129), 143), (words(137), 143), ("", 143)],
)
def test_a_run_that_was_asked_to_end_has_the_heads_status_if_that_ended_by_itself(
    scene: Scene, message: str, status: int
) -> None:
    scene.phase("Succeeded", "Succeeded")
    scene.last_words(message=message)
    scene.signals.append(signal.SIGTERM)
    assert scene.follow() == status


def test_the_second_signal_ends_all_pods_at_once(scene: Scene) -> None:
    scene.phase("Running", "Running")
    scene.then = [lambda: scene.signals.extend([signal.SIGINT, signal.SIGINT])]
    assert scene.follow() == 128 + signal.SIGINT
    assert scene.said[-1] == "ending all ranks at once; what was not saved is lost"
    assert [one for one in scene.deleted() if one[0] == "Pod"] == [
        ("Pod", "plait-test-0", 0, False), ("Pod", "plait-test-1", 0, False),
    ]  # fmt: skip
    assert [one for one in scene.deleted() if one[0] == "Job"] == [("Job", "plait-test", None, False)]


def test_a_run_that_is_ending_is_not_judged_or_told_of(scene: Scene) -> None:
    """Pods that wait are no news then, and a binder does nothing."""
    scene.phase("Running", "Running")
    kept = scene.cluster.store.get("Job", "plait-test")

    def stays() -> None:
        scene.signals.append(signal.SIGTERM)

    scene.then = [stays, lambda: scene.cluster.store.create(kept), lambda: scene.phase("Running", "Pending"),
                  lambda: scene.ends("Failed")]  # fmt: skip
    assert scene.follow() == 128 + signal.SIGTERM
    assert len(scene.said) == 2


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


def test_what_runs_is_said_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, kueue_queue="team")

    def suspended(suspend: bool) -> None:
        scene.cluster.store.get("Job", "plait-test")["spec"]["suspend"] = suspend

    suspended(True)
    scene.phase("Pending", "Pending")
    waits = [{"reason": "Unschedulable", "message": "0 nodes fit"}]

    def no_room() -> None:
        suspended(False)
        scene.pod(1)["status"]["conditions"] = waits

    def one_runs() -> None:
        scene.phase("Running", "Pending")

    def over() -> None:
        scene.pod(1)["metadata"]["deletionTimestamp"] = "now"  # what it waits for is no news any more

    scene.then = [no_room, lambda: None, one_runs, over, lambda: scene.phase("Running", "Running"),
                  lambda: scene.phase("Running", "Succeeded"), lambda: scene.phase("Succeeded", "Succeeded"),
                  lambda: scene.ends("Complete")]  # fmt: skip
    assert scene.follow() == 0
    assert scene.said == [
        "plait-test: 0 of 2 pods run; it waits in the queue team",
        "plait-test: 0 of 2 pods run; pod 1: 0 nodes fit",
        "plait-test: 1 of 2 pods run; pod 1: 0 nodes fit",
        "plait-test: 1 of 2 pods run",
        "plait-test: 2 of 2 pods run",
    ]


def starting(scene: Scene, reason: str | None, message: str | None = None) -> None:
    """Pod 1 has a node and waits."""
    scene.phase("Running", "Pending")
    waiting = {key: value for key, value in (("reason", reason), ("message", message)) if value}
    scene.pod(1)["status"]["containerStatuses"] = [{"name": CONTAINER, "state": {"waiting": waiting}}]


@pytest.mark.parametrize("reason", kubernetes.HOPELESS)
def test_a_pod_that_will_not_start_by_waiting_ends_the_run(scene: Scene, reason: str) -> None:
    starting(scene, reason, "no such image")
    with pytest.raises(Hopeless, match=f"Pod plait-test-1 does not start, .* ended: {reason}. no such image"):
        scene.follow()
    assert scene.deleted() == [("Job", "plait-test", None, False)]


@pytest.mark.parametrize(("reason", "said"), [("ImagePullBackOff", r"ImagePullBackOff\.$"), (None, "no reason given")])
def test_a_pod_that_waits_too_long_ends_the_run(scene: Scene, reason: str | None, said: str) -> None:
    starting(scene, reason)
    scene.then = [lambda: None] * 1000
    with pytest.raises(Hopeless, match=f"the run was ended: {said}"):
        scene.follow()
    assert sum(scene.slept) == 60.5  # more than kubernetes.wait


def test_pods_without_a_node_may_wait_for_ever_and_others_are_looked_at(scene: Scene) -> None:
    starting(scene, "ErrImageNeverPull")
    scene.phase("Pending", "Pending")
    del scene.pod(0)["spec"]["nodeName"]
    node = scene.pod(1)["spec"].pop("nodeName")
    scene.then = [lambda: None] * 200
    scene.then[150] = lambda: scene.pod(1)["spec"].update(nodeName=node)
    with pytest.raises(Hopeless, match="Pod plait-test-1"):
        scene.follow()
    assert len(scene.slept) == 151


def test_a_pod_of_the_same_name_waits_anew(scene: Scene) -> None:
    starting(scene, None)
    scene.then = [lambda: None] * 300

    def anew() -> None:
        scene.cluster.store.remove(scene.pod(1))
        scene.cluster.add_pod(scene.run, 1, nodeName="n1")

    scene.then[100] = anew
    with pytest.raises(Hopeless):
        scene.follow()
    assert sum(scene.slept) == 101 * 0.5 + 60.5


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        ({}, ""),
        ({"reason": "ContainerCreating"}, ""),
        ({"reason": "PodInitializing", "message": "x"}, ""),
        ({"reason": "ImagePullBackOff", "message": "no such image"}, "pod 1: ImagePullBackOff no such image"),
        ({"reason": "ImagePullBackOff"}, "pod 1: ImagePullBackOff"),
    ],
)
def test_why_a_pod_waits(scene: Scene, waiting: dict[str, str], said: str) -> None:
    starting(scene, waiting.get("reason"), waiting.get("message"))
    assert kubernetes.waiting(scene.pod(1)) == said


def gated(monkeypatch: pytest.MonkeyPatch, hosts: Sequence[str] = TABLE.hosts) -> Scene:
    scene = Scene(monkeypatch, table=RankTable(tuple(hosts), ranks_per_node=1))
    scene.cluster.store.create({"kind": "ConfigMap", "metadata": {"name": "plait-test"}, "data": {}})
    for index in range(2):
        scene.cluster.store.remove(scene.pod(index))
        scene.cluster.add_pod(scene.run, index)
    return scene


def test_pods_of_a_table_are_bound_by_who_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = gated(monkeypatch)
    assert scene.follow(until_bound=True) == 0
    assert scene.said == ["bound 2 pods to n[0-1]"] and not scene.slept
    scene.raised = LaunchError("gone.")
    with pytest.raises(
        LaunchError, match=r"It goes on, but pods of its rank table that are started again are bound by"
    ):
        scene.follow()


def test_a_run_is_followed_further_once_it_is_bound_unless_only_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = gated(monkeypatch)
    scene.then = [lambda: scene.ends("Complete")]
    assert scene.follow() == 0
    assert len(scene.slept) == 1


def test_pods_that_are_not_there_yet_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = gated(monkeypatch)
    pod = scene.pod(1)
    scene.cluster.store.remove(pod)
    scene.then = [lambda: None, lambda: scene.cluster.add_pod(scene.run, 1)]
    assert scene.follow(until_bound=True) == 0
    assert len(scene.slept) == 2


def test_a_table_that_cannot_be_kept_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = gated(monkeypatch, ("n0", "n9"))
    for name in ("n1", "n2"):
        scene.cluster.store.remove(scene.cluster.node(name))

    def refuse(verb: str, kind: str, name: str) -> None:
        if verb == "delete":
            raise LaunchError("you may not delete")

    with pytest.raises(PlacementError, match="The node n9 of the rank table is not there"):
        scene.follow()
    assert scene.deleted() == [("Job", "plait-test", None, False)]
    scene = gated(monkeypatch, ("n0", "n9"))
    for name in ("n1", "n2"):
        scene.cluster.store.remove(scene.cluster.node(name))
    scene.cluster.before = refuse
    with pytest.raises(PlacementError, match="The node n9"):  # and not that it may not be deleted
        scene.follow()
