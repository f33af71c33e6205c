"""Lists public names of plait that only tests or benchmarks use, or nobody: they belong there, or nowhere.

A name counts as used where code says it, not docstrings or comments. Run in the root of the repository.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("plait", "tests", "benchmarks", "tools")


def names_in(text: str) -> Counter[str]:
    """How often code says each name."""
    found = Counter[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            found[token.string] += 1
        elif token.type == tokenize.STRING and "f" in token.string.partition('"')[0].lower():
            found.update(re.findall(r"\w+", token.string))  # Python before 3.12 has such a text in one piece
    return found


def public(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of what a module defines: at its top, and in its classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            decorated = {ast.unparse(one).split("(")[0] for one in node.decorator_list}
            if not any(one.endswith(("command", "callback")) for one in decorated):
                yield node.lineno, node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield inner.lineno, inner.name
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, one.id) for one in targets if isinstance(one, ast.Name) and one.id[0] != "_")


def main() -> None:
    """Print a line for each name."""
    said = {file: names_in(file.read_text()) for folder in FOLDERS for file in sorted(Path(folder).rglob("*.py"))}
    faces = {file for file in said if file.name == "__init__.py"}
    for file, own in said.items():
        if file.parts[0] != "plait" or file in faces:
            continue
        for line, name in public(ast.parse(file.read_text())):
            users = {other.parts[0] for other, names in said.items() if names[name] and other != file}
            if own[name] < 2 and "plait" not in users:
                print(f"{file}:{line}: {name}: {', '.join(sorted(users)) or 'nobody'}")


if __name__ == "__main__":
    main()
