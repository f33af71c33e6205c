"""A supervisor's waits and ends, with ranks that end as the test says and a clock that it sets."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plait.core.base.errors import LaunchError, RankFailure, RunLost
from plait.core.runs.attempts import Attempt, read_attempts, write_attempts
from plait.core.runs.host_memory import close_memory, memory_of
from plait.core.runs.lock import RunLock
from plait.core.runs.progress import Progress
from plait.launch.local import supervisor as module
from plait.launch.local.supervisor import AttemptRanks, SingleHost, Supervisor
from plait.launch.watch import RunGuard

TIER = "unit"


class Runs:
    """ends: what each attempt does, with the progress at hand; waits: seconds after each of
    them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, restarts: int = 3, *, locked: bool = True
    ) -> None:
        self.folder, self.ends = folder, list[Callable[[Progress], int]]()
        self.now, self.said, self.signals, self.checked = 1000.0, list[str](), deque[int](), 0
        self.mends: Callable[[RankFailure], str] = lambda failure: ""
        self.beside, self.given = list[str](), list[dict[str, Any]]()
        self.waits = list[float]()
        self.during: Callable[[], object] = lambda: None

        @contextmanager
        def catching() -> Iterator[deque[int]]:
            yield self.signals

        @contextmanager
        def beside() -> Iterator[None]:
            self.beside.append("on")
            yield
            self.beside.append("off")

        def run_ranks(start: object, world: int, logs: Path, *, guard: RunGuard, **options: Any) -> int:
            known = {"lock": guard.lock, "suspicion": guard.suspicion}
            self.given.append({"world": world, "logs": logs} | known | options)
            assert guard.progress
            self.waits.append(0.0)
            return self.ends.pop(0)(guard.progress)

        monkeypatch.setattr(module, "catching_signals", catching)
        monkeypatch.setattr(module, "run_ranks", run_ranks)
        monkeypatch.setattr(module, "say", self.said.append)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        runs = self

        class Fleet(SingleHost):
            def mend(self, failure: RankFailure) -> str:
                return runs.mends(failure)

        crew = AttemptRanks(
            start=cast("Any", None), world=2, hosts=("a", "b"), suspicion=lambda: None, plan="p", concurrent=beside
        )
        self.lock: Any = SimpleNamespace(path=folder / "lock.json", check=self._check)
        self.lock.path.write_text("")
        lock = cast("RunLock", self.lock) if locked else None
        self.supervisor = Supervisor(
            Fleet(lambda: crew), folder, folder / "logs", timeout=60, restarts=restarts, lock=lock
        )

    def _check(self) -> None:
        self.checked += 1
        self.during()

    def _sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 3)  # no sum of errors of rounding
        self.waits[-1] += seconds

    def dies(self, *, step: int = -1, cause: str = "killed", words: str = "", saves: int = 0) -> None:
        def end(progress: Progress) -> int:
            for rank in range(2 if step >= 0 else 0):
                progress.heard(rank, step, self.now)
            if saves:
                (self.folder / "checkpoints" / f"step-{saves}").mkdir(parents=True)
            log = f"{self.folder}/logs/rank-1.log"
            raise RankFailure(f"rank 1 died. Its log: {log}", ranks=(1,), cause=cause, words=words)

        self.ends.append(end)

    def well(self, status: int = 0) -> None:
        self.ends.append(lambda progress: status)

    def waited(self) -> list[float]:
        return [round(one, 1) for one in self.waits]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    return Runs(monkeypatch, tmp_path)


def test_each_wait_in_vain_is_twice_as_long_and_the_run_is_given_up(runs: Runs) -> None:
    for _ in range(4):
        runs.dies()
    with pytest.raises(RankFailure, match=r"^3 restarts in a row saved no new checkpoint.*rank 1 died") as end:
        runs.supervisor.run()
    assert (end.value.ranks, end.value.cause) == ((1,), "killed")
    assert runs.waited() == [1.0, 2.0, 4.0, 0.0]
    assert runs.said[1].startswith("starting again in 1 s from the beginning: 1 of 3 without a new checkpoint")
    assert runs.said[3].startswith("starting again in 2 s from the beginning: 2 of 3")
    waits = [one.wait_seconds for one in read_attempts(runs.folder)]
    assert waits[0] is None and [round(one or 0, 1) for one in waits[1:]] == [1.0, 2.0, 4.0]
    assert runs.beside == ["on"] * 4  # ended by the error


def test_a_new_checkpoint_begins_the_waits_anew(runs: Runs) -> None:
    runs.dies()
    runs.dies()
    runs.dies(saves=5)
    runs.dies()
    runs.well(7)
    assert runs.supervisor.run("more hosts") == 7
    assert runs.waited() == [1.0, 2.0, 1.0, 2.0, 0.0]
    assert "from the checkpoint of step 5: 1 of 3" in runs.said[5]
    assert [one.changed for one in read_attempts(runs.folder)] == ["more hosts", "", "", "", ""]
    assert runs.given[0] == {
        "world": 2, "logs": runs.folder / "logs", "timeout": 60, "lock": runs.lock, "suspicion": None,
        "signals": runs.signals,
    }  # fmt: skip
    assert runs.beside[-2:] == ["on", "off"]


def test_a_checkpoint_of_before_the_start_is_no_new_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-9").mkdir(parents=True)
    runs = Runs(monkeypatch, tmp_path, restarts=1)
    runs.dies()
    runs.dies()
    with pytest.raises(RankFailure, match="A restart saved no new checkpoint"):
        runs.supervisor.run()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"step": 4}, {"step": 4}, True),
        ({"step": 4}, {"step": 5}, False),
        ({"step": 4, "words": "of it"}, {"step": 4}, False),
        ({"step": 4, "cause": "killed"}, {"step": 4, "cause": "killed"}, False),
        ({"step": 4, "cause": "killed"}, {"step": 4}, False),
    ],
)
def test_a_rank_that_fails_twice_by_itself_in_the_same_way_at_the_same_step_is_the_end(
    runs: Runs, first: dict[str, Any], second: dict[str, Any], same: bool
) -> None:
    usual: dict[str, Any] = {"cause": "ended"}
    runs.dies(**(usual | first))
    runs.dies(**(usual | second))
    runs.well()
    if same:
        with pytest.raises(
            RankFailure, match=r"^The run failed twice in the same way at the same step and is given up"
        ):
            runs.supervisor.run()
    else:
        assert runs.supervisor.run() == 0


def test_a_run_without_a_lock_is_started_again_as_long_as_its_folder_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    runs = Runs(monkeypatch, folder, locked=False)

    def gone(progress: Progress) -> int:
        folder.rename(tmp_path / "moved")
        raise RankFailure("rank 1 died")

    runs.dies()
    runs.ends.append(gone)
    with pytest.raises(RankFailure, match=r"^rank 1 died$"):
        runs.supervisor.run()
    assert len(runs.given) == 2


@pytest.mark.parametrize("what", ["stopping", "folder", "lock"])
def test_a_run_that_is_to_end_or_is_gone_is_not_started_again(runs: Runs, what: str) -> None:
    def end(progress: Progress) -> int:
        if what == "stopping":
            progress.stopping = True
        elif what == "lock":
            runs.lock.path.unlink()
        else:
            runs.folder.rename(runs.folder.with_name("moved"))
        raise RankFailure("rank 1 died")

    runs.ends = [end]
    with pytest.raises(RankFailure, match=r"^rank 1 died$"):
        runs.supervisor.run()


def test_without_restarts_the_error_stands_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = Runs(monkeypatch, tmp_path, restarts=0)
    runs.dies()
    with pytest.raises(RankFailure, match=r"^rank 1 died"):
        runs.supervisor.run()
    assert not runs.said


def test_other_errors_are_nobodys_to_mend(runs: Runs) -> None:
    def end(progress: Progress) -> int:
        raise LaunchError("no such thing")

    runs.ends = [end]
    with pytest.raises(LaunchError, match="no such thing"):
        runs.supervisor.run()
    assert len(runs.given) == 1


def test_a_run_that_never_began_is_not_started_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> AttemptRanks:
        raise OSError(28, "No space left")

    monkeypatch.setattr(runs.supervisor.fleet, "crew", full)
    with pytest.raises(RankFailure, match=r"^Ranks cannot be started: .*No space left$"):
        runs.supervisor.run()
    assert not runs.said


def test_logs_are_named_where_they_are_kept(runs: Runs) -> None:
    runs.dies()
    runs.well()
    (runs.folder / "logs").mkdir()
    (runs.folder / "logs" / "rank-1.log").write_text("it")
    runs.supervisor.run()
    kept = runs.folder / "logs" / "attempt-1" / "rank-1.log"
    assert kept.read_text() == "it"
    assert runs.said[0].endswith(f"Its log: {kept}")


def test_hosts_that_cannot_be_mended_yet_are_waited_for(runs: Runs) -> None:
    answers = ["away", "away", "c for b"]

    def mend(failure: RankFailure) -> str:
        assert "rank 1 died" in str(failure)
        if (answer := answers.pop(0)) == "away":
            raise RankFailure("b is away")
        return answer

    runs.mends = mend
    runs.dies()
    runs.well()
    assert runs.supervisor.run() == 0
    assert runs.waited() == [7.0, 0.0]  # 1, 2 and 4 s
    assert runs.said[1:] == [runs.said[1], "b is away", runs.said[3], "b is away", runs.said[5], "c for b"]
    assert read_attempts(runs.folder)[1].changed == "c for b"


def test_hosts_that_stay_away_end_the_run(runs: Runs) -> None:
    def mend(failure: RankFailure) -> str:
        raise RankFailure("b is away")

    runs.mends = mend
    runs.dies()
    with pytest.raises(RankFailure, match=r"^b is away$"):
        runs.supervisor.run()
    assert runs.waited() == [7.0]
    assert runs.said.count("b is away") == 2


def test_a_signal_ends_the_wait_and_the_run(runs: Runs) -> None:
    def interrupt() -> None:
        if runs.checked == 5:
            runs.signals.append(15)

    def mend(failure: RankFailure) -> str:
        raise AssertionError("nothing is to be mended")

    runs.mends, runs.during = mend, interrupt
    runs.dies(saves=3)
    assert runs.supervisor.run() == 143
    assert runs.said[-1] == "SIGTERM: not started again; the same command goes on from the checkpoint of step 3"
    assert runs.checked == 5


def test_a_lock_that_is_lost_ends_the_wait(runs: Runs) -> None:
    def lost() -> None:
        raise RunLost("another launcher has it")

    runs.during = lost
    runs.dies()
    with pytest.raises(RunLost):
        runs.supervisor.run()
    assert len(runs.given) == 1


@pytest.mark.parametrize("newest", [0, 7])
def test_copies_in_memory_are_spoken_of_where_there_are_any(runs: Runs, newest: int) -> None:
    """The launcher's end frees them, so that the next start goes on from disk."""
    runs.dies(saves=newest)
    runs.mends = lambda failure: runs.signals.append(signal.SIGTERM) or ""
    (copies := memory_of(runs.folder) / "host0").mkdir(parents=True)
    (copies / "rank-00000-step-00000009.safetensors").touch()
    try:
        assert runs.supervisor.run() == 143
    finally:
        close_memory(runs.folder)
    whence = f"from the checkpoint of step {newest}" if newest else "from the beginning"
    assert f"starting again in 1 s from a copy in memory, or {whence}: 1 of 3" in runs.said[1]
    assert runs.said[2] == f"SIGTERM: not started again; the same command goes on {whence}"


@pytest.mark.parametrize("full", [2, 99])
def test_a_full_disk_on_which_ranks_cannot_be_started_is_waited_for(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    crew, times = runs.supervisor.fleet.crew, iter(range(100))

    def later() -> AttemptRanks:
        if 0 < next(times) <= full:  # the table of where ranks run cannot be written
            raise OSError(28, "No space left")
        return crew()

    monkeypatch.setattr(runs.supervisor.fleet, "crew", later)
    runs.dies(saves=7)
    runs.well()
    if full == 2:
        assert runs.supervisor.run() == 0
    else:
        match = r"given up \(run.restarts\): Ranks cannot be started: .*No space left"
        with pytest.raises(RankFailure, match=match):
            runs.supervisor.run()
    assert any("from the checkpoint of step 7: 3 of 3" in one for one in runs.said)


def test_the_history_goes_on_where_it_was_and_logs_of_long_ago_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_attempts(tmp_path, [Attempt(attempt=6, started=1.0)])  # whose launcher was killed
    runs, log = Runs(monkeypatch, tmp_path), tmp_path / "logs" / "rank-1.log"
    log.parent.mkdir()
    log.write_text("it")
    for step in range(1, 6):
        runs.dies(saves=step)
    runs.during = lambda: log.write_text("it")
    runs.well()
    assert runs.supervisor.run() == 0
    found = [(one.attempt, one.outcome) for one in read_attempts(tmp_path)]
    assert found == [(6, "cut off"), *((number, "failed") for number in range(7, 12)), (12, "finished")]
    assert {path.name for path in (tmp_path / "logs").glob("attempt-*")} == {f"attempt-{n}" for n in (9, 10, 11)}
