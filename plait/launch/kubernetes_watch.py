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

WATCH = 300
"""Seconds of one watch; then objects are listed again, so that nothing stays unseen for longer."""
LONGEST = 5.0
"""Seconds between two tries to list where the server is away, beside those that each try takes."""
PAUSE = 0.5
"""Seconds before a connection that broke is made anew."""
KEPT = 16_384
"""Bytes of a log's end that are kept."""


class Objects:
    """The objects of a kind with some labels, kept up to date by a thread inside the ``with`` block. It lists
    them once, and is then told what happens."""

    def __init__(self, cluster: KubernetesNamespace, kind: str, labels: str) -> None:
        self._cluster, self._kind, self._labels = cluster, kind, labels
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._found: dict[str, Object] = {}
        self._gone: dict[str, Object] = {}
        self._error: LaunchError | None = None
        self._away: Away | None = None
        self.seen = False
        """Whether they were listed yet."""
        self._thread = threading.Thread(target=self._run, name=kind, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()

    def now(self) -> list[Object]:
        """All of them, as they were seen last. Raises Away as long as the server does not answer,
        LaunchError if they may not be seen."""
        with self._lock:
            if problem := self._error or self._away:
                raise type(problem)(str(problem))
            return list(self._found.values())

    def gone(self) -> list[Object]:
        """Those that were deleted, as they were last."""
        with self._lock:
            return list(self._gone.values())

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                found, version = self._cluster.list(self._kind, self._labels)
                self._replace({one["metadata"]["uid"]: one for one in found})
                for what, one in self._cluster.watch(self._kind, self._labels, version, WATCH):
                    self._take(what, one)
                    if self._ending.is_set():
                        return
            except Away as away:
                with self._lock:
                    self._away = away
                self._ending.wait(LONGEST)
            except Dropped:
                self._ending.wait(PAUSE)
            except LaunchError as error:
                with self._lock:
                    self._error = error
                return

    def _replace(self, found: dict[str, Object]) -> None:
        with self._lock:
            self._gone |= {key: one for key, one in self._found.items() if key not in found}
            self._found, self._away, self.seen = found, None, True

    def _take(self, what: str, one: Object) -> None:
        key = one["metadata"]["uid"]
        with self._lock:
            if what == "DELETED":
                self._found.pop(key, None)
                self._gone[key] = one
            else:
                self._found[key] = one


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
