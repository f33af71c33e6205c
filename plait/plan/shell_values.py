"""Variables of a shell script: those that it sets are put in, others stay as they are written."""

from __future__ import annotations

import re
import shlex
from ast import Add, BinOp, Constant, Expression, FloorDiv, Mult, Sub, parse
from collections.abc import Mapping

ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+|local[ \t]+|declare[ \t]+(?:-\w+[ \t]+)*)?([A-Za-z_]\w*)(\+?)=", re.MULTILINE
)
_REFERENCE = re.compile(r"\$\(\((.*?)\)\)|\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$([A-Za-z_]\w*)")
DEPTH = 20
"""Variables within variables, at most."""


def expanded(text: str, variables: Mapping[str, str], depth: int = DEPTH) -> str:
    """With variables put in; what nobody sets stays."""

    def put(match: re.Match[str]) -> str:
        if match[1] is not None:
            return _computed(re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: variables.get(m[1], m[0]), match[1]),
                             match[0], variables, depth)  # fmt: skip
        name, default = match[2] or match[4], match[3]
        if name in variables and depth:
            value = variables[name]
            return expanded(value, {key: one for key, one in variables.items() if key != name}, depth - 1)
        return default.strip("\"'") if default is not None else match[0]

    return _REFERENCE.sub(put, text)


def _computed(text: str, otherwise: str, variables: Mapping[str, str], depth: int) -> str:
    """Sums and products of whole numbers."""
    told = expanded(text, variables, depth - 1) if depth else text
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


def value_at(text: str, at: int) -> tuple[str, int]:
    """An assignment's value from ``at`` on, and where it ends."""
    if text[at : at + 1] == "(":
        depth, end = 0, at
        for end in range(at, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if not depth:
                break
        lines = (uncommented(line) for line in text[at + 1 : end].splitlines())
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


def uncommented(line: str) -> str:
    """Without what follows a # that begins a word."""
    return re.sub(r"(^|\s)#.*$", "", line)


def _unquoted(line: str) -> str:
    """Words without the quotes around them."""
    try:
        return " ".join(shlex.split(line))
    except ValueError:
        return line
