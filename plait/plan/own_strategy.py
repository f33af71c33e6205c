"""The strategy that another framework's file has, beside the best that a search finds, and what changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from plait.core.base.errors import PlaitError
from plait.core.base.text import in_bytes, in_seconds
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.candidate import Candidate
from plait.plan.emit import check_emits, emit
from plait.plan.reasons import differences
from plait.plan.told import Told

HOW = "This is the file's own strategy: strategy=auto on the command line searches for a faster one."
SAME = 0.005
"""A share of a step: a search that gains less finds nothing faster."""


@dataclass(frozen=True)
class OwnStrategy:
    """own: the file's own strategy, None where it has no prediction, for the reason ``refused``. changes:
    settings of the framework that the best has otherwise."""

    own: Candidate | None
    refused: str
    changes: list[str]

    def told(self, best: Candidate) -> str:
        """A sentence on both."""
        if self.own is None:
            return f"The file's own strategy has no prediction: {self.refused}"
        short = "" if self.own.memory.fits else f", and does not fit ({in_bytes(self.own.most_memory)})"
        before = f"As the file has it, a step takes {in_seconds(self.own.seconds)}{short}"
        if self.own.memory.fits and best.seconds > (1 - SAME) * self.own.seconds:
            return f"{before}: the search finds nothing faster."
        what = f" with {', '.join(self.changes)}" if self.changes else ""
        return f"{before}; the best found takes {in_seconds(best.seconds)}{what}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"own": self.own and self.own.to_dict(), "refused": self.refused, "changes": self.changes}


def own_strategy(planner: Planner, told: Told, own: Job | PlaitError, best: Candidate) -> OwnStrategy:
    """The file's own strategy beside the best that was found. own: its job, or why there is none."""
    try:
        if isinstance(own, PlaitError):
            raise own
        found = replace(planner, job=own).predict(own)
    except PlaitError as error:
        return OwnStrategy(None, str(error), [])
    return OwnStrategy(found, "", list(_changes(found, best, told.framework)))


def _changes(own: Candidate, best: Candidate, framework: str) -> Iterator[str]:
    """Settings as the framework writes them; in a job's words where it cannot be told the job."""
    try:
        check_emits(best.job, framework)
        before, after = (_settings(emit(one.job, framework).text) for one in (own, best))
    except PlaitError:
        rows = differences(own.readable, best.readable).items()
        yield from (f"{key}={value}" for key, (_, value) in rows)
        return
    yield from (text for name, text in after.items() if before.get(name) != text)
    yield from (f"no {name}" for name in before if name not in after)


def _settings(text: str) -> dict[str, str]:
    """Settings by name: a line each."""
    lines = [line.strip().rstrip("\\, ") for line in text.splitlines()]
    return {re.split(r"[\s=:]", line)[0]: line for line in lines if re.match(r"[-\w\"]", line)}
