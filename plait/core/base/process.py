"""Processes as the operating system sees them: identity, state, memory and usable cores, ends of
child processes, and TCP ports reserved for future processes."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar


class ProcessState(NamedTuple):
    """A process's state. letter: R running, S sleeping, D waiting for a disk, T stopped, t traced,
    F frozen by its control group, Z ended (zombie). started: clock ticks since boot."""

    letter: str
    started: int

    @property
    def stopped(self) -> bool:
        """True if a signal, a debugger or the control group has stopped the process."""
        return self.letter in "tTF"


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None if there is no such process."""
    if pid < 1:
        return None
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # without /proc only the process's existence is known
        return ProcessState("S", 0) if _exists(pid) else None
    letter = "F" if words[0] in "SD" and _frozen(pid) else words[0]
    return ProcessState(letter, int(words[19]))


GROUPS = Path("/sys/fs/cgroup")
"""The folder of the control groups."""
FREEZER_FUNCTIONS = ("get_signal", "do_freezer_trap", "__refrigerator")
"""The kernel functions in which a frozen process sleeps, unless its earlier sleep was only
extended."""


def _frozen(pid: int) -> bool:
    """Return True if the process's control group, or an ancestor of it, is frozen. The kernel shows
    such a process as sleeping (cgroup version 2) or waiting for a disk (version 1)."""
    try:
        groups = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        where = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
    files = [GROUPS / "freezer" / path[1:] / "freezer.state" for _, kinds, path in groups if "freezer" in kinds]
    files += [root / path[1:] / "cgroup.events" for _, kinds, path in groups if not kinds
              for root in (GROUPS, GROUPS / "unified")]  # fmt: skip
    return where in FREEZER_FUNCTIONS or any(
        re.search(r"^(frozen 1|FROZEN)$", _text(file), re.MULTILINE) for file in files
    )


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


class Killable(Protocol):
    """A child process that can be killed, such as ``subprocess.Popen``."""

    @property
    def pid(self) -> int | None:
        """The process id; None if it is no process of this machine."""
        ...

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        ...

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        ...


K = TypeVar("K", bound=Killable)
FROZEN, LETHAL = 1.0, 10.0
"""The seconds that ``end_all`` waits for killed processes: ``FROZEN`` if all of them are frozen,
else ``LETHAL``. The kernel frees a process's memory before the process ends."""


def end_all(processes: Sequence[K]) -> list[K]:
    """Kill child processes and wait for their ends. Return the processes that have not ended: the
    kernel ends no process that is frozen, or blocked in a driver, before it resumes."""
    for process in processes:
        process.kill()
    began = time.monotonic()
    while left := [one for one in processes if one.poll() is None]:
        letters = {one.pid: state.letter for one in left if (state := process_state(one.pid or 0))}
        waited = time.monotonic() - began
        if waited > LETHAL or (waited > FROZEN and {*letters.values()} <= {"F", "Z"}):
            return [one for one in left if letters.get(one.pid) != "Z"]  # Z: ended, though a debugger still holds it
        time.sleep(0.005)
    return []


def process_since(pid: int, started: int) -> ProcessState | None:
    """Return the state of the process ``pid`` that began at ``started``; None if that process has
    ended, even if another process now has its id."""
    state = process_state(pid)
    return None if state is None or state.letter in "ZX" or state.started != started else state


def how_it_ended(status: int) -> str:
    """Return the end of a process in words. status: its exit status, -N if signal N killed it.

    >>> how_it_ended(-9)
    'was killed by SIGKILL'
    >>> how_it_ended(1)
    'ended with status 1'
    """
    return f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class ProcessMemory(NamedTuple):
    """A process's resident memory in bytes, now and at its peak."""

    now: int
    peak: int


def process_memory(pid: int | None = None) -> ProcessMemory | None:
    """Return the memory of a process, by default of this one; None if the system does not report
    it."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
        words = dict(line.split(":", 1) for line in lines if ":" in line)
        now, peak = (int(words[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return ProcessMemory(now, peak)


def forget_peak() -> bool:
    """Reset this process's ``ProcessMemory.peak`` to its present memory; return True if the system
    supports it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def main_thread_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's main thread so far; 0 if the system does not report
    them."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def pid_namespace_key() -> str:
    """Return a key of this process's pid namespace and this boot; equal for processes that see each
    other's ids. Without /proc, the key is the host name."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def boot_id() -> str:
    """Return the id of this boot; equal for processes that share a kernel, and hence the monotonic
    clock. Raises OSError on systems other than Linux."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def path_of(program: str) -> str | None:
    """Return a program's full path; None if it is not found. The sbin folders, which an ordinary
    user's PATH often lacks, are searched too."""
    return shutil.which(program) or shutil.which(program, path="/usr/local/sbin:/usr/sbin:/sbin:/usr/bin")


def command_of(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of Plait's in its own process. python: the interpreter.

    The option ``-P`` keeps Python from importing modules of the working directory, such as a user's
    ``json.py``.

    >>> command_of("plait.train.worker", "runs/a", python="python3")
    ['python3', '-P', '-m', 'plait.train.worker', 'runs/a']
    """
    return [python, "-P", "-m", module, *arguments]


def end_piped(process: subprocess.Popen[Any]) -> None:
    """Kill a child process, close its pipes and wait for its end."""
    process.kill()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(OSError):
            pipe.close()
    process.wait()


def open_standard_streams() -> None:
    """Open /dev/null for each of standard input, output and error that is closed (``>&-``).
    Otherwise printing fails, or goes to the next file that is opened, which gets the same
    descriptor."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent is killed, so that no process continues
    unnoticed."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name of this process in ``ps`` and ``top``, of at most 15 characters."""
    _prctl(PR_SET_NAME, name.encode())


@contextmanager
def adopting() -> Generator[None]:
    """Make orphaned descendants of this process its children inside the block (Linux)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Generator[int]:
    """Yield a TCP port that the system gives to no other process inside the ``with`` block. host:
    an address of this machine; empty for all addresses.

    Another process could take a free port before rank 0 has imported torch and listens on it. So a
    socket that does not listen holds the port. A server that sets SO_REUSEADDR, as Python's and
    torch's servers do, can still listen there; requests for any free port get another port.

    >>> with reserved_port() as port, socket.create_server(("127.0.0.1", port)) as server:
    ...     server.getsockname() == ("127.0.0.1", port)
    True
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


MANY_OBJECTS = 100_000
"""The number of objects that one garbage collection traverses in a few milliseconds."""


@contextmanager
def uncollected() -> Generator[None]:
    """Disable garbage collection in a block, or in a function that this decorates; restore its
    state afterwards.

    If the block makes more than ``MANY_OBJECTS`` objects, they move to the oldest generation at its
    end. Otherwise the next collection would traverse all of them at once.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            if (
                gc.get_count()[0] > MANY_OBJECTS and not gc.get_freeze_count()
            ):  # objects that the caller has frozen stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
