"""Lets TCP hand a link more than 64 KiB at once ("BIG TCP", Linux 6.3): run as ``python -I -S segment.py
BYTES DEVICE...`` in a namespace.

rtnetlink by hand: iproute2 has had words for these attributes since 6.3 only, and distributions still ship
older ones. A kernel that does not know them ignores them. Standard library only: this file is run as a
script, in a bare interpreter that starts in milliseconds.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

RTM_NEWLINK, NLM_F_REQUEST, NLM_F_ACK = 16, 1, 4
IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE = 63, 64


def message(device: str, size: int) -> bytes:
    """The request to let ``device`` send and merge segments of up to ``size`` bytes."""
    attributes = b"".join(
        struct.pack("=HHI", 8, kind, size) for kind in (IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE)
    )
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(device), 0, 0) + attributes
    return struct.pack("=IHHII", 16 + len(body), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0) + body


def main() -> None:
    """Ask for every device, one after the other."""
    size, devices = int(sys.argv[1]), sys.argv[2:]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        for device in devices:
            netlink.send(message(device, size))
            (error,) = struct.unpack("=i", netlink.recv(1 << 16)[16:20])
            if error:
                sys.exit(f"{device}: segments of {size} bytes: {os.strerror(-error)}")


if __name__ == "__main__":
    main()
