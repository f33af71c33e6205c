"""Faults that a programmer makes, as edits of a syntax tree: each operator maps a node to what may
stand in its place.

Left out, since no test could or should tell: docstrings, f-strings, annotations, asserts, what
stands in a ``raise`` (texts of errors), ``__all__``, and imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Fault:
    """One edit. kind: the operator's name; node: what is replaced; text: what stands there
    instead."""

    kind: str
    node: ast.expr | ast.stmt
    text: str


def faults(tree: ast.Module) -> Iterator[Fault]:
    """Every fault that can be planted in a module, in source order."""
    for node in _code(tree):
        if isinstance(node, ast.stmt):
            yield from _of_statement(node)
        elif isinstance(node, ast.expr):
            yield from _of_expression(node)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes below one, without those that are left out."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _left_out(child):
                continue
            yield child
            if not isinstance(child, ast.Raise):
                yield from _code(child)


def _left_out(node: ast.AST) -> bool:
    if isinstance(node, (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "__all__" for each in node.targets)


def _of_statement(node: ast.stmt) -> Iterator[Fault]:
    if isinstance(node, ast.Raise):
        yield Fault("raise deleted", node, "pass")
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield Fault("call deleted", node, "pass")
    elif isinstance(node, ast.AugAssign):
        yield Fault("update deleted", node, "pass")
    elif isinstance(node, ast.Break):
        yield Fault("break is continue", node, "continue")
    elif isinstance(node, ast.Continue):
        yield Fault("continue is break", node, "break")
    elif isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Constant):
        yield Fault("condition negated", node.test, f"not ({ast.unparse(node.test)})")


def _of_expression(node: ast.expr) -> Iterator[Fault]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and (other := COMPARED.get(type(node.ops[0]))):
        boundary = isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        changed = ast.Compare(node.left, [other()], node.comparators)
        yield Fault("boundary" if boundary else "comparison negated", node, ast.unparse(changed))
    elif isinstance(node, ast.BinOp) and (other := COMPUTED.get(type(node.op))) and not _is_text(node):
        yield Fault("arithmetic", node, ast.unparse(ast.BinOp(node.left, other(), node.right)))
    elif isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield Fault("and is or", node, ast.unparse(ast.BoolOp(other, node.values)))
        for left in range(len(node.values)):
            rest = node.values[:left] + node.values[left + 1 :]
            yield Fault("operand dropped", node, ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Fault("not dropped", node, ast.unparse(node.operand))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (name := SWAPPED.get(node.func.id)):
        yield Fault(f"{node.func.id} is {name}", node.func, name)
    elif isinstance(node, ast.IfExp):
        yield Fault("branches exchanged", node, ast.unparse(ast.IfExp(node.test, node.orelse, node.body)))
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)


def _of_constant(node: ast.Constant) -> Iterator[Fault]:
    if isinstance(node.value, bool):
        yield Fault("constant", node, str(not node.value))
    elif isinstance(node.value, int):
        yield Fault("constant", node, str(node.value + 1))
    elif isinstance(node.value, float):
        yield Fault("constant", node, repr(node.value * 2 or 1.0))


def _is_text(node: ast.BinOp) -> bool:
    """Whether a sum or product joins texts: what users read is judged by eye."""
    parts = (node.left, node.right)
    return any(isinstance(each, ast.JoinedStr) or isinstance(getattr(each, "value", None), str) for each in parts)
