"""The section of a job file that says what to ask Kubernetes for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from plait.core.base.codec.data import Count, Natural, Section
from plait.core.base.errors import JobError
from plait.core.job.one_line import one_line_each

Texts = Annotated[tuple[str, ...], Field(strict=False)]
NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
LABEL = r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
"""A qualified name: a label's key, a taint's, an extended resource's."""
VALUE = r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?"
"""A label's value, or a taint's."""
QUANTITY = r"\+?(\d+(\.\d*)?|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?"
"""https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""
COUNT = r"\+?\d+([kMGTPE]|[KMGTPE]i|[eE]\+?\d+)?"
"""Of an extended resource: https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node/"""
TAINT = re.compile(
    rf"((?P<key>{LABEL})(=(?P<value>{VALUE}))?)?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?", re.ASCII
)
VOLUME = re.compile(rf"(?P<claim>{NAME})?(?P<path>/[^:]*)?:(?P<mount>/[^:]+)")
PAIR = re.compile(r"(?P<key>[^=]+)=(?P<value>[^\0]*)")
VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*=[^\0]*")
RESOURCE = re.compile(rf"[\w-]+={QUANTITY}|{LABEL}={COUNT}", re.ASCII)
NODE_LABEL = re.compile(rf"{LABEL}={VALUE}", re.ASCII)
TOPOLOGY = re.compile(rf"(required|preferred):{LABEL}|unconstrained|", re.ASCII)
FORMS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "image": (re.compile(r"\S*"), "an image's name, which has no blanks"),
    "namespace": (re.compile(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?"), "lower-case letters, digits and -"),
    "service_account": (re.compile(rf"({NAME})?"), "lower-case letters, digits, - and ."),
    "priority": (re.compile(rf"({NAME})?"), "lower-case letters, digits, - and ."),
    "kueue_queue": (re.compile(rf"({NAME})?"), "lower-case letters, digits, - and ."),
    "reservation": (re.compile(VALUE, re.ASCII), "at most 63 letters, digits, - . and _"),
    "python": (re.compile(r"\S+"), "a program, such as python3"),
    "gpu_resource": (re.compile(rf"(?=.*/){LABEL}", re.ASCII), "nvidia.com/gpu, amd.com/gpu"),
    "tolerations": (TAINT, "key=value:NoSchedule"),
    "volumes": (VOLUME, "CLAIM:/path in the pod, or /path on the node:/path in the pod"),
    "env": (VARIABLE, "NAME=value"),
    "resources": (RESOURCE, "cpu=32, memory=200Gi, and whole numbers of what has a / in its name: rdma/hca=8"),
    "node_labels": (NODE_LABEL, "label=value"),
    "kueue_topology": (TOPOLOGY, "required:LABEL, preferred:LABEL, unconstrained"),
    "kueue_stage_topology": (re.compile(rf"({LABEL})?", re.ASCII), "a label"),
}


def formed(field: str, one: str, key: str = "") -> None:
    """Raise JobError, which names the key, for a text that Kubernetes would not take in a field's place."""
    form, example = FORMS[field]
    if not form.fullmatch(one):
        raise JobError(f"has '{one}'", key=key or f"kubernetes.{field}", fix=f"Write {example}")


class KubernetesSection(Section):
    """What to ask Kubernetes for, with ``plait train --on kubernetes``."""

    image: str = ""
    """The container image, with Plait installed in it."""
    namespace: str = ""
    """Where to run; ``--on kubernetes:NAMESPACE`` does too. That of the kubeconfig's context if empty."""
    context: str = ""
    """The context of the kubeconfig. The current one if empty."""
    workload: Literal["auto", "job", "jobset"] = "auto"
    """A JobSet, or an Indexed Job with a headless Service. ``auto``: a JobSet if the cluster knows them."""
    nodes: Natural = 0
    """How many pods, one to a node. 0: as many as the job's ranks need, ``gpus`` ranks in each, or one."""
    gpus: Natural = 0
    """GPUs of each pod."""
    gpu_resource: str = "nvidia.com/gpu"
    """What GPUs are called, such as ``amd.com/gpu``."""
    resources: Texts = ()
    """Further limits of each pod, such as ``"cpu=32"``, ``"memory=200Gi"``, ``"rdma/hca=8"``."""
    volumes: Texts = ()
    """``"CLAIM:/data"`` mounts a PersistentVolumeClaim, ``"/mnt/shared:/data"`` a folder of the nodes."""
    env: Texts = ()
    """Variables of every rank, such as ``"NCCL_DEBUG=INFO"``."""
    python: str = "python"
    """Python in the image."""
    service_account: str = ""
    """The pods' service account. The namespace's default if empty."""
    tolerations: Texts = ()
    """Taints that pods tolerate, such as ``"nvidia.com/gpu:NoSchedule"``."""
    node_labels: Texts = ()
    """Labels that nodes must have, such as ``"node.kubernetes.io/instance-type=p5.48xlarge"``."""
    reservation: str = ""
    """A reservation to run in: nodes with the taint ``plait.dev/reserved=RESERVATION:NoSchedule``."""
    spare_nodes: Texts = ()
    """With a rank table: nodes that may take the place of lost ones, and no others; any that fits if
    empty."""
    priority: str = ""
    """The pods' priority class."""
    pod: str | None = None
    """A YAML file with a pod's spec that is merged into ours: all that has no key here."""
    kueue_queue: str = ""
    """Kueue's queue."""
    kueue_topology: str = ""
    """Have Kueue place the pods: ``"required:LABEL"``, ``"preferred:LABEL"`` or ``"unconstrained"``."""
    kueue_stage_topology: str = ""
    """With ``kueue_topology``: a label of nodes that those of one pipeline stage are to share."""
    host_network: bool = False
    """Pods have the network of their node, with its RDMA devices; ``port`` must be free there."""
    exclusive: bool = True
    """Share nodes with no other run of Plait's."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29400
    """Where the first pod listens for the others."""
    grace: Count = 120
    """Seconds that ranks have to save when they are asked to end."""
    wait: Count = 900
    """Seconds that pods may take to start once the cluster has let them in: pulling the image counts."""
    max_restarts: Natural = 3
    """Starts in a row that may end without a new checkpoint before the run is given up; 0: it is not started
    again. As long as there is progress there is no limit."""
    keep: Natural = 3600
    """Seconds that an ended job stays in the cluster, to be looked at."""

    _lines = field_validator("*")(one_line_each("kubernetes"))

    @field_validator(*FORMS)
    @classmethod
    def _formed(cls, value: str | tuple[str, ...], info: Any) -> str | tuple[str, ...]:
        for one in (value,) if isinstance(value, str) else value:
            formed(info.field_name, one)
        return value

    @field_validator("env", "resources", "node_labels")
    @classmethod
    def _once(cls, value: tuple[str, ...], info: Any) -> tuple[str, ...]:
        names = [one.partition("=")[0] for one in value]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise JobError(f"says {twice} twice", key=f"kubernetes.{info.field_name}", fix="Say it once")
        return value
