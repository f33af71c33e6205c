"""Which cluster of Kubernetes is meant, by a kubeconfig or from inside of a pod, and what is said
of none."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from kubernetes.config.config_exception import ConfigException

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes import api as kubernetes_api
from plait.launch.kubernetes.api import KubernetesNamespace

TIER = "unit"
CLUSTER = """
current-context: a
contexts: [{{name: a, context: {{cluster: c, user: u, namespace: 5}}}}]
clusters: [{{name: c, cluster: {{server: "{server}"{more}}}}}]
users: [{{name: u, user: {{{user}}}}}]
"""


def test_inside_of_a_cluster_a_pod_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.setattr("kubernetes.config.load_incluster_config", lambda client_configuration: None)
    monkeypatch.setattr(kubernetes_api, "POD_NAMESPACE", tmp_path / "namespace")
    assert KubernetesNamespace().namespace == "default"
    (tmp_path / "namespace").write_text("pods\n")
    assert KubernetesNamespace().namespace == "pods"


def test_without_any_cluster_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))

    def outside(client_configuration: object) -> None:
        raise ConfigException("no service account")

    monkeypatch.setattr("kubernetes.config.load_incluster_config", outside)
    with pytest.raises(
        LaunchError, match=r"No cluster of Kubernetes is known here: (?!no service).*kubernetes.context"
    ):
        KubernetesNamespace()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a: [", "expected the node content"),
        (b"\xff\x00", "can't decode byte"),
        (CLUSTER.format(server="https://[::1", more="", user="token: x"), "Invalid IPv6 URL"),
        (CLUSTER.format(server="https://a", more="", user="auth-provider: {name: gcp}"), "no attribute"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, says: str
) -> None:
    file = tmp_path / "config"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    with pytest.raises(LaunchError, match=f"No cluster of Kubernetes is known here: .*{says}.* Say which by"):
        KubernetesNamespace()


def test_a_namespace_of_digits_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(CLUSTER.format(server="https://a", more="", user="token: x"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    assert KubernetesNamespace().namespace == "5"


@pytest.mark.system
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("/bin/sh, args: [-c, 'echo Your login has ended. >&2; exit 7']", "process returned 7. Your login has ended"),
        ("/nowhere/a-login, args: [cluster]", "No such file or directory"),
        ("/bin/echo, args: ['{}']", "malformed response. missing key 'apiVersion'"),
    ],
)
def test_a_command_that_a_user_logs_in_by_is_named_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, says: str
) -> None:
    login = f"exec: {{apiVersion: client.authentication.k8s.io/v1, command: {command}}}"
    (tmp_path / "config").write_text(CLUSTER.format(server="https://a", more="", user=login))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    words, handlers = command.partition(",")[0], logging.getLogger().handlers[:]
    with pytest.raises(LaunchError, match=re.escape(f"the command '{words}', which failed: ")) as refused:
        KubernetesNamespace()
    assert says in str(refused.value)
    assert not capsys.readouterr().err and logging.getLogger().handlers == handlers


@pytest.mark.system
def test_who_logs_in_by_a_command_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "x"}}'
    (tmp_path / "answer").write_text(answer)
    login = f"exec: {{apiVersion: client.authentication.k8s.io/v1, command: cat, args: [{tmp_path / 'answer'}]}}"
    (tmp_path / "config").write_text(CLUSTER.format(server="https://a", more="", user=login))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    assert KubernetesNamespace("a").namespace == "5"
