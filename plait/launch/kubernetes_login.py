"""By which kubeconfig, or which pod's service account, a cluster is spoken to; and what its client hides of a
command that a kubeconfig's user logs in by."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from kubernetes import client, config
from kubernetes.config import kube_config
from kubernetes.config.config_exception import ConfigException

from plait.core.base.errors import LaunchError

TO_TERMINAL = "'NoneType' object has no attribute 'strip'"
"""What the client says of a command that failed with its errors shown on the terminal (36.0)."""


def load(settings: client.Configuration, context: str) -> None:
    """From a kubeconfig; else as a pod's service account. Raises LaunchError where the kubeconfig's user is
    known by a command that fails, of which the client only makes a line of a log: it would go on as nobody.
    """
    try:
        with _logged() as problems:
            config.load_kube_config(context=context or None, client_configuration=settings)
    except ConfigException as error:
        try:
            config.load_incluster_config(client_configuration=settings)
        except ConfigException:
            raise error from None
        return
    if problems:
        why = " ".join(problems[0].removeprefix("exec: ").split()).rstrip(".")
        why = "it says above why" if why == TO_TERMINAL else why
        raise LaunchError(
            f"The kubeconfig's user is known to the cluster by the command '{_command(context)}', which failed: {why}. "
            "Have it succeed in this shell first (log in anew, install it), or choose another user by "
            "kubernetes.context."
        )


@contextmanager
def _logged() -> Iterator[list[str]]:
    """What is logged as an error inside the block, which nobody else is shown."""
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
    """What the context's user logs in by, without its arguments: secrets are among them."""
    merged = cast("Any", kube_config.KubeConfigMerger(kube_config.KUBE_CONFIG_DEFAULT_LOCATION)).config
    chosen = merged["contexts"].get_with_name(context or merged["current-context"])["context"]["user"]
    return merged["users"].get_with_name(chosen)["user"]["exec"]["command"]
