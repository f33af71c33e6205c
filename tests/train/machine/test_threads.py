"""Cores and priorities of a rank's threads; each case in a process of its own, since they last as long as the
process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are placed on Linux only")

# Starts a thread that waits, as gloo does, then places and prioritises.
PROGRAM = """
import os, sys, threading
from plait.train.machine import threads
before = threads.running()
event = threading.Event()
other = threading.Thread(target=event.wait)
other.start()
{body}
event.set()
"""


def run(body: str, prefix: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PROGRAM.format(body=body)],
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
        run(f"print(sorted(threads.take_cores({place}, {count}, 1)), sorted(os.sched_getaffinity(0)))")
        for place in range(count)
    ]
    assert taken == [f"[{core}] [{core}]" for core in cores()]


@pytest.mark.system
@pytest.mark.parametrize("ranks, threads", [(10_000, 1), (1, 10_000)])
def test_more_threads_than_cores_are_left_to_the_kernel(ranks: int, threads: int) -> None:
    assert (
        run(f"print(threads.take_cores(0, {ranks}, {threads}), len(os.sched_getaffinity(0)))")
        == f"set() {len(cores())}"
    )


@pytest.mark.system
@pytest.mark.skipif(len(cores()) < 2, reason="needs two cores")
def test_a_second_set_of_ranks_would_find_room() -> None:
    # A rank that leaves half of the machine or more free may not be alone there: another job would choose the
    # same cores.
    assert run("print(threads.take_cores(0, 1, 1))") == "set()"


@pytest.mark.system
def test_threads_that_wake_up_go_first() -> None:
    body = """
threads.serve_first(threads.running() - before)
print(os.sched_getscheduler(other.native_id), os.sched_getscheduler(0))
"""
    policy, own = map(int, run(body).split())
    assert own == os.SCHED_OTHER
    assert policy in (os.SCHED_RR, os.SCHED_OTHER)


@pytest.mark.system
def test_without_the_right_to_real_time_slices_are_set() -> None:
    body = """
def refuse(*_):
    raise PermissionError
os.sched_setscheduler = refuse
calls = []
threads._set_slice = lambda thread, seconds: calls.append((thread == other.native_id, seconds))
threads.serve_first(threads.running() - before)
print(calls == [(True, threads.SHORT), (False, threads.LONG)])
"""
    assert run(body) == "True"


@pytest.mark.system
def test_a_policy_that_somebody_chose_is_kept() -> None:
    body = """
threads.serve_first(threads.running() - before)
print(os.sched_getscheduler(other.native_id) == os.SCHED_BATCH)
"""
    assert run(body, ("chrt", "--batch", "0")) == "True"
