"""Reading topologies: one file for each format, one table of them.

A file's format is found by its content. Further sources tell what nodes are doing: the same formats, or those
that know states alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plait.core.base.errors import JobError, nearest
from plait.core.base.passed_over import PassedOver
from plait.core.base.uncollected import uncollected
from plait.core.topology.switches import Topology
from plait.place.readers import (
    config_map,
    kubernetes,
    plait_form,
    slurm_nodes,
    slurm_topology,
    slurm_yaml,
    topograph,
)
from plait.place.readers.source import Asked, Found, Source
from plait.place.readers.states import applied


@dataclass(frozen=True)
class Format:
    """name: for ``format``. what: for people. looks: whether a source is of it. read: all that it tells."""

    name: str
    what: str
    looks: Callable[[Source], bool]
    read: Callable[[Source, Asked], Found]


FORMATS = (
    Format("configmap", "a ConfigMap with a topology.conf or topology.yaml", config_map.looks, config_map.read),
    Format("plait", "Plait's own TOML or JSON", plait_form.looks, plait_form.read),
    Format("kubernetes", "kubectl get nodes,pods -A -o json", kubernetes.looks, kubernetes.read),
    Format("topograph", "Topograph's graph JSON", topograph.looks, topograph.read),
    Format("topology.conf", "or scontrol show topology", slurm_topology.looks, slurm_topology.read),
    Format("slurm-nodes", "scontrol show nodes, sinfo or squeue", slurm_nodes.looks, slurm_nodes.read),
    Format("topology.yaml", "Slurm's topology.yaml", slurm_yaml.looks, slurm_yaml.read),
)
"""In the order in which they are tried: the surest signs first."""
_KUBERNETES_YAML = re.compile(r"^kind:[ \t]*[\"']?(?:List|Node|Pod|Topology)", re.MULTILINE)


@dataclass
class Remarks:
    """Of a reading. notes: what a person should know of it. over: what was not taken, counted."""

    notes: list[str] = field(default_factory=list[str])
    over: PassedOver = field(default_factory=PassedOver)


@uncollected()
def read_topology(
    path: str,
    *,
    form: str = "",
    name: str = "",
    levels: Sequence[str] = (),
    states: Sequence[str] = (),
    tolerated: Sequence[str] = (),
) -> tuple[Topology, Remarks]:
    """The topology of a file, of standard input (``-``) or of a running manager (``slurm:``,
    ``kubernetes:``), and what is to be said of the reading.

    form: one of ``FORMATS``, found by the content where left out. name: which of several topologies. levels:
    node labels of Kubernetes, the outermost first. states: further files that tell what nodes are doing; what
    is down in one is down. tolerated: keys of taints that keep no job away. Raises JobError naming the file
    and the line, key or node.
    """
    later = Asked(tolerated=frozenset(tolerated))
    asked, remarks = Asked(name=name, levels=tuple(levels), tolerated=later.tolerated), Remarks()
    sources = _sources(path)
    topology: Topology | None = None
    for source in [*sources, *(source for other in states for source in _sources(other))]:
        try:
            first = source is sources[0]
            found = _format(source, form if first else "").read(source, asked if first else later)
            remarks.notes += found.notes
            remarks.over.add(found.over, source.where if len(sources) + len(states) > 1 else "")
            if topology is None:
                topology = found.topology
                if topology is None:
                    raise JobError("states of nodes, and no switches", fix="Give it with states=FILE beside a topology")
            if found.states or found.hardware:
                topology, more = applied(topology, found, source.where, remarks.over)
                remarks.notes += more
        except JobError as error:
            raise error if error.file else error.in_file(source.where) from None
    assert topology is not None
    return topology, remarks


def _sources(path: str) -> list[Source]:
    if path in SOURCES:
        return [Source(command, text) for command, text in answers(path)]
    return [Source.read(path)]


def _format(source: Source, name: str) -> Format:
    known = {form.name: form for form in FORMATS}
    if name:
        if name not in known:
            fix = f"Known: {', '.join(known)}"
            raise JobError(f"no format '{name}'{nearest(name, known)}", key="format", fix=fix)
        return known[name]
    if not source.text.strip():
        raise JobError("empty")
    found = next((form for form in FORMATS if form.looks(source)), None)
    if found is None and _KUBERNETES_YAML.search(source.text[:4096]):
        raise JobError("objects of Kubernetes as YAML", fix="Write them with kubectl ... -o json")
    if found is None:
        what = "; ".join(f"{form.name} ({form.what})" for form in FORMATS)
        raise JobError("no format of a topology is recognised", fix=f"Name it with format=NAME: {what}")
    return found


SECONDS = 60.0
"""That a command may take."""
SOURCES: dict[str, tuple[tuple[str, ...], ...]] = {
    "slurm:": (
        ("scontrol", "show", "topology"),
        ("scontrol", "-o", "show", "nodes"),
        ("squeue", "-h", "-t", "R,CG,CF", "-o", "%i|%e|%N"),
    ),
    "kubernetes:": (("kubectl", "get", "nodes,pods", "--all-namespaces", "-o", "json"),),
}
"""The commands of each: the first tells the wires, the others states."""
SQUEUE_HEADER = "JOBID|END_TIME|NODELIST\n"


def answers(source: str) -> list[tuple[str, str]]:
    """(command, what it printed) for every command of a source. Raises JobError for one that is not there or
    fails."""
    found: list[tuple[str, str]] = []
    for command in SOURCES[source]:
        text = _answer(command)
        found.append((" ".join(command), (SQUEUE_HEADER if command[0] == "squeue" else "") + text))
    return found


def _answer(command: Sequence[str]) -> str:
    shown = " ".join(command)
    if not shutil.which(command[0]):
        raise JobError(f"there is no command {command[0]} here", fix="Give a file with what it prints elsewhere")
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise JobError(f"'{shown}' has not answered within {SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise JobError(f"'{shown}' failed: {said[-1][:200] if said else f'status {done.returncode}'}")
    return done.stdout.decode(errors="replace")
