"""Whether what a run's log says of its attempts is what ``attempts.jsonl`` says: verdicts, steps, times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from plait.core.runs.attempts import Attempt

GOES_ON = re.compile(
    r"the run goes on from step (\d+).*?\. "
    r"(?:Failure noticed within ([\d.]+) s|(?:Time of the failure unknown|When it failed)[^;]*); "
    r"until ranks were started ([\d.]+) s; until they trained ([\d.]+) s; first new step ([\d.]+) s"
)
"""Of ``History.goes_on``."""


def disagreements(home: Path, attempts: Sequence[Attempt], said: str, *, killed: bool) -> list[str]:
    """In words. home: the run's folder. said: what the command printed that followed it. killed: whether it
    was ended at once, so that nobody could note how."""
    logs = "\n".join(file.read_text(errors="replace") for file in sorted((home / "logs").glob("slurm-*.log")))
    text = " ".join((logs or said).split())
    return [*_by_number(attempts, killed=killed), *_of_failures(attempts, text), *_of_times(attempts, text)]


def _by_number(attempts: Sequence[Attempt], *, killed: bool) -> list[str]:
    """Each has a number of its own, ends after it began and before the next, and goes on from what was
    done."""
    found: list[str] = []
    if [one.attempt for one in attempts] != list(range(1, len(attempts) + 1)):
        found.append("attempts are not numbered one after the other")
    for one, following in zip(attempts, [*attempts[1:], None], strict=True):
        if one.outcome == "running" and (following or not killed):
            found.append(f"attempt {one.attempt} is still running")
        if one.ended is not None and one.ended < one.started:
            found.append(f"attempt {one.attempt} ended before it began")
        if following and one.ended is not None and following.started < one.ended:
            found.append(f"attempt {following.attempt} began before the one before had ended")
        if following and one.step >= 0 and following.resumed > one.step:
            found.append(f"attempt {following.attempt} went on from {following.resumed}, of {one.step} done")
    return found


def _of_failures(attempts: Sequence[Attempt], text: str) -> list[str]:
    """The verdict on each is in the log."""
    return [
        f"the log does not say of attempt {one.attempt}: {one.why}"
        for one in attempts
        if one.outcome == "failed" and " ".join(one.why.split()) not in text
    ]


def _of_times(attempts: Sequence[Attempt], text: str) -> list[str]:
    """What it took to come there again is the same in both, in the same order."""
    told = [tuple(float(word) if word else None for word in one) for one in GOES_ON.findall(text)]
    noted = [
        (
            float(one.resumed), before.detection_seconds and round(before.detection_seconds, 1),
            round(one.wait_seconds, 1), round(one.restart_seconds or 0.0, 1), round(one.first_step_seconds or 0.0, 2),
        )
        for before, one in pairwise(attempts)
        if one.wait_seconds is not None and one.first_step_seconds is not None
    ]  # fmt: skip
    if len(told) != len(noted):
        return [f"{len(noted)} attempts went on, and the log says so of {len(told)}"]
    return [
        f"the log says {said} of what was noted as {have}"
        for said, have in zip(told, noted, strict=True)
        if not all(
            (one or 0.0) == (other or 0.0) or abs((one or 0.0) - (other or 0.0)) < 0.11
            for one, other in zip(said, have, strict=True)
        )
    ]
