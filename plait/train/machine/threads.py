"""Where a rank's threads run, and who goes first: its own cores, and the threads that move data before those
that compute.

A rank's compute thread keeps its core busy; the kernel lets it finish its time slice before a thread that
wakes up may run, and a collective advances by many short wake-ups. So communication threads get real-time
round-robin priority where the process may give it (root, or RLIMIT_RTPRIO; the kernel keeps 5 % of the time
for others whatever such threads do), otherwise a short time slice (Linux 6.12 and newer, EEVDF; no privilege
needed). gloo's two threads must not preempt each other: one spins on a lock that the other holds, until the
next tick of the clock. Measured with a 1 Gbit/s link: 17,000 polls a step without, 3,000 with round-robin,
and a fifth less CPU time in them. Elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from pathlib import Path

SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
SHORT, LONG = 100_000, 100_000_000  # nanoseconds, the least and the most that the kernel takes


def take_cores(place: int, ranks: int, threads: int) -> set[int]:
    """Keep the calling thread, and those it will start, on cores of its own: the ``place``-th share of this
    machine's, ``threads`` each.

    Without it the kernel moves two ranks onto one core whenever a communication thread has woken up on the
    other, and each has to fetch its data anew. Done only where the ranks fill the machine (no room for a
    second such set of ranks, which would choose the same cores). Returns the cores; none where nothing was
    done.
    """
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if not ranks * threads <= len(cores) < 2 * ranks * threads:
        return set()
    mine = set(cores[place * threads : (place + 1) * threads])
    os.sched_setaffinity(0, mine)
    return mine


PCI = Path("/sys/bus/pci/devices")
"""Where Linux tells of devices by their addresses."""


def stay_near(address: str, devices: Path = PCI) -> set[int]:
    """Keep the calling thread, and those it will start, on the cores of the NUMA node that a device is
    plugged into: copies to a GPU from another socket's memory take longer. address: on the PCI bus. Returns
    the cores; none where Linux does not say, or allows this process none of them."""
    try:
        near = _numbers((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()
    mine = near & os.sched_getaffinity(0)
    if mine:
        os.sched_setaffinity(0, mine)
    return mine


def _numbers(text: str) -> set[int]:
    """A list as Linux writes it.

    >>> sorted(_numbers("0-2,8\\n"))
    [0, 1, 2, 8]
    """
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def running() -> set[int]:
    """The kernel's numbers of this process's threads; none where it is not Linux."""
    return {int(name) for name in os.listdir("/proc/self/task")} if sys.platform == "linux" else set()


def serve_first(threads: set[int]) -> None:
    """Let ``threads`` run at once when they wake up, though the calling thread, which computes, is busy."""
    if not threads or any(os.sched_getscheduler(thread) != os.SCHED_OTHER for thread in threads):
        return  # somebody chose a policy for this process on purpose
    try:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        for thread in threads:
            _set_slice(thread, SHORT)
        _set_slice(threading.get_native_id(), LONG)


def _set_slice(thread: int, nanoseconds: int) -> None:
    number = SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
    ctypes.CDLL(None).syscall(number, thread, ctypes.create_string_buffer(attributes, 48), 0)
