"""Drawing faults: files weighted by their lines, then a kind, then one fault of it, all from one
seed."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.operators import faults

FOLDERS = ("core", "formats", "plan", "place", "diagnose", "train", "launch")
"""Folders of the package that faults are planted in."""


@dataclass(frozen=True)
class Mutant:
    """One fault in one file. start, end: where it stands, in characters; line: counted from 1;
    statement: the first line of the innermost statement that holds it; inside: whether that is in a
    function; whole: the text is a line, not an expression."""

    file: Path
    kind: str
    start: int
    end: int
    line: int
    statement: int
    inside: bool
    text: str
    whole: bool = False

    def planted(self, source: str) -> str:
        """The file's text with the fault in it."""
        return source[: self.start] + self._replacement() + source[self.end :]

    def _replacement(self) -> str:
        return self.text if self.whole or self.text in ("pass", "break", "continue") else f"({self.text})"

    def shown(self, source: str) -> str:
        """The fault on one line, as a person reads it."""
        was = " ".join(source[self.start : self.end].split())
        return f"{self.kind}: {was[:70]}  ->  {self.text[:70]}"


def draw(root: Path, count: int, seed: int, folders: Sequence[str] = FOLDERS) -> list[Mutant]:
    """``count`` different mutants of the package below ``root``; equal ones from equal seeds and
    sources."""
    chance = random.Random(seed)
    files = sorted(path for folder in folders for path in (root / "plait" / folder).rglob("*.py"))
    weights = [len(path.read_text().splitlines()) for path in files]
    known = dict[Path, list[Mutant]]()
    drawn = list[Mutant]()
    while len(drawn) < count:
        (file,) = chance.choices(files, weights)
        if file not in known:
            known[file] = mutants_of(file)
        if not known[file]:
            continue
        kind = chance.choice(sorted({one.kind for one in known[file]}))  # else half of them were constants
        if (one := chance.choice([each for each in known[file] if each.kind == kind])) not in drawn:
            drawn.append(one)
    return drawn


def mutants_of(file: Path) -> list[Mutant]:
    """Every mutant of a file."""
    source = file.read_text()
    tree = ast.parse(source)
    starts = _starts(source)
    around = _Around(tree)
    found = list[Mutant]()
    for fault in faults(tree):
        node = fault.node
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = _place(source, starts, node.lineno, node.col_offset)
        end = _place(source, starts, node.end_lineno, node.end_col_offset)
        statement, inside = around.of(node.lineno, node.end_lineno)
        found.append(Mutant(file, fault.kind, begin, end, node.lineno, statement, inside, fault.text))
    return found


def mutant_at(file: Path, kind: str, span: tuple[int, int], text: str) -> Mutant:
    """A mutant that is written by hand. span: characters of a function's line, for which ``text``
    stands."""
    source = file.read_text()
    line = source.count("\n", 0, span[0]) + 1
    statement, inside = _Around(ast.parse(source)).of(line, line)
    return Mutant(file, kind, *span, line, statement, inside, text, whole=True)


class _Around:
    """Statements and functions around lines of a file."""

    def __init__(self, tree: ast.AST) -> None:
        self.statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        self.functions = [node for node in self.statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def of(self, first: int, last: int) -> tuple[int, bool]:
        """The first line of the innermost statement around lines; True where they are in a
        function."""
        around = [each for each in self.statements if _holds(each, first, last)]
        inside = any(_holds(body, first, last) for each in self.functions for body in each.body)
        return max(map(_first, around)), inside


def _holds(outer: ast.stmt, first: int, last: int) -> bool:
    assert outer.end_lineno is not None
    return _first(outer) <= first and last <= outer.end_lineno


def _first(node: ast.stmt) -> int:
    """A statement's first line, with its decorators."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _starts(source: str) -> list[int]:
    """Where each line begins, in characters."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _place(source: str, starts: list[int], line: int, column: int) -> int:
    """Characters before a place that ``ast`` gives as a line and a count of UTF-8 bytes."""
    text = source[starts[line - 1] : starts[line]]
    return starts[line - 1] + len(text.encode()[:column].decode())
