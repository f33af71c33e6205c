"""Pin a rank's threads to its own cores, and give communication threads priority over compute
threads.

A rank's compute thread keeps its core busy. The kernel lets it finish its time slice before a
thread that wakes up may run, and a collective advances by many short wake-ups. So communication
threads get real-time round-robin priority if the process may set it (root, or RLIMIT_RTPRIO; the
kernel reserves 5 % of the time for other threads). Otherwise they get a short time slice (Linux
6.12 and newer, EEVDF; no privilege needed).

gloo's two threads must not preempt each other: one spins on a lock that the other holds, until the
next clock tick. Measured with a 1 Gbit/s link: 17,000 polls a step without, 3,000 with round-robin,
and a fifth less CPU time in these threads. On other systems than Linux nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from pathlib import Path

SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
SHORT, LONG = 100_000, 100_000_000  # nanoseconds, the least and the most that the kernel accepts


def pin_cores(local_rank: int, ranks: int, threads: int) -> set[int]:
    """Pin the calling thread, and threads that it starts later, to its own cores: the
    ``local_rank``-th share of this machine's, ``threads`` cores each.

    Without pinning, the kernel moves two ranks onto one core whenever a communication thread has
    woken up on the other, and each must reload its caches. Done only if the ranks fill the machine
    (no room for a second such set of ranks, which would choose the same cores). Return the cores;
    an empty set if nothing was done.
    """
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if not ranks * threads <= len(cores) < 2 * ranks * threads:
        return set()
    mine = set(cores[local_rank * threads : (local_rank + 1) * threads])
    os.sched_setaffinity(0, mine)
    return mine


PCI = Path("/sys/bus/pci/devices")
"""Linux's folder of PCI devices, by address."""


def pin_near_device(address: str, devices: Path = PCI) -> set[int]:
    """Pin the calling thread, and threads that it starts later, to the NUMA node of a device:
    copies to a GPU from another socket's memory take longer. address: the device's address on the
    PCI bus. Return the cores; an empty set if Linux does not know them, or this process may use
    none of them."""
    try:
        near = _numbers((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()
    mine = near & os.sched_getaffinity(0)
    if mine:
        os.sched_setaffinity(0, mine)
    return mine


def _numbers(text: str) -> set[int]:
    r"""Return the numbers in a list in Linux's format, such as ``0-3,8``.

    >>> sorted(_numbers("0-2,8\n"))
    [0, 1, 2, 8]
    """
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def running() -> set[int]:
    """Return the kernel's ids of this process's threads; an empty set on other systems than
    Linux."""
    return {int(name) for name in os.listdir("/proc/self/task")} if sys.platform == "linux" else set()


def prioritize(threads: set[int]) -> None:
    """Let ``threads`` run as soon as they wake up, even while the calling compute thread is
    busy."""
    if not threads or any(os.sched_getscheduler(thread) != os.SCHED_OTHER for thread in threads):
        return  # the user chose a scheduling policy for this process
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
