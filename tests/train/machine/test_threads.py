"""Cores and priorities of a rank's threads: asked of a kernel that is made up, and of the real one
in a process of its own, since they last as long as the process."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.train.machine import threads
from plait.train.machine.gpu import gpu_address
from plait.train.machine.threads import pin_near_device

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are placed on Linux only")

# Starts a thread that waits, as gloo does, then places and prioritises.
PROGRAM = """
import os, sys, threading
from plait.train.machine import threads
from plait.train.machine.gpu import gpu_address
from plait.train.machine.threads import pin_near_device
before = threads.running()
event = threading.Event()
other = threading.Thread(target=event.wait)
other.start()
{body}
event.set()
"""


def run(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@pytest.mark.system
def test_ranks_that_fill_the_machine_get_disjoint_cores() -> None:
    count = len(cores())
    taken = [
        run(f"print(sorted(threads.pin_cores({local_rank}, {count}, 1)), sorted(os.sched_getaffinity(0)))")
        for local_rank in range(count)
    ]
    assert taken == [f"[{core}] [{core}]" for core in cores()]


@pytest.mark.system
def test_threads_that_wake_up_go_first() -> None:
    body = """
threads.prioritize(threads.running() - before)
print(os.sched_getscheduler(other.native_id), os.sched_getscheduler(0))
"""
    policy, own = map(int, run(body).split())
    assert own == os.SCHED_OTHER
    assert policy in (os.SCHED_RR, os.SCHED_OTHER)


class Kernel:
    """What is asked of it. cores: that this process may use; policies: of threads, else the usual
    one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: set[int] | None = None) -> None:
        self.cores, self.policies, self.may = cores or set(), dict[int, int](), True
        self.placed, self.priorities = list[tuple[int, set[int]]](), list[tuple[int, int, int]]()
        self.slices, self.machine = list[tuple[int, int, tuple[int, ...], int]](), "x86_64"
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: self.cores)
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mine: self.placed.append((pid, mine)))
        monkeypatch.setattr(os, "sched_getscheduler", lambda thread: self.policies.get(thread, os.SCHED_OTHER))
        monkeypatch.setattr(os, "sched_setscheduler", self._policy)
        monkeypatch.setattr(os, "getpriority", lambda which, thread: 3 if which == os.PRIO_PROCESS else 99)
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=self.machine))
        monkeypatch.setattr(threading, "get_native_id", lambda: 77)
        monkeypatch.setattr(threads.ctypes, "CDLL", lambda name: SimpleNamespace(syscall=self._syscall))

    def _policy(self, thread: int, policy: int, parameters: os.sched_param) -> None:
        if not self.may:
            raise PermissionError
        self.priorities.append((thread, policy, parameters.sched_priority))

    def _syscall(self, number: int, thread: int, attributes: Any, flags: int) -> None:
        self.slices.append((number, thread, struct.unpack("IIQiIQQQ", attributes.raw), flags))


@pytest.mark.parametrize(
    ("local_rank", "ranks", "each", "mine"),
    [
        (0, 4, 2, {1, 2}),
        (3, 4, 2, {7, 9}),
        (1, 2, 4, {5, 6, 7, 9}),
        (0, 5, 1, {1}),
        (0, 4, 1, None),  # there is room for a second such set
        (0, 9, 1, None),  # more threads than cores
        (0, 3, 3, None),
    ],
)
def test_each_rank_takes_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, ranks: int, each: int, mine: set[int] | None
) -> None:
    kernel = Kernel(monkeypatch, {1, 2, 3, 4, 5, 6, 7, 9})
    assert threads.pin_cores(local_rank, ranks, each) == (mine or set())
    assert kernel.placed == ([(0, mine)] if mine else [])


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, {0, 1})
    monkeypatch.setattr(sys, "platform", "darwin")
    assert threads.pin_cores(0, 2, 1) == set() and threads.running() == set()
    assert not kernel.placed


def test_threads_of_this_process_are_told_by_their_numbers() -> None:
    assert threading.get_native_id() in threads.running()


def test_threads_are_given_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    threads.prioritize({5, 6})
    assert kernel.priorities == [(5, os.SCHED_RR, 1), (6, os.SCHED_RR, 1)]
    threads.prioritize(set())
    assert len(kernel.priorities) == 2 and not kernel.slices


def test_without_the_right_to_it_slices_are_short_and_the_own_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    kernel.may = False
    threads.prioritize({5})
    short, long = ((48, os.SCHED_OTHER, 0, 3, 0, one, 0, 0) for one in (threads.SHORT, threads.LONG))
    assert kernel.slices == [(314, 5, short, 0), (314, 77, long, 0)]
    kernel.machine = "riscv64"
    threads.prioritize({5})
    assert len(kernel.slices) == 2


def test_no_thread_is_touched_where_one_has_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    kernel.policies = {6: os.SCHED_BATCH}
    threads.prioritize({5, 6})
    assert not kernel.priorities and not kernel.slices


@pytest.mark.parametrize(
    ("listed", "allowed", "taken"),
    [("0-3,8\n", {2, 3, 4, 8}, {2, 3, 8}), ("0-3\n", {4, 5}, set[int]()), ("", {0, 1}, set[int]()),
     (None, {0, 1}, set[int]()), ("a-b", {0}, set[int]())],
)  # fmt: skip
def test_a_rank_stays_near_its_gpu_as_far_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, allowed: set[int], taken: set[int]
) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    if listed is not None:
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(listed)
    set_to = list[set[int]]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cores: set_to.append(cores))
    assert pin_near_device("0000:3b:00.0", tmp_path) == taken
    assert set_to == ([taken] if taken else [])


def test_a_gpu_is_found_where_linux_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xB9, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: one)
    assert gpu_address(0) == "0001:b9:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace())
    assert gpu_address(0) == ""
