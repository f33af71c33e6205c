"""Measures of the source tree: size, knowledge that is written more than once, faces of packages.

    python tools/house.py [FOLDER] [--json]     FOLDER: a checkout, by default this one

Every figure is a count over syntax trees; ``MEASURES`` says of each what is counted. Names are matched as
text, so a figure is an upper bound: two classes of one name may be two things on purpose.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LAYER = {"ffn_hidden", "num_kv_heads", "head_size"}
OPS = set("NFTKRLMAXDSGHEZCWJ")
"""Letters of segment ops."""
MOST_PARAMETERS = 6


@dataclass(frozen=True)
class File:
    """A module: its name with dots, text and syntax tree."""

    path: Path
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> int:
        """Lines of text."""
        return self.text.count("\n")

    @cached_property
    def names(self) -> set[str]:
        """Attributes that are asked for, and parameters."""
        return {
            node.attr if isinstance(node, ast.Attribute) else node.arg
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.Attribute, ast.arg))
        }


class Tree:
    """A checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plait, self.tests = self._files("plait"), self._files("tests")

    def _files(self, folder: str) -> list[File]:
        return [
            File(path, ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__"),
                 path.read_text())
            for path in sorted((self.root / folder).rglob("*.py"))
        ]  # fmt: skip

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Modules of plait that each module of plait imports, wherever the import stands."""
        modules = {file.module for file in self.plait}
        return {file.module: set(_imported(file, modules)) - {file.module} for file in self.plait}

    @cached_property
    def at_import(self) -> dict[str, set[str]]:
        """Modules of plait that are imported when a module of plait is, so not within a function and not for
        types only."""
        modules = {file.module for file in self.plait}
        return {file.module: set(_imported(file, modules, _executed(file.tree))) - {file.module} for file in self.plait}

    @cached_property
    def classes(self) -> dict[str, list[str]]:
        """The modules that define a class of each name."""
        found = defaultdict[str, list[str]](list)
        for file in self.plait:
            for node in ast.walk(file.tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(file.module)
        return found


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when a module is imported."""
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
            continue
        yield node
        left += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def _imported(file: File, modules: set[str], nodes: Iterator[ast.AST] | None = None) -> Iterator[str]:
    for node in nodes or ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules:
                    yield inner
                elif node.module in modules:
                    yield node.module


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected sets of more than one module (Tarjan)."""
    index, low, stack, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in arrows[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            found.append(stack[at:])
            del stack[at:]

    for module in arrows:
        if module not in index:
            visit(module)
    return [sorted(circle) for circle in found if len(circle) > 1]


def _many_parameters(tree: Tree) -> list[str]:
    found = list[str]()
    for file in tree.plait:
        for node in ast.walk(file.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                own = [one for one in every if one.arg not in ("self", "cls")]
                if len(own) > MOST_PARAMETERS:
                    found.append(f"{file.module}.{node.name} {len(own)}")
    return found


def _asks_a_kind(file: File) -> bool:
    """Whether something called ``kind`` is compared with letters of ops, or letters are keys of a table of
    them."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            about = any("kind" in ast.unparse(side).rsplit(".", 1)[-1] for side in sides)
            if about and any(isinstance(side, ast.Constant) and _letters(side.value) for side in sides):
                return True
        if isinstance(node, ast.Dict) and len(node.keys) > 3:
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if len(keys) == len(node.keys) and all(_letters(key) and len(str(key)) == 1 for key in keys):
                return True
    return False


def _letters(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) == len(set(value)) and set(value) <= OPS


def _one_importer(tree: Tree) -> list[str]:
    importers = Counter(other for others in tree.imports.values() for other in others)
    return [file.module for file in tree.plait if importers[file.module] == 1]


def _exports(tree: Tree) -> list[str]:
    """Names that the faces of core's packages give: most of one package first."""
    found = list[tuple[int, str]]()
    for file in tree.plait:
        if file.path.name == "__init__.py" and file.module.startswith("plait.core."):
            given = next((len(node.value.elts) for node in file.tree.body if isinstance(node, ast.Assign)
                          and isinstance(node.value, (ast.List, ast.Tuple))
                          and ast.unparse(node.targets[0]) == "__all__"), 0)  # fmt: skip
            found.append((given, file.module))
    return [f"{module} {given}" for given, module in sorted(found, reverse=True)]


MEASURES: dict[str, Callable[[Tree], int | list[str]]] = {
    "files of plait": lambda tree: len(tree.plait),
    "lines of plait": lambda tree: sum(file.lines for file in tree.plait),
    "lines of tests": lambda tree: sum(file.lines for file in tree.tests),
    "files over 400 lines": lambda tree: [f"{file.module} {file.lines}" for file in tree.plait if file.lines > 400],
    "files that name parts of a layer": lambda tree: [file.module for file in tree.plait if file.names & LAYER],
    "files that interpret op letters, outside the engine": lambda tree: [
        file.module for file in tree.plait if not file.module.startswith("plait.train.engine") and _asks_a_kind(file)
    ],
    f"functions of more than {MOST_PARAMETERS} parameters": _many_parameters,
    "classes whose name another class has": lambda tree: [
        f"{name}: {', '.join(modules)}" for name, modules in sorted(tree.classes.items()) if len(modules) > 1
    ],
    "files with one importer": _one_importer,
    "import circles": lambda tree: [" ".join(circle) for circle in _circles(tree.at_import)],
    "import circles, imports within functions and for types included": lambda tree: [
        " ".join(circle) for circle in _circles(tree.imports)
    ],
    "faces of core's packages": _exports,
}  # fmt: skip


def main() -> None:
    """Print the figures; with --json what was counted too."""
    parser = argparse.ArgumentParser(description="Measures of the source tree.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true", help="print what was counted as JSON")
    asked = parser.parse_args()
    tree = Tree(asked.folder)
    found = {what: measure(tree) for what, measure in MEASURES.items()}
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    for what, value in found.items():
        print(f"{value if isinstance(value, int) else len(value):8,}  {what}")


if __name__ == "__main__":
    main()
