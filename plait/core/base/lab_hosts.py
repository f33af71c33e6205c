"""Host names, addresses and link rates of a lab (an emulated cluster). A rank finds its host by the
address of its link, because all hosts of a lab share the machine's host name. Imports only the
standard library, as a lab must."""

from __future__ import annotations

import re
import socket
import struct
from ipaddress import IPv4Address

from plait.core.base.errors import JobError

IFNAME = "eth0"
"""The first network interface of every host; further interfaces are eth1, eth2, ..."""
FIRST_ADDRESS = IPv4Address("10.77.0.1")
MOST = 1000
"""The most hosts of a lab: a Linux bridge takes 1024 ports."""
MOST_NICS = 16
"""The most links of a host. Each link has its own subnet; the first contains :data:`FIRST_ADDRESS`,
the next follow it."""
_SIOCGIFADDR = 0x8915  # netdevice(7)
_NAME = re.compile(r"host(0|[1-9][0-9]{0,3})")


def interface(nic: int) -> str:
    """Return the name of a lab host's network interface for link ``nic``, such as ``eth0``."""
    return f"eth{nic}"


def nic_of(local_rank: int, ranks: int, nics: int) -> int:
    """Return the link that local rank ``local_rank`` uses, if ``ranks`` local ranks share ``nics``
    links in order.

    >>> [nic_of(rank, 4, 2) for rank in range(4)]
    [0, 0, 1, 1]
    """
    return local_rank * min(nics, ranks) // ranks


def address(host: int, nic: int = 0) -> str:
    """Return the IPv4 address of a host's link."""
    return str(FIRST_ADDRESS + (nic << 16) + host)


def name(host: int) -> str:
    """Return a host's name in topologies and rank tables, which is also the name of its switch
    port."""
    return f"host{host}"


def number(text: str) -> int:
    """Return the number of the host called ``text``. Raises JobError if ``text`` is no host name.

    >>> number("host3")
    3
    """
    match = _NAME.fullmatch(text)
    if not match:
        raise JobError(f"{text!r} is no host of a lab", fix="They are called host0, host1, ...")
    return int(match[1])


def here() -> str | None:
    """Return the name of the lab host that this process runs on, by the address of its first link;
    None if there is no such link."""
    import fcntl  # not on every system; only labs need it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", IFNAME.encode()))
        except OSError:
            return None
    host = int(IPv4Address(answer[20:24])) - int(FIRST_ADDRESS)
    return name(host) if 0 <= host < MOST else None


# ---- rates of links ----

UNLIMITED = "unlimited"
MIN_RATE, MAX_RATE = 10**6, 8 * 10**11
"""The smallest and the largest rate of a link, in bits per second."""
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-z]*)")


def parse_rate(text: str) -> int | None:
    """Return the bits per second of a rate in tc's notation, None for ``unlimited``. Raises
    JobError if the text is no rate or out of range.

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
    """Return the bits per second of a rate in tc's notation, however large. Raises JobError if the
    text is no rate."""
    match = _RATE.fullmatch(text.strip().lower())
    if not match or match[2] not in _UNITS:
        raise JobError(f"{text!r} is not a link rate", fix="Write it like 400mbit or 2.5gbit, or unlimited")
    return round(float(match[1]) * _UNITS[match[2]])


def format_rate(rate: int | None) -> str:
    """Return the shortest tc notation of a rate: the inverse of :func:`parse_rate`.

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
