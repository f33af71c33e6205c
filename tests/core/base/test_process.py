"""How processes of ours are started: nothing beside a job or in the working directory is
executed."""

from __future__ import annotations

import ast
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base import process
from plait.core.base.process import ProcessMemory, ProcessState, command_of, process_state

PACKAGE = Path(__file__).parents[3] / "plait"


@pytest.mark.system
def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    for name in ("json", "secrets", "torch"):
        (tmp_path / f"{name}.py").write_text("open('was imported', 'w'); raise SystemExit(7)\n")
    done = subprocess.run(command_of("plait.cli.main", "--version"), cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0 and not (tmp_path / "was imported").exists()


def test_modules_are_started_in_one_way() -> None:
    """Which keeps the working directory out: no other command says ``-m``."""
    places = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List)  # a command; srun has an option of that name, too
        for word in node.elts
        if isinstance(word, ast.Constant) and word.value == "-m"
    ]
    assert places == ["core/base/process.py"]
    assert command_of("plait.train.worker", "a") == [sys.executable, "-P", "-m", "plait.train.worker", "a"]


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /proc."""
    monkeypatch.setattr(process, "Path", lambda name: tmp_path / str(name).removeprefix("/proc/"))
    (tmp_path / "self").mkdir()
    (tmp_path / "7").mkdir()
    return tmp_path


def stat(letter: str, started: int, name: str = "a) b (c") -> str:
    """A line as Linux has it: a process may be called anything."""
    return f"7 ({name}) {letter} " + " ".join(str(field) for field in range(4, 22)) + f" {started} 23 24\n"


@pytest.mark.parametrize(
    ("letter", "stopped", "there"),
    [("R", False, True), ("S", False, True), ("T", True, True), ("t", True, True), ("Z", False, False),
     ("X", False, False)],
)  # fmt: skip
def test_a_process_is_told_by_its_number_and_when_it_began(proc: Path, letter: str, stopped: bool, there: bool) -> None:
    (proc / "7" / "stat").write_text(stat(letter, 5000))
    state = process.process_state(7)
    assert state == ProcessState(letter, 5000)
    assert state is not None and state.stopped == stopped
    assert process.process_since(7, 5000) == (state if there else None)
    assert process.process_since(7, 4999) is None, "another has its number now"


@pytest.mark.parametrize(
    ("letter", "group", "wchan", "file", "text", "found"),
    [
        ("D", "6:freezer:/a/b", "futex", "freezer/a/b/freezer.state", "FROZEN\n", "F"),
        ("D", "6:freezer:/a/b", "futex", "freezer/a/b/freezer.state", "THAWED\n", "D"),
        ("D", "5:memory:/a/b", "futex", "freezer/a/b/freezer.state", "FROZEN\n", "D"),
        ("S", "0::/a", "", "a/cgroup.events", "populated 1\nfrozen 1\n", "F"),
        ("S", "0::/a", "", "unified/a/cgroup.events", "populated 1\nfrozen 1\n", "F"),
        ("S", "0::/a", "", "a/cgroup.events", "populated 1\nfrozen 0\n", "S"),
        ("S", "0::/../a", "get_signal", "none", "", "F"),  # in a container, which sees no groups
        ("S", "0::/../a", "do_poll", "none", "", "S"),
        ("T", "0::/a", "", "a/cgroup.events", "frozen 1\n", "T"),
    ],
)
def test_a_process_is_frozen_with_its_control_group(
    proc: Path, monkeypatch: pytest.MonkeyPatch, letter: str, group: str, wchan: str, file: str, text: str, found: str
) -> None:
    (proc / "7" / "stat").write_text(stat(letter, 5000))
    (proc / "7" / "cgroup").write_text(f"9:cpu:/c\n{group}\n")
    (proc / "7" / "wchan").write_text(wchan)
    (proc / "groups" / file).parent.mkdir(parents=True)
    (proc / "groups" / file).write_text(text)
    monkeypatch.setattr(process, "GROUPS", proc / "groups")
    state = process.process_state(7)
    assert state is not None and state == ProcessState(found, 5000) and state.stopped == (found in "FT")


class Held:
    """A child that ends so many seconds after it was killed."""

    def __init__(self, pid: int, letter: str, after: float) -> None:
        self.pid, self.letter, self.after, self.killed = pid, letter, after, math.inf

    def poll(self) -> int | None:
        return -9 if process.time.monotonic() >= self.killed + self.after else None

    def kill(self) -> None:
        self.killed = process.time.monotonic()


@pytest.mark.parametrize(
    ("held", "left", "took"),
    [
        ([("S", 2.0), ("R", 5.0)], [], 5.0),
        ([("F", math.inf), ("S", 0.5)], [0], process.FROZEN),
        ([("F", math.inf), ("D", 3.0)], [0], 3.0),
        ([("D", math.inf)], [0], process.LETHAL),
        ([("Z", math.inf)], [], process.FROZEN),  # a debugger has it; it has ended
    ],
)
def test_children_are_waited_for_as_long_as_the_kernel_may_take_to_end_them(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[str, float]], left: list[int], took: float
) -> None:
    clock: Any = SimpleNamespace(now=100.0, monotonic=lambda: clock.now, sleep=lambda seconds: setattr(
        clock, "now", clock.now + seconds))  # fmt: skip
    monkeypatch.setattr(process, "time", clock)
    children = [Held(pid, *one) for pid, one in enumerate(held, start=1)]
    monkeypatch.setattr(process, "process_state", lambda pid: ProcessState(children[pid - 1].letter, 0))
    assert process.end_all(children) == [children[at] for at in left]
    assert clock.now - 100.0 == pytest.approx(took, abs=0.02)


def test_without_a_proc_it_is_known_whether_a_process_is_there(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        assert number == 0, "nobody is to be killed"
        if pid != 8:
            raise {9: PermissionError, 10: ProcessLookupError, 11: OverflowError}[pid]

    monkeypatch.setattr(os, "kill", kill)
    there = ProcessState("S", 0)
    assert [process.process_state(pid) for pid in (8, 9, 10, 11, 0, -8)] == [there, there, None, None, None, None]


@pytest.mark.parametrize(
    ("status", "told"),
    [(0, "ended with status 0"), (1, "ended with status 1"), (-15, "was killed by SIGTERM"),
     (-signal.SIGRTMIN - 1, f"was killed by signal {signal.SIGRTMIN + 1}")],
)  # fmt: skip
def test_how_a_process_ended(status: int, told: str) -> None:
    assert process.how_it_ended(status) == told


def test_memory_of_a_process(proc: Path) -> None:
    assert process.process_memory(7) is None
    (proc / "7" / "status").write_text("Name:\ta:b\nno colon\nVmHWM:\t  20 kB\nVmRSS:\t  3 kB\n")
    (proc / "self" / "status").write_text("VmHWM:\t  2 kB\nVmRSS:\t  1 kB\n")
    assert process.process_memory(7) == ProcessMemory(3 << 10, 20 << 10)
    assert process.process_memory() == ProcessMemory(1 << 10, 2 << 10)
    for text in ("VmRSS:\t  3 kB\n", "VmHWM:\nVmRSS:\n", "VmHWM: a kB\nVmRSS: b kB\n"):
        (proc / "7" / "status").write_text(text)
        assert process.process_memory(7) is None


def test_a_peak_is_forgotten_where_linux_can_do_that(proc: Path) -> None:
    assert process.forget_peak()
    assert (proc / "self" / "clear_refs").read_text() == "5"  # proc(5): the peak of resident memory
    (proc / "self" / "clear_refs").unlink()
    (proc / "self").rmdir()
    assert not process.forget_peak()


def test_seconds_of_a_main_thread(proc: Path) -> None:
    assert process.main_thread_seconds(7) == 0.0
    (proc / "7" / "task" / "7").mkdir(parents=True)
    (proc / "7" / "task" / "7" / "schedstat").write_text("2500000000 7 8\n")
    assert process.main_thread_seconds(7) == 2.5
    (proc / "7" / "task" / "7" / "schedstat").write_text("\n")
    assert process.main_thread_seconds(7) == 0.0


def test_where_numbers_of_processes_mean_nothing_the_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc(path: str) -> str:
        raise OSError

    here = process.pid_namespace_key()
    assert here == process.pid_namespace_key() != socket.gethostname()
    assert here.startswith(process.boot_id())
    monkeypatch.setattr(os, "readlink", no_proc)
    assert process.pid_namespace_key() == socket.gethostname()


def test_what_linux_is_asked_for_is_asked_for_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[int, int | bytes]]()

    class Library:
        def prctl(self, option: int, value: int | bytes) -> None:
            told.append((option, value))

    monkeypatch.setattr("ctypes.CDLL", lambda _: Library())
    process.die_with_parent()
    process.name_process("plait")
    with process.adopting():
        assert told[-1] == (36, 1)
    assert told == [(1, signal.SIGKILL), (15, b"plait"), (36, 1), (36, 0)]  # prctl(2)
    with pytest.raises(ValueError, match="ends"), process.adopting():
        raise ValueError("ends")
    assert told[-1] == (36, 0)
    assert process.usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    process.die_with_parent()
    assert len(told) == 6
    assert process.usable_cores() == 1
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert process.usable_cores() == 12


def test_the_first_process_is_one() -> None:
    assert process_state(1) is not None
    assert process_state(0) is process_state(-1) is None
