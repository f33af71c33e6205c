"""What a node is like before ranks are started on it: looked at by its agent, judged by the launcher.

Links between nodes are tried by the ranks themselves (``run.selfcheck``), and more is measured by ``plait
check``. Limits: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html (shared
memory, memlock)."""

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

UNKNOWN = -1
"""Of a number: nobody says. Of a limit: there is none."""
LATE = 30.0
"""Seconds by which a clock may be off: files of the run's folder are compared by their times."""
LEAST_SHARED = 1 << 30
"""Bytes of /dev/shm that NCCL's ranks of a node want; containers have 64 MiB unless told otherwise."""
LEAST_LOCKED = 1 << 30
"""Bytes of memory that RDMA wants to lock."""
RAISED = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
"""Limits whose soft value may be as high as the hard one: files, threads, memory that a NIC reads by
itself."""


@dataclass(frozen=True)
class Fitness:
    """Of a node. asked: GPUs that a manager was asked for. gpus: that can be seen, if any were. shared: free
    bytes of /dev/shm. locked: bytes that may be locked. clock: seconds since 1970. plait, torch:
    versions."""

    asked: int = 0
    gpus: int = UNKNOWN
    shared: int = UNKNOWN
    locked: int = UNKNOWN
    clock: float = 0.0
    plait: str = ""
    torch: str = ""


def raise_limits() -> None:
    """Have this process, and what it starts, use what the system allows it."""
    for limit in RAISED:
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(limit)
            resource.setrlimit(limit, (hard, hard))


def look() -> Fitness:
    """At this node."""
    from plait import __version__

    torch, shared = "", UNKNOWN
    with suppress(PackageNotFoundError):
        torch = version("torch")
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").free
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return Fitness(
        asked=granted_gpus(), gpus=gpus_seen() if granted_gpus() else UNKNOWN, shared=shared,
        locked=UNKNOWN if locked == resource.RLIM_INFINITY else locked,
        clock=time.time(), plait=__version__, torch=torch,
    )  # fmt: skip


def gpus_seen(programs: str = os.defpath) -> int:
    """GPUs that the driver's own program lists, and slices in place of one that is sliced (MIG); ``UNKNOWN``
    where there is no such program, as on AMD's."""
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
    """unfit: why ranks cannot run on a node, by its host. remarks: what may be slow or fail later."""

    unfit: Mapping[str, str]
    remarks: tuple[str, ...]


def judge(found: Mapping[str, Fitness], came: Mapping[str, float]) -> PreflightVerdict:
    """found: of every host. came: when each was heard, by this machine's clock."""
    unfit, remarks = dict[str, str](), list[str]()
    own = look()
    torch = _torch(found.values(), own.torch)
    for host, one in found.items():
        if 0 <= one.gpus < one.asked:
            unfit[host] = f"it shows {one.gpus} of {one.asked} GPUs (nvidia-smi -L)"
        elif one.plait and (one.plait, one.torch) != (own.plait, torch):
            has, wants = f"{one.plait} and PyTorch {one.torch or 'none'}", f"{own.plait} and {torch or 'none'}"
            unfit[host] = f"it has Plait {has}, and {'the launcher' if torch == own.torch else 'others'} {wants}"
        if one.clock and abs(off := one.clock - came[host]) > LATE:
            remarks.append(f"the clock of {host} is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}")
        if one.asked and 0 <= one.shared < LEAST_SHARED:
            remarks.append(f"/dev/shm of {host} has {one.shared >> 20} MiB free; NCCL wants 1 GiB")
        if one.asked and 0 <= one.locked < LEAST_LOCKED:
            remarks.append(f"{host} lets processes lock {one.locked >> 10} KiB (ulimit -Hl), too little for RDMA")
    return PreflightVerdict(unfit, tuple(remarks))


def _torch(found: Iterable[Fitness], own: str) -> str:
    """The PyTorch that nodes are to have: that of most, or the launcher's if as many have that. The launcher
    trains nothing: it may be outside of the container in which ranks are."""
    counts = Counter(one.torch for one in found if one.plait)
    return max(counts, key=lambda torch: (counts[torch], torch == own), default=own)


def room(folder: Path, needed: int = 1 << 30) -> str:
    """A remark on the disk of a run's folder, if it is nearly full."""
    with suppress(OSError):
        if (free := shutil.disk_usage(folder).free) < needed:
            return f"the disk of {folder} has {free >> 20} MiB free"
    return ""
