"""Whose fault it was, when ranks fail; who is told to stop, and how that is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plait.core.base.errors import PlaitError
from plait.core.base.process import process_since, process_state
from plait.core.runs.attempts import read_attempts
from plait.core.runs.lock import RunLock
from plait.launch import watch
from plait.launch.local import supervisor as supervisor_of
from plait.launch.local.local import RankStarter, local_start, run_ranks
from plait.launch.local.supervisor import AttemptRanks, SingleHost, Supervisor
from plait.launch.watch import RunGuard
from tests.support.lab import wait_until
from tests.support.ports import own_port

BARE = [sys.executable, "-I", "-c"]


def run(code: str, world: int, folder: Path, *, timeout: float = 600.0, lock: RunLock | None = None) -> int:
    start = local_start([*BARE, code, str(folder)], world, own_port())
    return run_ranks(start, world, folder / "logs", guard=RunGuard(lock=lock), timeout=timeout)


# A rank as Plait's own: it listens, says what it does, and either trains or does not.
LISTENS = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from plait.core.runs.channel import Channel
from plait.core.base.env import take_launcher
from plait.train.machine.control import Control
from plait.train.machine.rank_process import run_and_end

me, folder = os.environ["RANK"], Path(sys.argv[1])

def main():
    with Control(Channel.inherited(take_launcher())) as control:
        {begin}
        (folder / ("ready" + me)).touch()
        {then}

run_and_end(main)
"""
TRAINS = "control.save_from_now_on(); control.set_activity('step 1', step=0)"
UNTIL_TOLD = """
        while not control:
            time.sleep(0.01)
        (folder / ("saved" + me)).touch()
        return control.status
"""


def rank(then: str, begin: str = "pass") -> str:
    return LISTENS.format(root=str(Path(__file__).parents[2]), begin=begin, then=then)


def pending(pid: int) -> int:
    """Signals that have been sent to a process and have not come to anything yet, as a mask; those
    that it ignores the kernel throws away at once."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))


def started_at(pid: int) -> int:
    state = process_state(pid)
    return state.started if state else 0


def when_ready(folder: Path, world: int, act: object) -> threading.Thread:
    """Calls ``act`` when all ranks are up."""

    def wait() -> None:
        while not all((folder / f"ready{number}").exists() for number in range(world)):
            time.sleep(0.01)
        assert callable(act)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_signals_that_are_ignored_already_stay_so(tmp_path: Path) -> None:
    """As in a script's background job, and under nohup; SIGTERM is heard there all the same."""
    launcher = (
        "import sys; from pathlib import Path; from plait.launch.local.local import local_start, run_ranks; "
        "folder = Path(sys.argv[1]); "
        f"sys.exit(run_ranks(local_start([*{BARE!r}, (folder / 'rank.py').read_text(), str(folder)], 2, 1), 2, "
        "folder / 'logs', timeout=600))"
    )
    (tmp_path / "rank.py").write_text(rank(UNTIL_TOLD, TRAINS))
    process = subprocess.Popen(
        ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh", sys.executable, "-c", launcher, str(tmp_path)]
    )
    when_ready(tmp_path, 2, lambda: None).join(60)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    wait_until(lambda: not pending(process.pid), "signals are left to be looked at")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert (tmp_path / "saved0").exists()


def test_ranks_that_do_not_listen_are_ended_with_what_they_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of benchmarks, which know of no line to a launcher, whatever they do of a
    signal."""
    monkeypatch.setattr(watch, "GRACE", 0.5)
    code = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(sys.argv[1], 'child' + os.environ['RANK']).write_text(str(child.pid))\n"
        "pathlib.Path(sys.argv[1], 'ready' + os.environ['RANK']).touch()\n"
        "time.sleep(600)"
    )
    when_ready(tmp_path, 2, lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)])
    assert run(code, 2, tmp_path) == 143
    for number in range(2):
        pid = int((tmp_path / f"child{number}").read_text())
        wait_until(lambda pid=pid: process_since(pid, started_at(pid)) is None, "what a rank has started goes on")


# ---- started again ----


def supervisor(folder: Path, start: RankStarter) -> Supervisor:
    crew = AttemptRanks(start=start, world=1, hosts=("here",), suspicion=lambda: None)
    return Supervisor(SingleHost(lambda: crew), folder, folder / "logs", timeout=60, restarts=3)


def test_a_rank_that_was_killed_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_of, "FIRST_WAIT", 0.05)
    code = (
        "import os, sys; from pathlib import Path; file = Path(sys.argv[1]) / 'file'; again = file.exists(); "
        "file.touch(); print('two' if again else 'one', file=sys.stderr, flush=True); again or os.kill(os.getpid(), 9)"
    )
    assert supervisor(tmp_path, local_start([*BARE, code, str(tmp_path)], 1, own_port())).run() == 0
    first, second = read_attempts(tmp_path)
    assert (first.outcome, first.cause, first.ranks, first.world) == ("failed", "killed", (0,), 1)
    assert (second.outcome, second.attempt, second.hosts) == ("finished", 2, ("here",))
    assert first.detection_seconds is not None and second.wait_seconds is not None and first.ended is not None
    assert second.started >= first.ended >= first.started
    said, kept = capfd.readouterr().err, tmp_path / "logs" / "attempt-1" / "rank-0.log"
    assert "rank 0 was killed by SIGKILL" in said and str(kept) in said
    assert kept.read_text() == "one\n" and (tmp_path / "logs" / "rank-0.log").read_text() == "two\n"


def test_why_a_rank_ends_is_told_though_its_log_cannot_be_written(tmp_path: Path) -> None:
    rank = """
from plait.core.runs.channel import Channel
from plait.core.base.env import take_launcher
from plait.core.base.errors import CheckpointError
from plait.train.machine.control import Control
from plait.train.machine.rank_process import ignore_print_errors
import os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
ignore_print_errors()
with Control(Channel.inherited(take_launcher())) as control:
    control.report_failure(CheckpointError("there is no room for the checkpoint of step 40"))
sys.exit(2)
"""
    with pytest.raises(PlaitError, match=r"^there is no room for the checkpoint of step 40$") as raised:
        supervisor(tmp_path, local_start([sys.executable, "-c", rank], 1, own_port())).run()
    assert raised.value.exit_status == 2
