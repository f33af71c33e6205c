"""Topologies, read from files or generated.

Reading: one table of formats; a file's format is detected by its content. Additional sources give
the nodes' states, in the same formats or in formats that have states alone. Plait's own files are
TOML or JSON (``core.topology.form``). A ConfigMap with Slurm's topology, as Slinky mounts it and
Topograph's engine ``slinky`` writes it, has in its ``data`` a topology.yaml, or else a
topology.conf; if both are there, Slurm reads only the first.

Generated clusters: minipods of leaves of nodes, of equal or uneven sizes, some nodes busy, some
down. The load of minipods has a Beta distribution, so some are nearly empty and some nearly full.
Jobs take runs of neighbouring nodes at random positions, so the free nodes are fragmented as on a
real cluster. Equal arguments and seed generate the same cluster everywhere.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from plait.core.base.codec.json_text import is_table
from plait.core.base.codec.toml_text import parse_toml
from plait.core.base.codec.yaml_text import load
from plait.core.base.errors import JobError, nearest
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.process import uncollected
from plait.core.topology.form import from_dict
from plait.core.topology.hostlist import MOST_HOSTS
from plait.core.topology.switches import DOWN, UNKNOWN, Hardware, NodeState, Topology
from plait.core.topology.wiring import SwitchEntry, build
from plait.formats import topograph
from plait.formats.base.source import ReadOptions, ReadResult, Source, apply_result
from plait.formats.kubernetes import nodes as kubernetes
from plait.formats.slurm import nodes as slurm_nodes
from plait.formats.slurm import topology as slurm


@dataclass(frozen=True)
class Format:
    """A file format of topologies. name: as the user chooses it. what: description for users.
    matches: returns True if a source has the format. read: returns all that a source says of
    switches, nodes and states."""

    name: str
    what: str
    matches: Callable[[Source], bool]
    read: Callable[[Source, ReadOptions], ReadResult]


@dataclass
class Remarks:
    """Remarks on a topology that was read. notes: sentences for the user. over: counts of what was
    skipped."""

    notes: list[str] = field(default_factory=list[str])
    over: IgnoredInput = field(default_factory=IgnoredInput)


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
    """Return the topology of a file, of standard input (``-``) or of a running manager (``slurm:``,
    ``kubernetes:``), and remarks on the reading.

    form: one of ``FORMATS``, by default detected by the content. name: selects one of several
    topologies. levels: node labels of Kubernetes, the outermost first. states: further files with
    the nodes' states; a node that is down in one of them is down. tolerated: keys of taints that
    jobs tolerate. Raises JobError naming the file and the line, key or node.
    """
    later = ReadOptions(tolerated=frozenset(tolerated))
    asked = ReadOptions(name=name, levels=tuple(levels), tolerated=later.tolerated, only_source=not states)
    remarks = Remarks()
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
                    raise JobError("has states of nodes, and no switches", fix="Give it with states=FILE to a topology")
            if found.states or found.hardware:
                topology, more = apply_result(topology, found, source.where, remarks.over)
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
        raise JobError("is empty", fix="Name a file that lists switches and nodes")
    found = next((form for form in FORMATS if form.matches(source)), None)
    if found is None and _KUBERNETES_YAML.search(source.text[:4096]):
        raise JobError("has objects of Kubernetes as YAML", fix="Write them with kubectl ... -o json")
    if found is None:
        what = "; ".join(f"{form.name} ({form.what})" for form in FORMATS)
        raise JobError("no format of a topology is recognised", fix=f"Name it with format=NAME: {what}")
    return found


COMMAND_TIMEOUT = 60.0
"""Time limit of a command of a cluster manager, in seconds."""
INSTEAD = "Make it work in this shell, or give a file with what it prints elsewhere"
"""Advice for a command that is missing or fails."""
SOURCES: dict[str, tuple[tuple[str, ...], ...]] = {
    "slurm:": (
        ("scontrol", "show", "topology"),
        ("scontrol", "-o", "show", "nodes"),
        ("squeue", "-h", "-t", "R,CG,CF", "-o", "%i|%e|%N"),
    ),
    "kubernetes:": (("kubectl", "get", "nodes,pods", "--all-namespaces", "-o", "json"),),
}
"""Commands of each source: the first prints the wiring, the others print states."""
SQUEUE_HEADER = "JOBID|END_TIME|NODELIST\n"


def answers(source: str) -> list[tuple[str, str]]:
    """Return (command, its output) for every command of a source such as ``slurm:``. Raises
    JobError if a command is missing, fails, or takes longer than ``COMMAND_TIMEOUT``."""
    found: list[tuple[str, str]] = []
    for command in SOURCES[source]:
        text = _answer(command)
        found.append((" ".join(command), (SQUEUE_HEADER if command[0] == "squeue" else "") + text))
    return found


def _answer(command: Sequence[str]) -> str:
    shown = " ".join(command)
    if not shutil.which(command[0]):
        raise JobError(f"there is no command {command[0]} here", fix=INSTEAD)
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise JobError(f"'{shown}' has not answered within {COMMAND_TIMEOUT:.0f} s", fix=INSTEAD) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise JobError(f"'{shown}' failed: {said[-1][:200] if said else f'status {done.returncode}'}", fix=INSTEAD)
    return done.stdout.decode(errors="replace")


# ---- ConfigMaps, and Plait's own files ----


_CONFIG_MAP = re.compile(r"^kind:[ \t]*[\"']?ConfigMap\b", re.MULTILINE)


def _is_config_map(source: Source) -> bool:
    """True if a file is a ConfigMap."""
    return _only_config_map(source.json) is not None if source.is_json else bool(_CONFIG_MAP.search(source.text))


def _read_config_map(source: Source, options: ReadOptions) -> ReadResult:
    """Return the topology in a ConfigMap. Raises JobError naming the entry."""
    value = _only_config_map(source.json if source.is_json else load(source.text))
    data: Any = (value or {}).get("data")
    if not isinstance(data, dict):
        raise JobError(
            "has no entries", key="data", fix="Give a ConfigMap whose data has a topology.conf or topology.yaml"
        )
    entries = cast("dict[Any, Any]", data)
    texts = {str(key): Source(f"{source.where}: {key}", text) for key, text in entries.items() if isinstance(text, str)}
    for looks, read in ((slurm.is_topology_yaml, slurm.read_yaml), (slurm.is_topology_conf, slurm.read)):
        for key, inner in texts.items():
            if looks(inner.checked()):
                try:
                    found = read(inner, options)
                except JobError as error:
                    at = f"data.{key}" + (f", {error.key}" if error.key else "")
                    raise JobError(error.problem, key=at, fix=error.fix) from None
                over = IgnoredInput()
                others = [other for other in entries if other != key]
                over.note("entries of the ConfigMap beside the topology", str(next(iter(others), "")), len(others))
                over.add(found.over)
                return ReadResult(topology=found.topology, notes=found.notes, over=over)
    raise JobError("no entry is a topology.conf or a topology.yaml", key="data", fix=f"It has {', '.join(texts)[:200]}")


def _only_config_map(value: Any) -> dict[str, Any] | None:
    """Return the value if it is a ConfigMap, or a list of just one; else None."""
    if isinstance(value, dict) and isinstance(items := cast("dict[str, Any]", value).get("items"), list):
        value = cast("list[Any]", items)[0] if len(cast("list[Any]", items)) == 1 else None
    if not isinstance(value, dict) or cast("dict[str, Any]", value).get("kind") != "ConfigMap":
        return None
    return cast("dict[str, Any]", value)


_PLAIT = re.compile(r"^[ \t]*(\[switches\b|version\s*=|levels\s*=)", re.MULTILINE)

LARGEST_TOML = 4 << 20
"""Maximum number of characters of a TOML file, since TOML is slow to read; with host lists ten
thousand nodes take a hundredth of that."""


def _is_plait(source: Source) -> bool:
    """True if a file has Plait's own format."""
    if source.is_json:
        return is_table(source.json) and "switches" in source.json
    return bool(_PLAIT.search(source.text))


def _read_plait(source: Source, options: ReadOptions) -> ReadResult:
    """Return the topology in a file of Plait's own format. Raises JobError naming the line or the
    key."""
    del options
    values: Any = source.json if source.is_json else _toml(source.text)
    if not isinstance(values, dict):
        raise JobError("is not a table", fix="Write one with the key switches")
    return ReadResult(topology=from_dict(cast("dict[str, Any]", values)))


def _toml(text: str) -> dict[str, Any]:
    if len(text) > LARGEST_TOML:
        raise JobError(f"more than {LARGEST_TOML >> 20} MiB of TOML", fix="Write JSON, or names as host lists")
    try:
        return parse_toml(text.replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        raise JobError("nested too deeply" if deep else f"not valid TOML: {str(error)[:200]}") from None


FORMATS = (
    Format("configmap", "a ConfigMap with a topology.conf or topology.yaml", _is_config_map, _read_config_map),
    Format("plait", "Plait's own TOML or JSON", _is_plait, _read_plait),
    Format("kubernetes", "kubectl get nodes,pods -A -o json", kubernetes.is_node_list, kubernetes.read),
    Format("topograph", "Topograph's graph JSON", topograph.is_graph, topograph.read),
    Format("topology.conf", "or scontrol show topology", slurm.is_topology_conf, slurm.read),
    Format("slurm-nodes", "scontrol show nodes, sinfo or squeue", slurm_nodes.is_node_output, slurm_nodes.read),
    Format("topology.yaml", "Slurm's topology.yaml", slurm.is_topology_yaml, slurm.read_yaml),
)
"""All formats, in the order in which they are tried: the ones with the clearest signs first."""
_KUBERNETES_YAML = re.compile(r"^kind:[ \t]*[\"']?(?:List|Node|Pod|Topology)", re.MULTILINE)


CONCENTRATION = 4.0
"""Concentration of the Beta distribution: the larger, the more alike minipods are. 4 at a mean of
one half spreads them over nearly all of 0 to 1, with a standard deviation of 0.22."""
JOB_NODES = (1, 1, 2, 4, 8, 16)
"""Sizes of generated jobs in nodes, drawn uniformly."""


@dataclass(frozen=True, kw_only=True)
class MinipodSizes:
    """Sizes of a generated cluster. nodes: of all minipods. leaf_nodes: of a full leaf. uneven:
    maximum deviation of a minipod's size from the mean, relative to it."""

    minipods: int
    nodes: int
    leaf_nodes: int = 16
    uneven: float = 0.0

    def __post_init__(self) -> None:
        """Raise JobError naming an invalid value."""
        if not 1 <= self.minipods <= self.nodes <= MOST_HOSTS:
            problem = f"{self.nodes} nodes in {self.minipods} minipods"
            raise JobError(problem, key="nodes", fix=f"Use at least one a minipod, at most {MOST_HOSTS} in all")
        if self.leaf_nodes < 1:
            raise JobError(f"{self.leaf_nodes} nodes on a leaf switch", key="nodes-per-leaf", fix="Use at least 1")
        _check_part("uneven", self.uneven)


def generate(
    sizes: MinipodSizes,
    *,
    busy: float = 0.0,
    down: float = 0.0,
    seed: int = 0,
    hardware: Hardware = UNKNOWN,
    uplinks: int | None = None,
) -> Topology:
    """Return a generated cluster of these sizes. busy, down: fractions of all nodes that jobs hold,
    and that are down. uplinks: of every leaf. Raises JobError for a fraction outside [0, 1).

    >>> tree = generate(MinipodSizes(minipods=3, nodes=18))
    >>> [len(pod) for pod in tree.minipods().values()], tree.switches[2].name, tree.nodes[0].name
    ([6, 6, 6], 'leaf1', 'n01')
    """
    _check_part("busy", busy)
    _check_part("down", down)
    chance = random.Random(seed)
    leaves = [_split(size, sizes.leaf_nodes) for size in _sizes(sizes, chance)]
    names = iter(_numbered("n", sizes.nodes))
    leaf_names = iter(_numbered("leaf", sum(map(len, leaves))))
    pods = _numbered("mp", sizes.minipods)
    wirings = [SwitchEntry("core", pods)]
    members: list[list[str]] = []
    for pod, inside in zip(pods, leaves, strict=True):
        own = [
            SwitchEntry(next(leaf_names), (), [next(names) for _ in range(size)], uplinks=uplinks) for size in inside
        ]
        wirings += [SwitchEntry(pod, [leaf.name for leaf in own]), *own]
        members.append([node for leaf in own for node in leaf.nodes])
    states = _states(members, busy, down, chance)
    every = {name: hardware for pod in members for name in pod} if hardware != UNKNOWN else {}
    return build(wirings, hardware=every, states=states, name=f"{sizes.minipods} minipods, seed {seed}")


def _check_part(key: str, part: float) -> None:
    if not 0 <= part < 1:
        raise JobError(f"{part:g} is not allowed", key=key, fix="Use a number from 0 to below 1")


def _numbered(word: str, count: int) -> list[str]:
    digits = len(str(count))
    return [f"{word}{number:0{digits}}" for number in range(1, count + 1)]


def _sizes(of: MinipodSizes, chance: random.Random) -> list[int]:
    """Return the minipods' sizes, which sum to ``nodes`` and are each at least 1."""
    minipods, nodes = of.minipods, of.nodes
    shares = [1 + of.uneven * (2 * chance.random() - 1) for _ in range(minipods)]
    whole, sizes, given = sum(shares), list[int](), 0.0
    for place, share in enumerate(shares):
        given += share
        upto = round(given / whole * nodes)
        sizes.append(min(max(upto - sum(sizes), 1), nodes - sum(sizes) - (minipods - place - 1)))
    return sizes


def _split(size: int, most: int) -> list[int]:
    """Return the sizes of a minipod's leaves: as few leaves as possible, filled as evenly as
    possible."""
    count = -(-size // most)
    return [size // count + (place < size % count) for place in range(count)]


def _states(pods: Sequence[Sequence[str]], busy: float, down: float, chance: random.Random) -> Mapping[str, NodeState]:
    names = [name for pod in pods for name in pod]
    states: dict[str, NodeState] = dict.fromkeys(chance.sample(names, round(down * len(names))), DOWN)
    up = [sum(name not in states for name in pod) for pod in pods]
    job = 0
    for pod, left in zip(pods, _occupied(up, min(round(busy * len(names)), sum(up)), chance), strict=True):
        while left:
            job += 1
            state = NodeState(status="busy", holder=f"job {job}")
            start, size = chance.randrange(len(pod)), min(chance.choice(JOB_NODES), left)
            left -= size
            for step in range(len(pod)):
                name = pod[(start + step) % len(pod)]
                if size and name not in states:
                    states[name] = state
                    size -= 1
    return states


def _occupied(sizes: Sequence[int], wanted: int, chance: random.Random) -> list[int]:
    """Return the number of busy nodes of every minipod, ``wanted`` in total: fractions from a Beta
    distribution, scaled by one factor."""
    mean = wanted / sum(sizes) if sum(sizes) else 0.0
    if not 0 < mean < 1:
        return [round(mean * size) for size in sizes]
    parts = [chance.betavariate(mean * CONCENTRATION, (1 - mean) * CONCENTRATION) for _ in sizes]
    low, high = 0.0, 1e9

    def at(scale: float) -> list[float]:
        return [min(part * scale, 1.0) * size for part, size in zip(parts, sizes, strict=True)]

    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < wanted else (low, middle)
    counts = [int(count) for count in at(low)]
    for place in chance.sample(range(len(sizes)), len(sizes)):  # distribute the rounding's remainder
        more = min(sizes[place] - counts[place], wanted - sum(counts))
        counts[place] += max(more, 0)
    return counts
