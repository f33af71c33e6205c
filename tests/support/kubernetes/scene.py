"""A run of two pods in memory, and who follows it: what happens is told by the test, sleep by
sleep."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from plait.formats.kubernetes.manifests import CONTAINER, PodRun
from plait.launch.kubernetes import follow as kubernetes
from plait.launch.kubernetes.follow import follow
from tests.support.kubernetes.in_memory import InMemory, a_run


class Scene:
    """A run of two pods and who follows it. then: what happens at each sleep, one after the other;
    shown: the end of the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.cluster = InMemory(("n0", "n1", "n2"))
        self.run: PodRun = a_run(**settings)
        self.signals, self.said = deque[int](), list[str]()
        self.then, self.slept, self.now = list[Any](), list[float](), 1000.0
        self.shown, self.followed, self.gone = "", list[str](), list[Any]()
        self.raised: Exception | None = None
        scene = self

        class Objects:
            listed = True

            def __init__(self, cluster: object, kind: str, labels: str) -> None:
                assert labels == "plait.dev/run=plait-test"
                self.kind = kind

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def now(self) -> list[Any]:
                if self.kind != "Pod":
                    return list(scene.cluster.list(self.kind)[0])
                if scene.raised:
                    raise scene.raised
                return scene.cluster.pods()

            def gone(self) -> list[Any]:
                return scene.gone

        class Log(Objects):
            def __init__(self, *_: object) -> None:
                pass

            def follow(self, pod: Any) -> None:
                scene.followed.append(pod["metadata"]["name"])

            def finish(self) -> str:
                return scene.shown

        monkeypatch.setattr(kubernetes, "Objects", Objects)
        monkeypatch.setattr(kubernetes, "PodLog", Log)
        monkeypatch.setattr(kubernetes, "say", self.said.append)
        monkeypatch.setattr(kubernetes, "time", SimpleNamespace(sleep=self._sleep, monotonic=lambda: self.now))
        self.cluster.store.create({"kind": "Job", "metadata": {"name": self.run.name}, "spec": {}, "status": {}})
        for index in range(2):
            self.cluster.add_pod(self.run, index, nodeName=f"n{index}", schedulingGates=[])

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        assert self.then, "it goes on for ever"
        if step := self.then.pop(0):
            step()

    def follow(self) -> int:
        return follow(self.cluster.api, self.run, self.signals)

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
