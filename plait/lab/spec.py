"""The description of a lab: the number of hosts, ranks per host, and the links of hosts and
switches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.core.base import lab_hosts
from plait.core.base.errors import JobError
from plait.core.base.lab_hosts import MOST_NICS, UNLIMITED, parse_rate

if TYPE_CHECKING:
    from plait.core.cluster.hardware import Hosts
    from plait.core.topology.switches import Topology

MAX_HOSTS = lab_hosts.MOST
NO_LIMIT = 10**12  # bits per second, far more than one machine moves: the kernel's rate for an unlimited link
MIN_MTU, MAX_MTU = 576, 65535
SEGMENT, MAX_SEGMENT = (
    65536,
    524280,
)  # bytes; the TCP segment that every kernel can hand a link at once, and Linux's maximum
_SPEC = re.compile(
    r"([0-9]{1,9})x([0-9]{1,9})(?:@([^,]*))?(?:,([0-9]{1,9})pods(?:@([^,]*))?)?"
    r"(?:,nics=([0-9]{1,9}))?(?:,mtu=([0-9]{1,9}))?(?:,segment=([0-9]{1,9}))?"
)


@dataclass(frozen=True)
class LabSpec:
    """An emulated cluster: ``hosts`` machines of ``ranks_per_host`` ranks, each behind ``nics``
    links of rate ``nic``.

    nics: links of each host, shared out among its ranks in order. Links of equal number meet at
    their own switches and core (a rail). A rank sends to another rank over the link with the
    receiver's number.

    pods: minipods; hosts are divided evenly and in order, with one switch per minipod. core: rate
    of the link between each switch and the core, with several minipods.

    segment: the most bytes that TCP hands the link at once (Linux 6.3 and newer; always 64 KiB on
    older kernels). A larger segment costs less CPU time per byte, but a message no larger than a
    segment crosses an idle link without delay. Raise it for messages of megabytes only.

    >>> LabSpec.parse("2x4@10gbit").world_size
    8
    """

    hosts: int = 2
    ranks_per_host: int = 1
    nic: str = "1gbit"
    mtu: int = 9000
    segment: int = SEGMENT
    pods: int = 1
    core: str = UNLIMITED
    nics: int = 1

    def __post_init__(self) -> None:
        for key, value, limit in (
            ("hosts", self.hosts, MAX_HOSTS),
            ("ranks_per_host", self.ranks_per_host, 1024),
            ("nics", self.nics, MOST_NICS),
        ):
            if not 1 <= value <= limit:
                raise JobError(f"a lab cannot have {key} = {value}", fix=f"Choose {key} from 1 to {limit}")
        if not MIN_MTU <= self.mtu <= MAX_MTU:
            raise JobError(
                f"a link cannot have mtu = {self.mtu}", fix=f"Choose one from {MIN_MTU} to {MAX_MTU}, such as 9000"
            )
        if not SEGMENT <= self.segment <= MAX_SEGMENT:
            raise JobError(
                f"a link cannot have segment = {self.segment}", fix=f"Choose one from {SEGMENT} to {MAX_SEGMENT} bytes"
            )
        if self.pods < 1 or self.hosts % self.pods:
            raise JobError(
                f"{self.hosts} hosts cannot lie evenly in pods = {self.pods} minipods", fix="Choose a divisor of hosts"
            )
        if self.pods == 1 and self.core != UNLIMITED:
            raise JobError("one minipod has no link to a core", fix="Write 2pods@RATE or more, or leave it out")
        parse_rate(self.nic)
        parse_rate(self.core)

    @classmethod
    def parse(cls, text: str) -> LabSpec:
        """Parse ``HOSTSxRANKS[@NIC][,PODSpods[@CORE]][,nics=NICS][,mtu=MTU][,segment=BYTES]``, such
        as ``2x1@1gbit``, ``4x2@400mbit,nics=2`` or ``4x1@1gbit,2pods@300mbit``. Raises JobError if
        it does not parse."""
        match = _SPEC.fullmatch(text.strip().lower())
        if not match:
            raise JobError(
                f"{text!r} does not describe a lab",
                fix="Write HOSTSxRANKS@RATE, such as 2x1@1gbit, 4x2@400mbit,nics=2,mtu=1500 or 4x1@1gbit,2pods@300mbit",
            )
        hosts, ranks, nic, pods, core, nics, mtu, segment = match.groups()
        return cls(
            int(hosts), int(ranks), cls.nic if nic is None else nic, int(mtu or cls.mtu), int(segment or cls.segment),
            cls.pods if pods is None else int(pods), cls.core if core is None else core,
            cls.nics if nics is None else int(nics),
        )  # fmt: skip

    def __str__(self) -> str:
        segment = "" if self.segment == SEGMENT else f",segment={self.segment}"
        pods = "" if self.pods == 1 else f",{self.pods}pods@{self.core}"
        nics = "" if self.nics == 1 else f",nics={self.nics}"
        return f"{self.hosts}x{self.ranks_per_host}@{self.nic}{pods}{nics},mtu={self.mtu}{segment}"

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts together."""
        return self.hosts * self.ranks_per_host

    @property
    def rate(self) -> int | None:
        """The rate of each of a host's links in each direction, bits per second; None if
        unlimited."""
        return parse_rate(self.nic)

    @property
    def core_rate(self) -> int | None:
        """The rate of a minipod's link to the core in each direction, bits per second; None if
        unlimited."""
        return parse_rate(self.core)

    @property
    def as_topology(self) -> Topology:
        """The lab's switches and hosts as a ``Topology``, for placement.

        >>> LabSpec.parse("4x1@1gbit,2pods@300mbit").as_topology.free()
        {'pod0': {'pod0': ('host0', 'host1')}, 'pod1': {'pod1': ('host2', 'host3')}}
        """
        from plait.core.topology.switches import Hardware
        from plait.core.topology.wiring import SwitchEntry, build

        names = [lab_hosts.name(host) for host in range(self.hosts)]
        hardware = {name: Hardware(gpus=self.ranks_per_host, nics=self.nics, rails=self.nics) for name in names}
        each = self.hosts // self.pods
        pods = [SwitchEntry(f"pod{pod}", nodes=names[pod * each : (pod + 1) * each]) for pod in range(self.pods)]
        top = [SwitchEntry("core", [pod.name for pod in pods])] if self.pods > 1 else []
        return build([*top, *pods], hardware=hardware, name=f"lab {self}")

    def pod_of(self, host: int) -> int:
        """Return the minipod of a host."""
        return host // (self.hosts // self.pods)

    @property
    def as_hosts(self) -> Hosts:
        """The lab's hosts and links as ``Hosts``, for plans.

        >>> LabSpec.parse("2x4@10gbit").as_hosts
        Hosts(ranks_per_host=4, rate=1250000000.0, nics=1)
        """
        from plait.core.cluster.hardware import Hosts  # slow to import, and most of the lab does not need it

        return Hosts(ranks_per_host=self.ranks_per_host, rate=self.rate / 8 if self.rate else None, nics=self.nics)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank: ranks fill one host after the other. Raises JobError if the
        rank does not exist."""
        if not 0 <= rank < self.world_size:
            raise JobError(f"rank {rank} does not exist", fix=f"This lab has ranks 0 to {self.world_size - 1}")
        return rank // self.ranks_per_host
