"""Settings that a Python module gives, read from its text: nothing of it is executed.

Read: assignments to attributes (``config.training.seq_len = 8192``), keyword arguments
(``training=TrainingConfig(seq_len=8192)``), both under the last two names (``training.seq_len``); constants
and functions of the module itself that are called, with what they are called with. A value that is neither a
literal nor made of these is named as computed; what a function of another module sets is named, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.core.base.errors import JobError

DEEPEST = 8
"""Functions within functions, at most."""
_UNKNOWN = object()
COPIES = ("replace", "dataclasses.replace", "copy.deepcopy", "deepcopy", "copy.copy")
"""Functions that leave what they do not change."""
ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
"""Functions of a name and a default."""


@dataclass
class LiteralSettings:
    """values: by ``table.key``; of a value that is a call, the name of what is called, as ``Called``. calls:
    with their first argument, if it is a text. modules: that are imported. computed: what no literal says."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    modules: list[str] = field(default_factory=list[str])
    computed: list[str] = field(default_factory=list[str])
    bases: list[str] = field(default_factory=list[str])

    @property
    def unseen(self) -> list[str]:
        """A sentence on each function of another module that sets something."""
        return [f"What {name}() sets stands in another module, and is not in the prediction." for name in self.bases]


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
    others: dict[str, str] = field(default_factory=dict[str, str])

    def statement(self, node: ast.stmt, known: dict[str, Any], table: str, depth: int) -> None:
        """Settings of a statement. known: values of names. table: to which keyword arguments belong."""
        match node:
            case ast.Assign() | ast.AnnAssign():
                self.assign(node, known, table, depth)
            case ast.AugAssign(target=ast.Name() | ast.Attribute()):
                self.augment(node, known)
            case ast.Return(value=ast.Name(id=name)):
                self.base(name)
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
                self.others.pop(target.id, None)
                if isinstance(node.value, ast.Call) and self.foreign(_dotted(node.value.func)):
                    self.others[target.id] = _dotted(node.value.func)
                if isinstance(node.value, ast.Call):
                    self.call(node.value, known, table, depth)
                elif table == "" and depth == 0 and value is not _UNKNOWN and known is not self.constants:
                    self.found.values.setdefault(target.id, value)
            elif isinstance(target, ast.Attribute):
                self.base(_dotted(target).partition(".")[0])
                self.setting(_key(target), node.value, known, depth)

    def foreign(self, name: str) -> bool:
        """Whether what is called is a function of another module, which may set anything; not a class."""
        return name.rpartition(".")[2].lstrip("_")[:1].islower() and name not in {*self.functions, *COPIES}

    def base(self, name: str) -> None:
        """Note that the settings go on from what a function of another module gave a name."""
        if name in self.others and self.others[name] not in self.found.bases:
            self.found.bases.append(self.others[name])

    def augment(self, node: ast.AugAssign, known: dict[str, Any]) -> None:
        """``seq_len *= 2``: of a name or a setting that is known, its new value; any other is computed."""
        if isinstance(node.target, ast.Name):
            before, where = known.get(node.target.id, _UNKNOWN), known
            key = node.target.id
        else:
            key = _key(node.target)
            before, where = self.found.values.get(key, _UNKNOWN), self.found.values
        more = self.value(node.value, known)
        both = isinstance(before, int) and isinstance(more, int)
        where[key] = _computed(node.op, before, more) if both else _UNKNOWN
        if where is self.found.values and where[key] is _UNKNOWN:
            del where[key]
            self.found.computed.append(ast.unparse(node)[:60])

    def setting(self, key: str, node: ast.expr, known: dict[str, Any], depth: int) -> None:
        """One key and its value."""
        last = key.rpartition(".")[2]
        if isinstance(node, ast.Call) and (value := self.value(node, known)) is not _UNKNOWN:
            self.found.values[key] = value
            return
        if isinstance(node, ast.Call):  # a whole table, in place of one that was there
            copied = _dotted(node.func) in COPIES
            for other in [name for name in self.found.values if name.startswith(f"{last}.") and not copied]:
                del self.found.values[other]
            self.found.values[key] = Called(_dotted(node.func))
            self.call(node, known, last, depth)
            return
        calls = list(_calls(node))
        for inner in calls:
            self.call(inner, known, last, depth)
        if calls and len(calls) == len(getattr(node, "elts", [])):
            return
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
            else:
                self.found.computed.append(f"{name}(**{ast.unparse(keyword.value)[:60]})")

    def called(self, node: ast.Call, known: Mapping[str, Any]) -> Any:
        """Of the environment the default, and a number's text as a number."""
        name, some = _dotted(node.func), [self.value(one, known) for one in node.args]
        if name in ENVIRONMENT and len(some) == 2:
            return some[1]
        if name == "int" and len(some) == 1 and isinstance(some[0], int | str) and re.fullmatch(r"-?\d+", str(some[0])):
            return int(some[0])
        return _UNKNOWN

    def value(self, node: ast.expr, known: Mapping[str, Any]) -> Any:
        """A literal, a name that is known, or a product or sum of these; ``_UNKNOWN`` for the rest."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return known.get(name, _UNKNOWN)
            case ast.Attribute():
                return _dotted(node) if _dotted(node).startswith(("torch.", "F.")) else _UNKNOWN
            case ast.Call():
                return self.called(node, known)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                value = self.value(inner, known)
                return -value if isinstance(value, int | float) else _UNKNOWN
            case ast.BinOp(left=left, op=op, right=right):
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
    """Of two whole numbers; nothing where that is none."""
    match op:
        case ast.FloorDiv():
            return a // b if b else _UNKNOWN
        case ast.Mult():
            return a * b
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Pow() if 0 <= b <= 64 and abs(a) <= 64:
            return a**b
        case _:
            return _UNKNOWN


def _key(target: ast.expr) -> str:
    """The last two names of an expression of attributes."""
    return ".".join(_dotted(target).split(".")[-2:])


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
