"""When ranks are started again, when not, and what is written down of it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.base.errors import PlaitError, RankFailure
from plait.core.runs.attempts import Attempt, read_attempts, write_attempts
from plait.core.runs.lock import RunLock
from plait.launch import supervisor as module
from plait.launch.local import local_start
from plait.launch.supervisor import Crew, OneHost, Supervisor
from tests.support.ports import own_port

BARE = [sys.executable, "-I", "-c"]

# A rank: counts its starts, saves checkpoints as it is told, and ends as it is told. argv: folder, what it
# does at each start, divided by "|".
RANK = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
me = os.environ["RANK"]
starts = folder / ("starts" + me)
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
orders = sys.argv[2].split("|")
def save(step):
    (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
def say(text, status):
    print(text, file=sys.stderr, flush=True)
    sys.exit(status)
def die():
    os.kill(os.getpid(), 9)
exec(orders[min(number, len(orders) - 1)])
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT", 0.05)


def supervisor(
    folder: Path,
    orders: str,
    *,
    world: int = 1,
    restarts: int = 3,
    mend: Callable[[RankFailure], str] | None = None,
    lock: RunLock | None = None,
) -> Supervisor:
    class Fleet(OneHost):
        def mend(self, failure: RankFailure) -> str:
            return mend(failure) if mend else ""

    def crew() -> Crew:
        argv = [*BARE, RANK, str(folder), orders]
        return Crew(start=local_start(argv, world, own_port()), world=world, hosts=("here",), suspicion=lambda: None)

    folder.mkdir(exist_ok=True)
    return Supervisor(Fleet(crew), folder, folder / "logs", timeout=60, restarts=restarts, lock=lock)


def outcomes(folder: Path) -> list[str]:
    return [one.outcome for one in read_attempts(folder)]


def test_a_rank_that_was_killed_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervisor(tmp_path, "die()|pass").run() == 0
    first, second = read_attempts(tmp_path)
    assert (first.outcome, first.cause, first.ranks, first.world) == ("failed", "killed", (0,), 1)
    assert (second.outcome, second.attempt, second.hosts) == ("finished", 2, ("here",))
    assert first.detection_seconds is not None
    assert second.wait_seconds is not None
    assert first.ended is not None
    assert second.started >= first.ended >= first.started
    said = capfd.readouterr().err
    assert "rank 0 was killed by SIGKILL" in said
    assert "starting again in 0 s from the beginning: 1 of 3 without a new checkpoint" in said


def test_its_log_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervisor(tmp_path, "say('one', 1)|say('two', 0)").run() == 0
    kept = tmp_path / "logs" / "attempt-1" / "rank-0.log"
    assert kept.read_text() == "one\n"
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "two\n"
    assert str(kept) in capfd.readouterr().err


def test_three_restarts_without_a_new_checkpoint_are_the_last(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"3 restarts in a row saved no new checkpoint.*run\.restarts.*SIGKILL"):
        supervisor(tmp_path, "die()").run()
    assert outcomes(tmp_path) == ["failed"] * 4


def test_a_new_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    orders = "die()|die()|save(4); die()|die()|pass"
    assert supervisor(tmp_path, orders, restarts=2).run() == 0
    assert outcomes(tmp_path) == ["failed"] * 4 + ["finished"]


def test_none_means_none(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"SIGKILL; the other ranks were ended. Its log: \S+$"):
        supervisor(tmp_path, "die()", restarts=0).run()
    assert outcomes(tmp_path) == ["failed"]


@pytest.mark.parametrize(
    ("orders", "status"), [("say('plait-error: no such key', 2)", 2), ("say('plait-error: loss is nan', 93)", 1)]
)
def test_mistakes_and_numbers_that_are_not_finite_end_the_run(tmp_path: Path, orders: str, status: int) -> None:
    with pytest.raises(PlaitError, match=r"no such key|loss is nan") as error:
        supervisor(tmp_path, orders).run()
    assert error.value.exit_status == status
    assert outcomes(tmp_path) == ["failed"]


def test_a_bug_is_met_twice_and_not_four_times(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"twice in the same way at the same step.*rank 0 ended"):
        supervisor(tmp_path, "raise ValueError('always')").run()
    assert outcomes(tmp_path) == ["failed"] * 2


def test_ranks_that_waited_in_vain_are_started_again(tmp_path: Path) -> None:
    assert supervisor(tmp_path, "say('plait-error: rank 0 has waited in vain', 1)|pass").run() == 0
    assert [one.cause for one in read_attempts(tmp_path)] == ["gave up", ""]


def test_ctrl_c_while_it_waits_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT", 3600.0)
    monkeypatch.setattr(module, "LONGEST_WAIT", 3600.0)

    def when_it_waits() -> None:
        while outcomes(tmp_path) != ["failed"] or not (tmp_path / "logs" / "attempt-1").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=when_it_waits, daemon=True).start()
    assert supervisor(tmp_path, "save(8); die()|pass").run() == 130
    assert outcomes(tmp_path) == ["failed"]
    assert "SIGINT: not started again; the same command goes on from the checkpoint of step 8" in capfd.readouterr().err


def test_it_waits_for_hosts_as_long_as_restarts_allow(tmp_path: Path) -> None:
    answers = iter([RankFailure("host1 cannot be reached"), RankFailure("host1 cannot be reached"), "host2 for host1"])

    def mend(failure: RankFailure) -> str:
        answer = next(answers)
        if isinstance(answer, RankFailure):
            raise answer
        return answer

    assert supervisor(tmp_path, "die()|pass", mend=mend).run() == 0
    assert [one.changed for one in read_attempts(tmp_path)] == ["", "host2 for host1"]

    def never(failure: RankFailure) -> str:
        raise RankFailure("host1 cannot be reached")

    with pytest.raises(RankFailure, match="host1 cannot be reached"):
        supervisor(tmp_path / "other", "die()|pass", mend=never).run()


def test_a_full_disk_on_which_ranks_cannot_be_started_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def on_a_disk(folder: Path, orders: str, full: int) -> Supervisor:
        made = supervisor(folder, orders)
        crew, times = made.fleet.crew, iter(range(100))

        def later() -> Crew:
            if 0 < next(times) <= full:  # the table of where ranks run cannot be written
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return crew()

        made.fleet.crew = later  # type: ignore[method-assign]
        return made

    assert on_a_disk(tmp_path / "a", "save(7); die()|pass", full=2).run() == 0
    assert outcomes(tmp_path / "a") == ["failed", "finished"]
    assert "starting again in 0 s from the checkpoint of step 7: 3 of 3" in capfd.readouterr().err
    with pytest.raises(RankFailure, match=r"given up \(run.restarts\): Ranks cannot be started: .*No space left"):
        on_a_disk(tmp_path / "b", "die()", full=99).run()


def test_why_a_rank_ends_is_told_though_its_log_cannot_be_written(tmp_path: Path) -> None:
    rank = """
from plait.core.runs.channel import Channel
from plait.core.base.env import take_launcher
from plait.core.base.errors import CheckpointError
from plait.train.machine.control import Control
from plait.train.machine.rank_process import print_to_nobody
import os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
print_to_nobody()
with Control(Channel.inherited(take_launcher())) as control:
    control.fails(CheckpointError("there is no room for the checkpoint of step 40"))
sys.exit(2)
"""
    start = local_start([sys.executable, "-c", rank], 2, own_port())
    crew = Crew(start=start, world=2, hosts=("here",), suspicion=lambda: None)
    with pytest.raises(PlaitError, match=r"^there is no room for the checkpoint of step 40$") as raised:
        Supervisor(OneHost(lambda: crew), tmp_path, tmp_path / "logs", timeout=60, restarts=3).run()
    assert raised.value.exit_status == 2


def test_a_folder_or_a_lock_that_is_gone_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(PlaitError), RunLock(folder) as lock:
        supervisor(folder, "(folder / 'lock.json').unlink(); die()", lock=lock).run()
    assert outcomes(folder) == ["failed"]
    with pytest.raises(RankFailure):
        supervisor(folder, "import shutil; shutil.rmtree(folder); die()").run()
    assert not folder.exists()


def test_the_history_goes_on_where_it_was(tmp_path: Path) -> None:
    write_attempts(tmp_path, [Attempt(attempt=6, started=1.0)])  # whose launcher was killed
    assert supervisor(tmp_path, "pass").run() == 0
    assert [(one.attempt, one.outcome) for one in read_attempts(tmp_path)] == [(6, "cut off"), (7, "finished")]


def test_logs_of_long_ago_are_removed(tmp_path: Path) -> None:
    orders = "|".join(
        ["save(1); die()", "save(2); die()", "save(3); die()", "save(4); die()", "save(5); die()", "pass"]
    )
    assert supervisor(tmp_path, orders).run() == 0
    assert sorted(path.name for path in (tmp_path / "logs").glob("attempt-*")) == [f"attempt-{n}" for n in (3, 4, 5)]
