"""Preflight check of a node before ranks start on it: its limits are raised, its agent inspects it,
the launcher judges.

The ranks themselves try the links between nodes (``run.selfcheck``); ``plait check`` measures more.
Limits: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html (shared
memory, memlock).
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plait.core.base.cluster_env import granted_gpus
from plait.core.base.errors import LaunchError

UNKNOWN = -1
"""Marker of an unknown number, or of no limit."""
MAX_CLOCK_OFFSET = 30.0
"""Seconds that a clock may be off; the run folder's files are compared by their times."""
LEAST_SHARED = 1 << 30
"""Bytes of /dev/shm that NCCL needs for a node's ranks; containers have 64 MiB by default."""
LEAST_LOCKED = 1 << 30
"""Bytes of locked memory that RDMA needs."""
RAISED = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
"""Limits whose soft value is raised to the hard one: open files, processes and threads, locked
memory (for RDMA)."""
SPARE_FILES = 64
"""Spare file descriptors beyond the requested and the open ones: for imports, reads of /proc,
process starts."""


@dataclass(frozen=True)
class NodeReport:
    """The resources of a node, as its agent reports them. asked: GPUs requested from the cluster
    manager. gpus: visible GPUs, if any were requested. shared: free bytes of /dev/shm. locked:
    bytes that a process may lock. clock: seconds since 1970. plait, torch: versions."""

    asked: int = 0
    gpus: int = UNKNOWN
    shared: int = UNKNOWN
    locked: int = UNKNOWN
    clock: float = 0.0
    plait: str = ""
    torch: str = ""


def raise_limits() -> None:
    """Raise this process's soft limits to the hard ones; child processes inherit them."""
    for limit in RAISED:
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(limit)
            resource.setrlimit(limit, (hard, hard))


def make_room(files: int, what: str) -> None:
    """Raise this process's limit of open files (``ulimit -Sn``) so that it can open ``files`` more;
    child processes inherit the limit. what: the purpose of the files, for the error message.

    Raises LaunchError if the hard limit (``ulimit -Hn``) is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files + SPARE_FILES
    with suppress(OSError):
        needed += len(os.listdir("/proc/self/fd"))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{what} take this process {needed} open files, and the system allows it {hard} (ulimit -Hn). Raise that, "
            f"such as by a line '* hard nofile {needed}' in /etc/security/limits.conf, or run fewer ranks on a machine."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def look() -> NodeReport:
    """Return this node's resources and versions."""
    from plait import __version__

    torch, shared = "", UNKNOWN
    with suppress(PackageNotFoundError):
        torch = version("torch")
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").free
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return NodeReport(
        asked=granted_gpus(), gpus=visible_gpus() if granted_gpus() else UNKNOWN, shared=shared,
        locked=UNKNOWN if locked == resource.RLIM_INFINITY else locked,
        clock=time.time(), plait=__version__, torch=torch,
    )  # fmt: skip


def visible_gpus(programs: str = os.defpath) -> int:
    """Return the number of GPUs that nvidia-smi lists, with MIG slices in place of a sliced GPU;
    ``UNKNOWN`` without nvidia-smi, as with AMD GPUs. programs: the folders to search after PATH."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=programs)
    if program is None:
        return UNKNOWN
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    listed = re.findall(r"^GPU .*((?:\n\s+MIG .*)*)", done.stdout, re.MULTILINE)
    return sum(max(slices.count("\n"), 1) for slices in listed)


@dataclass(frozen=True)
class PreflightVerdict:
    """The result of the preflight check. unfit: why ranks cannot run on a node, by host. remarks:
    warnings of what may be slow or fail later."""

    unfit: Mapping[str, str]
    remarks: tuple[str, ...]


def judge(reports: Mapping[str, NodeReport], came: Mapping[str, float]) -> PreflightVerdict:
    """Return which nodes are unfit for ranks, and warnings. reports: each host's resources. came:
    seconds since 1970 at which each report arrived, on this machine's clock."""
    unfit, remarks = dict[str, str](), list[str]()
    own = look()
    torch = _torch(reports.values(), own.torch)
    for host, one in reports.items():
        if 0 <= one.gpus < one.asked:
            unfit[host] = f"only {one.gpus} of {one.asked} requested GPUs are visible (nvidia-smi -L)"
        elif one.plait and (one.plait, one.torch) != (own.plait, torch):
            has, wants = f"{one.plait} and PyTorch {one.torch or 'none'}", f"{own.plait} and {torch or 'none'}"
            unfit[host] = f"it has Plait {has}, and {'the launcher' if torch == own.torch else 'others'} {wants}"
        if one.clock and abs(off := one.clock - came[host]) > MAX_CLOCK_OFFSET:
            remarks.append(f"the clock of {host} is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}")
        if one.asked and 0 <= one.shared < LEAST_SHARED:
            remarks.append(f"/dev/shm of {host} has {one.shared >> 20} MiB free; NCCL wants 1 GiB")
        if one.asked and 0 <= one.locked < LEAST_LOCKED:
            remarks.append(f"{host} lets processes lock {one.locked >> 10} KiB (ulimit -Hl), too little for RDMA")
    return PreflightVerdict(unfit, tuple(remarks))


def _torch(reports: Iterable[NodeReport], own: str) -> str:
    """Return the PyTorch version that nodes should have: the most common one, or the launcher's on
    a tie. The launcher trains nothing: it may run outside the ranks' container."""
    counts = Counter(one.torch for one in reports if one.plait)
    return max(counts, key=lambda torch: (counts[torch], torch == own), default=own)


def nearly_full(folder: Path, needed: int = 1 << 30) -> str:
    """Return a warning if the disk of a run's folder has less than ``needed`` bytes free, else an
    empty string."""
    with suppress(OSError):
        if (free := shutil.disk_usage(folder).free) < needed:
            return f"the disk of {folder} has {free >> 20} MiB free"
    return ""
