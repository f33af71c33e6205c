"""Profile: what was measured of a machine or a cluster, and where, when and with what.

``plait measure machine`` measures it, or reads it from logs of other tools; ``plait.plan.profiled`` turns it
into a cluster's constants. The file is versioned JSON with a hash over its content. Everything is the median
of several samples, of which the slowest rank's counts.

    collectives   seconds by kind, group of ranks and size                        (InternEvo's VPro)
    modules       one layer's, by site, phase and shape, through the executor that trains     (UPro)
    products, attention, passes     plain operations by shape
    overlaps      how much computation and communication slow each other down                 (OPro)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from plait.core.base.codec.data import Count, Natural, NotNegative, Positive, Section
from plait.core.base.codec.stamped import Stamp, StampedSection
from plait.core.base.errors import JobError
from plait.core.model.precision import Precision

AGAIN = "Measure again with plait measure machine"
MOST_VALUES = 200_000
"""Of a profile: a large one has some thousands, and every value that is wrong costs kilobytes to tell."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
ModuleSite = Literal["embed", "norm", "attn", "mlp", "block", "head"]
ModulePhase = Literal["forward", "input gradient", "weight gradient"]


Seconds = Annotated[float, Field(ge=1e-12, le=1e9)]
Bytes = Annotated[int, Field(ge=1, le=1 << 60)]


class Group(Section):
    """Ranks that communicate with each other, and how they lie."""

    ranks: Annotated[int, Field(ge=2)]
    """How many."""
    per_node: Count
    """Of them on each node; the most, where nodes differ."""
    nodes: Count
    """Nodes that they are on."""
    minipods: Count = 1
    """Minipods (groups of nodes below one leaf) that these nodes are in."""
    stride: Count = 1
    """From one to the next in rank order."""
    at_once: Count = 1
    """Groups like this one that communicated side by side while it was measured."""

    @staticmethod
    def of(ranks: Sequence[int], ranks_per_node: int, *, nodes_per_minipod: int = 0, at_once: int = 1) -> Group:
        """Evenly spaced ``ranks`` of a machine.

        >>> str(Group.of((0, 8), 8))
        '2 ranks, one on each of 2 nodes'
        """
        nodes = [rank // ranks_per_node for rank in ranks]
        minipods = {node // nodes_per_minipod for node in nodes} if nodes_per_minipod else {0}
        return Group(
            ranks=len(ranks),
            per_node=max(nodes.count(node) for node in set(nodes)),
            nodes=len(set(nodes)),
            minipods=len(minipods),
            stride=ranks[1] - ranks[0],
            at_once=at_once,
        )

    def __str__(self) -> str:
        if self.nodes == 1:
            where = "in a node"
        elif self.per_node == 1:
            where = f"one on each of {self.nodes} nodes"
        else:
            where = f"on {self.nodes} nodes"
        return f"{self.ranks} ranks, {where}" + (f" of {self.minipods} minipods" if self.minipods > 1 else "")


class Point(Section):
    """One size."""

    bytes: Bytes
    """Of the whole tensor, gathered, reduced or exchanged, over all ranks of the group; of a send or a
    broadcast, what is sent."""
    seconds: Seconds
    """The median of several, each the slowest rank's."""
    spread: NotNegative = 0.0
    """Half the distance between the quartiles of the samples, relative to the median."""


FULL = 0.9
"""Of the best bandwidth: what counts as all of it."""


class Curve(Section):
    """One collective of one group, by size."""

    kind: CollectiveKind
    group: Group
    points: Annotated[tuple[Point, ...], Field(strict=False, min_length=1)]
    """By growing size."""
    source: str = ""
    """Where it comes from, if it was not measured with the rest."""

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0].seconds

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank moves of the largest message (nccl-tests' "bus bandwidth")."""
        last = self.points[-1]
        return last.bytes * wire_share(self.kind, self.group.ranks) / last.seconds

    @property
    def saturates(self) -> int:
        """Bytes from which on it has 0.9 of the best bandwidth that was measured (Arnold, section 4: 256
        MB of a collective, 2 MB of what is sent to one rank)."""
        best = max(point.bytes / point.seconds for point in self.points)
        return next(point.bytes for point in self.points if point.bytes / point.seconds >= FULL * best)


def wire_share(kind: CollectiveKind, ranks: int) -> float:
    """Of the whole tensor's bytes, what each rank sends if none is sent in vain.

    >>> wire_share("all_reduce", 4), wire_share("all_to_all", 4)
    (1.5, 0.1875)
    """
    others = (ranks - 1) / ranks
    if kind == "all_to_all":  # of a rank's own part of the tensor
        return others / ranks
    return {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others}.get(kind, 1.0)


class Product(Section):
    """A matrix product [m, k] x [k, n], on every rank at once."""

    m: Count
    k: Count
    n: Count
    precision: Precision
    seconds: Seconds
    spread: NotNegative = 0.0

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 2 * self.m * self.k * self.n / self.seconds


class AttentionCore(Section):
    """Causal attention between its projections, as the model calls it, on every rank at once."""

    batch: Count
    heads: Count
    queries: Count
    keys: Count
    head_size: Count
    precision: Precision
    backward: bool
    seconds: Seconds
    spread: NotNegative = 0.0


class MemoryPass(Section):
    """An elementwise operation that reads and writes so many bytes, on every rank at once."""

    bytes: Bytes
    seconds: Seconds
    spread: NotNegative = 0.0


class ModuleTime(Section):
    """One module of one layer, in one phase of one micro-batch, without what it waits for."""

    site: ModuleSite
    phase: ModulePhase
    family: str
    hidden: Count
    heads: Count
    kv_heads: Count
    ffn: Count
    vocab: Count
    batch: Count
    """Sequences."""
    sequence: Count
    """Tokens of each."""
    tp: Count
    precision: Precision
    seconds: NotNegative


PHASES: dict[str, ModulePhase] = {
    "F": "forward",
    "R": "forward",
    "L": "forward",
    "D": "input gradient",
    "C": "input gradient",
    "W": "weight gradient",
}
NORMS: dict[str, ModulePhase] = {"N": "forward", "J": "input gradient"}
"""Ops between two modules: the residual addition and the norm. J has the norm's weight gradient as well."""
SITES: tuple[ModuleSite, ...] = ("embed", "attn", "mlp", "block", "head")


def by_module(compute: Mapping[str, float]) -> dict[tuple[ModuleSite, ModulePhase], float]:
    """Seconds of modules from those of segment ops; of a norm, the mean over those of a layer. compute: by
    ``site.kind``, as in ``SegmentCosts``.

    >>> by_module({"mlp.F": 2.0, "mlp.R": 1.0, "mlp.N": 0.5, "attn.N": 0.7})
    {('mlp', 'forward'): 3.0, ('norm', 'forward'): 0.6}
    """
    found: dict[tuple[ModuleSite, ModulePhase], float] = defaultdict(float)
    norms: dict[ModulePhase, list[float]] = defaultdict(list)
    for key, seconds in compute.items():
        site, _, kind = key.partition(".")
        if kind in PHASES and site in SITES:
            found[site, PHASES[kind]] += seconds
        elif kind in NORMS and site in ("attn", "mlp", "block"):
            norms[NORMS[kind]].append(seconds)
    return {**found, **{("norm", phase): sum(each) / len(each) for phase, each in norms.items()}}


class Overlap(Section):
    """Matrix products beside one kind of collective."""

    kind: CollectiveKind
    group: Group
    bytes: Bytes
    """Of a collective, as a point has them."""
    m: Count
    k: Count
    n: Count
    precision: Precision
    computation: Positive
    """How many times as long products take while the collective is under way."""
    communication: Positive
    """How many times as long the collective takes while products are computed."""


class Machine(Section):
    """On what it was measured."""

    name: str = ""
    """Of the first rank's host, or the lab."""
    device: str = ""
    """A rank's, as its maker calls it; empty where a log does not say."""
    kind: Literal["cuda", "cpu"]
    """What runs on it."""
    memory: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    """Bytes of a rank's device; of a CPU, the rank's share of its host's. 0: not known."""
    cores: Natural = 0
    """Of a node, that its ranks share. 0: not known."""
    ranks: Count
    """Of the whole machine or cluster."""
    ranks_per_node: Count
    backend: str
    """Of collectives: ``gloo``, ``nccl``, ``staged``."""
    crowd: Annotated[float, Field(ge=1)] = 1.0
    """Ranks that want each core at the same time, those of all nodes that are emulated on it; 1 where each
    rank has a device of its own. Computation was measured as it is with all of them at work."""


class Profile(StampedSection):
    """A whole profile."""

    STAMP: ClassVar[Stamp] = Stamp(
        noun="profile", version=1, broken="is no profile, or only a part of one", fix=AGAIN, edited=AGAIN,
        most=MOST_VALUES,
    )  # fmt: skip

    machine: Machine
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    """The day on which it was measured."""
    versions: Mapping[str, str] = {}
    """Of Plait, torch and what carries collectives."""
    collectives: Annotated[tuple[Curve, ...], Field(strict=False)] = ()
    modules: Annotated[tuple[ModuleTime, ...], Field(strict=False)] = ()
    products: Annotated[tuple[Product, ...], Field(strict=False)] = ()
    attention: Annotated[tuple[AttentionCore, ...], Field(strict=False)] = ()
    passes: Annotated[tuple[MemoryPass, ...], Field(strict=False)] = ()
    overlaps: Annotated[tuple[Overlap, ...], Field(strict=False)] = ()

    @property
    def source(self) -> str:
        """As constants that follow from it name it."""
        return f"profile of {self.date}"

    def check(self) -> None:
        """Raise JobError for curves that contradict themselves."""
        for number, curve in enumerate(self.collectives):
            sizes = [point.bytes for point in curve.points]
            if sizes != sorted(set(sizes)):
                raise JobError(f"{sizes} do not grow", key=f"collectives[{number}].points.bytes")
            if not curve.group.nodes <= curve.group.ranks <= curve.group.nodes * curve.group.per_node:
                raise JobError("these ranks are not on these nodes", key=f"collectives[{number}].group")


def joined(profiles: Sequence[Profile]) -> Profile:
    """Several profiles of one cluster as one: where two have measured the same, the later one counts.

    Raises JobError for profiles of a CPU and of GPUs.
    """
    assert profiles
    kinds = {profile.machine.kind for profile in profiles}
    if len(kinds) > 1:
        raise JobError("these are profiles of different devices: cuda and cpu", key="machine.kind")
    named = [profile.machine for profile in profiles if profile.machine.device] or [profiles[0].machine]
    most = max((profile.machine for profile in profiles), key=lambda machine: machine.ranks)
    ranks = {"ranks": most.ranks, "ranks_per_node": max(one.machine.ranks_per_node for one in profiles)}
    curves = {
        (curve.kind, str(curve.group), curve.group.stride): curve for one in profiles for curve in one.collectives
    }
    return Profile(
        machine=max(named, key=lambda machine: machine.memory).model_copy(update=ranks),
        date=max(profile.date for profile in profiles),
        versions={name: version for profile in profiles for name, version in profile.versions.items()},
        collectives=tuple(curves.values()),
        modules=_last(one.modules for one in profiles),
        products=_last(one.products for one in profiles),
        attention=_last(one.attention for one in profiles),
        passes=_last(one.passes for one in profiles),
        overlaps=_last(one.overlaps for one in profiles),
    )


def _last(parts: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The last of them that has anything."""
    return next((part for part in reversed(list(parts)) if part), ())
