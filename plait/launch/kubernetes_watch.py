"""What a cluster tells as it happens: a run's pods, and the log of the first of them. Both outlive
connections that break."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import BinaryIO, Self

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes_api import Away, Dropped, KubernetesNamespace, NotThere
from plait.launch.kubernetes_manifests import Object

WATCH = 30
"""Seconds of one watch; then pods are listed again, so that nothing stays unseen for longer."""
PAUSE = 0.5
"""Seconds before a connection that broke is made anew."""
KEPT = 16_384
"""Bytes of a log's end that are kept."""


class Pods:
    """The pods with some labels, kept up to date by a thread inside the ``with`` block."""

    def __init__(self, cluster: KubernetesNamespace, labels: str) -> None:
        self._cluster, self._labels = cluster, labels
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._pods: dict[str, Object] = {}
        self._gone: dict[str, Object] = {}
        self._error: LaunchError | None = None
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()

    def now(self) -> list[Object]:
        """All of them, as they were seen last. Raises LaunchError if they may not be seen."""
        with self._lock:
            if self._error:
                raise self._error
            return list(self._pods.values())

    def gone(self) -> list[Object]:
        """Those that were deleted, as they were last."""
        with self._lock:
            return list(self._gone.values())

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                found, version = self._cluster.list("Pod", self._labels)
                self._replace({pod["metadata"]["uid"]: pod for pod in found})
                for kind, pod in self._cluster.watch_pods(self._labels, version, WATCH):
                    self._take(kind, pod)
                    if self._ending.is_set():
                        return
            except (Dropped, Away):
                self._ending.wait(PAUSE)
            except LaunchError as error:
                with self._lock:
                    self._error = error
                return

    def _replace(self, found: dict[str, Object]) -> None:
        with self._lock:
            self._gone |= {key: pod for key, pod in self._pods.items() if key not in found}
            self._pods = found

    def _take(self, kind: str, pod: Object) -> None:
        key = pod["metadata"]["uid"]
        with self._lock:
            if kind == "DELETED":
                self._pods.pop(key, None)
                self._gone[key] = pod
            else:
                self._pods[key] = pod


class PodLog:
    """Copies what a pod prints to ``sink``, and after a restart what the next one prints."""

    def __init__(self, cluster: KubernetesNamespace, sink: BinaryIO) -> None:
        self._cluster, self._sink = cluster, sink
        self._ending = threading.Event()
        self._pod = ""
        self._thread: threading.Thread | None = None
        self._shown = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()

    def follow(self, pod: Object) -> None:
        """Follow this pod, once its container has begun."""
        began = pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")
        if not began or pod["metadata"]["uid"] == self._pod or (self._thread and self._thread.is_alive()):
            return
        self._pod = pod["metadata"]["uid"]
        self._thread = threading.Thread(target=self._copy, args=(pod["metadata"]["name"],), name="log", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = 5.0) -> str:
        """Wait for the rest, for a while; the end of what was shown."""
        if self._thread:
            self._thread.join(seconds)
        return self._shown.decode(errors="replace")

    def _copy(self, pod: str) -> None:
        last = ""
        while not self._ending.is_set():
            try:
                for line in self._cluster.follow_log(pod, _seconds_since(last)):
                    when, _, text = line.partition(b" ")
                    if (stamp := when.decode(errors="replace")) > last or not last:
                        last = stamp
                        self._show(text + b"\n")
                return
            except Dropped as dropped:
                if dropped.status in (400, 404):  # gone, or not begun: its folder has the logs
                    return
                self._ending.wait(PAUSE)
            except (LaunchError, NotThere):
                return

    def _show(self, text: bytes) -> None:
        self._shown = (self._shown + text)[-KEPT:]
        with suppress(OSError, ValueError):  # nobody looks any more
            self._sink.write(text)
            self._sink.flush()


def _seconds_since(stamp: str) -> str:
    """Whole seconds, and one more."""
    if not stamp:
        return ""
    then = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    return str(int((datetime.now(UTC) - then).total_seconds()) + 2)
