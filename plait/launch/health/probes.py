"""Probes of this machine: can Plait train here, and what to fix if not. Each probe checks one thing
and has a time limit; ``doctor`` lists all of them.

The limits are those by which launchers judge nodes (``plait.launch.health.nodes``).
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from plait.core.base.errors import PlaitError
from plait.core.base.process import path_of, usable_cores
from plait.core.base.text import counted, in_bytes
from plait.launch.health.links import disk_of
from plait.launch.health.nodes import LEAST_LOCKED, LEAST_SHARED, UNKNOWN, look, nearly_full

State = Literal["fine", "look", "missing"]
"""A probe's result. ``look``: usable, but slower, riskier or without a part that some users need.
``missing``: unusable."""
LIMITS: Sequence[tuple[int, str, str, Callable[[int], str], int, int, str]] = (
    (resource.RLIMIT_NOFILE, "files", "open files", "{:,}".format, 256, 4096,
     "open files (ulimit -Hn) are {}: add '* hard nofile 65536' to /etc/security/limits.conf"),
    (resource.RLIMIT_NPROC, "processes", "processes", "{:,}".format, 1024, 1024,
     "processes (ulimit -Hu) are {}: add '* hard nproc 65536' to /etc/security/limits.conf"),
    (resource.RLIMIT_MEMLOCK, "locked", "locked memory", in_bytes, 0, LEAST_LOCKED,
     "locked memory (ulimit -Hl) is {}, too little for RDMA: add '* hard memlock unlimited' to "
     "/etc/security/limits.conf, or LimitMEMLOCK=infinity to slurmd's unit"),
)  # fmt: skip
"""Limits of a process: number, key in the report, name for people, formatter, the value below which
runs fail, the value below which some runs fail, advice. Ranks have about twenty threads each; only
GPUs need locked memory."""
LEAST_DISK = 20 << 30
"""Bytes below which the disk is soon full of checkpoints: with a billion parameters, each has 12
GB."""
LEAST_MEMORY = 2 << 30
TIME_ERROR = 5
"""The return value of adjtimex(2) for an unsynchronised clock."""
NAMESPACES = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
"""Programs that labs need, and their packages."""


class ProbeResult(NamedTuple):
    """A probe's answer. summary: a short description. fix: advice, empty if none is needed. values:
    machine-readable details."""

    summary: str
    state: State = "fine"
    fix: str = ""
    values: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class DoctorFinding:
    """A probe's answer with its subject. what: the subject."""

    what: str
    found: str
    state: State
    fix: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Probe:
    """A check with a time limit. what: its subject. limit: seconds."""

    what: str
    run: Callable[[], ProbeResult]
    limit: float = 20.0


def examine(probes: Sequence[Probe]) -> list[DoctorFinding]:
    """Run all probes at once; return their findings in the same order. A probe that exceeds its
    time limit is reported as such: a hanging disk or server must not hang the report."""
    answers: dict[str, ProbeResult] = {}

    def ask(probe: Probe) -> None:
        try:
            answers[probe.what] = probe.run()
        except (OSError, ValueError, LookupError, subprocess.SubprocessError, PlaitError) as error:
            answers[probe.what] = ProbeResult(f"could not be looked at: {error}", "look", "See the cause")

    began, threads = time.monotonic(), list[threading.Thread | None]()
    for probe in probes:
        thread = threading.Thread(target=ask, args=(probe,), name=probe.what, daemon=True)
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # no more threads: run this probe here, without a time limit
            ask(probe)
            threads.append(None)
    for probe, thread in zip(probes, threads, strict=True):
        if thread:
            thread.join(max(0.0, probe.limit - (time.monotonic() - began)))
    found = [answers.get(probe.what) or _silent(probe) for probe in probes]
    return [DoctorFinding(probe.what, *one[:3], dict(one.values)) for probe, one in zip(probes, found, strict=True)]


def _silent(probe: Probe) -> ProbeResult:
    fix = "Look what it waits for: most often a disk of another machine, or a driver"
    return ProbeResult(f"no answer within {probe.limit:.0f} s", "missing", fix)


def answer_of(*argv: str, limit: float = 10.0) -> tuple[int, str]:
    """Run a program; return (exit status, output). Status -1: the program is missing. Status 1 also
    if it takes longer than ``limit`` seconds."""
    program = path_of(argv[0])
    if program is None:
        return -1, ""
    try:
        done = subprocess.run([program, *argv[1:]], capture_output=True, text=True, errors="replace", check=False,
                              stdin=subprocess.DEVNULL, timeout=limit)  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {limit:.0f} s"
    return abs(done.returncode), (done.stdout.strip() or done.stderr.strip())


# ---- the machine ----


def processors() -> ProbeResult:
    """Report the CPU cores that this process may use."""
    cores = usable_cores()
    there = os.cpu_count() or cores
    told = counted(cores, "core") + (f" of {there}" if there != cores else "")
    return ProbeResult(told, values={"usable": cores, "there": there})


def memory(free: int | None) -> ProbeResult:
    """Report the free memory for CPU ranks. free: bytes, None if unknown."""
    if free is None:
        return ProbeResult("the free memory is unknown", "look", "Look at /proc/meminfo")
    fix = "Give the container or the job more: training a model takes at least 16 bytes a parameter"
    state = ("look", fix) if free < LEAST_MEMORY else ("fine", "")
    return ProbeResult(f"{in_bytes(free)} free", *state, {"free": free})  # type: ignore[arg-type]


def shared_memory(gpus: int) -> ProbeResult:
    """Report /dev/shm, through which ranks of one machine communicate with NCCL. gpus: number of
    GPUs of this machine; 0: its size does not matter."""
    free = look().shared
    if free == UNKNOWN:
        return ProbeResult("not there", "look", "Mount it: mount -t tmpfs tmpfs /dev/shm")
    values, found = {"free": free}, f"{in_bytes(free)} free"
    if free >= LEAST_SHARED:
        return ProbeResult(found, values=values)
    fix = (
        'NCCL and run.device = "shared" want 1 GiB: docker run --shm-size=16g; in a pod, an emptyDir of medium Memory '
        "at /dev/shm (plait train --on kubernetes mounts one); else mount -o remount,size=16g /dev/shm. Ranks on "
        "processors do without"
    )
    return ProbeResult(found, "missing" if gpus > 1 else "look", fix, values)


def run_folder(folder: Path) -> ProbeResult:
    """Report whether runs can be written to the folder, and the room left for them."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    found = disk_of(there)
    if "error" in found:
        fix = "Choose another with run.folder=FOLDER, make room, or see to its rights; plait doctor --folder tries it"
        return ProbeResult(f"cannot be written: {found['error']}", "missing", fix, found)
    found["inodes"] = os.statvfs(there).f_favail
    told, state, fix = f"{in_bytes(found['free'])} free, {found['rate'] / 1e6:,.0f} MB/s written", "fine", ""
    if nearly := nearly_full(there):
        state, fix = "missing", f"{nearly}. Make room, or choose another disk with run.folder=FOLDER"
    elif found["free"] < LEAST_DISK:
        state = "look"
        fix = "A checkpoint has 12 bytes a parameter: make room for train.keep_checkpoints of them and one more"
    return ProbeResult(told, state, fix, found)  # type: ignore[arg-type]


def limits(gpus: int) -> ProbeResult:
    """Report the system's limits of a process (``LIMITS``); launchers raise the soft limits to the
    hard ones. gpus: number of GPUs of this machine, which need locked memory."""
    values, told, wrong, states = dict[str, int](), list[str](), list[str](), {"fine"}
    for number, key, name, form, least, many, fix in LIMITS:
        hard = values[key] = resource.getrlimit(number)[1]
        told.append(f"{name} {'unlimited' if hard == resource.RLIM_INFINITY else form(hard)}")
        if 0 <= hard < many and (gpus or key != "locked"):
            states.add("missing" if hard < least else "look")
            wrong.append(fix.format(in_bytes(hard) if key == "locked" else hard))
    state, advice = min(states, key=("missing", "look", "fine").index), "; ".join(wrong)
    return ProbeResult(", ".join(told), state, advice[:1].upper() + advice[1:], values)  # type: ignore[arg-type]


def clock() -> ProbeResult:
    """Report whether this machine's clock is synchronised, by the kernel's adjtimex(2)."""
    returned = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(256))
    if returned < 0:
        fix = "Compare with another machine's; plait check measures how far clocks of hosts are apart"
        return ProbeResult("its synchronisation is unknown", "look", fix)
    if returned != TIME_ERROR:
        return ProbeResult("synchronised, says the kernel")
    fix = (
        "Start chrony or systemd-timesyncd (timedatectl set-ntp true): hosts of a run are compared by their clocks. A "
        "container has its host's. One machine alone does without"
    )
    return ProbeResult("not synchronised, says the kernel", "look", fix)


def own_name() -> ProbeResult:
    """Report the address of this machine's name, where gloo listens by default; check loopback."""
    name = socket.gethostname()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        fix = "Bring it up: ip link set lo up"
        return ProbeResult(f"loopback does not work: {error.strerror or error}", "missing", fix)
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        fix = (
            f"Add a line for {name} to /etc/hosts, or name an interface with run.network_interface: ranks of several "
            "machines need it"
        )
        return ProbeResult(f"the name {name} leads nowhere", "look", fix)
    values, found = {"host": name, "address": address}, f"{name} is {address}"
    if address.startswith("127.") or address == "::1":
        fix = "Ranks of several machines meet by it: name an interface with run.network_interface, or mend /etc/hosts"
        return ProbeResult(f"{found}, which other machines cannot reach", "look", fix, values)
    return ProbeResult(found, values=values)


def namespaces() -> ProbeResult:
    """Report the programs and namespaces that labs need."""
    doing = "Only plait lab and --on lab need this"
    if absent := {one: pack for one, pack in NAMESPACES.items() if not path_of(one)}:
        fix = f"Install {' and '.join(dict.fromkeys(absent.values()))}. {doing}"
        return ProbeResult(f"no {', '.join(absent)}", "look", fix)
    status, told = answer_of("unshare", "--user", "--map-root-user", "--net", "true")
    if not status:
        return ProbeResult("user and network namespaces can be made")
    fix = (
        "Allow them: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_"
        f"userns=0 (Ubuntu), or run the container with --privileged. {doing}"
    )
    return ProbeResult(f"user and network namespaces are refused: {told}", "look", fix)
