"""Arguments of a command that a shell script starts, without starting it: variables and arrays that the
script itself sets are put in; what a run would bring (``$1``, the environment) stays as it is written."""

from __future__ import annotations

import re
import shlex
from ast import Add, BinOp, Constant, Expression, FloorDiv, Mult, Sub, parse
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+|local[ \t]+|declare[ \t]+(?:-\w+[ \t]+)*)?([A-Za-z_]\w*)(\+?)=", re.MULTILINE
)
_REFERENCE = re.compile(r"\$\(\((.*?)\)\)|\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_SLURM = re.compile(
    r"^#SBATCH\s+(?:--(nodes|gpus-per-node|ntasks-per-node|gres)|-(N))[= ](?:gpu:)?(?:\w+:)?(\d+)\b", re.M
)
_OF_SLURM = {"nodes": "nnodes", "N": "nnodes", "ntasks-per-node": "nproc-per-node", "gpus-per-node": "nproc-per-node",
             "gres": "nproc-per-node"}  # fmt: skip
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_END = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<", "then", "fi", "do", "done", "else"}
DEPTH = 20
"""Variables within variables, at most."""


class Argument(NamedTuple):
    """A flag without its dashes, with ``-`` for ``_``, and the words behind it."""

    name: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((f"--{self.name}", *self.values))


def arguments(text: str) -> list[Argument]:
    """Flags of the commands in a script; of a text without commands all flags in it.

    >>> script = 'N=4\\nARGS=(--num-layers $((2*N)) --bf16)\\ntorchrun run.py ${ARGS[@]}'
    >>> [str(one) for one in arguments(script)]
    ['--num-layers 8', '--bf16']
    >>> [str(one) for one in arguments('--lr 1e-4 --save $1 # where')]
    ['--lr 1e-4', '--save $1']
    """
    joined = text.replace("\\\r\n", " ").replace("\\\n", " ")
    variables, rest = _variables(joined)
    found = list(_flags(_expanded(rest, variables)))
    if not found:
        for value in variables.values():
            found += _flags(_expanded(value, variables))
    said = {one.name for one in found if one.values and one.values[0].isdigit()}
    asked = {_OF_SLURM[long or short]: number for long, short, number in sorted(_SLURM.findall(text), key=_last)}
    return [*(Argument(name, (number,)) for name, number in asked.items() if name not in said),
            *(one for one in found if one.name not in asked or one.name in said)]  # fmt: skip


def _last(asked: tuple[str, str, str]) -> bool:
    """Whether it counts before others: GPUs of a node before its tasks."""
    return asked[0] != "ntasks-per-node"


def _variables(text: str) -> tuple[dict[str, str], str]:
    """What the script sets, and the script without it."""
    found, rest, at = dict[str, str](), list[str](), 0
    while match := _ASSIGNED.search(text, at):
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


def _expanded(text: str, variables: Mapping[str, str], depth: int = DEPTH) -> str:
    """With variables put in; what nobody sets stays."""

    def put(match: re.Match[str]) -> str:
        if match[1] is not None:
            return _computed(re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: variables.get(m[1], m[0]), match[1]),
                             match[0], variables, depth)  # fmt: skip
        name, default = match[2] or match[4], match[3]
        if name in variables and depth:
            value = variables[name]
            return _expanded(value, {key: one for key, one in variables.items() if key != name}, depth - 1)
        return default.strip("\"'") if default is not None else match[0]

    return _REFERENCE.sub(put, text)


def _computed(text: str, otherwise: str, variables: Mapping[str, str], depth: int) -> str:
    """Sums and products of whole numbers."""
    told = _expanded(text, variables, depth - 1) if depth else text
    try:
        return str(_number(parse(told.strip().replace("/", "//"), mode="eval")))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return otherwise


def _number(node: object) -> int:
    match node:
        case Expression(body=body):
            return _number(body)
        case Constant(value=int(value)):
            return value
        case BinOp(left=left, op=op, right=right):
            a, b = _number(left), _number(right)
            return a * b if isinstance(op, Mult) else a + b if isinstance(op, Add) else (
                a - b if isinstance(op, Sub) else a // b if isinstance(op, FloorDiv) else _number(None)
            )  # fmt: skip
        case _:
            raise ValueError


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
