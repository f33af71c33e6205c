"""A run that fails, as its launcher sees it: which rank began it, and as what error it ends the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from plait.core.base.errors import DO_NOT_RETRY, CheckpointError, JobError, NotFinite, PlaitError, RankFailure, RunLost
from plait.core.runs.channel import Error
from plait.core.runs.lock import RunLock
from plait.launch import watch as module
from tests.launch.story import Story

TIER = "unit"


def test_what_a_rank_said_while_nobody_listened_is_heard_at_the_end(story: Story) -> None:
    for step in range(61):
        story.trains(step, step)
    story.ends_with(0, 0)
    assert story.watch.until_ended() == 0
    assert story.progress.step == 60


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
    story: Story, kind: str, status: int, raised: type[PlaitError], exit_status: int
) -> None:
    story.ends[0].send(Error("step 2: the loss is nan.", kind))
    story.ends_with(status, 0)
    with pytest.raises(PlaitError) as error:
        story.watch.until_ended()
    assert (type(error.value), str(error.value)) == (raised, "step 2: the loss is nan.")
    assert error.value.exit_status == exit_status


def test_a_run_ends_well_with_its_last_rank(story: Story) -> None:
    assert story.run(lambda: story.trains(0, 0), lambda: story.ends_with(0, None), lambda: story.ends_with(0, 0)) == 0
    assert story.progress.step == 0


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


def test_one_that_is_stopped_made_the_others_fail(story: Story) -> None:
    story.trains(5, 5)
    story.processes[0].stopped = True
    with pytest.raises(RankFailure, match=r"rank 0 has not answered .* waited for it in vain") as failed:
        story.run(lambda: None, lambda: story.ends_with(None, 1))
    assert (failed.value.ranks, failed.value.cause) == ((0,), "stopped")


def test_one_that_is_stopped_is_no_cause_beside_one_that_was_killed(story: Story) -> None:
    story.trains(5, 5)
    story.processes[0].stopped = True
    with pytest.raises(RankFailure, match="rank 1 was killed"):
        story.run(lambda: None, lambda: story.ends_with(None, -9))


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
