"""Cluster: devices, nodes and links that a job is planned for, as data with its origin.

``specs/clusters/*.toml`` has those that ship; a user's own file has the same keys. Every constant says its
value, who says so, when, and how far it may be off, so that a prediction can be traced to what it rests on.

Links are tiers, from the innermost outward: the ranks of a node, the nodes of a leaf switch, and so on. Ranks
fill a cluster in order, so a tier's groups are ranges of ranks.
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
from plait.core.cluster.efficiency import SHARES, Constant, Efficiency, resolve_efficiency
from plait.core.cluster.overhead import Overhead, overhead_values
from plait.core.model.precision import Precision

LEAST = 1e-30
"""Of what is divided by."""
MEMORY_RATE = 1e10
"""Bytes per second between ranks of one machine; only its ratio to latencies matters, and only to chunk
sizes."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of equally many ranks, each host behind ``nics`` links, which its ranks share out in order.
    ranks_per_host: 0 if all ranks share one host. rate: bytes per second of a link, each way; None if nothing
    limits it."""

    ranks_per_host: int = 0
    rate: float | None = None
    nics: int = 1

    @property
    def rank_rate(self) -> float | None:
        """Bytes per second of a rank while all of its host send; None if nothing limits them."""
        return self.rate and self.rate * min(self.nics, self.ranks_per_host) / self.ranks_per_host

    def of(self, world_size: int) -> tuple[int, ...]:
        """The host of every rank: ranks fill one host after the other."""
        each = self.ranks_per_host or world_size
        return tuple(rank // each for rank in range(world_size))


HERE = Hosts()
"""This machine."""


class Device(Section):
    """What one rank computes on."""

    name: str
    """As its maker calls it."""
    driver_names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """As drivers call it (``torch.cuda.get_device_name``), by which a run finds its peak."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """What runs on it."""
    memory: Constant
    """Bytes."""
    memory_rate: Constant
    """Bytes per second of its memory."""
    host_rate: Constant | None = None
    """Bytes per second between its memory and the host's, each way, while all of a node's devices move as
    much; what is offloaded needs it."""
    host_memory_rate: Constant | None = None
    """Bytes per second of the host's memory that are a rank's, while all of a node's ranks use theirs; an
    optimizer that runs on the host needs it."""
    power: Constant | None = None
    """Watts that its maker has it draw at most (TDP); energy needs it."""
    peak: Mapping[Precision, Constant]
    """FLOP/s of dense matrix products, by precision."""
    tf32: Constant | None = None
    """The same of fp32 numbers that are rounded to TF32."""
    measured: bool = False
    """Whether ``peak`` is the best that a profile has, and no datasheet's: no MFU is taken of it."""
    stands_for: Mapping[Precision, str] = {}
    """The format that a precision stands for, where the device lacks its own: fp16 for ``bf16-mixed``."""
    reads_columns: bool = False
    """Whether it multiplies 8-bit matrices by columns as by rows, so that one copy serves forward and
    backward (Blackwell); else a transposed copy stands beside it (Hopper, Ada)."""


class Tier(Section):
    """Links of one kind."""

    name: str
    """As in ``nvlink``, ``leaf``, ``core``."""
    ranks: Natural
    """How many neighbouring ranks it connects. 0: all."""
    rate: Constant
    """Bytes per second, each way, that a rank has of it while all others use theirs."""
    mesh: bool = False
    """Whether every pair of its ranks has a link of its own, a part of ``rate`` (xGMI), so that a group of
    some of them has only the links among these; else any pair has the whole rate (NVSwitch)."""
    latency: Constant
    """Seconds of one message."""


class Cluster(Section):
    """A whole cluster file."""

    name: str
    """What users call it."""
    device: Device
    """What every rank computes on."""
    ranks_per_node: Count
    """Ranks of one machine."""
    nodes: Natural = 0
    """Machines there are. 0: as many as a job asks for."""
    tiers: Annotated[tuple[Tier, ...], Field(strict=False, min_length=1)]
    """From the innermost outward."""
    crowd: Annotated[float, Field(ge=1)] = 1.0
    """Ranks that want each processor at the same time, where ranks are processes that share them; all else is
    said of ranks that all compute at once. While some wait, the others are faster."""
    efficiency: Efficiency
    """What of the peaks is reached: the name of a file of ``specs/efficiency``, or a table whose ``like``
    names one and whose other keys replace constants of it. Left out: ``ampere``, or ``cpu`` where the device
    is one."""
    overhead: Overhead = Overhead()
    """What a device's memory holds besides tensors."""

    @staticmethod
    def read(path: Path) -> Cluster:
        """Raises JobError naming file and key."""
        try:
            return Cluster.from_dict(read_toml(path))
        except JobError as error:
            raise error if error.file else error.in_file(str(path)) from None

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Cluster:
        """A checked cluster from plain values."""
        device = values.get("device")
        cpu = isinstance(device, dict) and cast("dict[str, Any]", device).get("kind") == "cpu"
        told = values.get("efficiency", "cpu" if cpu else "ampere")
        overhead = overhead_values(values.get("overhead", {}), cpu=cpu)
        cluster = decode(Cluster, {**values, "efficiency": resolve_efficiency(told), "overhead": overhead})
        cluster.check()
        return cluster

    @staticmethod
    def preset(name: str) -> Cluster:
        """The one in ``specs/clusters/NAME.toml``."""
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
        """Raise JobError for values that are fine alone and wrong together, or that nothing can be divided
        by."""
        spans = [tier.ranks or inf for tier in self.tiers]
        if spans != sorted(set(spans)):
            told = ", ".join(str(tier.ranks or "all") for tier in self.tiers)
            raise JobError(f"{told}: they do not grow from tier to tier", key="tiers.ranks")
        self._check_cuts()
        self._check_meshes()
        self._check_divisors()
        if self.tiers[-1].ranks and self.nodes and self.tiers[-1].ranks < self.nodes * self.ranks_per_node:
            raise JobError("does not connect all nodes", key=f"tiers.{self.tiers[-1].name}.ranks")

    def _check_cuts(self) -> None:
        """Tiers have names of their own and cut no node, and no group of a tier within them."""
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise JobError(f"{', '.join(names)}: two have the same name", key="tiers.name")
        inner, what = 1, ""
        for ranks, name in sorted([(self.ranks_per_node, "a node"), *((one.ranks, one.name) for one in self.tiers)]):
            if ranks and ranks % inner:
                problem = f"the {ranks} ranks of {name} are no multiple of the {inner} of {what}"
                raise JobError(problem, key="tiers.ranks", fix="Give a multiple, or 0 for all ranks")
            inner, what = ranks or inner, name if ranks else what

    def _check_meshes(self) -> None:
        """Only the innermost tier can be a mesh, of a known number of ranks above one."""
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
        """The innermost tier that connects ``span`` neighbouring ranks; the outermost if none does. span: a
        number, or a column."""
        return sum(span > (tier.ranks or math.inf) for tier in self.tiers[:-1])

    @property
    def hosts(self) -> Hosts:
        """As resharding sees them."""
        outer = next((tier for tier in self.tiers if not tier.ranks or tier.ranks > self.ranks_per_node), None)
        return Hosts(ranks_per_host=self.ranks_per_node, rate=outer.rate.value * self.ranks_per_node if outer else None)
