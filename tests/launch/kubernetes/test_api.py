"""What is asked of Kubernetes' API, word for word, and what becomes of each answer; nothing is
connected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3
from urllib3.exceptions import MaxRetryError, ProtocolError

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes import api as kubernetes_api
from plait.launch.kubernetes.api import Conflict, KubernetesNamespace, NotFound, StreamBroken, Unavailable

TIER = "unit"

HERE = {"cluster": "small", "user": "me", "namespace": "ml"}
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets"


@dataclass
class Answer:
    """Of a server."""

    status: int = 200
    body: Any = None
    chunks: tuple[bytes | Exception, ...] = ()
    reason: str = ""
    closed: int = 0
    released: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def stream(self, amt: int | None, decode_content: bool) -> Iterator[bytes]:
        assert not decode_content  # bytes as they come
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def close(self) -> None:
        self.closed += 1

    def release_conn(self) -> None:
        self.released += 1


@dataclass
class Server:
    """answers: one after the other, the last for ever; asked: what came."""

    answers: list[Answer | Exception] = field(default_factory=list[Answer | Exception])
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    slept: list[float] = field(default_factory=list[float])
    now: float = 100.0
    takes: float = 0.001

    def request(self, pool: Any, method: str, url: str, **options: Any) -> Answer:
        assert pool.connection_pool_kw["retries"].total is False  # which nobody would hear of
        parts = urlsplit(url)
        self.asked.append({
            "host": f"{parts.scheme}://{parts.netloc}", "what": f"{method} {parts.path}",
            "query": {key: values[0] for key, values in parse_qs(parts.query).items()},
            "body": json.loads(options.get("body") or "null"), "timeout": options["timeout"],
        })  # fmt: skip
        self.now += self.takes
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    @property
    def last(self) -> dict[str, Any]:
        return self.asked[-1]


def _request(pool: Any, server: Server, method: str, url: str, **options: Any) -> Answer:
    return server.request(pool, method, url, **options)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    made = Server()
    monkeypatch.setattr(urllib3.PoolManager, "request", partialmethod(_request, made))
    monkeypatch.setattr(kubernetes_api, "time", SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.now))
    known(
        monkeypatch, tmp_path, {"here": HERE, "there": HERE | {"namespace": "yours"}, "bare": HERE | {"namespace": ""}}
    )
    return made


def known(monkeypatch: pytest.MonkeyPatch, folder: Path, contexts: dict[str, dict[str, str]]) -> None:
    """A kubeconfig."""
    path = folder / "config"
    path.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": next(iter(contexts), ""),
        "clusters": [{"name": "small", "cluster": {"server": "http://small:8001"}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": name, "context": one} for name, one in contexts.items()],
    }))  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))


def a(kind: str, name: str = "x", **labels: str) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "labels": labels}}


def test_the_namespace_is_the_users_or_the_contexts(server: Server) -> None:
    assert KubernetesNamespace().namespace == "ml"
    assert KubernetesNamespace("there").namespace == "yours"
    assert KubernetesNamespace("bare").namespace == "default"
    assert KubernetesNamespace("there", "mine").namespace == "mine"


def test_a_context_that_is_not_there_is_refused(server: Server) -> None:
    with pytest.raises(LaunchError, match="No cluster of Kubernetes is known here"):
        KubernetesNamespace("nowhere")


PODS = "/api/v1/namespaces/ml/pods"
MAPS = "/api/v1/namespaces/ml/configmaps"
ONE = f"{PODS}/p"
BACKGROUND = {"propagationPolicy": "Background"}


@pytest.mark.parametrize(
    ("do", "what", "query", "body"),
    [
        (lambda api: api.get("Pod", "p"), f"GET {ONE}", {}, None),
        (lambda api: api.get("Node", "n"), "GET /api/v1/nodes/n", {}, None),
        (lambda api: api.get("Job", "j"), "GET /apis/batch/v1/namespaces/ml/jobs/j", {}, None),
        (lambda api: api.get("JobSet", "j"), f"GET {JOBSETS}/j", {}, None),
        (lambda api: api.create(a("Job")), "POST /apis/batch/v1/namespaces/ml/jobs", {}, a("Job")),
        (lambda api: api.create(a("JobSet")), f"POST {JOBSETS}", {}, a("JobSet")),
        (lambda api: api.create(a("ConfigMap")), f"POST {MAPS}", {}, a("ConfigMap")),
        (lambda api: api.create(a("Secret")), "POST /api/v1/namespaces/ml/secrets", {}, a("Secret")),
        (lambda api: api.create(a("Service")), "POST /api/v1/namespaces/ml/services", {}, a("Service")),
        (lambda api: api.patch("Pod", "p", [{"op": "test"}]), f"PATCH {ONE}", {}, [{"op": "test"}]),
        (lambda api: api.patch("ConfigMap", "c", {"data": {}}), f"PATCH {MAPS}/c", {}, {"data": {}}),
        (lambda api: api.delete("Pod", "p"), f"DELETE {ONE}", BACKGROUND, None),
        (
            lambda api: api.delete("Pod", "p", grace=0),
            f"DELETE {ONE}",
            {"propagationPolicy": "Background", "gracePeriodSeconds": "0"},
            None,
        ),
        (
            lambda api: api.delete("JobSet", "j", wait_for_pods=True),
            f"DELETE {JOBSETS}/j",
            {"propagationPolicy": "Foreground"},
            None,
        ),
    ],
)  # fmt: skip
def test_what_is_asked(
    server: Server, do: Callable[[KubernetesNamespace], Any], what: str, query: Any, body: Any
) -> None:
    server.answers = [Answer(body={"kind": "Status"})]
    do(KubernetesNamespace())
    (asked,) = server.asked
    assert (asked["what"], asked["query"], asked["body"]) == (what, query, body)
    assert asked["host"] == "http://small:8001"
    assert (asked["timeout"].connect_timeout, asked["timeout"].read_timeout) == (5.0, 30.0)


def test_lists_have_labels_and_a_version(server: Server) -> None:
    server.answers = [Answer(body={"items": [a("Pod")], "metadata": {"resourceVersion": "7"}})]
    assert KubernetesNamespace().list("Pod", "run=x") == ([a("Pod")], "7")
    assert (server.last["what"], server.last["query"]) == ("GET /api/v1/namespaces/ml/pods", {"labelSelector": "run=x"})
    server.answers = [Answer(body={"items": [], "metadata": {}})]
    assert KubernetesNamespace().list("Node") == ([], "")
    assert server.last["what"] == "GET /api/v1/nodes"
    assert KubernetesNamespace().list("JobSet", "run=x") == ([], "")
    assert (server.last["what"], server.last["query"]) == (f"GET {JOBSETS}", {"labelSelector": "run=x"})


@pytest.mark.parametrize(
    ("versions", "known"),
    [
        (["jobset.x-k8s.io/v1alpha2"], True),
        (["batch/v1", "jobset.x-k8s.io/v1alpha2"], True),
        (["jobset.x-k8s.io/v1"], False),
        ([], False),
    ],
)
def test_jobsets_are_known_by_version(server: Server, versions: list[str], known: bool) -> None:
    server.answers = [Answer(body={"groups": [{"versions": [{"groupVersion": one}]} for one in versions]})]
    assert KubernetesNamespace().has_jobset() is known
    assert server.last["what"] == "GET /apis/"


def test_what_is_there_already_is_ours_if_its_labels_are(server: Server) -> None:
    """An answer to an earlier try may have been lost."""
    refused = Answer(409, {"message": "it exists"})
    server.answers = [refused, Answer(body=a("Job", run="x"))]
    assert KubernetesNamespace().create(a("Job", run="x")) == a("Job", run="x")
    server.answers = [refused, Answer(body=a("Job", run="y"))]
    with pytest.raises(Conflict, match="refused to create Job x: it exists"):
        KubernetesNamespace().create(a("Job", run="x"))


def test_what_is_gone_already_is_deleted(server: Server) -> None:
    server.answers = [Answer(404, {"message": "no such pod"})]
    KubernetesNamespace().delete("Pod", "p")
    with pytest.raises(NotFound, match=r"has no Pod p in namespace ml: no such pod\."):
        KubernetesNamespace().get("Pod", "p")
    with pytest.raises(NotFound):
        KubernetesNamespace().patch("Pod", "p", [])


@pytest.mark.parametrize(
    ("verb", "status", "kind", "said"),
    [
        ("patch", 409, Conflict, r"refused to patch Pod p: why\.$"),
        ("patch", 422, Conflict, r"refused to patch Pod p: why\.$"),
        ("get", 409, LaunchError, r"^Kubernetes refused to get Pod p: why\.$"),
        ("get", 401, LaunchError, r"does not let you get Pod p in namespace ml: why\. docs/kubernetes"),
        ("get", 403, LaunchError, r"does not let you get Pod p in namespace ml: why\. docs/kubernetes"),
        ("get", 400, LaunchError, r"^Kubernetes refused to get Pod p: why\.$"),
    ],
)
def test_refusals_are_told_at_once_and_by_kind(
    server: Server, verb: str, status: int, kind: type[Exception], said: str
) -> None:
    server.answers = [Answer(status, {"message": "why"})]
    more = ([],) if verb == "patch" else ()
    with pytest.raises(LaunchError, match=said) as refused:
        getattr(KubernetesNamespace(), verb)("Pod", "p", *more)
    assert type(refused.value) is kind
    assert len(server.asked) == 1 and not server.slept


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_that_is_overloaded_is_asked_again(server: Server, status: int) -> None:
    server.answers = [Answer(status, b"no JSON", reason="too much"), Answer(status), Answer(body=a("Pod"))]
    assert KubernetesNamespace().get("Pod", "x") == a("Pod")
    assert server.slept == [0.2, 0.4]


@pytest.mark.parametrize("broken", [ProtocolError("cut off"), MaxRetryError(None, "/", None), Answer(body=b'{"ite')])  # type: ignore[arg-type]
def test_a_connection_that_breaks_is_made_again(server: Server, broken: Answer | Exception) -> None:
    server.answers = [broken, broken, Answer(body=a("Pod"))]
    assert KubernetesNamespace().get("Pod", "x") == a("Pod")
    assert server.slept == [0.2, 0.4]


def test_pauses_double_up_to_five_seconds_and_end_with_patience(server: Server) -> None:
    server.answers = [Answer(503, {"message": "starting"})]
    with pytest.raises(Unavailable, match=r"refused to get Pod x: starting\.$"):
        KubernetesNamespace(patience=20.0).get("Pod", "x")
    assert server.slept[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert sum(server.slept) == pytest.approx(20.0, abs=0.1) and min(server.slept) >= 0
    assert len(server.asked) > len(server.slept)  # and once when patience is over


def test_a_minute_of_patience_unless_another_is_asked_for(server: Server) -> None:
    server.answers, server.takes = [ProtocolError("cut  off")], 7.0
    with pytest.raises(
        Unavailable, match=r"^Kubernetes at http://small:8001, retried for 60 s, refused to get Pod x: cut off$"
    ):
        KubernetesNamespace().get("Pod", "x")
    assert 60.0 <= server.now - 100.0 <= 60.0 + 2 * 7.0


@pytest.mark.parametrize("failing", [Answer(503), ProtocolError("cut off")])
def test_who_is_interrupted_is_told_at_once(server: Server, failing: Answer | Exception) -> None:
    server.answers = [failing]
    api = KubernetesNamespace()
    api.interrupted = [2]
    with pytest.raises(Unavailable):
        api.get("Pod", "x")
    assert len(server.asked) == 1


def test_an_answer_without_words_is_told_by_its_reason_or_number(server: Server) -> None:
    server.answers = [Answer(400, b"<html>", reason="Bad  Request")]
    with pytest.raises(LaunchError, match=r"refused to get Pod x: Bad Request$"):
        KubernetesNamespace().get("Pod", "x")
    server.answers = [Answer(400, ["no message"])]
    with pytest.raises(LaunchError, match=r"refused to get Pod x: HTTP status 400$"):
        KubernetesNamespace().get("Pod", "x")


def event(kind: str, **metadata: Any) -> bytes:
    return json.dumps({"type": kind, "object": metadata}).encode() + b"\n"


def test_a_watch_tells_what_happens_in_whatever_pieces_it_comes(server: Server) -> None:
    told = event("ADDED", name="a") + event("BOOKMARK") + event("DELETED", name="b")
    answer = Answer(chunks=(told[:5], told[5:40], told[40:-1]))  # the last line is not ended
    server.answers = [answer]
    assert list(KubernetesNamespace().watch("Pod", "run=x", "7", 30)) == [
        ("ADDED", {"name": "a"}),
        ("DELETED", {"name": "b"}),
    ]
    assert server.last["what"] == "GET /api/v1/namespaces/ml/pods"
    assert server.last["query"] == {
        "labelSelector": "run=x", "resourceVersion": "7", "watch": "true", "timeoutSeconds": "30",
        "allowWatchBookmarks": "true",
    }  # fmt: skip
    assert (server.last["timeout"].connect_timeout, server.last["timeout"].read_timeout) == (5.0, 40.0)
    assert (answer.closed, answer.released) == (1, 1)


def test_a_watch_from_too_old_a_version_is_dropped(server: Server) -> None:
    server.answers = [Answer(chunks=(event("ERROR", message="too old"), event("ADDED", name="a")))]
    with pytest.raises(StreamBroken, match="too old"):
        list(KubernetesNamespace().watch("Pod", "run=x", "7", 30))


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Answer(404, {"message": "no pod"}), 404),
        (ProtocolError("cut off"), 0),
        (Answer(chunks=(b"1 one\n", ProtocolError("cut off"))), 0),
        (Answer(chunks=(b"1 one\n", OSError("cut off"))), 0),
    ],
)
def test_a_stream_that_breaks_is_dropped_with_its_status(
    server: Server, answer: Answer | Exception, status: int
) -> None:
    server.answers = [answer]
    with pytest.raises(StreamBroken) as dropped:
        list(KubernetesNamespace().follow_log("p"))
    assert dropped.value.status == status
    if isinstance(answer, Answer) and answer.chunks:
        assert (answer.closed, answer.released) == (1, 1)


def test_a_log_is_followed_from_its_start_or_from_seconds_ago(server: Server) -> None:
    server.answers = [Answer(chunks=(b"1 one\n2 two\n",))]
    assert list(KubernetesNamespace().follow_log("p")) == [b"1 one", b"2 two"]
    assert server.last["what"] == "GET /api/v1/namespaces/ml/pods/p/log"
    assert server.last["query"] == {"follow": "true", "timestamps": "true"}
    assert (server.last["timeout"].connect_timeout, server.last["timeout"].read_timeout) == (5.0, 3600.0)
    list(KubernetesNamespace().follow_log("p", "12"))
    assert server.last["query"] == {"follow": "true", "timestamps": "true", "sinceSeconds": "12"}
