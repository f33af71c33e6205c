"""Kubernetes' API through its official client: objects as plain dictionaries, retries, readable
errors."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import kube_config
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url
from yaml import YAMLError

from plait.core.base.errors import LaunchError
from plait.formats.kubernetes.manifests import Object

PATIENCE = 60.0
"""Seconds for which requests to an unavailable or overloaded server are retried."""
ANSWER = (5.0, 30.0)
"""Timeouts of a connection and of an answer, seconds."""
MAX_RETRY_AFTER = 30.0
"""The longest ``Retry-After`` that is honoured, seconds."""
TRANSIENT = (0, 408, 429, 500, 502, 503, 504)
"""Transient HTTP statuses, which are retried; 0 is a failed connection."""
UNUSABLE = (ConfigException, HTTPError, YAMLError, OSError, LookupError, TypeError, ValueError, AttributeError,
            ImportError)  # fmt: skip
"""The client's exceptions for a kubeconfig that it cannot use, or whose proxy needs a package."""
JOBSET = {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"}
CONFIG: Any = config
"""The client's module of kubeconfigs, which has no types."""
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
NOUNS = {
    "Pod": "pod", "Service": "service", "ConfigMap": "config_map", "Secret": "secret", "Job": "job", "Node": "node",
    "JobSet": "custom_object",
}  # fmt: skip


class Unavailable(LaunchError):
    """Error for a server that does not answer, or is temporarily unavailable."""


class NotFound(LaunchError):
    """Error for a request about an object that does not exist."""


class Conflict(LaunchError):
    """Error for a change of an object that was changed meanwhile, or that exists already."""


@dataclass(frozen=True)
class _Call:
    """A request's verb, kind and name, for messages."""

    verb: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.name}".strip()


class KubernetesNamespace:
    """A namespace of a cluster.

    context, namespace: of the kubeconfig; its current ones if empty, or the pod's own namespace
    inside a pod. Methods raise LaunchError that says what was refused and why.
    """

    def __init__(self, context: str = "", namespace: str = "", *, patience: float = PATIENCE) -> None:
        settings = client.Configuration()
        try:
            load(settings, context)
            self.namespace = str(namespace or _current_namespace(context))
            parse_url(settings.host)
            settings.retries = False  # pyright: ignore[reportAttributeAccessIssue]  # this class retries, and can report it
            api = client.ApiClient(settings)
        except UNUSABLE as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise LaunchError(
                f"No cluster of Kubernetes is known here: {why}. Say which by a kubeconfig (~/.kube/config or "
                "KUBECONFIG), and by kubernetes.context."
            ) from None
        self.interrupted: Collection[int] = ()
        """Signals received meanwhile; if there are any, requests to an unavailable server are not
        retried."""
        self.patience = patience
        self._server = settings.host
        self._apis: dict[str, Any] = {
            "JobSet": client.CustomObjectsApi(api),
            "Job": client.BatchV1Api(api),
        }
        self._core, self._groups = client.CoreV1Api(api), client.ApisApi(api)

    def has_jobset(self) -> bool:
        """Return True if the cluster serves JobSets of the version that Plait writes."""
        groups = self._request(_Call("list", "API groups", ""), self._groups.get_api_versions)["groups"]
        served = {version["groupVersion"] for group in groups for version in group["versions"]}
        return f"{JOBSET['group']}/{JOBSET['version']}" in served

    def create(self, body: Object) -> Object:
        """Create an object and return it. Raises Conflict if a different object of that name exists
        already."""
        kind, name = body["kind"], body["metadata"]["name"]
        call = _Call("create", kind, name)
        try:
            return self._request(call, self._method("create", kind), body=body)
        except Conflict:
            found = self.get(kind, name)  # the answer to an earlier attempt may have been lost
            if found["metadata"].get("labels") != body["metadata"]["labels"]:
                raise
            return found

    def get(self, kind: str, name: str) -> Object:
        """Return an object. Raises NotFound if it does not exist."""
        return self._request(_Call("get", kind, name), self._method("read", kind), name)

    def list(self, kind: str, labels: str = "") -> tuple[list[Object], str]:
        """Return all objects of a kind with these labels, and the resource version to start a watch
        from."""
        verb = self._method("list", kind)
        answer = self._request(_Call("list", kind, labels), verb, label_selector=labels)
        return answer["items"], answer["metadata"].get("resourceVersion", "")

    def everywhere(self, kind: str) -> list[Object]:
        """Return all objects of a kind, in every namespace. Raises LaunchError if that is not
        allowed."""
        verb = getattr(self._core, f"list_{NOUNS[kind]}_for_all_namespaces")
        return self._request(_Call("list", f"{kind}s of all namespaces", ""), verb)["items"]

    def patch(
        self, kind: str, name: str, changes: Sequence[Object] | Mapping[str, Any], *, status: bool = False
    ) -> Object:
        """Patch an object and return it: a JSON patch if ``changes`` is a sequence, else a merge
        patch. status: patch the object's status, which needs a permission of its own. Raises
        NotFound, and Conflict if a test of the patch fails or the uid does not match."""
        body = changes if isinstance(changes, Mapping) else [*changes]
        call = _Call("patch the status of" if status else "patch", kind, name)
        method = self._method("patch", kind, "_status" if status else "")
        return self._request(call, method, name, body=body)

    def delete(
        self, kind: str, name: str, *, grace: int | None = None, wait_for_pods: bool = False, uid: str = ""
    ) -> None:  # fmt: skip
        """Delete an object; no error if it does not exist. grace: seconds that its pods have to
        end; None: their own. wait_for_pods: the object stays until its pods have ended. uid: delete
        only an object with this uid."""
        options: Object = {"propagation_policy": "Foreground" if wait_for_pods else "Background"}
        if grace is not None:
            options["grace_period_seconds"] = grace
        if uid:
            options["body"] = {"preconditions": {"uid": uid}}
        call = _Call("delete", kind, name)
        with suppress(NotFound, Conflict):
            self._request(call, self._method("delete", kind), name, **options)

    def watch(self, kind: str, labels: str, version: str, seconds: int) -> Iterator[tuple[str, Object]]:
        """Yield events (ADDED, MODIFIED or DELETED; the object) until the server ends the watch;
        raise ``StreamBroken`` if the connection breaks."""
        options: dict[str, Any] = {
            "label_selector": labels, "resource_version": version, "watch": True, "timeout_seconds": seconds,
            "allow_watch_bookmarks": True, "_preload_content": False, "_request_timeout": (ANSWER[0], seconds + 10.0),
        }  # fmt: skip
        method = self._method("list", kind)
        options |= self._where(kind)
        for line in self._lines(lambda: method(**options)):
            event = json.loads(line)
            if event["type"] == "ERROR":  # 410: the version is too old
                raise StreamBroken(event["object"].get("message", ""))
            if event["type"] != "BOOKMARK":
                yield event["type"], event["object"]

    def follow_log(self, pod: str, since: str = "") -> Iterator[bytes]:
        """Return the lines of a container's log, each after its timestamp, from the start or from
        ``since`` seconds ago, until the log ends. The iterator raises ``StreamBroken`` if the
        connection breaks."""
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
            raise StreamBroken(str(error), getattr(error, "status", None) or 0) from None

    def _method(self, verb: str, kind: str, part: str = "") -> Callable[..., Any]:
        api, noun = self._apis.get(kind, self._core), NOUNS[kind]
        if kind == "JobSet" and verb == "read":
            verb = "get"
        return getattr(api, (f"{verb}_{noun}" if kind == "Node" else f"{verb}_namespaced_{noun}") + part)

    def _where(self, kind: str) -> dict[str, Any]:
        """Return the client's arguments that locate objects of a kind."""
        group = JOBSET if kind == "JobSet" else {}
        return {**group, "namespace": self.namespace} if kind in NOUNS and kind != "Node" else {}

    def _request(self, call: _Call, method: Callable[..., Any], *name: str, **options: Any) -> Any:
        """Call the client with retries; return the answer's JSON. Raises LaunchError if the request
        is refused."""
        options |= self._where(call.kind) | ({"name": name[0]} if name else {})
        deadline, pause = time.monotonic() + self.patience, 0.2
        while True:
            try:
                answer = method(**options, _preload_content=False, _request_timeout=ANSWER)
                return json.loads(answer.data)
            except ApiException as error:
                status, cause = cast("Any", error).status or 0, _cause(error)
                pause = max(pause, _retry_after(error))
                if status not in TRANSIENT or self.interrupted or time.monotonic() > deadline:
                    raise self._refused(call, status, cause) from None
            except (HTTPError, ValueError) as error:  # no connection, or an answer that is cut off
                if self.interrupted or time.monotonic() > deadline:
                    raise self._refused(call, 0, " ".join(str(error).split())) from None
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(pause * 2, 5.0)

    def _refused(self, call: _Call, status: int, cause: str) -> LaunchError:
        if status == 404:
            return NotFound(f"Kubernetes has no {call.kind} {call.name} in namespace {self.namespace}: {cause}")
        if status in (409, 422) and call.verb.startswith(("create", "patch", "delete")):
            return Conflict(f"Kubernetes refused to {call}: {cause}")
        if status in (401, 403):
            return LaunchError(
                f"Kubernetes does not let you {call} in namespace {self.namespace}: {cause} docs/kubernetes.md lists "
                "what is needed."
            )
        where = "" if status else f" at {self._server}, retried for {self.patience:.0f} s,"
        kind = Unavailable if status in TRANSIENT else LaunchError
        return kind(f"Kubernetes{where} refused to {call}: {cause or f'HTTP status {status}'}")


class StreamBroken(Exception):
    """Error for a stream from the server that broke; it can be opened again. status: the HTTP
    status, if the request was refused; else 0."""

    def __init__(self, cause: str, status: int = 0) -> None:
        super().__init__(cause)
        self.status = status


def _retry_after(error: Any) -> float:
    """Return the server's ``Retry-After`` in seconds, at most ``MAX_RETRY_AFTER``; 0 if it has
    none."""
    headers: Mapping[str, Any] = getattr(error, "headers", None) or {}
    text = str(headers.get("Retry-After", ""))
    return min(float(text), MAX_RETRY_AFTER) if text.isdecimal() else 0.0


def _cause(error: Any) -> str:
    """Return the server's message."""
    body = getattr(error, "body", None)
    with suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(body or "")["message"]).rstrip(".") + "."
    return " ".join(str(error.reason or "").split())


def _current_namespace(context: str) -> str:
    with suppress(ConfigException, OSError):
        contexts, current = CONFIG.list_kube_config_contexts()
        chosen = next((one for one in contexts if one["name"] == context), current)
        return chosen["context"].get("namespace") or "default"
    return POD_NAMESPACE.read_text().strip() if POD_NAMESPACE.is_file() else "default"


TO_TERMINAL = "'NoneType' object has no attribute 'strip'"
"""The client's message for a login command that failed after it wrote its errors to the terminal
(36.0)."""


def load(settings: client.Configuration, context: str) -> None:
    """Load the client's settings from a kubeconfig, else from the pod's service account. Raises
    LaunchError if the kubeconfig's login command fails: the client only logs that, and would go on
    unauthenticated."""
    try:
        with _logged() as problems:
            CONFIG.load_kube_config(context=context or None, client_configuration=settings)
    except ConfigException as error:
        try:
            CONFIG.load_incluster_config(client_configuration=settings)
        except ConfigException:
            raise error from None
        return
    if problems:
        why = " ".join(problems[0].removeprefix("exec: ").split()).rstrip(".")
        why = "see its output above" if why == TO_TERMINAL else why
        raise LaunchError(
            f"The kubeconfig's user is known to the cluster by the command '{_command(context)}', which failed: {why}. "
            "Have it succeed in this shell first (log in anew, install it), or choose another user by "
            "kubernetes.context."
        )


@contextmanager
def _logged() -> Generator[list[str]]:
    """Collect the error messages logged inside the block, instead of showing them; yield their
    list."""
    found, root = list[str](), logging.getLogger()

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    before = root.handlers[:]
    root.handlers[:] = [Kept(logging.ERROR)]
    try:
        yield found
    finally:
        root.handlers[:] = before


def _command(context: str) -> str:
    """Return the command that the context's user logs in with, without its arguments, which may
    contain secrets."""
    merged = cast("Any", kube_config.KubeConfigMerger(kube_config.KUBE_CONFIG_DEFAULT_LOCATION)).config
    chosen = merged["contexts"].get_with_name(context or merged["current-context"])["context"]["user"]
    return merged["users"].get_with_name(chosen)["user"]["exec"]["command"]
