"""A shell that is followed (``shell_run``): what it has set and started so far."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from plait.plan.shell_nodes import Node
from plait.plan.shell_syntax import UNKNOWN
from plait.plan.shell_words import Value, Variables, Words, unknown


class Run(NamedTuple):
    """A command that is started: its line and its words."""

    line: int
    words: tuple[str, ...]


@dataclass
class Log:
    """Notes that all shells of a script share. why: sources of unknown values, and what decides them.
    remarks: sentences. steps: commands so far. written: files that commands may have written."""

    why: dict[str, str] = field(default_factory=dict[str, str])
    remarks: list[str] = field(default_factory=list[str])
    steps: int = 0
    written: set[str] = field(default_factory=set[str])


@dataclass
class Shell:
    """A shell so far. status: of its last command, None where a run decides. flow: ``exit``, ``return``,
    ``break`` or ``continue`` where it goes on elsewhere. printed: output, where it is looked at; None of a
    part: not known. prints: what commands print, None where that is not known. file: the script. decided:
    what a run decides, and how, on the way that this shell went."""

    log: Log = field(compare=False)
    prints: Callable[[str, Shell], str | None] = field(compare=False)
    file: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)
    variables: Variables = field(default_factory=Variables)
    exported: frozenset[str] = frozenset()
    functions: dict[str, Node] = field(default_factory=dict[str, Node])
    locals: tuple[dict[str, Value | bool], ...] = ()
    runs: tuple[Run, ...] = ()
    status: bool | None = True
    flow: str = ""
    printed: tuple[str | None, ...] | None = None
    decided: tuple[tuple[str, bool], ...] = field(default=(), compare=False)

    def copy(self) -> Shell:
        """Another shell that goes on from here."""
        return replace(self, variables=replace(self.variables, values=dict(self.variables.values)))

    @property
    def words(self) -> Words:
        """The expansion of words in this shell."""
        return Words(self.variables, lambda text: self.prints(text, self))

    def record(self, runs: Iterable[Run]) -> None:
        """Add commands that are started, each once."""
        known = {one.words for one in self.runs}
        self.runs += tuple(one for one in runs if one.words not in known)

    def remark(self, text: str) -> None:
        """Note something of the line that is reached."""
        self.log.remarks.append(f"line {self.line}: {text.replace(UNKNOWN, '')}.")

    def not_read(self, text: str, why: str = "") -> None:
        """Note what is not read, and may set anything."""
        self.remark(f"{text} is not read{why}")
        self.variables.open = f"line {self.line}: {text.replace(UNKNOWN, '')} is not read"

    def path(self, name: str) -> str:
        """A file that a command names, from the shell's folder on; empty where that is not known."""
        folder = self.variables.values.get("PWD")
        known = isinstance(folder, str) and UNKNOWN not in folder + name
        return os.path.normpath(os.path.join(str(folder), name)) if known or os.path.isabs(name) else ""

    def show(self, text: str | None) -> None:
        """Print; None: what is not known."""
        if self.printed is not None:
            self.printed += (text,)


def forget(shell: Shell, names: Iterable[str], why: str) -> None:
    """Have variables not be known any more."""
    for name in names:
        array = isinstance(shell.variables.values.get(name), dict)
        source = f"${{{name}[@]}}" if array else f"${name}"
        shell.variables.put(name, unknown(source))
        shell.log.why[source] = why


def fork(shell: Shell, why: str, *, status: bool) -> Shell:
    """A copy that goes one way where a run decides."""
    found = shell.copy()
    found.status, found.decided = status, (*found.decided, (why, status))
    return found
