"""Hold a lab's network namespaces, and run helpers inside them: ``python -I -S inside.py VERB
...``.

``keep HOSTS PID``: hold a namespace for each host, and kill every process inside them when the lab
ends. The lab (process PID) holds the write end of the pipe that is standard input. When the lab
closes the pipe or dies, even by ``kill -9``, the keeper kills every process in its namespaces and
exits. Nothing refers to the namespaces any more, so the kernel removes them with their links and
queues. Namespaces are unnamed, so none can be left behind.

``reach HOST PORT ADDRESS...``: run on every host at once; find which hosts each host reaches. The
script listens, prints a line, waits for a line, connects to every address, and prints the numbers
of the reachable hosts. It keeps listening until its standard input ends, so that every host finds
its peers listening.

``segment BYTES DEVICE...``: let TCP hand a link more than 64 KiB at once ("BIG TCP", Linux 6.3).
The script speaks rtnetlink itself: iproute2 knows these attributes since 6.3 only, and
distributions still ship older versions. A kernel that does not know the attributes ignores them.

Standard library only, in a bare interpreter that starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SWEEP_PATIENCE = 5.0  # seconds to wait until killed processes have ended
QUIET = 0.05  # seconds without a process in our namespaces after which the sweep ends


def unshare(flags: int) -> None:
    """Call unshare(2); ``os.unshare`` exists only from Python 3.12 on. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_root_of_a_user_namespace() -> None:
    """Map the caller to root of a new user namespace: enough to own networks, without rights
    outside the namespace."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for path, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{path}", "w") as file:
            file.write(text)


def make_namespaces(hosts: int) -> tuple[bool, list[int]]:
    """Create one network namespace per host, each held by a file descriptor; move this process to
    one more, the switch's.

    Returns True if a user namespace was needed, and the hosts' descriptors.
    """
    in_userns = False
    fds: list[int] = []
    for _ in range(hosts + 1):
        try:
            unshare(CLONE_NEWNET)
        except PermissionError:
            if in_userns:
                raise
            become_root_of_a_user_namespace()
            in_userns = True
            unshare(CLONE_NEWNET)
        fds.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    return in_userns, fds[:hosts]


def kill_all_inside(namespaces: set[int]) -> None:
    """SIGKILL every process in ``namespaces`` (their inode numbers) until none is left; a process
    group or session of its own protects no process.

    The sweep repeats until no process was found for ``QUIET`` seconds, at most ``SWEEP_PATIENCE``:
    a rank that was being started when the lab died may not have entered its namespace yet."""
    now = time.monotonic()
    deadline, quiet_until = now + SWEEP_PATIENCE, now + QUIET
    while now < min(deadline, quiet_until):
        if any(kill_inside(int(name), namespaces) for name in os.listdir("/proc") if name.isdigit()):
            quiet_until = time.monotonic() + QUIET
        time.sleep(0.005)
        now = time.monotonic()


def kill_inside(pid: int, namespaces: set[int]) -> bool:
    """SIGKILL a process if it lives in ``namespaces``; return True if it did. A pidfd makes sure
    that the checked process is the killed one."""
    if pid == os.getpid():
        return False
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino not in namespaces:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:  # the process has ended, or may not be inspected
        return False
    finally:
        os.close(handle)


def wait_for_the_end(lab: int) -> None:
    """Wait until the lab closes our standard input or dies. lab: its process. The pipe alone is not
    enough: a child forked by the lab may hold it open."""
    ends = select.poll()
    ends.register(0, select.POLLIN | select.POLLHUP)
    try:
        ends.register(os.pidfd_open(lab), select.POLLIN)
    except ProcessLookupError:
        return
    ends.poll()


def keep(hosts: int, lab: int) -> int:
    """Create the namespaces, report them in one JSON line, wait until the lab ends, kill what runs
    inside. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the lab decides when the keeper ends, not the terminal
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        in_userns, fds = make_namespaces(hosts)
    except OSError as error:
        print(json.dumps({"error": errno.errorcode.get(error.errno or 0, "?"), "message": error.strerror}), flush=True)
        return 1
    namespaces = {os.fstat(fd).st_ino for fd in fds} | {os.stat("/proc/self/ns/net").st_ino}
    print(json.dumps({"userns": in_userns, "fds": fds}), flush=True)
    os.close(1)
    wait_for_the_end(lab)
    kill_all_inside(namespaces)
    return 0


# ---- on the hosts ----


PATIENCE = 1.0
"""Timeout of a connection, seconds."""
RTM_NEWLINK, NLM_F_REQUEST, NLM_F_ACK = 16, 1, 4
IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE = 63, 64


def reach(own: int, port: int, addresses: list[str]) -> None:
    """Listen on ``port``, wait for a line on standard input, connect to every address, and print
    the numbers of the reachable hosts as JSON. own: this host's number."""
    found: list[int] = []

    def connect(number: int, address: str) -> None:
        try:
            socket.create_connection((address, port), timeout=PATIENCE).close()
        except OSError:
            return
        found.append(number)

    with socket.create_server((addresses[own], port), backlog=len(addresses)):
        print("listening", flush=True)
        sys.stdin.readline()
        threads = [threading.Thread(target=connect, args=pair, daemon=True) for pair in enumerate(addresses)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        print(json.dumps(sorted(found)), flush=True)
        sys.stdin.read()


def segment(size: int, devices: list[str]) -> None:
    """Let the devices send and merge TCP segments of up to ``size`` bytes, one device after the
    other; exit with a message if the kernel refuses."""
    kinds = (IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE)
    attributes = b"".join(struct.pack("=HHI", 8, kind, size) for kind in kinds)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        for device in devices:
            body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(device), 0, 0) + attributes
            head = struct.pack("=IHHII", 16 + len(body), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0)
            netlink.send(head + body)
            (error,) = struct.unpack("=i", netlink.recv(1 << 16)[16:20])
            if error:
                sys.exit(f"{device}: segments of {size} bytes: {os.strerror(-error)}")


if __name__ == "__main__":
    verb, first, *rest = sys.argv[1:]
    if verb == "keep":
        sys.exit(keep(int(first), int(rest[0])))
    reach(int(first), int(rest[0]), rest[1:]) if verb == "reach" else segment(int(first), rest)
