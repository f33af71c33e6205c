"""Watching ranks, without a process: what they said last, and as what error they end the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plait.core.channel import Beat, Channel, Error
from plait.core.errors import DO_NOT_RETRY, CheckpointError, JobError, NotFinite, PlaitError
from plait.core.progress import Progress
from plait.launch.watch import Rank, Watch

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
    yield Watch([Rank(0, Ended(status), ours, heard=0.0)], tmp_path, deque(), timeout=60, lock=None,
                progress=progress), progress  # fmt: skip
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
