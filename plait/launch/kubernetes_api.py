"""Kubernetes' API through its official client: objects as plain dictionaries, patience, errors in words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url
from yaml import YAMLError

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes_login import load
from plait.launch.kubernetes_manifests import Object

PATIENCE = 60.0
"""Seconds for which a server that is away, or overloaded, is asked again."""
ANSWER = (5.0, 30.0)
"""Seconds to connect, and to wait for an answer."""
LONGEST_WISH = 30.0
"""Seconds that a server may ask for."""
PASSING = (0, 408, 429, 500, 502, 503, 504)
"""HTTP statuses that may be gone in a moment; 0 is a connection that failed."""
UNUSABLE = (ConfigException, HTTPError, YAMLError, OSError, LookupError, TypeError, ValueError, AttributeError,
            ImportError)  # fmt: skip
"""What the client raises for a kubeconfig that it cannot use, or whose proxy needs a package."""
JOBSET = {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"}
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
NOUNS = {
    "Pod": "pod", "Service": "service", "ConfigMap": "config_map", "Secret": "secret", "Job": "job", "Node": "node",
    "JobSet": "custom_object",
}  # fmt: skip


class Away(LaunchError):
    """The server does not answer, or cannot for now."""


class NotThere(LaunchError):
    """There is no such object."""


class Conflict(LaunchError):
    """The object was changed meanwhile, or is there already."""


@dataclass(frozen=True)
class _Call:
    """verb and kind, for people."""

    verb: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.name}".strip()


class KubernetesNamespace:
    """A namespace of a cluster.

    context, namespace: of the kubeconfig; what is current if empty, or the pod's own inside of one.
    Methods raise LaunchError that says what was refused and why.
    """

    def __init__(self, context: str = "", namespace: str = "", *, patience: float = PATIENCE) -> None:
        settings = client.Configuration()
        try:
            load(settings, context)
            self.namespace = str(namespace or _current_namespace(context))
            parse_url(settings.host)
            settings.retries = False  # pyright: ignore[reportAttributeAccessIssue]  # we do that, and can say so
            api = client.ApiClient(settings)
        except UNUSABLE as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise LaunchError(
                f"No cluster of Kubernetes is known here: {why}. Say which by a kubeconfig (~/.kube/config or "
                "KUBECONFIG), and by kubernetes.context."
            ) from None
        self.interrupted: Collection[int] = ()
        """What has come meanwhile that its user has to see to at once: a server that is away is not waited
        for then."""
        self.patience = patience
        self._server = settings.host
        self._apis: dict[str, Any] = {
            "JobSet": client.CustomObjectsApi(api),
            "Job": client.BatchV1Api(api),
        }
        self._core, self._groups = client.CoreV1Api(api), client.ApisApi(api)

    def has_jobset(self) -> bool:
        """Whether the cluster knows JobSets of the version that we write."""
        groups = self._asked(_Call("list", "API groups", ""), self._groups.get_api_versions)["groups"]
        served = {version["groupVersion"] for group in groups for version in group["versions"]}
        return f"{JOBSET['group']}/{JOBSET['version']}" in served

    def create(self, body: Object) -> Object:
        """Raises Conflict if there is one of that name already that is not this one."""
        kind, name = body["kind"], body["metadata"]["name"]
        call = _Call("create", kind, name)
        try:
            return self._asked(call, self._method("create", kind), body=body)
        except Conflict:
            found = self.get(kind, name)  # the answer to an earlier try may have been lost
            if found["metadata"].get("labels") != body["metadata"]["labels"]:
                raise
            return found

    def get(self, kind: str, name: str) -> Object:
        """Raises NotThere."""
        return self._asked(_Call("get", kind, name), self._method("read", kind), name)

    def list(self, kind: str, labels: str = "") -> tuple[list[Object], str]:
        """All with these labels, and the version from which on to watch."""
        verb = self._method("list", kind)
        answer = self._asked(_Call("list", kind, labels), verb, label_selector=labels)
        return answer["items"], answer["metadata"].get("resourceVersion", "")

    def everywhere(self, kind: str) -> list[Object]:
        """All of a kind, in every namespace. Raises LaunchError where that is not allowed."""
        verb = getattr(self._core, f"list_{NOUNS[kind]}_for_all_namespaces")
        return self._asked(_Call("list", f"{kind}s of all namespaces", ""), verb)["items"]

    def patch(
        self, kind: str, name: str, changes: Sequence[Object] | Mapping[str, Any], *, status: bool = False
    ) -> Object:
        """A JSON patch if ``changes`` is a sequence. status: of its status, which is a right of its own.
        Raises NotThere, and Conflict if a test in it fails, or a uid in it is another object's."""
        body = changes if isinstance(changes, Mapping) else [*changes]
        call = _Call("patch the status of" if status else "patch", kind, name)
        method = self._method("patch", kind, "_status" if status else "")
        return self._asked(call, method, name, body=body)

    def delete(
        self, kind: str, name: str, *, grace: int | None = None, wait_for_pods: bool = False, uid: str = ""
    ) -> None:  # fmt: skip
        """No error if it is gone already. wait_for_pods: it stays until they have ended. uid: of the only
        object of this name that is meant."""
        options: Object = {"propagation_policy": "Foreground" if wait_for_pods else "Background"}
        if grace is not None:
            options["grace_period_seconds"] = grace
        if uid:
            options["body"] = {"preconditions": {"uid": uid}}
        call = _Call("delete", kind, name)
        with suppress(NotThere, Conflict):
            self._asked(call, self._method("delete", kind), name, **options)

    def watch(self, kind: str, labels: str, version: str, seconds: int) -> Iterator[tuple[str, Object]]:
        """(ADDED, MODIFIED or DELETED; the object) until the server ends it; raises ``Dropped`` if it
        breaks."""
        options: dict[str, Any] = {
            "label_selector": labels, "resource_version": version, "watch": True, "timeout_seconds": seconds,
            "allow_watch_bookmarks": True, "_preload_content": False, "_request_timeout": (ANSWER[0], seconds + 10.0),
        }  # fmt: skip
        method = self._method("list", kind)
        options |= self._where(kind)
        for line in self._lines(lambda: method(**options)):
            event = json.loads(line)
            if event["type"] == "ERROR":  # 410: the version is too old
                raise Dropped(event["object"].get("message", ""))
            if event["type"] != "BOOKMARK":
                yield event["type"], event["object"]

    def follow_log(self, pod: str, since: str = "") -> Iterator[bytes]:
        """Lines of a container's log, each after its time, from its start or ``since`` seconds ago, until it
        ends; raises ``Dropped`` if the connection breaks."""
        options: dict[str, Any] = {"follow": True, "timestamps": True, "_preload_content": False}
        if since:
            options["since_seconds"] = int(since)
        wait = (ANSWER[0], 3600.0)
        return self._lines(
            lambda: self._core.read_namespaced_pod_log(pod, self.namespace, _request_timeout=wait, **options)
        )

    def _lines(self, call: Callable[[], Any]) -> Iterator[bytes]:
        try:
            answer = call()
            try:
                rest = b""
                for chunk in answer.stream(amt=None, decode_content=False):
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from lines
                if rest:
                    yield rest
            finally:
                answer.close()
                answer.release_conn()
        except (ApiException, HTTPError, OSError) as error:
            raise Dropped(str(error), getattr(error, "status", None) or 0) from None

    def _method(self, verb: str, kind: str, part: str = "") -> Callable[..., Any]:
        api, noun = self._apis.get(kind, self._core), NOUNS[kind]
        if kind == "JobSet" and verb == "read":
            verb = "get"
        return getattr(api, (f"{verb}_{noun}" if kind == "Node" else f"{verb}_namespaced_{noun}") + part)

    def _where(self, kind: str) -> dict[str, Any]:
        """Arguments by which a method of the client finds objects of a kind."""
        group = JOBSET if kind == "JobSet" else {}
        return {**group, "namespace": self.namespace} if kind in NOUNS and kind != "Node" else {}

    def _asked(self, call: _Call, method: Callable[..., Any], *name: str, **options: Any) -> Any:
        """The answer's JSON."""
        options |= self._where(call.kind) | ({"name": name[0]} if name else {})
        deadline, pause = time.monotonic() + self.patience, 0.2
        while True:
            try:
                answer = method(**options, _preload_content=False, _request_timeout=ANSWER)
                return json.loads(answer.data)
            except ApiException as error:
                status, cause = error.status or 0, _cause(error)
                pause = max(pause, _wished(error))
                if status not in PASSING or self.interrupted or time.monotonic() > deadline:
                    raise self._refused(call, status, cause) from None
            except (HTTPError, ValueError) as error:  # no connection, or an answer that is cut off
                if self.interrupted or time.monotonic() > deadline:
                    raise self._refused(call, 0, " ".join(str(error).split())) from None
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(pause * 2, 5.0)

    def _refused(self, call: _Call, status: int, cause: str) -> LaunchError:
        if status == 404:
            return NotThere(f"Kubernetes has no {call.kind} {call.name} in namespace {self.namespace}: {cause}")
        if status in (409, 422) and call.verb.startswith(("create", "patch", "delete")):
            return Conflict(f"Kubernetes refused to {call}: {cause}")
        if status in (401, 403):
            return LaunchError(
                f"Kubernetes does not let you {call} in namespace {self.namespace}: {cause} docs/kubernetes.md lists "
                "what is needed."
            )
        where = "" if status else f" at {self._server}, asked for {self.patience:.0f} s"
        kind = Away if status in PASSING else LaunchError
        return kind(f"Kubernetes{where} refused to {call}: {cause or f'HTTP status {status}'}")


class Dropped(Exception):
    """A stream of the server's broke off; it can be begun anew. status: of HTTP, if it was refused."""

    def __init__(self, cause: str, status: int = 0) -> None:
        super().__init__(cause)
        self.status = status


def _wished(error: ApiException) -> float:
    """Seconds after which a server that has too much to do wants to be asked again."""
    text = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
    return min(float(text), LONGEST_WISH) if text.isdecimal() else 0.0


def _cause(error: ApiException) -> str:
    """The server's message."""
    body = getattr(error, "body", None)
    with suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(body or "")["message"]).rstrip(".") + "."
    return " ".join(str(error.reason or "").split())


def _current_namespace(context: str) -> str:
    with suppress(ConfigException, OSError):
        found: Any = config.list_kube_config_contexts()
        contexts, current = found
        chosen = next((one for one in contexts if one["name"] == context), current)
        return chosen["context"].get("namespace") or "default"
    return POD_NAMESPACE.read_text().strip() if POD_NAMESPACE.is_file() else "default"
