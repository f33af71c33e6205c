"""A rank ends with the status it means to, whatever its threads are doing."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
