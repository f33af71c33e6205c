"""Ranks that do not answer their launcher: when it speaks, whom it names, who looks for the
cause."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import pytest

from plait.core.base.errors import RankFailure
from plait.core.runs.channel import Beat, StoreCall
from plait.core.runs.evidence import Verdict
from plait.launch import watch as module
from plait.launch.hang import HangDetection, LocalRank, RankStatus
from tests.launch.story import Story

TIER = "unit"


@pytest.mark.parametrize(("late", "held_up"), [(1000.0, 1000.0), (module.STOPPED_SECONDS, 0.0)])
def test_time_in_which_the_launcher_was_held_up_is_nobodys_silence(story: Story, late: float, held_up: float) -> None:
    """And a look that is a little late is a look."""
    story.trains(0, 0)
    stopped = [lambda: setattr(story.clock, "held_up", late), None]
    assert story.run(None, *stopped, *story.nap(20), story.ended(0, 0)) == 0
    assert [source.held_up for source in story.sources] == [held_up, held_up]


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


def test_silence_is_spoken_of_at_half_of_the_timeout(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.trains(3, 2)
    story.run(None, *story.nap(30), story.ended(0, 0))
    assert "has not answered" not in capsys.readouterr().err


def test_silence_of_more_than_half_of_the_timeout_is_spoken_of_again_after_a_word(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.trains(3, 2)
    word = [lambda: story.trains(3, 2), None]
    story.run(None, *story.nap(33), *word, *story.nap(33), story.ended(0, 0))
    assert capsys.readouterr().err.count("rank 1 has not answered") == 2


@pytest.mark.parametrize(
    ("stopped", "says", "cause"),
    [(False, r"rank 1 has not answered", "silent"),
     (True, r"rank 0 has not answered .*\(step 3; its process is stopped", "stopped")],
)  # fmt: skip
def test_of_silent_ranks_the_one_behind_is_named_or_one_that_is_stopped(
    story: Story, stopped: bool, says: str, cause: str
) -> None:
    story.trains(3, 2)
    story.processes[0].stopped = stopped
    with pytest.raises(RankFailure, match=says) as failed:
        story.run(*story.nap(64))
    assert failed.value.cause == cause


def test_one_that_may_rightly_take_long_is_not_hurried(story: Story) -> None:
    """Unless it is stopped, or others wait for it; nor are all, once they train."""
    for end in story.ends:
        end.send(Beat("saving after step 3", 3, patient=True))
    assert story.run(*story.nap(200), story.ended(0, 0)) == 0


def test_a_start_in_which_nobody_does_anything_ends(story: Story) -> None:
    """Rank 0 waits at the store for rank 1, which was never heard, and has waited for longer."""
    story.ends[0].send(Beat("meeting the other ranks", patient=True))
    story.ends[0].send(StoreCall(1, "wait", ("key",)))
    with pytest.raises(RankFailure, match=r"rank 1 has not answered for 6\d s \(starting\)") as failed:
        story.run(*story.nap(64))
    assert (failed.value.ranks, failed.value.cause) == ((1,), "silent")


@pytest.mark.parametrize("works", ["step", "patient"])
def test_a_start_goes_on_as_long_as_one_works(story: Story, works: str) -> None:
    """Others may wait for it at the store for hours."""
    story.ends[0].send(StoreCall(1, "wait", ("key",)))
    beat = Beat("preparing the corpus", patient=True) if works == "patient" else Beat("step 1", 0)
    talks = [lambda: (story.after(1.0), story.ends[1].send(beat))] * 200
    assert story.run(*talks, story.ended(0, 0)) == 0


def test_what_a_thread_of_torchs_asks_of_the_store_is_no_sign_of_life(story: Story) -> None:
    story.trains(3, 2)
    asks = [lambda: (story.after(1.0), story.ends[1].send(StoreCall(1, "check", ("dump",))))] * 64
    with pytest.raises(RankFailure, match=r"rank 1 has not answered for 6\d s \(step 2\)"):
        story.run(*asks)


def test_one_that_may_rightly_take_long_and_is_stopped_ends_the_run(story: Story) -> None:
    for end in story.ends:
        end.send(Beat("compiling", patient=True))
    story.processes[1].stopped = True
    with pytest.raises(RankFailure, match="rank 1 has not answered"):
        story.run(*story.nap(64))


def test_one_that_has_ended_is_not_silent(story: Story) -> None:
    story.trains(0, 0)
    story.ends_with(0, None)
    talks = [lambda: (story.after(1.0), story.ends[1].send(Beat("step 1", 1)))] * 100
    assert story.run(*talks, story.ended(0, 0)) == 0


class Suspects:
    """A suspicion. given: what each look was told; says: its verdict; explains: of a run that
    fails."""

    deadline = 20.0

    def __init__(self) -> None:
        self.given, self.cleared = list[tuple[dict[int, RankStatus], dict[int, LocalRank], bool]](), 0
        self.says: Verdict | None = None
        self.explains = Verdict(cause="none", why="It goes on.")
        self.explained = list[dict[int, LocalRank]]()

    def look(self, seen: Any, processes: Any, *, silent: bool) -> Verdict | None:
        self.given.append((seen(), processes(), silent))
        return self.says

    def explain(self, seen: dict[int, RankStatus], processes: dict[int, LocalRank]) -> Verdict:
        self.explained.append(processes)
        return self.explains

    def clear(self) -> None:
        self.cleared += 1


@pytest.fixture
def suspects(story: Story) -> Suspects:
    made = Suspects()
    story.watch.suspicion = cast("HangDetection", made)
    return made


HOST = Verdict(cause="host code", why="Rank 1 holds the lock.", ranks=(1,))


NOBODY = Verdict(cause="cut off", why="A link is cut.")


UNKNOWN = Verdict(cause="unknown", why="Nobody knows.", ranks=(0,))


def test_a_verdict_ends_the_run_and_names_the_log(story: Story, suspects: Suspects, tmp_path: Path) -> None:
    suspects.says = HOST
    with pytest.raises(RankFailure) as failed:
        story.run(None)
    log = tmp_path / "rank-1.log"
    assert str(failed.value) == f"Rank 1 holds the lock. All ranks were ended. Its log: {log}"
    assert (failed.value.ranks, failed.value.cause) == ((1,), "host code")
    suspects.says = NOBODY
    with pytest.raises(RankFailure, match=r"^A link is cut\. All ranks were ended\.$"):
        story.watch._judge_hang()


def test_a_rank_is_silent_after_the_deadline(story: Story, suspects: Suspects) -> None:
    story.trains(3, 3)
    talks = [lambda: (story.after(1.0), story.ends[0].send(Beat("step 3", 3)))] * 21
    story.run(None, *talks, story.ended(None, 0), None, story.ended(0, 0))
    assert [one for _, _, one in suspects.given] == [False] * 21 + [True, False, False, False]
    assert suspects.cleared == 1


def test_one_that_may_take_long_is_silent_only_if_it_is_stopped(story: Story, suspects: Suspects) -> None:
    for end in story.ends:
        end.send(Beat("compiling", patient=True))
    story.run(
        None, *story.nap(25), lambda: setattr(story.processes[1], "stopped", True),
        story.ended(0, 0),
    )  # fmt: skip
    assert [one for _, _, one in suspects.given] == [False] * 26 + [True, False]


def test_what_is_known_of_ranks_is_told_to_who_looks(story: Story, suspects: Suspects) -> None:
    story.ends[0].send(Beat("step 4", 4, False, True, 8))
    story.processes[0].pid = 11  # type: ignore[assignment]
    story.processes[0].log = "one\nlast words\n"
    story.processes[1].stopped = True
    story.run(None, None, story.ended(0, 0))
    seen, nearby, _ = suspects.given[1]
    assert seen[0] == RankStatus(state="runs", pid=11, doing="step 4", step=4, first=True, writing=8)
    assert seen[1].state == "stopped"
    assert list(nearby) == [0] and nearby[0].pid == 11 and nearby[0].log() == "one\nlast words\n"


def test_how_ranks_ended_is_told_to_who_explains(story: Story, suspects: Suspects) -> None:
    story.processes[0].log = "one\nlast words\n"
    story.trains(3, 3)
    given = list[dict[int, RankStatus]]()

    def explain(seen: dict[int, RankStatus], processes: dict[int, LocalRank]) -> Verdict:
        given.append(seen)
        return suspects.explains

    suspects.explain = explain  # type: ignore[method-assign]
    with pytest.raises(RankFailure):
        story.run(None, story.ended(7, 0))
    assert (given[0][0].state, given[0][0].status, given[0][0].error) == ("ended", 7, "last words")
    assert given[0][0].ended_at == 1000.0
    assert (given[0][1].status, given[0][1].error) == (0, "")


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
        story.run(None, story.ended(7, None))
    assert suspects.explained == [{}]  # processes end, and are not asked


def test_once_ranks_are_to_stop_nobody_asks_who_is_at_fault(story: Story, suspects: Suspects) -> None:
    story.trains(3, 3)
    suspects.explains = HOST
    with pytest.raises(RankFailure, match="rank 0 ended with status 7"):
        story.run(None, story.sent(signal.SIGTERM), story.ended(7, None))
    assert not suspects.explained


def test_a_hang_is_looked_for_while_ranks_save_but_not_once_they_were_killed(story: Story, suspects: Suspects) -> None:
    story.trains(3, 3)
    looks = list[int]()
    story.run(
        None, story.sent(signal.SIGTERM), lambda: looks.append(len(suspects.given)),
        lambda: looks.append(len(suspects.given)), story.sent(signal.SIGINT), None,
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
        story.run(*story.nap(64))


def test_a_silence_is_that_of_the_rank_that_the_others_wait_for(story: Story, suspects: Suspects) -> None:
    """Also where it may rightly take long, and its other threads work."""
    story.trains(3, 2)
    suspects.explains = Verdict(cause="none", why="Rank 0 is saving; the others wait for that.", ranks=(0,))
    saves = [lambda: (story.after(1.0), story.ends[0].send(Beat("saving", 3, patient=True)))] * 64
    with pytest.raises(RankFailure, match=r"wait for that\. They have waited for 60 s \(run\.timeout\)") as failed:
        story.run(*saves)
    assert (failed.value.ranks, failed.value.cause) == ((0,), "silent")
