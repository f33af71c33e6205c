"""The ranks that read or write one checkpoint: they succeed together, or every one of them gets the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from plait.core.base.errors import CheckpointError, PlaitError, RunLost
from plait.train.comm.objects import broadcast, gather

KINDS: Mapping[str, type[PlaitError]] = {"checkpoint": CheckpointError, "lost": RunLost}
"""Errors that keep their class on other ranks."""


class Peers:
    """All ranks of ``group``; a single process without one. Results travel, so they are plain JSON values.

    Waits are bounded by the group's timeout: a rank that does not answer is a RuntimeError on the others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def agree(self, work: Callable[[], Any]) -> list[Any]:
        """``work`` done by every rank: all results, by rank, or an error everywhere."""
        result, failure = _attempt(work)
        told = _told(failure, self.rank)
        answers = gather((result, told), self.group) if self.size > 1 else [(result, told)]
        if failure is not None:
            raise failure
        for _, told in answers:
            if told is not None:
                raise _error(told)
        return [answer for answer, _ in answers]

    def lead(self, work: Callable[[], Any]) -> Any:
        """``work`` done by rank 0 alone: its result, or its error, everywhere."""
        result, failure = _attempt(work) if self.rank == 0 else (None, None)
        told = None
        if self.size > 1:
            result, told = broadcast((result, _told(failure, self.rank)), 0, self.group)
        if failure is not None:
            raise failure
        if told is not None:
            raise _error(told)
        return result


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  (raised again once the others know)
        return None, error


def _told(error: Exception | None, rank: int) -> dict[str, Any] | None:
    """An error as the other ranks hear of it."""
    if error is None:
        return None
    for kind, one in KINDS.items():
        if isinstance(error, one):
            return {"kind": kind, "text": str(error)}
    if isinstance(error, OSError):  # with its number: who hears of a full disk says so
        file = () if error.filename is None else (str(error.filename),)
        return {"kind": "system", "args": [error.errno, error.strerror, *file] if error.errno else [str(error)]}
    return {"kind": "bug", "text": f"rank {rank}: {error!r}"}


def _error(told: dict[str, Any]) -> Exception:
    if told["kind"] in KINDS:
        return KINDS[told["kind"]](told["text"])
    if told["kind"] == "system":
        return OSError(*told["args"])
    return RuntimeError(told["text"])
