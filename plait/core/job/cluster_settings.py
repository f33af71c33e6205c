"""The sections ``[slurm]``, ``[kubernetes]`` and ``[place]`` of a job file: cluster managers and
placement."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from plait.core.base.codec.data import Count, Example, ExtraValue, Natural, NotNegative, Section, Texts, decode
from plait.core.base.codec.toml_text import override
from plait.core.base.errors import JobError
from plait.core.job.texts import resolve_paths, single_line_validator

MOUNT = re.compile(r"/[^:,]*(:/[^:,]*(:[\w+]+)?)?")


class SlurmSection(Section):
    """Slurm options of ``plait train --on slurm``."""

    partition: str = ""
    """Partition to run in, which ``--on slurm:PARTITION`` sets too. Empty: the cluster's
    default."""
    nodes: Natural = 0
    """Number of nodes. 0: as many as the job's ranks need, with as many ranks on each node as it
    has GPUs, or one."""
    gpus: Natural | Literal["auto"] = "auto"
    """GPUs to request on each node. ``auto``: one for every rank, unless ``run.device`` is
    ``"cpu"``, nodes have no GPU, or ``options`` request GPUs. Ranks use the GPUs that were
    requested, and end if they do not find them."""
    cpus: Natural = 0
    """CPU cores to request on each node where nodes are shared. 0: ``run.threads`` for every
    rank."""
    mem: str = ""
    """Memory to request on each node, such as ``"200G"``. Empty: all of it where nodes are not
    shared, else the partition's default."""
    gres: Texts = ()
    """Further generic resources of each node, such as ``"nic:2"``, for the job and for the step
    that starts ranks."""
    spares: Natural = 0
    """Nodes to request in addition to those that ranks need. A spare node replaces a node that
    fails, within the same job."""
    segment: Natural = 0
    """Number of nodes that must lie in one block each (``--segment``), where Slurm knows blocks. 0:
    no such request."""
    time: str = ""
    """Time limit in Slurm's form: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``. Empty: the
    partition's."""
    account: str = ""
    """Account to charge. Empty: the user's default account."""
    reservation: str = ""
    """Reservation to run in."""
    signal_time: Count = 60
    """Seconds before the time limit at which ranks save and end, so that the job's next start goes
    on from there."""
    requeue: bool = True
    """Start again, on other nodes, after a node or a rank has failed or the time limit was
    reached."""
    restarts: Natural = 3
    """Consecutive starts without a new checkpoint before the job is given up."""
    exclusive: bool = True
    """Share nodes with no other job, so that the run has all of their CPU cores and memory."""
    chain: bool = False
    """Go on in a new job (``--dependency``) instead of requeueing the same job: for short time
    limits, and where jobs may not be requeued."""
    options: Texts = ()
    """Further options of sbatch, such as ``"--constraint=h100"``."""
    srun_options: Texts = ()
    """Further options of srun, for the step that starts ranks, such as ``"--mpi=none"``."""
    cpu_bind: str = "none"
    """srun's ``--cpu-bind``. ``none``: every rank binds itself to the processors next to its
    GPU."""
    container: str = ""
    """Container image with Plait installed, in which ranks run."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Container runtime. ``pyxis``: srun's own ``--container-image``, by enroot. ``apptainer``:
    ``apptainer exec``, in the step."""
    container_mounts: Texts = ()
    """Folders that ranks see in the container, as ``"/data"`` or ``"/on/the/node:/inside"``. The
    run's folder is always mounted."""
    container_options: Texts = ()
    """Further options of the container runtime, such as ``"--no-container-mount-home"`` or
    ``"--rocm"``."""
    python: str = "python"
    """Python executable in the container."""
    setup: Texts = ()
    """Shell lines to run before the ranks start, such as ``"module load cuda"``."""

    _lines = field_validator("*")(single_line_validator("slurm"))

    @field_validator("container_mounts")
    @classmethod
    def _mounts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if not MOUNT.fullmatch(one):
                fix = "Write /folder, or /on/the/node:/inside"
                raise JobError(f"has '{one}'", key="slurm.container_mounts", fix=fix)
        return value


NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
LABEL = r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
"""Qualified name of Kubernetes: the key of a label or a taint, or the name of an extended
resource."""
VALUE = r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?"
"""Value of a label or a taint of Kubernetes."""
QUANTITY = r"\+?(\d+(\.\d*)?|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?"
"""Quantity of a resource:
https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""
COUNT = r"\+?\d+([kMGTPE]|[KMGTPE]i|[eE]\+?\d+)?"
"""Count of an extended resource:
https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node/"""
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


def check_format(field: str, text: str, key: str = "") -> None:
    """Raise JobError, naming the key, if Kubernetes would refuse the text ``text`` as value of
    ``field``."""
    form, example = FORMS[field]
    if not form.fullmatch(text):
        raise JobError(f"has '{text}'", key=key or f"kubernetes.{field}", fix=f"Write {example}")


class KubernetesSection(Section):
    """Kubernetes options of ``plait train --on kubernetes``."""

    image: str = ""
    """Container image with Plait installed."""
    namespace: str = ""
    """Namespace to run in, which ``--on kubernetes:NAMESPACE`` sets too. Empty: the namespace of
    the kubeconfig's context."""
    context: str = ""
    """Context of the kubeconfig. Empty: the current context."""
    workload: Literal["auto", "job", "jobset"] = "auto"
    """Kind of Kubernetes object: a JobSet, or an Indexed Job with a headless Service. ``auto``: a
    JobSet if the cluster knows JobSets."""
    nodes: Natural = 0
    """Number of pods, one on each node. 0: as many as the job's ranks need, with ``gpus`` ranks in
    each pod, or one."""
    gpus: Natural = 0
    """GPUs of each pod."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of the cluster's GPUs, such as ``amd.com/gpu``."""
    resources: Texts = ()
    """Further resource limits of each pod, such as ``"cpu=32"``, ``"memory=200Gi"``,
    ``"rdma/hca=8"``."""
    volumes: Texts = ()
    """Volumes of each pod: ``"CLAIM:/data"`` mounts a PersistentVolumeClaim,
    ``"/mnt/shared:/data"`` a folder of the node."""
    env: Texts = ()
    """Environment variables of every rank, such as ``"NCCL_DEBUG=INFO"``."""
    python: str = "python"
    """Python executable in the image."""
    service_account: str = ""
    """Service account of the pods. Empty: the namespace's default."""
    tolerations: Texts = ()
    """Taints that the pods tolerate, such as ``"nvidia.com/gpu:NoSchedule"``."""
    node_labels: Texts = ()
    """Labels that nodes must have, such as ``"node.kubernetes.io/instance-type=p5.48xlarge"``."""
    reservation: str = ""
    """Reservation to run in: nodes with the taint ``plait.dev/reserved=RESERVATION:NoSchedule``."""
    spare_nodes: Texts = ()
    """Names of the nodes that may replace lost nodes of a run with a rank table. Empty: any node
    that fits."""
    priority: str = ""
    """Priority class of the pods."""
    pod: str | None = None
    """YAML file with a pod's spec that is merged into Plait's, for everything that has no key
    here."""
    kueue_queue: str = ""
    """Queue of Kueue to submit to."""
    kueue_topology: str = ""
    """Kueue's request for the topology of the pods: ``"required:LABEL"``, ``"preferred:LABEL"`` or
    ``"unconstrained"``."""
    kueue_stage_topology: str = ""
    """Label of nodes that the pods of one pipeline stage are to share. Needs ``kueue_topology``."""
    host_network: bool = False
    """Pods use the network of their node, with its RDMA devices; ``port`` must be free on the
    node."""
    exclusive: bool = True
    """Share nodes with no other run of Plait."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29400
    """Port on which the first pod listens for the other pods."""
    grace: Count = 120
    """Seconds that ranks have to save a checkpoint when Kubernetes ends their pod."""
    wait: Count = 900
    """Seconds that pods may take to start once the cluster has admitted them, including the time to
    pull the image."""
    max_restarts: Natural = 3
    """Consecutive starts without a new checkpoint before the run is given up. 0: the run is not
    started again. Starts that make progress are not limited."""
    keep: Natural = 3600
    """Seconds that an ended job stays in the cluster for inspection."""

    _lines = field_validator("*")(single_line_validator("kubernetes"))

    @field_validator(*FORMS)
    @classmethod
    def _formed(cls, value: str | tuple[str, ...], info: Any) -> str | tuple[str, ...]:
        for one in (value,) if isinstance(value, str) else value:
            check_format(info.field_name, one)
        return value

    @field_validator("env", "resources", "node_labels")
    @classmethod
    def _once(cls, value: tuple[str, ...], info: Any) -> tuple[str, ...]:
        names = [one.partition("=")[0] for one in value]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise JobError(f"contains {twice} twice", key=f"kubernetes.{info.field_name}", fix="Keep one of the two")
        return value


Weight = Annotated[float, Field(ge=0, le=1)]


class PlaceSection(Section):
    """Placement of ranks for ``plait place``: which nodes may be used, and which score a placement
    minimises. The section is kept with a plan and is not part of the plan's hash."""

    alpha: Weight | None = None
    """Weight of the spread of DP groups; the weight of the spread of PP groups is 1 - alpha. Not
    set: alpha of the most similar job in ``affinity``."""
    affinity: Annotated[str, ExtraValue("auto")] = "auto"
    """Jobs whose speed was measured for several placements. ``auto``: measurements of your own and
    published ones. Otherwise a file of such jobs."""
    distance: Literal["scaled", "plain"] = "scaled"
    """Distance by which the most similar of these jobs is found. ``scaled``: over ratios that are
    scaled to a like size. ``plain``: Arnold's plain distance."""
    by: Literal["spread", "seconds"] = "spread"
    """Score that a placement minimises: the spread over minipods, weighted by ``alpha``, or the
    predicted seconds."""
    unit: Literal["pp", "dp", "both"] = "both"
    """Groups to keep together first. ``both``: try both, and take the better placement."""
    method: Literal["exact", "cpsat", "program"] = "exact"
    """Method of the search. ``exact``: closed forms, in milliseconds, and a solver for small jobs
    that they leave open. ``cpsat``: a solver, for what closed forms cannot express. ``program``:
    the program of Arnold's paper, to compare with."""
    limit: NotNegative = 10.0
    """Seconds that a solver may take."""
    level: str = ""
    """Level of switches that count as minipods, by name or depth. Empty: the switches just below
    the top."""
    spares: Natural | Annotated[str, Field(pattern=r"^\d{1,9}(/(minipod|row))?$"), Example("2/minipod or 1/row")] = 0
    """Nodes to keep free for repairs: ``N``, ``N/minipod``, ``N/row`` (for each PP group)."""
    avoid: str = ""
    """Nodes and switches to leave out, such as ``n3,leaf07,n[10-14]``."""
    gpu: Texts = ()
    """Type of GPU, or ``STAGE=TYPE`` where stages differ. Empty: the best single type."""
    gpus_per_node: Natural = 0
    """GPUs of a node, if neither the topology nor the cluster gives them."""
    forbid: Texts = ()
    """Pairs ``STAGE:MINIPOD``: stages that must not be placed in a minipod."""
    preempt: NotNegative | None = None
    """Price of taking a node from another job, added to the score for each such node. Not set: no
    node of another job is taken."""
    move_price: NotNegative | None = None
    """Least gain in the score for each further node that a repair moves. Not set: a repair moves no
    further node."""
    topology: str = ""
    """Topology of switches on which ``plait plan`` places every strategy to predict its step, and
    which ``plait place`` uses without ``--topology``."""
    rank_table: str = ""
    """Rank table with the positions of ranks on ``topology``, for ``plait plan``, which then places
    nothing itself."""
    network: str = ""
    """File with the measured cost of spreading groups over minipods. Empty: published figures."""
    flows: Natural = 0
    """Connections of a NIC, to predict the cost of hashing them onto uplinks. 0: no such
    prediction."""
    format: str = ""
    """Format of the topology's file. Empty: detected from its content."""
    states: Texts = ()
    """Further files with the states of nodes."""
    tolerate: Texts = ()
    """Taints of Kubernetes nodes on which the job may still be placed."""

    def changed(self, words: Sequence[str]) -> PlaceSection:
        """Return the section with ``place.KEY=VALUE`` applied; other words are ignored. Raises
        JobError, naming the key."""
        own = [word.removeprefix("place.") for word in words if word.startswith("place.")]
        text = {name for name, one in PlaceSection.model_fields.items() if one.annotation is str}
        values, _ = override(self.model_dump(mode="json", exclude_none=True), own, text.__contains__)
        return decode(PlaceSection, resolve_paths({"place": values}, Path())["place"], "place")
