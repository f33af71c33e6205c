"""Jobs of a background thread: when one has ended, and what whoever waits for it is told."""

from __future__ import annotations

from typing import Any, cast

import pytest

from plait.train.comm.background import BackgroundHandle
from plait.train.machine.device import RankDevice


class Queue:
    """A device that has come as far as it is told. joined: what the waiting thread's work was put
    behind."""

    def __init__(self) -> None:
        self.there, self.joined = False, list[Any]()

    def reached(self, mark: Any) -> bool:
        return self.there

    def join(self, mark: Any) -> None:
        self.joined.append(mark)


def test_a_job_on_a_device_has_ended_when_the_device_has_come_so_far() -> None:
    queue, handle = Queue(), BackgroundHandle()
    assert not handle.done()
    handle.finish(None, cast("RankDevice", queue), mark=cast("Any", "here"))
    assert not handle.done()
    queue.there = True
    assert handle.done()
    handle.wait()
    assert queue.joined == ["here"]


def test_a_job_without_a_device_has_ended_with_its_last_word() -> None:
    handle = BackgroundHandle()
    handle.finish(None)
    assert handle.done()
    handle.wait()


def test_whoever_waits_for_a_job_that_failed_is_told_why() -> None:
    queue, handle = Queue(), BackgroundHandle()
    handle.finish(ValueError("torn"), cast("RankDevice", queue))
    with pytest.raises(ValueError, match="torn"):
        handle.wait()
    assert queue.joined == []
