"""Arguments of a command that a shell script starts, without starting it: variables and arrays that the
script itself sets are put in; what a run would bring (``$1``, the environment) stays as it is written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from plait.plan.read_branches import taken
from plait.plan.shell_values import ASSIGNED, expanded, uncommented, value_at

_SLURM = re.compile(
    r"^#SBATCH\s+(?:--(nodes|gpus-per-node|ntasks-per-node|gres)|-(N))[= ](?:gpu:)?(?:\w+:)?(\d+)\b", re.M
)
_OF_SLURM = {"nodes": "nnodes", "N": "nnodes", "ntasks-per-node": "nproc-per-node", "gpus-per-node": "nproc-per-node",
             "gres": "nproc-per-node"}  # fmt: skip
_DEFAULT = re.compile(r'^[ \t]*:[ \t]+"?\$\{(\w+):?=([^}]*)\}"?', re.M)
"""A variable that has a value unless a run brings one."""
_QUOTED = re.compile(r'"(\$\{\w+\[@\]\})"')
"""All words of an array, each a word."""
_COMMAND = re.compile(r"\s--[a-z]")
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_END = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<", "then", "fi", "do", "done", "else"}


class Argument(NamedTuple):
    """A flag without its dashes, with ``-`` for ``_``, and the words behind it."""

    name: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((f"--{self.name}", *self.values))


class Script(NamedTuple):
    """arguments: of its command. open: conditions that a run decides, with what their branches set. passed:
    how other commands with flags begin."""

    arguments: list[Argument]
    open: dict[str, list[str]]
    passed: list[str]

    @property
    def notes(self) -> list[str]:
        """A sentence on each condition that a run decides, and on other commands."""
        told = (
            [f"Of its commands the one with most flags is read, not {', '.join(self.passed)}."] if self.passed else []
        )
        return told + [
            f"A run decides {condition}, which sets {', '.join(names)}: all of its branches are read, and of a value "
            "that several set the last."
            for condition, names in self.open.items()
        ]


def arguments(text: str) -> list[Argument]:
    """Flags of the commands in a script."""
    return read_script(text).arguments


def read_script(text: str) -> Script:
    """Flags of the commands in a script; of a text without commands all flags in it.

    >>> script = 'N=4\\nARGS=(--num-layers $((2*N)) --bf16)\\ntorchrun run.py ${ARGS[@]}'
    >>> [str(one) for one in read_script(script).arguments]
    ['--num-layers 8', '--bf16']
    >>> [str(one) for one in read_script('--lr 1e-4 --save $1 # where').arguments]
    ['--lr 1e-4', '--save $1']
    """
    joined = _DEFAULT.sub(r"\1=${\1:-\2}", text)
    joined = _QUOTED.sub(r"\1", joined.replace("\\\r\n", " ").replace("\\\n", " "))
    runs = taken(joined)
    variables, rest = _variables(runs.text)
    passed = list[str]()
    found = _flags(expanded(rest, variables), passed)
    if not found:
        for value in variables.values():
            found += _of_line(expanded(value, variables))
    said = {one.name for one in found if one.values and one.values[0].isdigit()}
    asked = {_OF_SLURM[long or short]: number for long, short, number in sorted(_SLURM.findall(text), key=_last)}
    flags = [*(Argument(name, (number,)) for name, number in asked.items() if name not in said),
             *(one for one in found if one.name not in asked or one.name in said)]  # fmt: skip
    return Script(flags, runs.open, passed)


def _last(asked: tuple[str, str, str]) -> bool:
    """Whether it counts before others: GPUs of a node before its tasks."""
    return asked[0] != "ntasks-per-node"


def _variables(text: str) -> tuple[dict[str, str], str]:
    """What the script sets, and the script without it."""
    found, rest, at = dict[str, str](), list[str](), 0
    while match := ASSIGNED.search(text, at):
        line = text.rfind("\n", 0, match.start() + 1) + 1
        if text[line : match.start()].lstrip().startswith("#"):
            at = match.end()
            continue
        rest.append(text[at : match.start()])
        value, at = value_at(text, match.end())
        name = match[1]
        if name in found:  # itself and more
            before = found[name]
            value = re.sub(rf"\$\{{?{name}\b(?:\[[@*]\])?\}}?", lambda _, text=before: text, value)
        found[name] = f"{found[name]} {value}" if match[2] and name in found else value
    return found, "".join([*rest, text[at:]])


def _flags(text: str, passed: list[str]) -> list[Argument]:
    """Of the command with most flags, and of lines that are flags alone. passed: other commands are added."""
    lines = [(line, list(_of_line(line))) for line in text.splitlines()]
    lines = [(line, given) for line, given in lines if given]
    commands = [(line, given) for line, given in lines if not line.lstrip().startswith("-")]
    most = max(commands, key=lambda one: len(one[1]), default=None)
    passed += [" ".join(line.split()[:3]) for line, given in commands if most and given is not most[1]]
    return [
        one for line, given in lines if not most or given is most[1] or line.lstrip().startswith("-") for one in given
    ]


def _of_line(line: str) -> Iterator[Argument]:
    """Flags in order with the words behind each."""
    name, values = "", list[str]()
    for word in _words(uncommented(line)):
        match = _FLAG.fullmatch(word) if word.startswith("--") else None
        if not match and word not in _END:
            values.append(word)
            continue
        if name:
            yield Argument(name, tuple(values))
        name, values = "", list[str]()
        if match:
            name, values = match[1].replace("_", "-"), [] if match[2] is None else [match[2]]
    if name:
        yield Argument(name, tuple(values))


def _words(line: str) -> list[str]:
    """Of a line; of a command within quotes (``bash -c "..."``) its own."""
    try:
        words = shlex.split(line)
    except ValueError:
        return line.split()
    return [one for word in words for one in (_words(word) if _COMMAND.search(word) else [word])]
