"""Commands of a shell script as a tree; words stand in it as they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Assignment(NamedTuple):
    """``name[index]+=value``. items: words of an array in brackets, None for a plain value."""

    name: str
    index: str | None
    append: bool
    value: str
    items: tuple[str, ...] | None = None


@dataclass
class Simple:
    """A command. line: 0 within a substitution. text: of its here-document or, for kind ``string``, its
    here-string; kind ``literal``: nothing of it is expanded; ``file``: it reads one. silent: its output goes
    elsewhere. files: that it writes."""

    line: int
    words: list[str] = field(default_factory=list[str])
    assignments: list[Assignment] = field(default_factory=list[Assignment])
    text: str | None = None
    kind: str = ""
    silent: bool = False
    files: list[str] = field(default_factory=list[str])


class Pipeline(NamedTuple):
    """Commands behind each other's output. negated: the status is turned round."""

    nodes: tuple[Node, ...]
    negated: bool


class Chain(NamedTuple):
    """Commands joined by ``&&`` and ``||``."""

    source: str
    first: Node
    rest: tuple[tuple[str, Node], ...]


class Group(NamedTuple):
    """Commands in braces, or in brackets: a subshell. silent: their output goes elsewhere."""

    body: Program
    subshell: bool
    silent: bool = False


class If(NamedTuple):
    """arms: conditions and what they guard. last: what runs where none holds."""

    source: str
    arms: tuple[tuple[Program, Program], ...]
    last: Program


class Loop(NamedTuple):
    """kind: ``for`` over words (None: the arguments), ``count`` (three expressions), ``while``, ``until``."""

    source: str
    kind: str
    name: str
    words: tuple[str, ...] | None
    condition: Program
    body: Program


class Case(NamedTuple):
    """arms: patterns and what they guard."""

    source: str
    word: str
    arms: tuple[tuple[tuple[str, ...], Program], ...]


class Function(NamedTuple):
    """A definition."""

    name: str
    body: Node


class Test(NamedTuple):
    """``[[ ... ]]``: its words and operators."""

    words: tuple[str, ...]


class Arithmetic(NamedTuple):
    """``(( ... ))``."""

    text: str


Node = Simple | Pipeline | Chain | Group | If | Loop | Case | Function | Test | Arithmetic
Program = tuple[Node, ...]
