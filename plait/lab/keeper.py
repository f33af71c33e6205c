"""The process that holds a lab's namespaces, and ends everything inside them when the lab ends.

Started by ``Lab`` as ``python -I -S keeper.py HOSTS PID`` with the read end of a pipe as standard input; the
lab, process PID, holds the other end. The lab closes the pipe or dies, by ``kill -9`` included: the keeper
kills every process that lives in its namespaces, then exits. Nothing refers to the namespaces any more, and
the kernel removes them with their links and queues. Nothing has a name, so nothing can be left behind.
Standard library only: this file is run as a script, in a bare interpreter that starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import sys
import time

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SWEEP_PATIENCE = 5.0  # seconds to wait for killed processes to be gone
QUIET = 0.05  # seconds without a process in our namespaces after which none will come


def unshare(flags: int) -> None:
    """unshare(2); ``os.unshare`` exists only from Python 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_root_of_a_user_namespace() -> None:
    """Map the caller to root of a new user namespace: enough to own networks, with no rights outside it."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for path, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{path}", "w") as file:
            file.write(text)


def make_namespaces(hosts: int) -> tuple[bool, list[int]]:
    """One network namespace per host, held by a file descriptor each; the keeper itself moves to one more,
    the switch.

    Returns whether a user namespace was needed, and the descriptors.
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
    """SIGKILL every process whose network namespace is one of ours, until none is left: no group or session
    escapes.

    Goes on looking for a while: a rank that was being started when the lab died may not have entered its
    namespace yet.
    """
    now = time.monotonic()
    deadline, quiet_until = now + SWEEP_PATIENCE, now + QUIET
    while now < min(deadline, quiet_until):
        if any(kill_inside(int(name), namespaces) for name in os.listdir("/proc") if name.isdigit()):
            quiet_until = time.monotonic() + QUIET
        time.sleep(0.005)
        now = time.monotonic()


def kill_inside(pid: int, namespaces: set[int]) -> bool:
    """SIGKILL one process if it lives in ``namespaces``; the descriptor makes sure the one looked at is the
    one killed."""
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
    except OSError:  # gone meanwhile, or not ours to look at
        return False
    finally:
        os.close(handle)


def wait_for_the_end(lab: int) -> None:
    """Until the lab closes our standard input, or has died: a child it forked may hold its end of the pipe
    open."""
    ends = select.poll()
    ends.register(0, select.POLLIN | select.POLLHUP)
    try:
        ends.register(os.pidfd_open(lab), select.POLLIN)
    except ProcessLookupError:
        return
    ends.poll()


def main() -> int:
    """Make the namespaces, say so in one JSON line, wait for the lab to end, sweep."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the lab decides when it is over, not the terminal
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        in_userns, fds = make_namespaces(int(sys.argv[1]))
    except OSError as error:
        print(json.dumps({"error": errno.errorcode.get(error.errno or 0, "?"), "message": error.strerror}), flush=True)
        return 1
    namespaces = {os.fstat(fd).st_ino for fd in fds} | {os.stat("/proc/self/ns/net").st_ino}
    print(json.dumps({"userns": in_userns, "fds": fds}), flush=True)
    os.close(1)
    wait_for_the_end(int(sys.argv[2]))
    kill_all_inside(namespaces)
    return 0


if __name__ == "__main__":
    sys.exit(main())
