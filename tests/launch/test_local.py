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

from plait.core.base.errors import PlaitError, RankFailure, RunLost
from plait.core.base.process import process_since, process_state
from plait.core.runs.evidence import Verdict
from plait.core.runs.lock import NAME, RunLock
from plait.core.runs.parts import ask
from plait.launch import watch
from plait.launch.hang import Suspicion
from plait.launch.local import local_start, run_ranks
from plait.launch.watch import RunGuard
from tests.support.lab import children, wait_until
from tests.support.ports import own_port

# Rank 1 dies; rank 0, which needs it, of that, once the launcher has taken note of the first.
DIES = """
import os, pathlib, signal, sys, time
dying = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    dying.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
while not (dying.exists() and dying.read_text()):
    time.sleep(0.01)
while os.path.exists("/proc/" + dying.read_text()):
    time.sleep(0.01)
os.abort()
"""
BARE = [sys.executable, "-I", "-c"]


def run(code: str, world: int, folder: Path, *, timeout: float = 600.0, lock: RunLock | None = None) -> int:
    start = local_start([*BARE, code, str(folder)], world, own_port())
    return run_ranks(start, world, folder / "logs", guard=RunGuard(lock=lock), timeout=timeout)


def test_a_rank_that_dies_ends_one_that_waits_for_ever(tmp_path: Path) -> None:
    waits = "import os, sys, time; os.environ['RANK'] == '2' and sys.exit(7); time.sleep(600)"
    with pytest.raises(RankFailure, match="rank 2 ended with status 7"):
        run(waits, 3, tmp_path)


def test_the_first_of_two_that_were_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
        run(DIES.replace("sys.argv[1]", "sys.argv[1] + '/dying'"), 2, tmp_path)


def test_a_run_that_ends_well_was_suspected_for_nothing(tmp_path: Path) -> None:
    """A rank that does what others wait for once somebody is suspected, who asked what it is at."""
    code = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1], 'hang.json').exists(): time.sleep(0.01)"
    start = local_start([*BARE, code, str(tmp_path)], 1, own_port())
    said: list[object] = []

    def localise(evidence: object) -> Verdict:
        said.append(evidence)
        return Verdict(cause="unknown", why="It.", ranks=())

    suspicion = Suspicion(tmp_path, 1, deadline=0.2, localise=localise)
    ask(tmp_path)
    assert run_ranks(start, 1, tmp_path / "logs", guard=RunGuard(suspicion=suspicion), timeout=600.0) == 0
    assert said
    assert not (tmp_path / "hang.json").exists()


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

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

run_and_end(main)
"""
TRAINS = "control.save_from_now_on(); control.doing('step 1', step=0)"
UNTIL_TOLD = """
        while not control:
            time.sleep(0.01)
        (folder / ("saved" + me)).touch()
        return control.status
"""
NEVER_ENDS = """
        while not control:
            time.sleep(0.01)
        (folder / ("asked" + me)).touch()
        time.sleep(600)
        (folder / ("ended" + me)).touch()
"""
ALL_READY = """
        while not all((folder / f"ready{n}").exists() for n in range(3)):
            time.sleep(0.01)
        """


def rank(then: str, begin: str = "pass") -> str:
    return LISTENS.format(root=str(Path(__file__).parents[2]), begin=begin, then=then)


def pending(pid: int) -> int:
    """Signals that have been sent to a process and have not come to anything yet, as a mask; those that it
    ignores the kernel throws away at once."""
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


def process_of(rank: int) -> int:
    """The process of a rank that this process has started."""
    wanted = f"RANK={rank}".encode()
    return next(pid for pid in children() if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_ranks_that_train_are_told_and_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, status: int
) -> None:
    when_ready(tmp_path, 2, lambda: os.kill(os.getpid(), number))
    assert run(rank(UNTIL_TOLD, TRAINS), 2, tmp_path) == status
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert f"{number.name}: stopping after this step" in capfd.readouterr().err


@pytest.mark.parametrize(
    "stuck",
    [
        pytest.param("time.sleep(600)", id="asleep"),
        pytest.param("__import__('threading').Event().wait()", id="waiting"),
        pytest.param("pause = __import__('ctypes').CDLL(None).pause; [pause() for _ in range(99)]",
                     id="in C"),
    ],
)  # fmt: skip
def test_before_training_there_is_nothing_to_save_and_ranks_end(tmp_path: Path, stuck: str) -> None:
    when_ready(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(rank(stuck), 2, tmp_path) == 143


def test_a_signal_to_one_rank_stops_all_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    when_ready(tmp_path, 2, lambda: os.kill(process_of(1), signal.SIGTERM))
    assert run(rank(UNTIL_TOLD, TRAINS), 2, tmp_path) == 143
    assert (tmp_path / "saved0").exists()
    assert "rank 1 got SIGTERM" in capfd.readouterr().err


def test_who_was_asked_to_stop_and_finished_anyway_has_finished(tmp_path: Path) -> None:
    when_ready(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(rank(UNTIL_TOLD.replace("return control.status", "return 0"), TRAINS), 2, tmp_path) == 0


def test_a_rank_that_fails_to_save_is_named(tmp_path: Path) -> None:
    when_ready(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RankFailure, match="rank 1 ended with status 1"):
        run(rank(UNTIL_TOLD.replace("return control.status", "return 1 if me == '1' else 143"), TRAINS), 2, tmp_path)


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    def thrice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: all((tmp_path / f"asked{number}").exists() for number in range(2)), "nobody was asked")
        os.kill(os.getpid(), signal.SIGTERM)  # once more is no other wish
        os.kill(os.getpid(), signal.SIGINT)

    when_ready(tmp_path, 2, thrice)
    assert run(rank(NEVER_ENDS, TRAINS), 2, tmp_path) == 143
    assert not list(tmp_path.glob("ended*"))


def test_signals_that_are_ignored_already_stay_so(tmp_path: Path) -> None:
    """As in a script's background job, and under nohup; SIGTERM is heard there all the same."""
    launcher = (
        "import sys; from pathlib import Path; from plait.launch.local import local_start, run_ranks; "
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
    """Such as those of benchmarks, which know of no line to a launcher, whatever they do of a signal."""
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


@pytest.mark.parametrize("then", ["time.sleep(600)", "work(600)"], ids=["the others wait", "the others work"])
def test_a_stopped_rank_is_named_and_not_those_that_wait_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], then: str
) -> None:
    when_ready(tmp_path, 3, lambda: os.kill(process_of(1), signal.SIGSTOP))
    with pytest.raises(RankFailure, match=r"rank 1 has not answered for \d+ s \(step 1; its process is stopped"):
        run(rank(then, TRAINS), 3, tmp_path, timeout=5.0)
    assert "after 5 s the run is ended (run.timeout)" in capfd.readouterr().err  # people are warned before


def test_of_ranks_that_wait_the_one_behind_is_named(tmp_path: Path) -> None:
    then = ALL_READY + "me == '2' or control.doing('step 2', step=1); time.sleep(600)"
    with pytest.raises(RankFailure, match=r"rank 2 has not answered for \d+ s \(step 1\)"):
        run(rank(then, TRAINS), 3, tmp_path, timeout=4.0)


def test_a_long_step_is_no_silence_and_neither_is_a_long_save(tmp_path: Path) -> None:
    then = "work(4) if me == '0' else (control.doing('saving', patient=True), time.sleep(4))"
    assert run(rank(then, TRAINS), 2, tmp_path, timeout=3.0) == 0


def test_a_message_of_a_rank_is_passed_on_with_its_status(tmp_path: Path) -> None:
    says = "import sys, time; print('plait-error: nothing fits', file=sys.stderr); sys.exit(2)"
    with pytest.raises(PlaitError, match="nothing fits") as error:
        run(says, 2, tmp_path)
    assert error.value.exit_status == 2


def test_a_lost_lock_ends_the_run(tmp_path: Path) -> None:
    def run_locked() -> None:
        with RunLock(tmp_path / "run") as lock:
            when_ready(tmp_path, 1, (tmp_path / "run" / NAME).unlink)
            run(rank("time.sleep(600)", TRAINS), 1, tmp_path, lock=lock)

    with pytest.raises(RunLost, match=NAME):
        run_locked()
