"""Arithmetic of a shell on whole numbers, with variables that it reads and sets."""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping

Read = Callable[[str], int | None]
Write = Callable[[str, int | None], None]

_SET = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\*\*|<<|>>|[-+*/%])?=(?!=)(.*)|(\+\+|--)\s*)", re.DOTALL)
_STEP = re.compile(r"\s*(\+\+|--)([A-Za-z_]\w*)\s*")
_TARGET = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:\*\*|<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_CHOICE = re.compile(r"([^?]+)\?([^?:]+):([^?:]+)")
_CONSTANT = re.compile(r"(?<![\w.])(?:(\d+)#(\w+)|0([0-7]+))(?![\w.])")
_WORDS = {"&&": " and ", "||": " or ", "/": "//", "!": "~"}
_LARGEST = 1 << 62
_BINARY: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.Pow: operator.pow, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}  # fmt: skip


def evaluate(text: str, read: Read, write: Write) -> int | None:
    """The value of an expression; None where it is not known. Raises ValueError or SyntaxError for one that
    is none, or has what is not read (operators on bits).

    >>> evaluate("(3 - 1) % 3 == 2 && !0", lambda name: None, lambda name, value: None)
    1
    """
    *before, last = text.split(",")
    for one in before:
        evaluate(one, read, write)
    if step := _STEP.fullmatch(last):
        last = f"{step[2]} {step[1][0]}= 1"
    if found := _SET.fullmatch(last):
        name, how, other, step = found.groups()
        old = read(name) if how or step else None
        other = f"{name} {how or step[0]} ({other or 1})" if how or step else other
        write(name, new := evaluate(other, read, write))
        return old if step else new
    if (choice := _CHOICE.fullmatch(last)) and not targets(last):
        told = evaluate(choice[1], read, write)
        return None if told is None else evaluate(choice[2] if told else choice[3], read, write)
    if _TARGET.search(last) or re.search(r"\d_|~", last):
        raise ValueError("a variable that is set within an expression, or what is not read")
    last = _CONSTANT.sub(lambda found: str(int(found[2] or found[3], int(found[1] or 8))), last)
    last = re.sub(r"&&|\|\||!(?!=)|/", lambda found: _WORDS[found[0]], last)
    with warnings.catch_warnings(action="error"):  # of literals such as 1if
        node = ast.parse(last.strip() or "0", mode="eval").body
    return _number(node, read)


def targets(text: str) -> list[str]:
    """Variables that an expression sets."""
    return [one or other for one, other in _TARGET.findall(text)]


def _number(node: ast.AST, read: Read) -> int | None:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return read(name)
        case ast.BoolOp(op=op, values=parts):
            ends = isinstance(op, ast.Or)
            for part in parts:
                if (told := _number(part, read)) is None or bool(told) is ends:
                    return told if told is None else int(ends)
            return int(not ends)
        case ast.UnaryOp(op=op, operand=inner) if not isinstance(getattr(inner, "op", None), ast.Pow):
            told = _number(inner, read)
            kinds = {ast.USub: lambda one: -one, ast.UAdd: lambda one: one, ast.Invert: lambda one: int(not one)}
            return told if told is None else kinds[type(op)](told)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            a, b = _number(left, read), _number(right, read)
            return None if a is None or b is None else _apply(op, a, b)
        case _:
            raise ValueError(ast.dump(node)[:40])


def _apply(op: ast.AST, a: int, b: int) -> int:
    if type(op) not in _BINARY or (isinstance(op, ast.FloorDiv | ast.Mod) and not b):
        raise ValueError("an operator that is not read, or a division by 0")
    if isinstance(op, ast.Pow | ast.LShift | ast.RShift) and not 0 <= b < 64:
        raise ValueError(b)
    if abs(found := int(_BINARY[type(op)](a, b))) > _LARGEST:  # a shell wraps round
        raise ValueError("overflow")
    return found
