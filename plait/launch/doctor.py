"""Probes of this machine: whether Plait can train here, and what to do where it cannot. Each probe answers
for one thing, has a time limit, and needs no torch: what is asked of PyTorch is asked in another process.

Limits are those by which launchers judge nodes (``plait.launch.preflight``)."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from plait.core.base.errors import PlaitError
from plait.core.base.process import path_of
from plait.core.base.text import counted, in_bytes
from plait.launch.preflight import LEAST_LOCKED, LEAST_SHARED, RAISED, UNKNOWN, look, room
from plait.launch.self_check import disk_of

State = Literal["fine", "look", "missing"]
"""``look``: it works, and something is slower, riskier or not there that some need. ``missing``: it does not
work."""
LEAST_FILES, MANY_FILES = 256, 4096
"""Open files of a process below which a run of few ranks fails, and one of many (``open_files``)."""
LEAST_PROCESSES = 1024
"""Processes and threads of a user below which ranks may not start: each has about twenty."""
LEAST_DISK = 20 << 30
"""Bytes below which checkpoints soon find no room: one of a billion parameters has 12 GB."""
TIME_ERROR = 5
"""What adjtimex(2) returns of a clock that nobody has set right."""


@dataclass(frozen=True)
class DoctorFinding:
    """found: a few words. fix: what to do; empty where nothing is to be done. values: for programs."""

    what: str
    found: str
    state: State = "fine"
    fix: str = ""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Probe:
    """what: it answers for. limit: seconds that it may take."""

    what: str
    ask: Callable[[], DoctorFinding]
    limit: float = 20.0


def examine(probes: Sequence[Probe]) -> list[DoctorFinding]:
    """All of them at once, in their order. One that does not answer in its time is told as such: a disk or a
    server that hangs must not hang us."""
    answers: dict[str, DoctorFinding] = {}

    def ask(probe: Probe) -> None:
        try:
            answers[probe.what] = probe.ask()
        except (OSError, ValueError, LookupError, subprocess.SubprocessError, PlaitError) as error:
            answers[probe.what] = DoctorFinding(probe.what, f"could not be looked at: {error}", "look", "See the cause")

    began, threads = time.monotonic(), list[threading.Thread | None]()
    for probe in probes:
        thread = threading.Thread(target=ask, args=(probe,), name=probe.what, daemon=True)
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # no more threads: one after the other, and without a limit
            ask(probe)
            threads.append(None)
    for probe, thread in zip(probes, threads, strict=True):
        if thread:
            thread.join(max(0.0, probe.limit - (time.monotonic() - began)))
    return [answers.get(probe.what) or _silent(probe) for probe in probes]


def _silent(probe: Probe) -> DoctorFinding:
    fix = "Look what it waits for: most often a disk of another machine, or a driver"
    return DoctorFinding(probe.what, f"no answer within {probe.limit:.0f} s", "missing", fix)


def answer_of(*argv: str, limit: float = 10.0) -> tuple[int, str]:
    """Exit status and output of a program; -1 and nothing of one that is not there."""
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


def shared_memory(gpus: int) -> DoctorFinding:
    """/dev/shm, through which ranks of a machine speak under NCCL."""
    free = look().shared
    if free == UNKNOWN:
        return DoctorFinding("/dev/shm", "not there", "look", "Mount it: mount -t tmpfs tmpfs /dev/shm")
    values, found = {"free": free}, f"{in_bytes(free)} free"
    if free >= LEAST_SHARED:
        return DoctorFinding("/dev/shm", found, values=values)
    fix = (
        'NCCL and run.device = "shared" want 1 GiB: docker run --shm-size=16g; in a pod, an emptyDir of medium Memory '
        "at /dev/shm (plait train --on kubernetes mounts one); else mount -o remount,size=16g /dev/shm. Ranks on "
        "processors do without"
    )
    return DoctorFinding("/dev/shm", found, "missing" if gpus > 1 else "look", fix, values)


def run_folder(folder: Path) -> DoctorFinding:
    """Whether runs can be written, and for how long."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    what = f"folder of runs ({folder})"
    found = disk_of(there)
    if "error" in found:
        fix = "Choose another with run.folder=FOLDER, make room, or see to its rights; plait doctor --folder tries it"
        return DoctorFinding(what, f"cannot be written: {found['error']}", "missing", fix, found)
    found["inodes"] = os.statvfs(there).f_favail
    told = f"{in_bytes(found['free'])} free, {found['rate'] / 1e6:,.0f} MB/s written"
    if nearly := room(there):
        fix = "Make room, or choose another disk with run.folder=FOLDER"
        return DoctorFinding(what, told, "missing", f"{nearly}. {fix}", found)
    if found["free"] < LEAST_DISK:
        fix = "A checkpoint has 12 bytes a parameter: make room for train.keep_checkpoints of them and one more"
        return DoctorFinding(what, told, "look", fix, found)
    return DoctorFinding(what, told, values=found)


def limits(gpus: int) -> DoctorFinding:
    """What the system lets a process have; launchers raise the soft limits to the hard ones."""
    hard = {number: resource.getrlimit(number)[1] for number in RAISED}
    files, processes, locked = (hard[number] for number in RAISED)
    values = {"files": files, "processes": processes, "locked": locked}
    told = f"open files {_limit(files)}, processes {_limit(processes)}, locked memory {_limit(locked, in_bytes)}"
    wrong, state = list[str](), "fine"
    if 0 <= files < MANY_FILES:
        state = "missing" if files < LEAST_FILES else "look"
        wrong.append(f"open files (ulimit -Hn) are {files}: add '* hard nofile 65536' to /etc/security/limits.conf")
    if 0 <= processes < LEAST_PROCESSES:
        state = "missing"
        wrong.append(f"processes (ulimit -Hu) are {processes}: add '* hard nproc 65536' to /etc/security/limits.conf")
    if 0 <= locked < LEAST_LOCKED and gpus:
        state = "look" if state == "fine" else state
        wrong.append(
            f"locked memory (ulimit -Hl) is {in_bytes(locked)}, too little for RDMA: add '* hard memlock unlimited' to "
            "/etc/security/limits.conf, or LimitMEMLOCK=infinity to slurmd's unit"
        )
    fix = "; ".join(wrong)
    return DoctorFinding("limits", told, state, fix[:1].upper() + fix[1:], values)  # type: ignore[arg-type]


def _limit(value: int, form: Callable[[int], str] = lambda number: f"{number:,}") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else form(value)


def clock() -> DoctorFinding:
    """Whether somebody sets this machine's clock: by systemd, else by the kernel's own word."""
    status, told = answer_of("timedatectl", "show", "--property=NTPSynchronized", "--value", limit=5.0)
    synchronised, by = told == "yes", "timedatectl"
    if status or told not in ("yes", "no"):
        returned, by = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(256)), "the kernel"
        if returned < 0:
            fix = "Compare with another machine's; plait check measures how far clocks of hosts are apart"
            return DoctorFinding("clock", "nobody says whether it is synchronised", "look", fix)
        synchronised = returned != TIME_ERROR
    if synchronised:
        return DoctorFinding("clock", f"synchronised, says {by}")
    fix = (
        "Start chrony or systemd-timesyncd (timedatectl set-ntp true): hosts of a run are compared by their clocks. A "
        "container has its host's. One machine alone does without"
    )
    return DoctorFinding("clock", f"not synchronised, says {by}", "look", fix)


def own_name() -> DoctorFinding:
    """Where this machine's name leads, which is where gloo listens unless told otherwise; and loopback."""
    name = socket.gethostname()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        fix = "Bring it up: ip link set lo up"
        return DoctorFinding("network", f"loopback does not work: {error.strerror or error}", "missing", fix)
    fix = f"Add a line for {name} to /etc/hosts, or name an interface with run.network_interface"
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return DoctorFinding(
            "network", f"the name {name} leads nowhere", "look", f"{fix}: ranks of several machines need it"
        )
    values = {"host": name, "address": address}
    if address.startswith("127.") or address == "::1":
        fix = "Ranks of several machines meet by it: name an interface with run.network_interface, or mend /etc/hosts"
        return DoctorFinding("network", f"{name} is {address}, which nobody else reaches", "look", fix, values)
    return DoctorFinding("network", f"{name} is {address}", values=values)


def namespaces() -> DoctorFinding:
    """What labs are made of."""
    needed = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
    absent = {one: pack for one, pack in needed.items() if not path_of(one)}
    doing = "Only plait lab and --on lab need this"
    if absent:
        fix = f"Install {' and '.join(dict.fromkeys(absent.values()))}. {doing}"
        return DoctorFinding("namespaces", f"no {', '.join(absent)}", "look", fix)
    status, told = answer_of("unshare", "--user", "--map-root-user", "--net", "true")
    if status:
        fix = (
            "Allow them: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_"
            f"userns=0 (Ubuntu), or run the container with --privileged. {doing}"
        )
        return DoctorFinding("namespaces", f"user and network namespaces are refused: {told}", "look", fix)
    return DoctorFinding("namespaces", "user and network namespaces can be made")


def processors(cores: int, free: int | None) -> tuple[DoctorFinding, DoctorFinding]:
    """cores: usable. free: bytes of memory."""
    there = os.cpu_count() or cores
    told = counted(cores, "core") + (f" of {there}" if there != cores else "")
    found = DoctorFinding("processors", told, values={"usable": cores, "there": there})
    if free is None:
        return found, DoctorFinding("memory", "nobody says how much is free", "look", "Look at /proc/meminfo")
    fix = "Give the container or the job more: training a model takes at least 16 bytes a parameter"
    small = free < 2 << 30
    memory = DoctorFinding("memory", f"{in_bytes(free)} free", "look" if small else "fine", fix if small else "",
                     {"free": free})  # fmt: skip
    return found, memory
