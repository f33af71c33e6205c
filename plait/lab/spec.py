"""What a lab looks like: how many hosts, ranks on each, and the link between a host and the switch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.core.errors import JobError

if TYPE_CHECKING:
    from plait.core.cluster import Hosts

UNLIMITED = "unlimited"
MAX_HOSTS = 1000  # a Linux bridge takes 1024 ports
MIN_RATE, MAX_RATE = 10**6, 8 * 10**11  # bits per second
NO_LIMIT = 10**12  # bits per second, far more than one machine moves: how a link without a limit is told to the kernel
MIN_MTU, MAX_MTU = 576, 65535
SEGMENT, MAX_SEGMENT = (
    65536,
    524280,
)  # bytes; what any kernel's TCP hands a link at once, and the most that Linux allows
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-z]*)")
_SPEC = re.compile(r"([0-9]{1,9})x([0-9]{1,9})(?:@([^,]*))?(?:,mtu=([0-9]{1,9}))?(?:,segment=([0-9]{1,9}))?")


def parse_rate(text: str) -> int | None:
    """Bits per second of a rate as tc writes it, or None for ``unlimited``.

    >>> parse_rate("2.5gbit")
    2500000000
    """
    rate = None if text.strip().lower() == UNLIMITED else to_bits(text)
    if rate is not None and not MIN_RATE <= rate <= MAX_RATE:
        raise JobError(
            f"the link rate {text!r} is out of range", fix="Choose a rate from 1mbit to 800gbit, or unlimited"
        )
    return rate


def to_bits(text: str) -> int:
    """Bits per second of any rate tc may write."""
    match = _RATE.fullmatch(text.strip().lower())
    if not match or match[2] not in _UNITS:
        raise JobError(f"{text!r} is not a link rate", fix="Write it like 400mbit or 2.5gbit, or unlimited")
    return round(float(match[1]) * _UNITS[match[2]])


def format_rate(rate: int | None) -> str:
    """The shortest tc form of a rate: the inverse of :func:`parse_rate`.

    >>> format_rate(2_500_000_000)
    '2.5gbit'
    """
    if rate is None:
        return UNLIMITED
    for unit in ("gbit", "mbit", "kbit"):
        for digits in range(4):
            number = f"{rate / _UNITS[unit]:.{digits}f}"
            if (
                float(number)
                and round(float(number) * _UNITS[unit]) == rate
                and (rate >= _UNITS[unit] or unit == "kbit")
            ):
                return f"{number}{unit}"
    return f"{rate}bit"


@dataclass(frozen=True)
class LabSpec:
    """An emulated cluster: ``hosts`` machines of ``ranks_per_host`` ranks, each behind one link of rate
    ``nic``.

    segment: the most bytes that TCP hands the link at once (Linux 6.3 and newer; elsewhere 64 KiB whatever it
    says). The larger, the less CPU time a byte costs, but a message no larger than a segment passes an idle
    link at no cost: raise it for messages of megabytes only.

    >>> LabSpec.parse("2x4@10gbit").world_size
    8
    """

    hosts: int = 2
    ranks_per_host: int = 1
    nic: str = "1gbit"
    mtu: int = 9000
    segment: int = SEGMENT

    def __post_init__(self) -> None:
        for key, value, limit in (("hosts", self.hosts, MAX_HOSTS), ("ranks_per_host", self.ranks_per_host, 1024)):
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
        parse_rate(self.nic)

    @classmethod
    def parse(cls, text: str) -> LabSpec:
        """Read ``HOSTSxRANKS[@NIC][,mtu=MTU][,segment=BYTES]``, such as ``2x1@1gbit`` or
        ``4x2@400mbit,mtu=1500``."""
        match = _SPEC.fullmatch(text.strip().lower())
        if not match:
            raise JobError(
                f"{text!r} does not describe a lab",
                fix="Write HOSTSxRANKS@RATE, such as 2x1@1gbit or 4x2@400mbit,mtu=1500",
            )
        hosts, ranks, nic, mtu, segment = match.groups()
        return cls(
            int(hosts), int(ranks), cls.nic if nic is None else nic, int(mtu or cls.mtu), int(segment or cls.segment)
        )

    def __str__(self) -> str:
        segment = "" if self.segment == SEGMENT else f",segment={self.segment}"
        return f"{self.hosts}x{self.ranks_per_host}@{self.nic},mtu={self.mtu}{segment}"

    @property
    def world_size(self) -> int:
        """Ranks on all hosts together."""
        return self.hosts * self.ranks_per_host

    @property
    def rate(self) -> int | None:
        """Bits per second of a host's link in each direction; None when unlimited."""
        return parse_rate(self.nic)

    @property
    def as_hosts(self) -> Hosts:
        """The hosts and their links, as plans see them.

        >>> LabSpec.parse("2x4@10gbit").as_hosts
        Hosts(ranks_per_host=4, rate=1250000000.0)
        """
        from plait.core.cluster import Hosts  # slow to load, and most of the lab needs none

        return Hosts(ranks_per_host=self.ranks_per_host, rate=self.rate / 8 if self.rate else None)

    def host_of(self, rank: int) -> int:
        """The host a rank lives on: ranks fill one host after the other."""
        if not 0 <= rank < self.world_size:
            raise JobError(f"rank {rank} does not exist", fix=f"This lab has ranks 0 to {self.world_size - 1}")
        return rank // self.ranks_per_host
