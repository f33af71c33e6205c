"""Work shared with a copy of the process: all of it done, whatever becomes of the copy."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.plan.search import search as forked
from plait.plan.search.search import can_fork, map_with_fork

LONG = 120.0
"""Seconds that a copy takes if nobody ends it."""


def in_the_copy(do: Callable[[], object]) -> Callable[[int], list[int]]:
    """Work on a number: it, and who did it. Neither process does its first before the other has
    one; the copy does something then."""
    here, both, met = os.getpid(), multiprocessing.get_context("fork").Barrier(2), list[int]()

    def work(piece: int) -> list[int]:
        if os.getpid() not in met:
            met.append(os.getpid())
            both.wait(LONG)
        if os.getpid() != here:
            do()
        return [piece, os.getpid()]

    return work


@pytest.fixture
def _possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many processors there are, and threads, as those of pytest's workers."""
    monkeypatch.setattr(forked, "can_fork", lambda: True)


@pytest.mark.system
@pytest.mark.usefixtures("_possible")
def test_both_do_a_part_and_nothing_is_lost() -> None:
    found = map_with_fork(in_the_copy(lambda: None), range(6))
    assert [piece for piece, _ in found] == list(range(6))
    assert len({process for _, process in found}) == 2


@pytest.mark.system
@pytest.mark.usefixtures("_possible")
@pytest.mark.parametrize("what", ["is killed", "raises", "cannot say what it found"])
def test_what_the_copy_does_not_hand_back_is_done_here(what: str) -> None:
    def fail() -> None:
        if what == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raises":
            raise RuntimeError("not here")

    work, told = in_the_copy(fail), what == "cannot say what it found"
    found = map_with_fork(
        lambda piece: (work(piece), threading.Lock() if told else None), range(6)
    )  # no lock can be sent
    assert [one for one, _ in found] == [[piece, os.getpid()] for piece in range(6)]


@pytest.mark.system
@pytest.mark.usefixtures("_possible")
def test_what_is_raised_here_is_raised_and_the_copy_is_gone() -> None:
    here = os.getpid()

    def work(piece: int) -> int:
        if os.getpid() == here:
            raise KeyboardInterrupt
        time.sleep(LONG)
        return piece

    with pytest.raises(KeyboardInterrupt):
        map_with_fork(work, range(4))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("threads", "processors", "platform", "is_copy", "may"),
    [
        (1, 2, "linux", False, True),
        (1, 1, "linux", False, False),
        (2, 2, "linux", False, False),
        (1, 2, "darwin", False, False),
        (1, 2, "linux", True, False),
    ],
)
def test_when_a_copy_is_worth_it(
    monkeypatch: pytest.MonkeyPatch, threads: int, processors: int, platform: str, is_copy: bool, may: bool
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if is_copy else None)
    assert can_fork() is may  # imported by name: unit tests find the module's replaced


@pytest.mark.system
@pytest.mark.usefixtures("_possible")
def test_where_no_process_can_be_made_all_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    assert map_with_fork(lambda piece: 2 * piece, range(4)) == [0, 2, 4, 6]


PROGRAM = """
import os, sys, time
from plait.plan.search.search import map_with_fork
os.sched_getaffinity = lambda _: {0, 1}
def work(piece):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: both write to one pipe
    time.sleep(LONG)
try:
    map_with_fork(work, range(2))
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""


@pytest.mark.system
def test_ctrl_c_ends_both_and_prints_nothing(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.replace("LONG", str(LONG)))
    process = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout
    try:
        both = {int(process.stdout.readline()) for _ in range(2)}
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, errors = process.communicate(timeout=LONG / 2)
    finally:
        process.kill()
    assert len(both) == 2
    assert (out, errors, process.returncode) == ("interrupted\n", "", 130)
    for each in both:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)
