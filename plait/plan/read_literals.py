"""Settings that a Python module gives, read from its text: nothing of it is executed.

Read: assignments to attributes (``config.training.seq_len = 8192``), keyword arguments
(``training=TrainingConfig(seq_len=8192)``), both under the last two names (``training.seq_len``); constants
and functions of the module itself that are called, with what they are called with. A value that is neither a
literal nor made of these is named as computed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.core.base.errors import JobError

DEEPEST = 8
"""Functions within functions, at most."""
_UNKNOWN = object()


@dataclass
class LiteralSettings:
    """values: by ``table.key``; of a value that is a call, the name of what is called, as ``Called``. calls:
    with their first argument, if it is a text. modules: that are imported. computed: what no literal says."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    modules: list[str] = field(default_factory=list[str])
    computed: list[str] = field(default_factory=list[str])


class Called(str):
    """The dotted name of what is called for a value."""


def python_settings(text: str, file: str, function: str = "") -> LiteralSettings:
    """Of one function of a module. Raises JobError for what is no Python, and where it has several and none
    is named.

    >>> text = "def a():\\n    c = f()\\n    c.training.seq_len = 2 * 4096\\n    return c"
    >>> python_settings(text, "a.py").values
    {'training.seq_len': 8192}
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise JobError(f"is no Python: {error}", file=file, fix="Name a module, or file.py:function") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    reader = _LiteralReader(functions, LiteralSettings())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            reader.found.modules.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            reader.found.modules += [one.name for one in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            reader.assign(node, reader.constants, "", 0)
    body = [node for node in tree.body if isinstance(node, ast.Expr)]
    if function or functions:
        body = _chosen(functions, file, function).body
    known = dict(reader.constants)
    for node in body:
        reader.statement(node, known, "", 0)
    return reader.found


def _chosen(functions: Mapping[str, ast.FunctionDef], file: str, function: str) -> ast.FunctionDef:
    public = [name for name in functions if not name.startswith("_")]
    if function in functions:
        return functions[function]
    if not function and len(public) == 1:
        return functions[public[0]]
    problem = f"has no function '{function}'" if function else f"has {len(public)} functions"
    some = ", ".join(public[:8]) + (", ..." if len(public) > 8 else "")
    raise JobError(problem, file=file, fix=f"Name one, as {file}:{(public or ['NAME'])[0]}. There are: {some}")


@dataclass
class _LiteralReader:
    functions: Mapping[str, ast.FunctionDef]
    found: LiteralSettings
    constants: dict[str, Any] = field(default_factory=dict[str, Any])

    def statement(self, node: ast.stmt, known: dict[str, Any], table: str, depth: int) -> None:
        """Settings of a statement. known: values of names. table: to which keyword arguments belong."""
        match node:
            case ast.Assign() | ast.AnnAssign():
                self.assign(node, known, table, depth)
            case ast.Return(value=ast.Call() as call) | ast.Expr(value=ast.Call() as call):
                self.call(call, known, table, depth)
            case ast.If() | ast.For() | ast.While() | ast.With() | ast.Try():
                self.found.computed.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0][:60]}")
                for inner in getattr(node, "body", []):
                    self.statement(inner, known, table, depth)
            case _:
                pass

    def assign(self, node: ast.Assign | ast.AnnAssign, known: dict[str, Any], table: str, depth: int) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None:
            return
        for target in targets:
            if isinstance(target, ast.Name):
                value = self.value(node.value, known)
                known[target.id] = value
                if isinstance(node.value, ast.Call):
                    self.call(node.value, known, table, depth)
                elif table == "" and depth == 0 and value is not _UNKNOWN and known is not self.constants:
                    self.found.values.setdefault(target.id, value)
            elif isinstance(target, ast.Attribute):
                *_, before, last = ("", *_dotted(target).split("."))
                self.setting(f"{before}.{last}" if before else last, node.value, known, depth)

    def setting(self, key: str, node: ast.expr, known: dict[str, Any], depth: int) -> None:
        """One key and its value."""
        last = key.rpartition(".")[2]
        if isinstance(node, ast.Call):  # a whole table, in place of one that was there
            for other in [name for name in self.found.values if name.startswith(f"{last}.")]:
                del self.found.values[other]
            self.found.values[key] = Called(_dotted(node.func))
            self.call(node, known, last, depth)
            return
        for inner in _calls(node):
            self.call(inner, known, last, depth)
        value = self.value(node, known)
        if value is not _UNKNOWN:
            self.found.values[key] = value
        else:
            self.found.computed.append(f"{key} = {ast.unparse(node)[:60]}")

    def call(self, node: ast.Call, known: dict[str, Any], table: str, depth: int) -> None:
        """Keyword arguments of a call; of a function of the module, what it sets."""
        name = _dotted(node.func)
        first = self.value(node.args[0], known) if node.args else ""
        self.found.calls.append((name, first if isinstance(first, str) else ""))
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            self.call(node.func.value, known, table, depth)
        own = self.functions.get(name)
        if own is not None and depth < DEEPEST:
            inner = dict(self.constants) | _defaults(own, self)
            for keyword in node.keywords:
                if keyword.arg:
                    inner[keyword.arg] = self.value(keyword.value, known)
            for at, argument in zip(own.args.args, node.args, strict=False):
                inner[at.arg] = self.value(argument, known)
            for statement in own.body:
                self.statement(statement, inner, table, depth + 1)
            return
        for keyword in node.keywords:
            if keyword.arg:
                self.setting(f"{table}.{keyword.arg}" if table else keyword.arg, keyword.value, known, depth)

    def value(self, node: ast.expr, known: Mapping[str, Any]) -> Any:
        """A literal, a name that is known, or a product or sum of these; ``_UNKNOWN`` for the rest."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return known.get(name, _UNKNOWN)
            case ast.Attribute():
                return _dotted(node) if _dotted(node).startswith(("torch.", "F.")) else _UNKNOWN
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                value = self.value(inner, known)
                return -value if isinstance(value, int | float) else _UNKNOWN
            case ast.BinOp(left=left, op=ast.Mult() | ast.Add() | ast.Sub() | ast.FloorDiv() as op, right=right):
                a, b = self.value(left, known), self.value(right, known)
                return _computed(op, a, b) if isinstance(a, int) and isinstance(b, int) else _UNKNOWN
            case ast.IfExp(test=test, body=body, orelse=other):
                told = self.value(test, known)
                return _UNKNOWN if told is _UNKNOWN else self.value(body if told else other, known)
            case ast.List(elts=some) | ast.Tuple(elts=some):
                values = [self.value(one, known) for one in some]
                return _UNKNOWN if _UNKNOWN in values else values
            case _:
                return _UNKNOWN


def _computed(op: ast.operator, a: int, b: int) -> Any:
    if isinstance(op, ast.FloorDiv):
        return a // b if b else _UNKNOWN
    return a * b if isinstance(op, ast.Mult) else a + b if isinstance(op, ast.Add) else a - b


def _defaults(own: ast.FunctionDef, reader: _LiteralReader) -> dict[str, Any]:
    """By parameter."""
    arguments = own.args
    plain = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [
        *zip(plain, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {one.arg: reader.value(value, reader.constants) for one, value in pairs if value is not None}


def _calls(node: ast.expr) -> Iterator[ast.Call]:
    """Calls that are elements of a list."""
    for one in getattr(node, "elts", []):
        if isinstance(one, ast.Call):
            yield one


def _dotted(node: ast.expr) -> str:
    """Names of an expression of attributes; a call within it stands as its name.

    >>> _dotted(ast.parse("a.b(1).c", mode="eval").body)
    'a.b.c'
    """
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return f"{_dotted(inner)}.{name}".lstrip(".")
        case ast.Call(func=inner):
            return _dotted(inner)
        case _:
            return ""
