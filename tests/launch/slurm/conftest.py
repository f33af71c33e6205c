"""Slurm's controller as a test tells it, for launchers that speak to it by its commands."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import repeat

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.slurm import commands

Look = str | tuple[str, str] | None
"""A state, or one with its reason; None while the controller is away. Before one that begins with
``!`` the test's own process is sent SIGTERM."""


class ScriptedSlurm:
    """told: commands that it was given. answers: by a command's first word. refused: what fails
    once. refusal: why everything fails, if it does. jobs: what each is at each look."""

    def __init__(self) -> None:
        self.told, self.refused, self.refusal = list[tuple[str, ...]](), list[tuple[str, ...]](), ""
        self.answers = dict[str, str]()
        self.jobs: dict[str, Iterator[Look]] = {"7": repeat("RUNNING")}

    def looks(self, *script: Look, job: str = "7") -> None:
        """Have a job be so at each look."""
        self.jobs[job] = iter(script)

    def state(self, job: str) -> commands.SlurmJobState:
        if (now := next(self.jobs.get(job, iter([None])))) is None:
            raise LaunchError("Slurm refused: Unable to contact slurm controller.")
        name, reason = (now, "") if isinstance(now, str) else now
        if name.startswith("!"):
            signal.raise_signal(signal.SIGTERM)
        nodes = () if name.strip("!") == "PENDING" else ("n1",)
        return commands.SlurmJobState(name.strip("!"), 0, nodes, reason)

    def command(self, *argv: str, data: str | None = None) -> str:
        self.told.append(argv)
        if argv in self.refused or self.refusal:
            self.refused = [one for one in self.refused if one != argv]
            raise LaunchError(self.refusal or "Slurm refused: Job/step already completing or completed.")
        return self.answers.get(argv[0], "")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """Job 7 is running, and everything is granted at once."""
    one = ScriptedSlurm()
    monkeypatch.setattr(commands, "state", one.state)
    monkeypatch.setattr(commands, "command", one.command)
    monkeypatch.setattr(commands, "LOOK", 0.001)
    return one
