"""What hosts of a lab are called and which addresses they have, so that a rank can tell where it is: all of
them share the machine's own name."""

from __future__ import annotations

import re
import socket
import struct
from ipaddress import IPv4Address

from plait.core.base.errors import JobError

IFNAME = "eth0"
"""What every host calls its link."""
FIRST_ADDRESS = IPv4Address("10.77.0.1")
MOST = 1000
"""Hosts of a lab: a Linux bridge takes 1024 ports."""
_SIOCGIFADDR = 0x8915  # netdevice(7)
_NAME = re.compile(r"host(0|[1-9][0-9]{0,3})")


def address(host: int) -> str:
    """The address of a host on the lab's network."""
    return str(FIRST_ADDRESS + host)


def name(host: int) -> str:
    """What a host is called in topologies and rank tables, and its port at the switch."""
    return f"host{host}"


def number(text: str) -> int:
    """The host of a name. Raises JobError for what is none.

    >>> number("host3")
    3
    """
    match = _NAME.fullmatch(text)
    if not match:
        raise JobError(f"{text!r} is no host of a lab", fix="They are called host0, host1, ...")
    return int(match[1])


def here() -> str | None:
    """The name of the host that we are on, by the address of its link; None where there is no such link."""
    import fcntl  # not on every system, and only labs ask

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", IFNAME.encode()))
        except OSError:
            return None
    host = int(IPv4Address(answer[20:24])) - int(FIRST_ADDRESS)
    return name(host) if 0 <= host < MOST else None
