"""Watching ranks, without a process: what they said last, and as what error they end the run."""

from __future__ import annotations

import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plait.core.base.errors import DO_NOT_RETRY, CheckpointError, JobError, NotFinite, PlaitError, RankFailure, RunLost
from plait.core.runs.channel import Beat, Channel, Error, Stop
from plait.core.runs.evidence import Verdict
from plait.core.runs.lock import RunLock
from plait.core.runs.progress import Progress
from plait.launch import watch as module
from plait.launch.gather import Seen
from plait.launch.hang import Nearby, Suspicion
from plait.launch.watch import RankProcess, RunGuard, Watch

TIER = "unit"


class Ended:
    """A process that has ended with a status."""

    pid, stopped = None, False

    def __init__(self, status: int) -> None:
        self.returncode = status

    def poll(self) -> int:
        return self.returncode

    def kill(self) -> None: ...

    def said(self) -> str:
        return ""


@contextmanager
def watched(tmp_path: Path, status: int, *messages: Beat | Error) -> Iterator[tuple[Watch, Progress]]:
    """The watch of a rank that has said this and ended."""
    ours, theirs = Channel.pair()
    line = Channel(theirs)
    for message in messages:
        line.send(message)
    line.close()
    progress = Progress(1)
    yield (
        Watch(
            [RankProcess(0, Ended(status), ours, heard=0.0)],
            tmp_path,
            deque(),
            guard=RunGuard(lock=None, progress=progress),
            timeout=60,
        ),
        progress,
    )
    ours.close()


def test_what_a_rank_said_while_nobody_listened_is_heard_at_the_end(tmp_path: Path) -> None:
    with watched(tmp_path, 0, *(Beat(f"step {step}", step) for step in range(61))) as (watch, progress):
        assert watch.until_ended() == 0
        assert progress.step == 60


@pytest.mark.parametrize(
    ("kind", "status", "raised", "exit_status"),
    [
        ("NotFinite", DO_NOT_RETRY, NotFinite, 1),
        ("CheckpointError", 2, CheckpointError, 2),
        ("JobError", 2, JobError, 2),
        ("NoSuchError", 2, PlaitError, 2),
        ("", 2, PlaitError, 2),
    ],
)
def test_a_ranks_error_ends_the_run_as_what_it_is(
    tmp_path: Path, kind: str, status: int, raised: type[PlaitError], exit_status: int
) -> None:
    said = Error("step 2: the loss is nan.", kind)
    with watched(tmp_path, status, said) as (watch, _), pytest.raises(PlaitError) as error:
        watch.until_ended()
    assert (type(error.value), str(error.value)) == (raised, "step 2: the loss is nan.")
    assert error.value.exit_status == exit_status


# ---- ranks that do as a story tells, on a clock of its own ----


class Clock:
    """In place of ``time``."""

    now = 1000.0
    held_up = 0.0
    """Seconds in which the launcher is stopped while it waits for what is said next."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Made:
    """A rank's process that does as it is told."""

    pid = None

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.stopped = self.killed = False
        self.log = ""

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.killed = True
        if self.returncode is None:
            self.returncode = -9

    def said(self) -> str:
        return self.log


class Elsewhere:
    """Something that signals may come from."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.held_up = 0.0

    def fileno(self) -> int:
        return self.ours.fileno()

    def take(self) -> int | None:
        if not (said := self.ours.recv(1)):
            raise EOFError
        return said[0] or None

    def look(self, held_up: float) -> None:
        self.held_up += held_up


class Story:
    """Ranks, and what happens to them: one step before each look of the watch."""

    def __init__(self, folder: Path, clock: Clock, world: int = 2) -> None:
        self.clock, self.steps = clock, deque[Callable[[], object]]()
        self.sources = [Elsewhere(), Elsewhere()]
        self.processes = [Made() for _ in range(world)]
        pairs = [Channel.pair() for _ in range(world)]
        self.ends = [Channel(theirs) for _, theirs in pairs]
        self.ranks = [RankProcess(at, self.processes[at], ours, heard=clock.now) for at, (ours, _) in enumerate(pairs)]
        self.signals = deque[int]()
        self.progress = Progress(world)
        self.watch = Watch(
            self.ranks,
            folder,
            self.signals,
            guard=RunGuard(lock=None, progress=self.progress),
            timeout=60,
            sources=[self, *self.sources],
        )

    def fileno(self) -> int:
        return self.sources[0].theirs.fileno()

    def take(self) -> int | None:
        return None

    def look(self, held_up: float) -> None:
        assert self.steps, "the run goes on, and there is nothing more to tell"
        self.steps.popleft()()

    def run(self, *steps: Callable[[], object]) -> int:
        self.steps.extend([*steps, lambda: None])  # in which what was done last is seen
        return self.watch.until_ended()

    def trains(self, *at: int) -> None:
        """Each rank says its step."""
        for end, step in zip(self.ends, at, strict=True):
            end.send(Beat(f"step {step}", step))

    def ends_with(self, *codes: int | None) -> None:
        for process, code in zip(self.processes, codes, strict=True):
            process.returncode = code

    def after(self, seconds: float) -> None:
        """A look at a time takes no more than ``NAP``."""
        self.clock.now += seconds

    def asked(self) -> list[list[int]]:
        """What each rank was asked."""
        found: list[list[int]] = []
        for end in self.ends:
            found.append([])
            while (message := end.receive()) is not None:
                assert isinstance(message, Stop)
                found[-1].append(message.signal)
        return found


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    clock = Clock()

    class Held(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            clock.now, clock.held_up = clock.now + clock.held_up, 0.0
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Held)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("plait.core.runs.progress.time", clock)
    monkeypatch.setattr(module, "LOOK", 0.001)
    found = Story(tmp_path, clock)
    yield found
    for end in [*found.ends, *(rank.channel for rank in found.ranks)]:
        end.close()
    for source in found.sources:
        source.ours.close()
        source.theirs.close()


def test_a_run_ends_well_with_its_last_rank(story: Story) -> None:
    assert story.run(lambda: story.trains(0, 0), lambda: story.ends_with(0, None), lambda: story.ends_with(0, 0)) == 0
    assert story.progress.step == 0


def test_time_in_which_the_launcher_was_held_up_is_nobodys_silence(story: Story) -> None:
    story.trains(0, 0)
    stopped = [lambda: setattr(story.clock, "held_up", 1000.0), lambda: None]
    assert story.run(lambda: None, *stopped, *nap(story, 20), lambda: story.ends_with(0, 0)) == 0
    assert [source.held_up for source in story.sources] == [1000.0, 1000.0]


def test_a_look_that_is_a_little_late_is_a_look(story: Story) -> None:
    story.trains(0, 0)
    late = [lambda: setattr(story.clock, "held_up", module.NAP), lambda: None]
    assert story.run(lambda: None, *late, lambda: story.ends_with(0, 0)) == 0
    assert [source.held_up for source in story.sources] == [0.0, 0.0]


def nap(story: Story, seconds: int) -> list[Callable[[], object]]:
    """Looks that go by in time."""
    return [lambda: story.after(1.0)] * seconds


def test_a_rank_that_is_silent_is_spoken_of_and_then_ends_the_run(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.trains(3, 2)
    talks = [lambda: (story.after(1.0), story.ends[0].send(Beat("step 3", 3)))] * 64
    with pytest.raises(RankFailure, match=r"rank 1 has not answered for 6\d s \(step 2\); the other ranks") as failed:
        story.run(*talks)
    assert (failed.value.ranks, failed.value.cause) == ((1,), "silent")
    assert capsys.readouterr().err.count("after 60 s the run is ended") == 1
    assert 60 <= 64 - len(story.steps) <= 63


def test_of_silent_ranks_the_one_behind_is_named(story: Story) -> None:
    story.trains(3, 2)
    with pytest.raises(RankFailure, match="rank 1 has not answered"):
        story.run(*nap(story, 64))


def test_of_silent_ranks_one_that_is_stopped_is_named(story: Story) -> None:
    story.trains(3, 2)
    story.processes[0].stopped = True
    with pytest.raises(RankFailure, match=r"rank 0 has not answered .*\(step 3; its process is stopped") as failed:
        story.run(*nap(story, 64))
    assert failed.value.cause == "stopped"


def test_one_that_may_rightly_take_long_is_not_hurried(story: Story) -> None:
    """Unless it is stopped, or others wait for it."""
    for end in story.ends:
        end.send(Beat("compiling", patient=True))
    assert story.run(*nap(story, 200), lambda: story.ends_with(0, 0)) == 0


def test_one_that_may_rightly_take_long_and_is_stopped_ends_the_run(story: Story) -> None:
    for end in story.ends:
        end.send(Beat("compiling", patient=True))
    story.processes[1].stopped = True
    with pytest.raises(RankFailure, match="rank 1 has not answered"):
        story.run(*nap(story, 64))


def test_one_that_has_ended_is_not_silent(story: Story) -> None:
    story.trains(0, 0)
    story.ends_with(0, None)
    talks = [lambda: (story.after(1.0), story.ends[1].send(Beat("step 1", 1)))] * 100
    assert story.run(*talks, lambda: story.ends_with(0, 0)) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_every_rank_to_save_and_end(
    story: Story, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    asked = list[list[int]]()
    status = 128 + number
    story.trains(5, 5)
    found = story.run(
        lambda: None,
        lambda: story.signals.append(number),
        lambda: asked.extend(story.asked()),
        lambda: story.ends_with(status, None),  # which is no failure
        lambda: story.ends_with(status, 0),
    )
    assert (found, asked, story.progress.stopping) == (status, [[number], [number]], True)
    assert "stopping after this step; the run is saved first" in capsys.readouterr().err
    assert not any(process.killed for process in story.processes)


def test_the_second_ctrl_c_ends_all_at_once(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.trains(5, 5)
    found = story.run(
        lambda: None,
        lambda: story.signals.extend([signal.SIGTERM, signal.SIGTERM, signal.SIGHUP]),  # asked, and that is enough
        lambda: story.processes[0].killed or story.signals.append(signal.SIGINT),
        lambda: None,
    )
    assert found == 128 + signal.SIGTERM
    assert [process.killed for process in story.processes] == [True, True]
    assert story.asked() == [[signal.SIGTERM]] * 2
    assert "what was not saved is lost" in capsys.readouterr().err


def test_a_rank_that_got_a_signal_has_all_asked(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.trains(5, 5)
    asked = list[list[int]]()
    assert story.run(
        lambda: story.ends[1].send(Stop(signal.SIGTERM)),
        lambda: None,
        lambda: asked.extend(story.asked()),
        lambda: story.ends_with(143, 143),
    ) == 143  # fmt: skip
    assert asked == [[signal.SIGTERM]] * 2
    assert "rank 1 got SIGTERM: stopping after this step" in capsys.readouterr().err


def test_what_fails_once_ranks_are_to_end_before_they_train_is_no_news(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.trains(0, -1)
    assert story.run(
        lambda: None, lambda: story.signals.append(signal.SIGINT), lambda: story.ends_with(1, None),
        lambda: story.ends_with(1, 1),
    ) == 130  # fmt: skip
    assert "ending; nothing is to be saved yet" in capsys.readouterr().err


def test_what_fails_while_ranks_save_is_news(story: Story) -> None:
    story.trains(5, 5)
    with pytest.raises(RankFailure, match="rank 0 ended with status 1"):
        story.run(lambda: None, lambda: story.signals.append(signal.SIGINT), lambda: story.ends_with(1, None))


@pytest.mark.parametrize(("sources", "kills"), [([0, 1], False), ([0, 0], True), ([0, 1, 1], True)])
def test_one_ctrl_c_may_reach_every_node(story: Story, sources: list[int], kills: bool) -> None:
    story.trains(5, 5)
    comes = [lambda at=at: story.sources[at].theirs.send(bytes([signal.SIGINT])) for at in sources]
    story.run(lambda: None, *comes, lambda: None, lambda: story.ends_with(130, 130))
    assert story.processes[0].killed == kills


def test_a_source_that_is_gone_is_listened_to_no_more(story: Story) -> None:
    assert story.run(story.sources[1].theirs.close, lambda: None, lambda: story.ends_with(0, 0)) == 0


# ---- which rank began it ----


def test_one_that_was_killed_began_it(story: Story) -> None:
    story.trains(5, 5)
    story.processes[0].log = "plait-error: rank 1 is gone\n"
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL; the other ranks were ended") as failed:
        story.run(lambda: None, lambda: story.ends_with(1, -9))
    assert (failed.value.ranks, failed.value.cause) == ((1,), "killed")


def test_of_those_that_ended_the_first_began_it(story: Story) -> None:
    story.trains(5, 5)
    story.processes[1].log = "Traceback\nMemoryError\n"

    def meanwhile(seconds: float) -> None:
        story.ends_with(7, 1)

    story.clock.sleep = meanwhile  # type: ignore[method-assign]
    with pytest.raises(RankFailure, match="rank 1 ended with status 1; the other") as failed:
        story.run(lambda: None, lambda: story.ends_with(None, 1))
    assert (failed.value.cause, failed.value.words) == ("ended", "MemoryError")


def test_of_those_that_ended_one_with_a_message_is_told(story: Story) -> None:
    story.trains(5, 5)
    story.ends[1].send(Error("no such file.", "JobError"))
    with pytest.raises(JobError, match=r"^no such file\.$"):
        story.run(lambda: None, lambda: story.ends_with(7, 2))


def test_one_that_is_stopped_made_the_others_fail(story: Story) -> None:
    story.trains(5, 5)
    story.processes[0].stopped = True
    with pytest.raises(RankFailure, match=r"rank 0 has not answered .* waited for it in vain") as failed:
        story.run(lambda: None, lambda: story.ends_with(None, 1))
    assert (failed.value.ranks, failed.value.cause) == ((0,), "stopped")


def test_one_that_gave_up_does_not_know_whose_fault_it_is(story: Story) -> None:
    story.ends[0].send(Error("Rank 1 did not answer.", "RankFailure"))
    with pytest.raises(RankFailure, match=r"^Rank 1 did not answer\.$") as failed:
        story.run(lambda: None, lambda: story.ends_with(RankFailure.exit_status, None))
    assert (failed.value.ranks, failed.value.cause) == ((), "gave up")


def test_when_one_was_killed_is_known_to_a_look(story: Story) -> None:
    story.trains(5, 5)
    with pytest.raises(RankFailure, match="SIGKILL"):
        story.run(lambda: None, lambda: story.after(0.5), lambda: story.ends_with(-9, None))
    assert story.progress.unnoticed(story.clock.now) == pytest.approx(0.5 + module.LOOK)


# ---- who looks for the cause of a hang ----


class Suspects:
    """A suspicion. given: what each look was told; says: its verdict; explains: of a run that fails."""

    deadline = 20.0

    def __init__(self) -> None:
        self.given, self.cleared = list[tuple[dict[int, Seen], dict[int, Nearby], bool]](), 0
        self.says: Verdict | None = None
        self.explains = Verdict(cause="none", why="It goes on.")
        self.explained = list[dict[int, Nearby]]()

    def look(self, seen: Any, processes: Any, *, silent: bool) -> Verdict | None:
        self.given.append((seen(), processes(), silent))
        return self.says

    def explain(self, seen: dict[int, Seen], processes: dict[int, Nearby]) -> Verdict:
        self.explained.append(processes)
        return self.explains

    def clear(self) -> None:
        self.cleared += 1


@pytest.fixture
def suspects(story: Story) -> Suspects:
    made = Suspects()
    story.watch.suspicion = cast("Suspicion", made)
    return made


HOST = Verdict(cause="host code", why="Rank 1 holds the lock.", ranks=(1,))
NOBODY = Verdict(cause="cut off", why="A link is cut.")
UNKNOWN = Verdict(cause="unknown", why="Nobody knows.", ranks=(0,))


def test_a_verdict_ends_the_run_and_names_the_log(story: Story, suspects: Suspects, tmp_path: Path) -> None:
    suspects.says = HOST
    with pytest.raises(RankFailure) as failed:
        story.run(lambda: None)
    log = tmp_path / "rank-1.log"
    assert str(failed.value) == f"Rank 1 holds the lock. All ranks were ended. Its log: {log}"
    assert (failed.value.ranks, failed.value.cause) == ((1,), "host code")
    suspects.says = NOBODY
    with pytest.raises(RankFailure, match=r"^A link is cut\. All ranks were ended\.$"):
        story.watch._judge_hang()


def test_a_rank_is_silent_after_the_deadline(story: Story, suspects: Suspects) -> None:
    story.trains(3, 3)
    talks = [lambda: (story.after(1.0), story.ends[0].send(Beat("step 3", 3)))] * 21
    story.run(lambda: None, *talks, lambda: story.ends_with(None, 0), lambda: None, lambda: story.ends_with(0, 0))
    assert [one for _, _, one in suspects.given] == [False] * 21 + [True, False, False, False]
    assert suspects.cleared == 1


def test_one_that_may_take_long_is_silent_only_if_it_is_stopped(story: Story, suspects: Suspects) -> None:
    for end in story.ends:
        end.send(Beat("compiling", patient=True))
    story.run(
        lambda: None, *nap(story, 25), lambda: setattr(story.processes[1], "stopped", True),
        lambda: story.ends_with(0, 0),
    )  # fmt: skip
    assert [one for _, _, one in suspects.given] == [False] * 26 + [True, False]


def test_what_is_known_of_ranks_is_told_to_who_looks(story: Story, suspects: Suspects) -> None:
    story.ends[0].send(Beat("step 4", 4, False, True, 8))
    story.processes[0].pid = 11  # type: ignore[assignment]
    story.processes[0].log = "one\nlast words\n"
    story.processes[1].stopped = True
    story.run(lambda: None, lambda: None, lambda: story.ends_with(0, 0))
    seen, nearby, _ = suspects.given[1]
    assert seen[0] == Seen(state="runs", pid=11, doing="step 4", step=4, first=True, writing=8)
    assert seen[1].state == "stopped"
    assert list(nearby) == [0] and nearby[0].pid == 11 and nearby[0].log() == "one\nlast words\n"


def test_how_ranks_ended_is_told_to_who_explains(story: Story, suspects: Suspects) -> None:
    story.processes[0].log = "one\nlast words\n"
    story.trains(3, 3)
    given = list[dict[int, Seen]]()

    def explain(seen: dict[int, Seen], processes: dict[int, Nearby]) -> Verdict:
        given.append(seen)
        return suspects.explains

    suspects.explain = explain  # type: ignore[method-assign]
    with pytest.raises(RankFailure):
        story.run(lambda: None, lambda: story.ends_with(7, 0))
    assert (given[0][0].state, given[0][0].status, given[0][0].said) == ("ended", 7, "last words")
    assert given[0][0].ended_at == 1000.0
    assert (given[0][1].status, given[0][1].said) == (0, "")


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (HOST, "^Rank 1 holds the lock"),
        (Verdict(cause="crashed", why="It."), "^rank 0 ended with status 7"),
        (UNKNOWN, "^rank 0 ended with status 7"),
    ],
)
def test_one_that_failed_may_be_a_victim(story: Story, suspects: Suspects, verdict: Verdict, says: str) -> None:
    story.trains(3, 3)
    suspects.explains = verdict
    with pytest.raises(RankFailure, match=says):
        story.run(lambda: None, lambda: story.ends_with(7, None))
    assert suspects.explained == [{}]  # processes end, and are not asked


def test_once_ranks_are_to_stop_nobody_asks_who_is_at_fault(story: Story, suspects: Suspects) -> None:
    story.trains(3, 3)
    suspects.explains = HOST
    with pytest.raises(RankFailure, match="rank 0 ended with status 7"):
        story.run(lambda: None, lambda: story.signals.append(signal.SIGTERM), lambda: story.ends_with(7, None))
    assert not suspects.explained


def test_a_hang_is_looked_for_while_ranks_save_but_not_once_they_were_killed(story: Story, suspects: Suspects) -> None:
    story.trains(3, 3)
    looks = list[int]()
    story.run(
        lambda: None, lambda: story.signals.append(signal.SIGTERM), lambda: looks.append(len(suspects.given)),
        lambda: looks.append(len(suspects.given)), lambda: story.signals.append(signal.SIGINT), lambda: None,
    )  # fmt: skip
    assert looks[1] > looks[0]
    assert len(suspects.given) == looks[1] + 1


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (HOST, r"^Rank 1 holds the lock\. All ranks were ended"),
        (UNKNOWN, r"the other ranks were ended\. Nobody knows\. Its log"),
        (Verdict(cause="none", why="It."), r"the other ranks were ended\. Its log"),
    ],
)
def test_a_silence_that_ends_the_run_is_explained(
    story: Story, suspects: Suspects, verdict: Verdict, says: str
) -> None:
    story.trains(3, 2)
    suspects.explains = verdict
    with pytest.raises(RankFailure, match=says):
        story.run(*nap(story, 64))


def test_silence_is_spoken_of_at_half_of_the_timeout(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.trains(3, 2)
    story.run(lambda: None, *nap(story, 30), lambda: story.ends_with(0, 0))
    assert "has not answered" not in capsys.readouterr().err


def test_silence_of_more_than_half_of_the_timeout_is_spoken_of_again_after_a_word(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.trains(3, 2)
    word = [lambda: story.trains(3, 2), lambda: None]
    story.run(lambda: None, *nap(story, 33), *word, *nap(story, 33), lambda: story.ends_with(0, 0))
    assert capsys.readouterr().err.count("rank 1 has not answered") == 2


def test_a_lock_is_checked_at_every_look(story: Story) -> None:
    checks = list[int]()

    def check() -> None:
        checks.append(0)
        if len(checks) == 3:
            raise RunLost("another launcher has the run")

    story.watch.lock = cast("RunLock", SimpleNamespace(check=check))
    with pytest.raises(RunLost):
        story.run(*[lambda: None] * 9)
    assert len(checks) == 3


@pytest.mark.parametrize(("text", "message"), [("plait-error: it is\n", True), ("plait: it is\n", False)])
def test_a_message_in_a_log_counts_as_one_that_was_sent(story: Story, text: str, message: bool) -> None:
    story.processes[0].log = f"before\n{text}"
    story.trains(3, 3)
    with pytest.raises(PlaitError, match=r"^it is$" if message else "rank 0 ended with status 2") as failed:
        story.run(lambda: None, lambda: story.ends_with(2, None))
    assert failed.value.exit_status == (2 if message else 1)


def test_one_that_was_killed_is_told_as_that_whatever_it_said(story: Story) -> None:
    story.trains(3, 3)
    story.ends[0].send(Error("no such file.", "JobError"))
    with pytest.raises(RankFailure, match="rank 0 was killed by SIGKILL") as failed:
        story.run(lambda: None, lambda: story.ends_with(-9, None))
    assert failed.value.words == "no such file."


def test_when_the_first_of_those_that_were_killed_was_gone_counts(story: Story) -> None:
    story.trains(5, 5)

    def meanwhile(seconds: float) -> None:
        assert seconds == 0.5
        story.clock.now += seconds
        story.processes[1].returncode = -9

    story.clock.sleep = meanwhile  # type: ignore[method-assign]
    with pytest.raises(RankFailure, match="rank 0 was killed"):
        story.run(lambda: None, lambda: story.after(0.5), lambda: story.ends_with(-9, None))
    assert story.progress.unnoticed(story.clock.now) == pytest.approx(0.5 + module.LOOK)


def test_one_that_is_stopped_is_no_cause_beside_one_that_was_killed(story: Story) -> None:
    story.trains(5, 5)
    story.processes[0].stopped = True
    with pytest.raises(RankFailure, match="rank 1 was killed"):
        story.run(lambda: None, lambda: story.ends_with(None, -9))


# ---- signals and words ----


def test_signals_are_queued_and_what_handled_them_before_comes_back() -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    own = list[int]()
    mine = signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
    try:
        with module.catching_signals() as caught:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.raise_signal(number)
            assert list(caught) == [signal.SIGTERM, signal.SIGINT]
        signal.raise_signal(signal.SIGTERM)
        assert own == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, ignored)
        signal.signal(signal.SIGTERM, mine)


def test_another_thread_leaves_signals_to_its_caller() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def other() -> object:
        with module.catching_signals() as caught:
            return signal.getsignal(signal.SIGTERM), list(caught)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result() == (before, [])


@pytest.mark.parametrize(("columns", "widest"), [(40, 40), (200, 100), (None, 360)])
def test_what_is_said_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int | None, widest: int
) -> None:
    monkeypatch.setattr(module, "terminal_width", lambda stream: columns)
    module.say("word " * 70)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("plait: word")
    assert widest - 10 < max(map(len, lines)) <= widest


def test_ranks_that_run_already_are_watched_to_their_end(story: Story, tmp_path: Path) -> None:
    given: dict[str, Any] = {"timeout": 60, "sources": [story], "guard": RunGuard(progress=story.progress)}
    story.steps.extend([lambda: story.signals.append(0), lambda: signal.raise_signal(signal.SIGTERM),
                        lambda: None, lambda: story.ends_with(143, 143), lambda: None])  # fmt: skip
    assert module.watched(story.ranks, tmp_path, **given) == 143
    assert story.progress.stopping
