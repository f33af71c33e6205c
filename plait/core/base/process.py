"""What the system says of processes: whether one still is the one that we know, whether it is stopped, how
much memory it takes, how many cores ours may use. Ports that are kept for processes to come."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar


class ProcessState(NamedTuple):
    """letter: R runs, S sleeps, D waits for a disk, T is stopped, t is traced, F is frozen by its control
    group, Z has ended. started: ticks since boot."""

    letter: str
    started: int

    @property
    def stopped(self) -> bool:
        """By a signal, a debugger or its control group."""
        return self.letter in "tTF"


def process_state(pid: int) -> ProcessState | None:
    """The state of a process; None if there is no such process."""
    if pid < 1:
        return None
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # where there is no /proc, nothing is known but whether it is there
        return ProcessState("S", 0) if _exists(pid) else None
    letter = "F" if words[0] in "SD" and _frozen(pid) else words[0]
    return ProcessState(letter, int(words[19]))


GROUPS = Path("/sys/fs/cgroup")
"""The folder of control groups."""
FREEZER = ("get_signal", "do_freezer_trap", "__refrigerator")
"""Functions of the kernel in which a frozen process sleeps, where the sleep has not only been made longer."""


def _frozen(pid: int) -> bool:
    """Whether the control group of a process, or one above it, is frozen: the kernel shows such a process as
    one that sleeps (version 2) or waits for a disk (version 1)."""
    try:
        groups = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        where = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
    files = [GROUPS / "freezer" / path[1:] / "freezer.state" for _, kinds, path in groups if "freezer" in kinds]
    files += [root / path[1:] / "cgroup.events" for _, kinds, path in groups if not kinds
              for root in (GROUPS, GROUPS / "unified")]  # fmt: skip
    return where in FREEZER or any(re.search(r"^(frozen 1|FROZEN)$", _text(file), re.MULTILINE) for file in files)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


class Killable(Protocol):
    """A child that can be ended, as ``subprocess.Popen``."""

    @property
    def pid(self) -> int | None:
        """Its number; None if it is no process of this machine."""
        ...

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        ...

    def kill(self) -> None:
        """Send it SIGKILL."""
        ...


K = TypeVar("K", bound=Killable)
FROZEN, LETHAL = 1.0, 10.0
"""Seconds in which a killed process must have ended, if it is frozen and if it is not: first the kernel frees
what it held."""


def end_all(processes: Sequence[K]) -> list[K]:
    """Kill children and wait until they have ended; those that have not. The kernel ends no process that is
    frozen, or blocked in a driver, before it is let go."""
    for process in processes:
        process.kill()
    began = time.monotonic()
    while left := [one for one in processes if one.poll() is None]:
        letters = {one.pid: state.letter for one in left if (state := process_state(one.pid or 0))}
        waited = time.monotonic() - began
        if waited > LETHAL or (waited > FROZEN and {*letters.values()} <= {"F", "Z"}):
            return [one for one in left if letters.get(one.pid) != "Z"]  # that is what a debugger still holds
        time.sleep(0.005)
    return []


def process_since(pid: int, started: int) -> ProcessState | None:
    """The state of the process that began at ``started``; None if it has ended, whoever has its number
    now."""
    state = process_state(pid)
    return None if state is None or state.letter in "ZX" or state.started != started else state


def how_it_ended(status: int) -> str:
    """In words, from the exit status of a process, which is -N if signal N killed it.

    >>> how_it_ended(-9)
    'was killed by SIGKILL'
    >>> how_it_ended(1)
    'ended with status 1'
    """
    return f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class ProcessMemory(NamedTuple):
    """Bytes that are resident, now and at most so far."""

    now: int
    peak: int


def process_memory(pid: int | None = None) -> ProcessMemory | None:
    """Of a process, this one if not told; None where the system does not say."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
        words = dict(line.split(":", 1) for line in lines if ":" in line)
        now, peak = (int(words[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return ProcessMemory(now, peak)


def forget_peak() -> bool:
    """From now on this process's ``ProcessMemory.peak`` is the most since now; whether the system can do
    that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def main_thread_seconds(pid: int) -> float:
    """Of a processor, that the main thread of a process has taken so far; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def where_pids_mean_the_same() -> str:
    """Equal for two processes that see each other's numbers: this boot of this kernel, this container."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def boot_id() -> str:
    """Equal for two processes that share a kernel, and with it the monotonic clock. Raises OSError where it
    is not Linux."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def path_of(program: str) -> str | None:
    """The full path of a program, None of one that is not there. The sbin folders are looked in too, which an
    ordinary user's PATH often lacks."""
    return shutil.which(program) or shutil.which(program, path="/usr/local/sbin:/usr/sbin:/sbin:/usr/bin")


def command_of(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs a module of ours in a process of its own. python: the interpreter.

    With ``-P``: without it Python looks for every module in the working directory first, and executes a
    ``json.py`` that somebody has put there.

    >>> command_of("plait.train.worker", "runs/a", python="python3")
    ['python3', '-P', '-m', 'plait.train.worker', 'runs/a']
    """
    return [python, "-P", "-m", module, *arguments]


def open_standard_streams() -> None:
    """Where standard input, output or errors were closed (``>&-``) let there be nothing to read, and let what
    is printed be lost. Else printing fails, or lands in the next file that is opened, which gets the
    number."""
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
    """Ask Linux to end this process when the one that started it is killed, so that nothing goes on
    unseen."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """What ``ps`` and ``top`` call this process; at most 15 characters."""
    _prctl(PR_SET_NAME, name.encode())


@contextmanager
def adopting() -> Generator[None]:
    """Orphans among this process's descendants become its children meanwhile (Linux)."""
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
    """How many cores this process may use."""
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
    """A TCP port that the system gives to nobody else inside the ``with`` block. host: an address of this
    machine; empty for all of them.

    A port that is looked up and let go may be another's by the time that rank 0 has imported torch and
    listens. So it is held by a socket that does not listen itself: a server that sets SO_REUSEADDR, as those
    of Python and torch do, can listen there, and whoever asks for any free port is given another.

    >>> with reserved_port() as port, socket.create_server(("127.0.0.1", port)) as server:
    ...     server.getsockname() == ("127.0.0.1", port)
    True
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]
