"""The state of an interpreted shell, its built-in commands, and programs whose output follows from
their arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from plait.formats.base.shell_syntax import SEVERAL, UNKNOWN, Node, ShellSyntaxError, unknown
from plait.formats.base.shell_words import Value, Words, has_braces


class Run(NamedTuple):
    """A started command: line and words."""

    line: int
    words: tuple[str, ...]


@dataclass
class Log:
    """Notes shared by all shells of a script. remarks: sentences for the user. steps: commands
    interpreted so far. written: files that commands may have written."""

    remarks: list[str] = field(default_factory=list[str])
    steps: int = 0
    written: set[str] = field(default_factory=set[str])


@dataclass
class Shell(Words):
    """The state of a shell.

    runs: started commands. status: success of the last command, None if only a run decides. flow: a
    pending ``exit``, ``return``, ``break`` or ``continue``. printed: parts of the output if it is
    captured, else None; a part is None if unknown. file: the script's path. decided: conditions
    that only a run decides, and the outcome assumed on this shell's path."""

    log: Log = field(default_factory=Log, compare=False)
    file: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)
    exported: frozenset[str] = frozenset()
    functions: dict[str, Node] = field(default_factory=dict[str, Node])
    locals: tuple[dict[str, Value | bool], ...] = ()
    runs: tuple[Run, ...] = ()
    status: bool | None = True
    flow: str = ""
    printed: tuple[str | None, ...] | None = None
    decided: tuple[tuple[str, bool], ...] = field(default=(), compare=False)

    def copy(self) -> Shell:
        """Return a copy that continues independently."""
        return replace(self, values=dict(self.values))

    def record(self, runs: Iterable[Run]) -> None:
        """Add started commands, each once."""
        known = {one.words for one in self.runs}
        self.runs += tuple(one for one in runs if one.words not in known)

    def remark(self, text: str) -> None:
        """Add a remark on the current line."""
        self.log.remarks.append(f"line {self.line}: {text}.")

    def note_unread(self, text: str, why: str = "") -> None:
        """Note a command that is not read and may set any variable."""
        self.remark(f"{text} is not read{why}")
        self.open = f"line {self.line}: {text} is not read"

    def refuse(self, form: str) -> ShellSyntaxError:
        """Return the error for a form that Plait does not interpret."""
        return ShellSyntaxError(f"line {self.line}: '{form}' is a form that Plait does not follow")

    def path(self, name: str) -> str:
        """Return the path of a file, relative to the shell's folder; empty if either is unknown."""
        folder = str(self.values.get("PWD"))
        return "" if UNKNOWN in folder + name else os.path.normpath(os.path.join(folder, name))

    def show(self, text: str | None) -> bool:
        """Append a text to the shell's captured output, or None for unknown output; return True as
        exit status."""
        if self.printed is not None:
            self.printed += (text,)
        return True


def declare(node: Node, shell: Shell) -> bool:
    """Run ``export``, ``local``, ``declare``, ``readonly`` or ``typeset``. Raises ShellSyntaxError
    for forms that Plait does not interpret."""
    how, args = node.Variant.Value, node.Args or ()
    given = [word for one in args if not one.Name for word in shell.fields(one.Value)]
    options = "".join(one for one in given if one.startswith("-"))
    if strange := set("nuliA") & set(options):
        raise shell.refuse(f"{how} -{min(strange)}")
    if braces := [one.text for one in args if one.Name and one.Value and has_braces(one.Value)]:
        raise shell.refuse(braces[0])
    names = [one.Name.Value for one in args if one.Name]
    values = [shell.assignment(one) for one in args if one.Name and not one.Naked]  # before any is set
    if shell.locals and how in ("local", "declare", "typeset") and "g" not in options:
        kept = {name: shell.values.get(name, False) for name in names}
        shell.locals = (*shell.locals[:-1], kept | shell.locals[-1])
        shell.values |= dict.fromkeys(names)
    for name, value in values:
        shell.put(name, value)
    for word in given:
        if UNKNOWN in word:
            shell.note_unread(f"{how} {word}")
        elif not word.startswith("-"):
            name, _, value = word.partition("=")
            names.append(name)
            shell.put(name, value)
    shell.fixed |= set(names if how == "readonly" or "r" in options else ())
    shell.exported |= set(names if how == "export" or "x" in options else ())
    return True


def _leave(word: str) -> Builtin:
    """Return the built-in ``exit``, ``return``, ``break`` or ``continue``."""

    def run(shell: Shell, operands: list[str], text: str | None) -> bool | None:
        shell.flow = word if word in ("exit", "return") else f"{word} {operands[0] if operands else 1}"
        return operands[0] == "0" if operands and operands[0].isdigit() else None if operands else shell.status

    return run


def _set(shell: Shell, operands: list[str], text: str | None) -> bool:
    if "--" in operands:
        shell.set_arguments(operands[operands.index("--") + 1 :])
    return True


def _shift(shell: Shell, operands: list[str], text: str | None) -> bool:
    arguments, count = shell.get("@"), operands[0] if operands else "1"
    if isinstance(arguments, list):
        shell.put("@", arguments[int(count) :] if count.isdigit() else unknown("$@") + SEVERAL)
    return True


def _unset(shell: Shell, operands: list[str], text: str | None) -> bool:
    for name in operands:
        if "[" in name:
            shell.forget(name.partition("[")[0])
        else:
            shell.put(name, None)
    return True


def _read(shell: Shell, operands: list[str], text: str | None) -> bool | None:
    """Run ``read`` on a here-document: set variables to the words of the text's first line."""
    flags = "".join(one[1:] for one in operands if one.startswith("-"))
    names = [one for one in operands if not one.startswith("-")] or ["REPLY"]
    if text is None or UNKNOWN in text or "\\" in text or not set(flags) <= {"r", "a"}:
        for name in filter(str.isidentifier, names):
            shell.forget(name)
        return None
    marks, line = shell.blanks, text.split("\n")[0]
    if "a" in flags:
        shell.put(names[0], [one for one in shell.split(line) if one])
        return True
    line = line.strip("".join(one for one in marks if one.isspace()))
    words = re.split(f"[{re.escape(marks)}]+", line, maxsplit=len(names) - 1) if len(names) > 1 else [line]
    for name, word in zip_longest(names, words, fillvalue=""):
        shell.put(name, word)
    return True


def _set_unknown(shell: Shell, operands: list[str], text: str | None) -> None:
    """Run a command that prints unknown text or sets the variables among its words to unknown
    values."""
    for name in (*filter(str.isidentifier, operands), "OPTARG"):
        shell.forget(name)
    shell.show(None)


def _shopt(shell: Shell, operands: list[str], text: str | None) -> None:
    if "-s" in operands and (found := [one for one in operands if one.startswith(("nocase", "extglob"))]):
        raise shell.refuse(f"shopt {found[0]}")


def _echo(shell: Shell, operands: list[str], text: str | None) -> bool:
    escapes = False
    while operands and re.fullmatch(r"-[neE]+", operands[0]):
        escapes, operands = escapes or "e" in operands[0], operands[1:]
    text = " ".join(operands) + "\n"
    return shell.show(None if escapes and "\\" in text else text)


def _cd(shell: Shell, operands: list[str], text: str | None) -> bool | None:
    """Run ``cd`` without a check that the folder exists."""
    to = operands[-1] if operands else "~"
    folder = shell.path(to) if to[:1] not in ("-", "~") else ""
    shell.put("PWD", folder or unknown("$PWD"))
    return True if folder else None


def _path(program: Callable[[str], str]) -> Builtin:
    """Return a program that prints a path made of its last word."""

    def run(shell: Shell, operands: list[str], text: str | None) -> bool:
        known = operands and UNKNOWN not in operands[-1] and shell.path(operands[-1])
        return shell.show(program(operands[-1]) if known else None)

    return run


Builtin = Callable[[Shell, list[str], str | None], bool | None]
"""A built-in command: a function of the shell, the command's arguments and its here-document;
returns the status."""

BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys((":", "true"), lambda shell, given, text: True),
    "false": lambda shell, given, text: False,
    "[": lambda shell, given, text: shell.bracket(given[:-1]),
    "test": lambda shell, given, text: shell.bracket(given),
    "set": _set, "shift": _shift, "unset": _unset, "read": _read, "shopt": _shopt, "echo": _echo, "cd": _cd,
    "cat": lambda shell, given, text: shell.show(None if given else text),
    "pwd": lambda shell, given, text: shell.show(shell.path("") or None),
    "dirname": _path(lambda path: os.path.dirname(path.rstrip("/")) or "."),
    **dict.fromkeys(("realpath", "readlink"), _path(os.path.realpath)),
    **dict.fromkeys(("mapfile", "readarray", "getopts", "printf"), _set_unknown),
    **{word: _leave(word) for word in ("exit", "return", "break", "continue")},
}  # fmt: skip
