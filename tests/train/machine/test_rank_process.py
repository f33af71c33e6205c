"""A rank ends with the status it means to, whatever its threads are doing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.train.machine.rank_process import ignore_print_errors, run_and_end

# The thread waits in C++ without the interpreter's lock and wants it back while the process ends, which takes
# until the object is gone.
STUCK = """
import threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from plait.train.machine.rank_process import run_and_end

class Slow:
    def __del__(self, sleep=time.sleep):  # names are gone by then
        sleep(1.0)

slow = Slow()
store = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=0.5))

def main():
    threading.Thread(target=store.get, args=("nobody sets it",), daemon=True).start()
    time.sleep(0.1)
    print("at the end")
    return 3

run_and_end(main)  # by sys.exit it dies of SIGABRT (CPython 3.11)
"""


def ran(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.system
def test_a_thread_that_wants_the_lock_does_not_change_how_it_ends() -> None:
    done = ran(STUCK)
    assert (done.returncode, done.stdout) == (3, "at the end\n")


@pytest.mark.system
def test_no_status_is_0_and_an_exception_is_1_with_its_traceback() -> None:
    assert ran("from plait.train.machine.rank_process import run_and_end; run_and_end(lambda: None)").returncode == 0
    done = ran("from plait.train.machine.rank_process import run_and_end; run_and_end(lambda: 1 // 0)")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


class Ended(BaseException):
    """The process, with this status."""


@pytest.mark.parametrize(
    ("ends", "status", "raised"),
    [
        (lambda: None, 0, False),
        (lambda: 0, 0, False),
        (lambda: 7, 7, False),
        (lambda: sys.exit(143), 143, False),
        (lambda: sys.exit(0), 0, False),
        (lambda: sys.exit("a text"), 1, False),
        (lambda: 1 // 0, 1, True),
    ],
)
def test_the_process_ends_with_mains_status_and_its_output_written_out(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: Callable[[], int | None],
    status: int,
    raised: bool,
) -> None:
    flushed = list[str]()

    def ended(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", ended)
    real = sys.stderr.flush
    monkeypatch.setattr(sys.stdout, "flush", lambda: flushed.append("out"))
    monkeypatch.setattr(sys.stderr, "flush", lambda: flushed.append("err") or real())
    with pytest.raises(Ended) as end:
        run_and_end(ends)
    assert end.value.args == (status,)
    assert flushed[-2:] == ["out", "err"]
    assert ("ZeroDivisionError" in capsys.readouterr().err) == raised


def test_a_process_ends_also_where_nothing_can_be_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError

    def ended(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(sys.stdout, "flush", broken)
    with pytest.raises(Ended):
        run_and_end(lambda: 3)


def test_what_nobody_can_read_is_lost_and_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reads, writes = os.pipe()
    path = tmp_path / "log"
    monkeypatch.setattr("plait.train.machine.rank_process.open_standard_streams", lambda: None)
    with open(writes, "w") as gone, path.open("w", encoding="ascii") as log:
        monkeypatch.setattr(sys, "stdout", gone)
        monkeypatch.setattr(sys, "stderr", log)
        log.write("before ")
        os.close(reads)
        ignore_print_errors()
        print("nobody reads this")
        sys.stdout.flush()
        print("a line, é", file=sys.stderr)
        assert path.read_text() == "before a line, ?\n"  # at once, line by line
        assert sys.stderr.fileno() == log.fileno()
        monkeypatch.undo()


def test_streams_stay_open_when_their_wrapper_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr("plait.train.machine.rank_process.open_standard_streams", lambda: None)
        monkeypatch.setattr(sys, "stdout", log)
        monkeypatch.setattr(sys, "stderr", log)
        ignore_print_errors()
        sys.stdout.close()
        os.fstat(log.fileno())
        monkeypatch.undo()
