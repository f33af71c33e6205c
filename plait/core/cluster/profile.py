"""Profile: measurements of a machine or a cluster, with place, date and versions.

``plait measure machine`` measures it, or reads it from logs of other tools;
``plan.calibrate.profiled`` turns it into a cluster's constants. The file is versioned JSON with a
hash over its content. Every figure is the median of several samples, each of the slowest rank.

    collectives   seconds by kind, process group and size                         (InternEvo's VPro)
    modules       of one layer, by sublayer, phase and shape, run by the training executor    (UPro)
    products, attention, passes     plain operations by shape
    overlaps      slowdown of concurrent computation and communication                        (OPro)
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
"""Most values of a profile. A large profile has some thousands, and the message about each wrong
value takes kilobytes."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
ModuleSite = Literal["embed", "norm", "attn", "mlp", "block", "head"]
ModulePhase = Literal["forward", "input gradient", "weight gradient"]


Seconds = Annotated[float, Field(ge=1e-12, le=1e9)]
Bytes = Annotated[int, Field(ge=1, le=1 << 60)]


class Group(Section):
    """Ranks that communicate with each other, and their arrangement on nodes."""

    ranks: Annotated[int, Field(ge=2)]
    """Number of ranks."""
    per_node: Count
    """Ranks of the group on each node; the most, if nodes differ."""
    nodes: Count
    """Number of nodes with ranks of the group."""
    minipods: Count = 1
    """Number of minipods (groups of nodes below one leaf) with these nodes."""
    stride: Count = 1
    """Distance from one rank of the group to the next, in rank order."""
    at_once: Count = 1
    """Number of groups like this one that communicated concurrently during the measurement."""

    @staticmethod
    def of(ranks: Sequence[int], ranks_per_node: int, *, nodes_per_minipod: int = 0, at_once: int = 1) -> Group:
        """Return the group of evenly spaced ``ranks`` of a machine.

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
    """Measurement of one message size."""

    bytes: Bytes
    """Bytes of the whole tensor, gathered, reduced or exchanged, over all ranks of the group; for a
    send or a broadcast, the bytes sent."""
    seconds: Seconds
    """Median seconds of several samples, each of the slowest rank."""
    spread: NotNegative = 0.0
    """Half the distance between the quartiles of the samples, relative to the median."""


FULL_BANDWIDTH = 0.9
"""Share of the best measured bandwidth above which a message counts as reaching full bandwidth."""


class Curve(Section):
    """Measurements of one collective of one group, by message size."""

    kind: CollectiveKind
    group: Group
    points: Annotated[tuple[Point, ...], Field(strict=False, min_length=1)]
    """Points in order of growing size."""
    source: str = ""
    """Source of the curve, if it was not measured with the rest of the profile."""

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0].seconds

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank moves for the largest message (nccl-tests' "bus
        bandwidth")."""
        last = self.points[-1]
        return last.bytes * wire_share(self.kind, self.group.ranks) / last.seconds

    @property
    def saturation_bytes(self) -> int:
        """Bytes from which on the collective has 0.9 of the best measured bandwidth (Arnold,
        section 4: 256 MB for a collective, 2 MB for a send to one rank)."""
        best = max(point.bytes / point.seconds for point in self.points)
        return next(point.bytes for point in self.points if point.bytes / point.seconds >= FULL_BANDWIDTH * best)


def wire_share(kind: CollectiveKind, ranks: int) -> float:
    """Return the bytes that each rank sends, as a share of the whole tensor's bytes, if no byte is
    sent in vain.

    >>> wire_share("all_reduce", 4), wire_share("all_to_all", 4)
    (1.5, 0.1875)
    """
    others = (ranks - 1) / ranks
    if kind == "all_to_all":  # a share of the rank's own part of the tensor
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
        """FLOP/s of the product."""
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
    """An elementwise operation that reads and writes ``bytes`` bytes, on every rank at once."""

    bytes: Bytes
    seconds: Seconds
    spread: NotNegative = 0.0


class ModuleTime(Section):
    """Seconds of one module of one layer, in one phase of one micro-batch, without waiting."""

    site: ModuleSite
    phase: ModulePhase
    family: str
    hidden: Count
    heads: Count
    kv_heads: Count
    ffn: Count
    vocab: Count
    batch: Count
    """Number of sequences."""
    sequence: Count
    """Tokens of each sequence."""
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
"""Phases of ops between two modules: the residual addition and the norm. J has the norm's weight
gradient as well."""
SITES: tuple[ModuleSite, ...] = ("embed", "attn", "mlp", "block", "head")


def by_module(compute: Mapping[str, float]) -> dict[tuple[ModuleSite, ModulePhase], float]:
    """Return the seconds of modules from the seconds of segment ops; of a norm, the mean over the
    norms of a layer. compute: seconds by ``site.kind``, as in ``SegmentCosts``.

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
    """Matrix products that run concurrently with one kind of collective."""

    kind: CollectiveKind
    group: Group
    bytes: Bytes
    """Bytes of the collective, as in ``Point``."""
    m: Count
    k: Count
    n: Count
    precision: Precision
    computation: Positive
    """Slowdown factor of the products while the collective runs."""
    communication: Positive
    """Slowdown factor of the collective while products are computed."""


class Machine(Section):
    """The machine or cluster that was measured."""

    name: str = ""
    """Name of the first rank's host, or of the lab."""
    device: str = ""
    """Name of a rank's device, as its maker calls it; empty if a log does not have it."""
    kind: Literal["cuda", "cpu"]
    """Kind of a rank's device."""
    memory: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    """Bytes of a rank's device memory; on a CPU, the rank's share of its host's memory. 0:
    unknown."""
    cores: Natural = 0
    """CPU cores of a node, which its ranks share. 0: unknown."""
    ranks: Count
    """Ranks of the whole machine or cluster."""
    ranks_per_node: Count
    backend: str
    """Backend of collectives: ``gloo``, ``nccl``, ``staged``."""
    crowd: Annotated[float, Field(ge=1)] = 1.0
    """Ranks that compete for each core, over all nodes that are emulated on it; 1 if each rank has
    a device of its own. Computation was measured with all of these ranks at work."""


class Profile(StampedSection):
    """A whole profile."""

    STAMP: ClassVar[Stamp] = Stamp(
        noun="profile", version=1, broken="is no profile, or only a part of one", fix=AGAIN, edited=AGAIN,
        most=MOST_VALUES,
    )  # fmt: skip

    machine: Machine
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    """Day of the measurement."""
    versions: Mapping[str, str] = {}
    """Versions of Plait, torch and the library of collectives."""
    collectives: Annotated[tuple[Curve, ...], Field(strict=False)] = ()
    modules: Annotated[tuple[ModuleTime, ...], Field(strict=False)] = ()
    products: Annotated[tuple[Product, ...], Field(strict=False)] = ()
    attention: Annotated[tuple[AttentionCore, ...], Field(strict=False)] = ()
    passes: Annotated[tuple[MemoryPass, ...], Field(strict=False)] = ()
    overlaps: Annotated[tuple[Overlap, ...], Field(strict=False)] = ()

    @property
    def source(self) -> str:
        """Name of the profile in constants that follow from it."""
        return f"profile of {self.date}"

    def check(self) -> None:
        """Raise JobError for curves that contradict themselves."""
        for number, curve in enumerate(self.collectives):
            sizes = [point.bytes for point in curve.points]
            if sizes != sorted(set(sizes)):
                raise JobError(f"{sizes} do not grow: sort the points", key=f"collectives[{number}].points.bytes")
            if not curve.group.nodes <= curve.group.ranks <= curve.group.nodes * curve.group.per_node:
                raise JobError("ranks must lie between nodes and nodes x per_node", key=f"collectives[{number}].group")


def joined(profiles: Sequence[Profile]) -> Profile:
    """Return several profiles of one cluster as one: if two have the same measurement, the later
    profile counts.

    Raises JobError for profiles of a CPU and of GPUs.
    """
    assert profiles
    kinds = {profile.machine.kind for profile in profiles}
    if len(kinds) > 1:
        raise JobError("profiles of cuda and of cpu devices cannot be joined", key="machine.kind")
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
    """Return the last of the parts that is not empty; the empty tuple if all are."""
    return next((part for part in reversed(list(parts)) if part), ())
