"""The API server of a small Kubernetes: over HTTP on loopback, its answers can be made to fail."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.kubernetes import discovery
from tests.support.kubernetes.objects import KINDS, Object, Refusal, Store, check, stamp

PATH = re.compile(
    r"/apis?/[\w./-]+?/(?:namespaces/(?P<namespace>[\w-]+)/)?(?P<plural>\w+)(?:/(?P<name>[\w.-]+))?(?P<part>/log|/status)?"
)


@dataclass
class Fault:
    """Answers to a method on matching paths are ``status``, ``times`` times, each after ``delay``
    seconds.

    status 0: the connection breaks; -1: only late. after: how many of them are answered before.
    Methods WATCH and LOG are streams that break off.
    """

    method: str
    path: str
    status: int
    times: int = 1
    delay: float = 0.0
    after: int = 0
    then: Any = None
    """Called without arguments when it strikes."""


@dataclass
class Server:
    """The API server. logs: the folder of containers' output. jobset: whether JobSets are known."""

    logs: Path
    jobset: bool = False
    store: Store = field(default_factory=Store)
    faults: list[Fault] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    going: bool = True
    away: bool = False
    """Whether connections break: an upgrade, a network between."""
    stamps: dict[str, list[str]] = field(default_factory=dict)
    """When each line of a pod's log was first seen."""

    def start(self) -> None:
        server = self

        class Handler(_Handler):
            kubernetes = server

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that hang up are no news."""

        self.http = Server(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.going = False
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def kubeconfig(self, path: Path) -> Path:
        cluster = {"server": f"http://127.0.0.1:{self.http.server_address[1]}"}
        context = {"cluster": "small", "user": "me", "namespace": "ml"}
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "small", "cluster": cluster}], "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "here", "context": context}],
        }))  # fmt: skip
        return path

    def running(self) -> set[str]:
        """Pods, by their uids, whose containers run."""
        raise NotImplementedError

    def fault(self, method: str, path: str) -> Fault | None:
        for one in self.faults:
            if one.times and one.method == method and re.search(one.path, path):
                if one.after:
                    one.after -= 1
                    continue
                one.times -= 1
                return one
        return None

    def delete(self, kind: str, name: str, foreground: bool, grace: int | None, uid: str = "") -> Object:
        store = self.store
        with store.changed:
            body = store.get(kind, name)
            if uid not in ("", body["metadata"]["uid"]):
                raise Refusal(409, f"Precondition failed: UID in precondition: {uid}")
            if kind == "Pod":
                delete_pod(store, body, grace)
            elif foreground and kind in ("Job", "JobSet"):
                body["metadata"].setdefault("deletionTimestamp", stamp())
                store.update(body)
            else:
                store.remove(body)
            return body


def delete_pod(store: Store, pod: Object, grace: int | None) -> None:
    """As the kubelet will see it; one on no node is gone at once, and one that is deleted by force,
    whatever becomes of its processes
    (https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination-forced)."""
    seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
    if grace == 0:
        store.remove(pod)
        return
    if not pod["spec"].get("nodeName"):  # as the pod garbage collector does (pkg/controller/podgc)
        pod["status"]["phase"] = "Failed"
    gone = datetime.now(UTC) + timedelta(seconds=seconds)
    pod["metadata"].setdefault("deletionTimestamp", gone.isoformat(timespec="seconds").replace("+00:00", "Z"))
    before = pod["metadata"].get("deletionGracePeriodSeconds", seconds)
    pod["metadata"]["deletionGracePeriodSeconds"] = min(before, seconds)
    if pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running"):
        store.update(pod)
    else:
        store.remove(pod)


class _Handler(BaseHTTPRequestHandler):
    kubernetes: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "null")
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if self.kubernetes.away:
            self.close_connection = True
            return
        self.kubernetes.asked.append((self.command, path + ("?watch" if "watch" in query else "")))
        try:
            if fault := self.kubernetes.fault(self.command, path + ("?watch" if "watch" in query else "")):
                time.sleep(fault.delay)
                if fault.then:
                    fault.then()
                if fault.status == 0:
                    self.close_connection = True
                    return
                if fault.status > 0:
                    raise Refusal(fault.status, "it was made to fail")
            self._do(path, {key: values[0] for key, values in query.items()}, body)
        except Refusal as refusal:
            told = {"kind": "Status", "status": "Failure", "message": str(refusal), "code": refusal.status}
            self._send(refusal.status, told, retry=1 if refusal.status == 429 else 0)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _do(self, path: str, query: dict[str, str], body: Any) -> None:
        server, store = self.kubernetes, self.kubernetes.store
        if told := discovery.answer(path, jobset=server.jobset):
            self._send(200, told)
            return
        match = PATH.fullmatch(path)
        if not match or match["plural"] not in KINDS or (match["plural"] == "jobsets" and not server.jobset):
            raise Refusal(404, "the server could not find the requested resource")
        if match["namespace"] not in (None, "ml"):
            raise Refusal(403, f"you cannot use the namespace {match['namespace']}.")
        kind, name = KINDS[match["plural"]], match["name"]
        if match["part"] == "/log":
            self._log(store.get("Pod", name), query)
        elif self.command == "POST":
            check(body)
            self._send(201, store.create(body))
        elif self.command == "PATCH":
            self._send(200, store.patch(kind, name, body, status=match["part"] == "/status"))
        elif self.command == "DELETE":
            policy = {**query, **(body or {})}.get("propagationPolicy")
            grace = {**query, **(body or {})}.get("gracePeriodSeconds")
            uid = ((body or {}).get("preconditions") or {}).get("uid", "")
            seconds = None if grace is None else int(grace)
            self._send(200, server.delete(kind, name, policy == "Foreground", seconds, uid))
        elif name:
            self._send(200, store.get(kind, name))
        elif "watch" in query:
            self._watch(kind, query)
        else:
            with store.changed:
                items = json.loads(json.dumps(store.of(kind, query.get("labelSelector", ""))))
                version = str(store.version)
            self._send(200, {"kind": f"{kind}List", "metadata": {"resourceVersion": version}, "items": items})

    def _watch(self, kind: str, query: dict[str, str]) -> None:
        until = time.monotonic() + float(query.get("timeoutSeconds", 60))
        self._begin()
        version = int(query.get("resourceVersion") or 0)

        def going() -> bool:
            self._break("WATCH", kind)
            return self.kubernetes.going and time.monotonic() < until

        for event in self.kubernetes.store.watch(kind, query.get("labelSelector", ""), version, 0.1, going):
            self._chunk(json.dumps(event).encode() + b"\n")
        self._chunk(b"")

    def _log(self, pod: Object, query: dict[str, str]) -> None:
        """Of a container, as long as it runs; each line with when it was seen."""
        path = self.kubernetes.logs / pod["metadata"]["uid"]
        if not path.is_file():
            raise Refusal(400, "container is waiting to start")
        early = datetime.now(UTC) - timedelta(seconds=float(query.get("sinceSeconds", 1e6)))
        self._begin()
        read, rest, count = 0, b"", 0
        stamps = self.kubernetes.stamps.setdefault(pod["metadata"]["uid"], [])
        while self.kubernetes.going:
            over = pod["metadata"]["uid"] not in self.kubernetes.running()
            content = path.read_bytes()[read:]
            read += len(content)
            *lines, rest = (rest + content).split(b"\n")
            for line in lines:
                if count == len(stamps):
                    stamps.append(f"{stamp()[:-1]}{count % 1000:03d}Z")
                if datetime.fromisoformat(stamps[count]) >= early:
                    self._chunk(stamps[count].encode() + b" " + line + b"\n")
                count += 1
                self._break("LOG", "")
            if over:
                break
            time.sleep(0.05)
        self._chunk(b"")

    def _break(self, stream: str, path: str) -> None:
        if self.kubernetes.away or self.kubernetes.fault(stream, path):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            raise BrokenPipeError

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, body: Object, retry: int = 0) -> None:
        """retry: seconds after which an overloaded server wants to be asked again
        (https://kubernetes.io/docs/concepts/cluster-administration/flow-control/)."""
        with self.kubernetes.store.changed:
            content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if retry:
            self.send_header("Retry-After", str(retry))
        self.end_headers()
        self.wfile.write(content)
