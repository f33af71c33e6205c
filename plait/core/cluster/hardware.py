"""Cluster: devices, nodes and links that a job is planned for, as data with its origin.

``specs/clusters/*.toml`` has the shipped clusters; a user's own file has the same keys. Every
constant has a value, a source, a date and an uncertainty, so that a prediction can be traced to its
sources.

Links are tiers, from the innermost outward: between the ranks of a node, between the nodes of a
leaf switch, and so on. Ranks fill a cluster in order, so a tier's groups are ranges of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from plait.core.base.codec.data import Count, Natural, Section, decode
from plait.core.base.codec.toml_text import read_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError, nearest
from plait.core.cluster.efficiency import SHARES, Constant, Efficiency, Overhead, overhead_values, resolve_efficiency
from plait.core.model.precision import Precision

LEAST = 1e-30
"""Least value of a constant that is a divisor."""
MEMORY_RATE = 1e10
"""Bytes per second between ranks of one machine; only its ratio to latencies matters, and only for
chunk sizes."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts with equally many ranks, each host behind ``nics`` links, which its ranks share in
    order. ranks_per_host: 0 if all ranks share one host. rate: bytes per second of a link in each
    direction; None if unlimited."""

    ranks_per_host: int = 0
    rate: float | None = None
    nics: int = 1

    @property
    def rank_rate(self) -> float | None:
        """Bytes per second of a rank while all ranks of its host send; None if unlimited."""
        return self.rate and self.rate * min(self.nics, self.ranks_per_host) / self.ranks_per_host

    def of(self, world_size: int) -> tuple[int, ...]:
        """Return the host of every rank: ranks fill one host after the other."""
        each = self.ranks_per_host or world_size
        return tuple(rank // each for rank in range(world_size))


HERE = Hosts()
"""Hosts of a job on this machine."""


class Device(Section):
    """The device on which one rank computes."""

    name: str
    """Name of the device, as its maker calls it."""
    driver_names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names that drivers report (``torch.cuda.get_device_name``), by which a run finds the device's
    peak."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """Kind of the device."""
    memory: Constant
    """Bytes of the device's memory."""
    memory_rate: Constant
    """Bytes per second of the device's memory."""
    host_rate: Constant | None = None
    """Bytes per second between the device's and the host's memory, in each direction, while all of
    a node's devices move as much; needed for offloading."""
    host_memory_rate: Constant | None = None
    """Bytes per second of the host's memory for one rank, while all of a node's ranks use theirs;
    needed for an optimizer that runs on the host."""
    power: Constant | None = None
    """Most watts that the device draws, as its maker sets it (TDP); needed for energy."""
    peak: Mapping[Precision, Constant]
    """FLOP/s of dense matrix products, by precision."""
    tf32: Constant | None = None
    """FLOP/s of dense matrix products of fp32 numbers that are rounded to TF32."""
    measured: bool = False
    """True if ``peak`` is the best rate of a profile and not a datasheet's: no MFU is computed from
    it."""
    stands_for: Mapping[Precision, str] = {}
    """Format that a precision stands for, if the device lacks the precision's own: fp16 for
    ``bf16-mixed``."""
    reads_columns: bool = False
    """True if the device multiplies 8-bit matrices by columns as well as by rows, so that one copy
    serves forward and backward (Blackwell); else a transposed copy is kept in addition (Hopper,
    Ada)."""


class Tier(Section):
    """Links of one kind."""

    name: str
    """Name of the links, such as ``nvlink``, ``leaf``, ``core``."""
    ranks: Natural
    """Number of neighbouring ranks that the tier connects. 0: all."""
    rate: Constant
    """Bytes per second of one rank, in each direction, while all other ranks use their links."""
    mesh: bool = False
    """True if every pair of ranks has a link of its own, with a part of ``rate`` (xGMI), so that a
    group has only the links among its own ranks; else any pair has the whole rate (NVSwitch)."""
    latency: Constant
    """Latency of one message in seconds."""


class Cluster(Section):
    """A whole cluster file."""

    name: str
    """Name of the cluster for users."""
    device: Device
    """Device of every rank."""
    ranks_per_node: Count
    """Ranks of one node."""
    nodes: Natural = 0
    """Number of nodes. 0: as many as a job needs."""
    tiers: Annotated[tuple[Tier, ...], Field(strict=False, min_length=1)]
    """Tiers of links, from the innermost outward."""
    crowd: Annotated[float, Field(ge=1)] = 1.0
    """Ranks that compete for each CPU core, if ranks are processes that share cores. All other
    values hold while all ranks compute at once: while some ranks wait, the others are faster."""
    efficiency: Efficiency
    """Shares of the peaks that are reached: the name of a file of ``specs/efficiency``, or a table
    whose ``like`` names one and whose other keys replace its constants. Left out: ``ampere``, or
    ``cpu`` if the device is a CPU."""
    overhead: Overhead = Overhead()
    """Device memory besides tensors."""

    @staticmethod
    def read(path: Path) -> Cluster:
        """Return the cluster in a file. Raises JobError naming file and key."""
        try:
            return Cluster.from_dict(read_toml(path))
        except JobError as error:
            raise error if error.file else error.in_file(str(path)) from None

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Cluster:
        """Return a checked cluster from plain values. Raises JobError naming the key."""
        device = values.get("device")
        cpu = isinstance(device, dict) and cast("dict[str, Any]", device).get("kind") == "cpu"
        told = values.get("efficiency", "cpu" if cpu else "ampere")
        overhead = overhead_values(values.get("overhead", {}), cpu=cpu)
        cluster = decode(Cluster, {**values, "efficiency": resolve_efficiency(told), "overhead": overhead})
        cluster.check()
        return cluster

    @staticmethod
    def preset(name: str) -> Cluster:
        """Return the cluster in ``specs/clusters/NAME.toml``. Raises JobError for an unknown
        name."""
        folder = specs_folder() / "clusters"
        known = sorted(file.stem for file in folder.glob("*.toml"))
        if name not in known:
            raise JobError(
                f"no cluster '{name}'{nearest(name.lower(), known)}",
                key="cluster.preset",
                fix=f"Use here, or one of {', '.join(known)}",
            )
        return Cluster.read(folder / f"{name}.toml")

    def check(self) -> None:
        """Raise JobError for values that contradict each other, or that are divisors and too
        small."""
        spans = [tier.ranks or inf for tier in self.tiers]
        if spans != sorted(set(spans)):
            told = ", ".join(str(tier.ranks or "all") for tier in self.tiers)
            raise JobError(f"{told}: each tier must connect more ranks than the one inside it", key="tiers.ranks")
        self._check_cuts()
        self._check_meshes()
        self._check_divisors()
        if self.tiers[-1].ranks and self.nodes and self.tiers[-1].ranks < self.nodes * self.ranks_per_node:
            raise JobError("does not connect all nodes: write 0", key=f"tiers.{self.tiers[-1].name}.ranks")

    def _check_cuts(self) -> None:
        """Raise JobError unless tiers have different names and cut neither nodes nor groups of
        inner tiers."""
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise JobError(f"{', '.join(names)}: give each tier a name of its own", key="tiers.name")
        inner, what = 1, ""
        for ranks, name in sorted([(self.ranks_per_node, "a node"), *((one.ranks, one.name) for one in self.tiers)]):
            if ranks and ranks % inner:
                problem = f"the {ranks} ranks of {name} are no multiple of the {inner} of {what}"
                raise JobError(problem, key="tiers.ranks", fix="Give a multiple, or 0 for all ranks")
            inner, what = ranks or inner, name if ranks else what

    def _check_meshes(self) -> None:
        """Raise JobError unless a mesh is the innermost tier, with a known number of at least two
        ranks."""
        for at, tier in enumerate(self.tiers):
            if tier.mesh and (at or tier.ranks < 2):
                problem = "links of every pair are those of the innermost tier, of two ranks or more"
                raise JobError(problem, key=f"tiers.{tier.name}.mesh", fix="Leave it out")

    def _check_divisors(self) -> None:
        device, reached = self.device, self.efficiency
        rates = {f"device.peak.{name}": one for name, one in device.peak.items()}
        rates |= {"device.memory": device.memory, "device.memory_rate": device.memory_rate}
        host = {"device.host_rate": device.host_rate, "device.host_memory_rate": device.host_memory_rate}
        rates |= {key: one for key, one in host.items() if one}
        rates |= {f"tiers.{tier.name}.rate": tier.rate for tier in self.tiers}
        rates |= {f"efficiency.{name}": getattr(reached, name) for name in SHARES}
        rates |= {"efficiency.inside.share": reached.inside.share, "efficiency.across.share": reached.across.share}
        for key, constant in rates.items():
            if constant.value < LEAST:
                raise JobError(
                    f"{constant.value:g} is not allowed", key=f"{key}.value", fix="Allowed: a number above 0"
                )
        for name in ("slow_computation", "slow_communication"):
            value = getattr(reached, name).value
            if value < 1:
                problem = f"{value:g} would make it faster"
                raise JobError(problem, key=f"efficiency.{name}.value", fix="Allowed: a factor of at least 1")
        if self.overhead.reserve.value >= 1:
            problem = f"{self.overhead.reserve.value:g} leaves no memory"
            raise JobError(problem, key="overhead.reserve.value", fix="Allowed: a share below 1")
        if not device.peak:
            raise JobError("is empty", key="device.peak", fix="Give FLOP/s for at least one precision, as bf16-mixed")

    def tier_of(self, span: Any) -> Any:
        """Return the number of the innermost tier that connects ``span`` neighbouring ranks; the
        outermost if none does. span: a number, or an array."""
        return sum(span > (tier.ranks or math.inf) for tier in self.tiers[:-1])

    @property
    def hosts(self) -> Hosts:
        """Hosts of the cluster, for resharding."""
        outer = next((tier for tier in self.tiers if not tier.ranks or tier.ranks > self.ranks_per_node), None)
        return Hosts(ranks_per_host=self.ranks_per_node, rate=outer.rate.value * self.ranks_per_node if outer else None)
