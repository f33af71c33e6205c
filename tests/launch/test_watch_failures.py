"""A run that fails, as its launcher sees it: which rank began it, and as what error it ends the
run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


Tells = Callable[[Story], object]


def log(rank: int, text: str) -> Tells:
    return lambda story: setattr(story.processes[rank], "log", text)


def says(rank: int, text: str, kind: str) -> Tells:
    return lambda story: story.ends[rank].send(Error(text, kind))


def stopped(story: Story) -> None:
    story.processes[0].stopped = True


def then(status: int, *before: int | None) -> Tells:
    """In the moment in which causes are written, the other one ends, too."""

    def arrange(story: Story) -> None:
        story.clock.sleep = lambda seconds: story.ends_with(*(status if one is None else one for one in before))  # type: ignore[method-assign]

    return arrange


GAVE_UP = RankFailure.exit_status


@pytest.mark.parametrize(
    ("tells", "ends", "raised", "message", "blamed"),
    [
        # one that was killed began it, whatever it said, or the others
        ([log(0, "plait-error: rank 1 is gone\n")], (None, -9), RankFailure,
         "^rank 1 was killed by SIGKILL; the other ranks were ended", ((1,), "killed", "")),
        ([says(0, "no such file.", "JobError")], (-9, None), RankFailure, "^rank 0 was killed by SIGKILL",
         ((0,), "killed", "no such file.")),
        # of those that ended the first, unless one has a message
        ([log(1, "Traceback\nMemoryError\n"), then(7, None, 1)], (None, 1), RankFailure,
         "^rank 1 ended with status 1; the other", ((1,), "ended", "MemoryError")),
        ([says(1, "no such file.", "JobError")], (7, 2), JobError, r"^no such file\.$", None),
        # a message in a log counts as one that was sent
        ([log(0, "before\nplait-error: it is\n")], (2, None), PlaitError, "^it is$", None),
        ([log(0, "before\nplait: it is\n")], (2, None), RankFailure, "^rank 0 ended with status 2",
         ((0,), "ended", "plait: it is")),
        # one that is stopped made the others fail, unless one was killed
        ([stopped], (None, 1), RankFailure, r"^rank 0 has not answered .* waited for it in vain",
         ((0,), "stopped", "")),
        ([stopped], (None, -9), RankFailure, "^rank 1 was killed", ((1,), "killed", "")),
        # one that gave up does not know whose fault it is
        ([says(0, "Rank 1 did not answer.", "RankFailure")], (GAVE_UP, None), RankFailure,
         r"^Rank 1 did not answer\.$", ((), "gave up", "")),
    ],
)  # fmt: skip
def test_who_began_it(
    story: Story, tells: Sequence[Tells], ends: tuple[int | None, int | None], raised: type[PlaitError], message: str,
    blamed: tuple[tuple[int, ...], str, str] | None,
) -> None:  # fmt: skip
    """blamed: ranks, cause and their last words, of a failure of ranks."""
    story.trains(5, 5)
    for tell in tells:
        tell(story)
    with pytest.raises(PlaitError, match=message) as failed:
        story.run(None, story.ended(*ends))
    assert type(failed.value) is raised
    if isinstance(failed.value, RankFailure):
        assert (failed.value.ranks, failed.value.cause, failed.value.words) == blamed
    else:
        assert failed.value.exit_status == 2


def test_when_one_was_killed_is_known_to_a_look(story: Story) -> None:
    story.trains(5, 5)
    with pytest.raises(RankFailure, match="SIGKILL"):
        story.run(None, lambda: story.after(0.5), story.ended(-9, None))
    assert story.progress.unnoticed(story.clock.now) == pytest.approx(0.5 + module.LOOK)


def test_when_the_first_of_those_that_were_killed_was_gone_counts(story: Story) -> None:
    story.trains(5, 5)

    def meanwhile(seconds: float) -> None:
        assert seconds == 0.5
        story.clock.now += seconds
        story.processes[1].returncode = -9

    story.clock.sleep = meanwhile  # type: ignore[method-assign]
    with pytest.raises(RankFailure, match="rank 0 was killed"):
        story.run(None, lambda: story.after(0.5), story.ended(-9, None))
    assert story.progress.unnoticed(story.clock.now) == pytest.approx(0.5 + module.LOOK)


def test_a_lock_is_checked_at_every_look(story: Story) -> None:
    checks = list[int]()

    def check() -> None:
        checks.append(0)
        if len(checks) == 3:
            raise RunLost("another launcher has the run")

    story.watch.lock = cast("RunLock", SimpleNamespace(check=check))
    with pytest.raises(RunLost):
        story.run(*[None] * 9)
    assert len(checks) == 3
