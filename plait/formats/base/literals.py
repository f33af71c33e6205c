"""Settings of a Python module, read from its text; nothing is executed.

Read are assignments to attributes (``config.training.seq_len = 8192``) and keyword arguments
(``training=TrainingConfig(seq_len=8192)``), both under their last two names (``training.seq_len``),
and the module's own constants and called functions with their arguments. A value that does not
follow from literals is listed as computed; functions of other modules that set something are
listed, too. A condition on known values is decided; after any other condition, settings that differ
between its branches are unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from plait.core.base.errors import JobError

DEEPEST = 8
"""The greatest depth of nested calls that is followed."""
_UNKNOWN = object()
COPIES = ("replace", "dataclasses.replace", "copy.deepcopy", "deepcopy", "copy.copy")
"""Functions that return a copy of their argument with every setting that they do not change."""
PRINTING = ("print", "pprint", "len", "repr", "str", "isinstance", "setattr")
"""Functions that change nothing in their arguments, and ``setattr``, whose change is read."""
ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
"""Functions that return an environment variable by name and default."""


@dataclass
class LiteralSettings:
    """The settings of a module. values: by ``table.key``; for a value that is a call, the callee's
    name as ``Called``. calls: names of callees, with the first argument if it is text. modules:
    imported modules. computed: source of values that do not follow from literals. foreign_calls:
    functions of other modules that set something. open: source of unknown settings by
    ``table.key``."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    modules: list[str] = field(default_factory=list[str])
    computed: list[str] = field(default_factory=list[str])
    foreign_calls: list[str] = field(default_factory=list[str])
    open: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def foreign_notes(self) -> list[str]:
        """A sentence for each function of another module that sets something."""
        return [
            f"{name}() is in another module: its settings are not in the prediction." for name in self.foreign_calls
        ]


class Called(str):
    """The dotted name of the callee whose call is a value."""


def python_settings(text: str, file: str, function: str = "") -> LiteralSettings:
    """Return the settings of one function of a module, or of a module without functions. Raises
    JobError if the text is no Python, and if there are several functions and none is named.

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
            reader.settings.modules.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            reader.settings.modules += [one.name for one in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            reader.assign(node, reader.constants, "", 0)
        elif isinstance(node, ast.AugAssign):
            reader.augment(node, reader.constants)
        elif isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try):
            reader.constants |= dict.fromkeys(_set_names(node), _UNKNOWN)
    body = [node for node in tree.body if isinstance(node, ast.Expr)]
    if function or functions:
        body = _chosen(functions, file, function).body
    known = dict(reader.constants)
    for node in body:
        reader.statement(node, known, "", 0)
    return reader.settings


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
    settings: LiteralSettings
    constants: dict[str, Any] = field(default_factory=dict[str, Any])
    foreign_results: dict[str, str] = field(default_factory=dict[str, str])
    made: set[str] = field(default_factory=set[str])
    """Names of variables that hold an instance of a class."""

    def statement(self, node: ast.stmt, known: dict[str, Any], table: str, depth: int) -> None:
        """Read a statement. known: values of variables. table: the table that keyword arguments
        belong to."""
        match node:
            case ast.Assign() | ast.AnnAssign():
                self.assign(node, known, table, depth)
            case ast.AugAssign(target=ast.Name() | ast.Attribute()):
                self.augment(node, known)
            case ast.Return(value=ast.Name(id=name)):
                self.base(name)
            case ast.Return(value=ast.Call() as call):
                self.call(call, known, table, depth)
            case ast.Expr(value=ast.Call() as call):
                self.changed(call)
                self.call(call, known, table, depth)
            case ast.With(body=body) | ast.Try(body=body):
                self.block(body, known, table, depth)
            case ast.If() | ast.For() | ast.While():
                self.branch(node, known, table, depth)
            case _:
                pass

    def block(self, body: Sequence[ast.stmt], known: dict[str, Any], table: str, depth: int) -> None:
        """Read statements in order."""
        for inner in body:
            self.statement(inner, known, table, depth)

    def branch(self, node: ast.If | ast.For | ast.While, known: dict[str, Any], table: str, depth: int) -> None:
        """Read a condition or a loop. If the module's text does not decide it, its settings become
        unknown."""
        told = self.value(node.iter if isinstance(node, ast.For) else node.test, known)
        if isinstance(node, ast.If) and told is not _UNKNOWN:
            self.block(node.body if told else node.orelse, known, table, depth)
        elif isinstance(node, ast.For) and isinstance(told, list):
            for one in cast("list[Any]", told):
                self.assign(ast.Assign([node.target], ast.Constant(one)), known, table, depth + 1)
                self.block(node.body, known, table, depth)
        else:
            self.settings.computed.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0][:60]}")
            self.either(node.body, node.orelse, known, table, depth)

    def either(
        self, body: Sequence[ast.stmt], other: Sequence[ast.stmt], known: dict[str, Any], table: str, depth: int
    ) -> None:
        """Read both branches of an undecided condition; values that differ between them become
        unknown."""
        names, settings = dict(known), dict(self.settings.values)
        self.block(body, known, table, depth)
        first, mine = self.settings.values, dict(known)
        self.settings.values = settings
        known.clear()
        known.update(names)
        self.block(other, known, table, depth)
        for name in {*known, *mine}:
            if known.get(name, _UNKNOWN) is not mine.get(name, _UNKNOWN):
                known[name] = _UNKNOWN
        second = self.settings.values
        for key in [*first, *(key for key in second if key not in first)]:
            ways = [one.get(key, "left out") for one in (first, second)]
            if ways[0] != ways[1]:
                self.settings.open[key] = " or ".join(map(str, ways))
                second.pop(key, None)

    def assign(self, node: ast.Assign | ast.AnnAssign, known: dict[str, Any], table: str, depth: int) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None:
            return
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                self.unpack(target, node.value, known, table, depth)
            elif isinstance(target, ast.Name):
                value = self.value(node.value, known)
                known[target.id] = value
                self.foreign_results.pop(target.id, None)
                if isinstance(node.value, ast.Call) and self.foreign(_dotted(node.value.func)):
                    self.foreign_results[target.id] = _dotted(node.value.func)
                if isinstance(node.value, ast.Call) and value is _UNKNOWN:
                    self.made |= {target.id} if _dotted(node.value.func).rpartition(".")[2][:1].isupper() else set()
                    self.call(node.value, known, table, depth)
                elif table == "" and depth == 0 and value is not _UNKNOWN and known is not self.constants:
                    self.settings.values.setdefault(target.id, value)
            elif isinstance(target, ast.Attribute):
                self.base(_dotted(target).partition(".")[0])
                self.setting(_key(target), node.value, known, depth)

    def unpack(
        self, target: ast.Tuple | ast.List, value: ast.expr, known: dict[str, Any], table: str, depth: int
    ) -> None:
        """Read ``a, b = 1, 2``. If the value is no list of that length, the names become
        unknown."""
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        whole = self.value(value, known)
        if not parts and isinstance(whole, list):
            parts = [ast.Constant(one) for one in cast("list[Any]", whole)]
        if len(parts) != len(target.elts):
            parts = [ast.Name(f"a part of {ast.unparse(value)[:60]}")] * len(target.elts)
        known.update({one.id: _UNKNOWN for one in target.elts if isinstance(one, ast.Name)} if not parts else {})
        for one, part in zip(target.elts, parts, strict=True):
            self.assign(ast.Assign([one], part), known, table, depth)

    def foreign(self, name: str) -> bool:
        """True if the callee is a function of another module, which may set anything; False for a
        class."""
        return name.rpartition(".")[2].lstrip("_")[:1].islower() and name not in {*self.functions, *COPIES}

    def changed(self, node: ast.Call) -> None:
        """Note a function of another module that takes an object and may therefore change its
        settings."""
        name, names = _dotted(node.func), {*self.made, *self.foreign_results}
        some = [*node.args, *(keyword.value for keyword in node.keywords)]
        given = any(_dotted(one).partition(".")[0] in names for one in some)
        if (
            given
            and self.foreign(name)
            and name not in PRINTING
            and "log" not in name
            and name not in self.settings.foreign_calls
        ):
            self.settings.foreign_calls.append(name)

    def base(self, name: str) -> None:
        """Note that the settings extend the result of another module's function, held by a
        variable."""
        if name in self.foreign_results and self.foreign_results[name] not in self.settings.foreign_calls:
            self.settings.foreign_calls.append(self.foreign_results[name])

    def augment(self, node: ast.AugAssign, known: dict[str, Any]) -> None:
        """Read ``seq_len *= 2``: a known variable or setting gets its new value, any other counts
        as computed."""
        if isinstance(node.target, ast.Name):
            before, where = known.get(node.target.id, _UNKNOWN), known
            key = node.target.id
        else:
            key = _key(node.target)
            before, where = self.settings.values.get(key, _UNKNOWN), self.settings.values
        more = self.value(node.value, known)
        both = isinstance(before, int) and isinstance(more, int)
        where[key] = _computed(node.op, before, more) if both else _UNKNOWN
        if where is self.settings.values and where[key] is _UNKNOWN:
            del where[key]
            self.settings.open[key] = ast.unparse(node)[:60]
            self.settings.computed.append(ast.unparse(node)[:60])

    def setting(self, key: str, node: ast.expr, known: dict[str, Any], depth: int) -> None:
        """Set one key to the value of an expression."""
        last = key.rpartition(".")[2]
        if isinstance(node, ast.Call) and (value := self.value(node, known)) is not _UNKNOWN:
            self.settings.values[key] = value
            self.settings.open.pop(key, None)
            return
        if isinstance(node, ast.Call):  # a whole table, which replaces the earlier one
            copied = _dotted(node.func) in COPIES
            for other in [name for name in self.settings.values if name.startswith(f"{last}.") and not copied]:
                del self.settings.values[other]
            self.settings.values[key] = Called(_dotted(node.func))
            self.call(node, known, last, depth)
            return
        if isinstance(node, ast.Name) and node.id in self.made:
            self.settings.open[key] = node.id  # its table is read where the object is created
            return
        calls = list(_calls(node))
        for inner in calls:
            self.call(inner, known, last, depth)
        if calls and len(calls) == len(getattr(node, "elts", [])):
            return
        value = self.value(node, known)
        if value is not _UNKNOWN:
            self.settings.values[key] = value
            self.settings.open.pop(key, None)
        else:
            self.settings.values.pop(key, None)
            self.settings.open[key] = ast.unparse(node)[:60]
            self.settings.computed.append(f"{key} = {ast.unparse(node)[:60]}")

    def call(self, node: ast.Call, known: dict[str, Any], table: str, depth: int) -> None:
        """Read a call's keyword arguments; for a function of this module, read its body."""
        name = _dotted(node.func)
        first = self.value(node.args[0], known) if node.args else ""
        self.settings.calls.append((name, first if isinstance(first, str) else ""))
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            self.call(node.func.value, known, table, depth)
        if name == "setattr" and len(node.args) == 3:
            key = self.value(node.args[1], known)
            if isinstance(key, str):
                self.setting(_key(ast.Attribute(node.args[0], key)), node.args[2], known, depth)
            else:
                self.settings.open[f"**{len(self.settings.open)}"] = ast.unparse(node)[:60]
            return
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
        before = f"{table}." if table else ""
        for argument in node.args:
            if isinstance(argument, ast.Dict):
                self.spread(argument, "", known, depth)
        for keyword in node.keywords:
            if keyword.arg:
                self.setting(f"{before}{keyword.arg}", keyword.value, known, depth)
            elif not self.spread(keyword.value, before, known, depth):
                self.settings.computed.append(f"{name}(**{ast.unparse(keyword.value)[:60]})")
                self.settings.open[f"**{len(self.settings.open)}"] = f"**{ast.unparse(keyword.value)[:60]}"

    def spread(self, node: ast.expr, before: str, known: dict[str, Any], depth: int) -> bool:
        """Read a dictionary's settings. True if the dictionary is known."""
        if isinstance(node, ast.Dict) and all(isinstance(one, ast.Constant) for one in node.keys):
            for key, value in zip(node.keys, node.values, strict=True):
                self.setting(f"{before}{self.value(cast('ast.Constant', key), known)}", value, known, depth)
            return True
        found = self.value(node, known)
        if not isinstance(found, dict):
            return False
        for key, value in cast("dict[Any, Any]", found).items():
            self.setting(f"{before}{key}", ast.Name(f"{key}") if value is _UNKNOWN else ast.Constant(value), {}, depth)
        return True

    def called(self, node: ast.Call, known: Mapping[str, Any]) -> Any:
        """Return the value of a call: the default of an environment variable, a text as a number,
        ``min`` and the like, or a ``dict``; ``_UNKNOWN`` for any other call."""
        name, some = _dotted(node.func), [self.value(one, known) for one in node.args]
        if name in CHOOSING and some and all(isinstance(one, int | float) for one in some):
            return CHOOSING[name](some)
        if name == "dict" and not some and all(one.arg for one in node.keywords):
            return {str(one.arg): self.value(one.value, known) for one in node.keywords}
        if name in ENVIRONMENT and len(some) == 2:
            return some[1]
        if name == "int" and len(some) == 1 and isinstance(some[0], int | str) and re.fullmatch(r"-?\d+", str(some[0])):
            return int(some[0])
        return _UNKNOWN

    def joined(self, parts: Sequence[ast.expr], known: Mapping[str, Any], *, ends: bool) -> Any:
        """Return the operand that decides an ``and`` expression, or an ``or`` expression if
        ``ends``; ``_UNKNOWN`` if a run decides."""
        told: Any = not ends
        for part in parts:
            told = self.value(part, known)
            if told is _UNKNOWN or bool(told) is ends:
                return told
        return told

    def value(self, node: ast.expr, known: Mapping[str, Any]) -> Any:
        """Return the value of a literal, a known name, or an expression of these; else
        ``_UNKNOWN``."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return known.get(name, _UNKNOWN)
            case ast.Attribute():
                return _dotted(node) if _dotted(node).startswith(("torch.", "F.")) else _UNKNOWN
            case ast.Call():
                return self.called(node, known)
            case ast.UnaryOp(op=op, operand=inner):
                value = self.value(inner, known)
                if isinstance(op, ast.Not):
                    return _UNKNOWN if value is _UNKNOWN else not value
                return -value if isinstance(op, ast.USub) and isinstance(value, int | float) else _UNKNOWN
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                a, b = self.value(left, known), self.value(right, known)
                return _UNKNOWN if a is _UNKNOWN or b is _UNKNOWN else _computed(op, a, b)
            case ast.BoolOp(op=op, values=parts):
                return self.joined(parts, known, ends=isinstance(op, ast.Or))
            case ast.Dict(keys=keys, values=parts) if all(isinstance(one, ast.Constant) for one in keys):
                names = [one.value for one in keys if isinstance(one, ast.Constant)]
                return dict(zip(names, [self.value(part, known) for part in parts], strict=True))
            case ast.Subscript(value=inner, slice=at):
                whole, key = self.value(inner, known), self.value(at, known)
                try:
                    return whole[key]
                except (TypeError, LookupError):
                    return _UNKNOWN
            case ast.IfExp(test=test, body=body, orelse=other):
                told = self.value(test, known)
                return _UNKNOWN if told is _UNKNOWN else self.value(body if told else other, known)
            case ast.List(elts=some) | ast.Tuple(elts=some):
                values = [self.value(one, known) for one in some]
                return _UNKNOWN if _UNKNOWN in values else values
            case _:
                return _UNKNOWN


OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.FloorDiv: lambda a, b: a // b, ast.Div: lambda a, b: a / b, ast.Mod: operator.mod, ast.Mult: operator.mul,
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Pow: lambda a, b: a**b, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
CHOOSING: Mapping[str, Callable[[list[Any]], Any]] = {"min": min, "max": max, "int": lambda some: int(some[0])}
"""Functions of numbers that are evaluated."""


def _computed(op: ast.AST, a: Any, b: Any) -> Any:
    """Return the result of an operator on two known values; ``_UNKNOWN`` if there is none, or if a
    power's operands are not small numbers."""
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if isinstance(op, ast.Pow) and not (numbers and 0 <= b <= 64 and abs(a) <= 64):
        return _UNKNOWN
    if isinstance(op, ast.operator) and not numbers:
        return _UNKNOWN
    try:
        return OPERATORS[type(op)](a, b)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return _UNKNOWN


def _set_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement may set, in any of its branches."""
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]


def _key(target: ast.expr) -> str:
    """Return the last two names of an attribute expression."""
    return ".".join(_dotted(target).split(".")[-2:])


def _defaults(own: ast.FunctionDef, reader: _LiteralReader) -> dict[str, Any]:
    """Return the default values by parameter."""
    arguments = own.args
    plain = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [
        *zip(plain, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {one.arg: reader.value(value, reader.constants) for one, value in pairs if value is not None}


def _calls(node: ast.expr) -> Iterator[ast.Call]:
    """Yield the calls that are elements of a list."""
    for one in getattr(node, "elts", []):
        if isinstance(one, ast.Call):
            yield one


def _dotted(node: ast.expr) -> str:
    """Return the dotted name of an attribute expression; a call within it counts as its callee's
    name.

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
