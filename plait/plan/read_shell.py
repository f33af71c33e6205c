"""Arguments of a command that a shell script starts, without starting it: variables and arrays that the
script itself sets are put in; what a run would bring (``$1``, the environment) stays as it is written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from plait.plan.read_branches import taken
from plait.plan.shell_values import ASSIGNED, expanded

_SLURM = re.compile(
    r"^#SBATCH\s+(?:--(nodes|gpus-per-node|ntasks-per-node|gres)|-(N))[= ](?:gpu:)?(?:\w+:)?(\d+)\b", re.M
)
_OF_SLURM = {"nodes": "nnodes", "N": "nnodes", "ntasks-per-node": "nproc-per-node", "gpus-per-node": "nproc-per-node",
             "gres": "nproc-per-node"}  # fmt: skip
_QUOTED = re.compile(r'"(\$\{\w+\[@\]\})"')
"""All words of an array, each a word."""
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_END = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<", "then", "fi", "do", "done", "else"}


class Argument(NamedTuple):
    """A flag without its dashes, with ``-`` for ``_``, and the words behind it."""

    name: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((f"--{self.name}", *self.values))


class Script(NamedTuple):
    """arguments: of its commands. open: conditions that a run decides, with what their branches set."""

    arguments: list[Argument]
    open: dict[str, list[str]]

    @property
    def notes(self) -> list[str]:
        """A sentence on each condition that a run decides."""
        return [
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
    joined = _QUOTED.sub(r"\1", text.replace("\\\r\n", " ").replace("\\\n", " "))
    runs = taken(joined)
    variables, rest = _variables(runs.text)
    found = list(_flags(expanded(rest, variables)))
    if not found:
        for value in variables.values():
            found += _flags(expanded(value, variables))
    said = {one.name for one in found if one.values and one.values[0].isdigit()}
    asked = {_OF_SLURM[long or short]: number for long, short, number in sorted(_SLURM.findall(text), key=_last)}
    flags = [*(Argument(name, (number,)) for name, number in asked.items() if name not in said),
             *(one for one in found if one.name not in asked or one.name in said)]  # fmt: skip
    return Script(flags, runs.open)


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
        value, at = _value(text, match.end())
        name = match[1]
        if name in found:  # itself and more
            before = found[name]
            value = re.sub(rf"\$\{{?{name}\b(?:\[[@*]\])?\}}?", lambda _, text=before: text, value)
        found[name] = f"{found[name]} {value}" if match[2] and name in found else value
    return found, "".join([*rest, text[at:]])


def _value(text: str, at: int) -> tuple[str, int]:
    """An assignment's value from ``at`` on, and where it ends."""
    if text[at : at + 1] == "(":
        depth, end = 0, at
        for end in range(at, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if not depth:
                break
        lines = (_uncommented(line) for line in text[at + 1 : end].splitlines())
        return " ".join(_unquoted(line) for line in lines), end + 1
    quote = text[at : at + 1]
    if quote in ("'", '"'):
        end = at + 1
        while end < len(text) and text[end] != quote:
            end += 2 if text[end] == "\\" else 1
        return " ".join(text[at + 1 : end].split()), end + 1
    end, depth = at, 0
    while end < len(text) and (depth or not text[end].isspace()) and not (text[end] == ";" and not depth):
        depth += {"(": 1, ")": -1, "{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[at:end], end


def _uncommented(line: str) -> str:
    """Without what follows a # that begins a word."""
    return re.sub(r"(^|\s)#.*$", "", line)


def _unquoted(line: str) -> str:
    """Words without the quotes around them."""
    try:
        return " ".join(shlex.split(line))
    except ValueError:
        return line


def _flags(text: str) -> Iterator[Argument]:
    """Of every command, flags in order with the words behind each."""
    for line in text.splitlines():
        name, values = "", list[str]()
        for word in _words(_uncommented(line)):
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
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()
