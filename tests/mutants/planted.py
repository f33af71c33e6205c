"""Faults of a list, by the names of functions: the same in two states of the code, wherever these
lie."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.draw import Mutant, mutant_at

LIST = Path(__file__).parent / "planted.toml"


def planted(root: Path, file: Path = LIST) -> list[Mutant]:
    """Mutants of the list, in its order. Raises ValueError for all whose function is not there or
    has not the line once."""
    rows = tomllib.loads(file.read_text())["fault"]
    texts = {path: path.read_text() for path in sorted((root / "plait").rglob("*.py"))}
    sources = {path: text for path, text in texts.items() if any(row["was"] in text for row in rows)}
    functions = [(path, name, node) for path, text in sources.items() for name, node in _functions(ast.parse(text))]
    mutants, missing = list[Mutant](), list[str]()
    for row in rows:
        found = [
            (path, start)
            for path, name, node in functions
            if name == row["function"]
            for start in _places(sources[path], node, row["was"])
        ]
        if len(found) != 1:
            missing.append(f"{row['function']}: its line is there {len(found)} times")
            continue
        ((path, start),) = found
        mutants.append(mutant_at(path, "planted", (start, start + len(row["was"])), row["is"]))
    if missing:
        raise ValueError("; ".join(missing))
    return mutants


def _functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from _functions(node, f"{name}.")


def _places(source: str, node: ast.stmt, line: str) -> list[int]:
    """Where a line stands in a function, in characters of the file."""
    lines = source.splitlines(keepends=True)
    begins = [sum(map(len, lines[:at])) for at in range(node.lineno - 1, node.end_lineno or 0)]
    return [
        begin + len(text) - len(text.lstrip())
        for begin, text in zip(begins, lines[node.lineno - 1 : node.end_lineno], strict=True)
        if text.strip() == line
    ]
