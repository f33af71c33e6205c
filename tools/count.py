#!/usr/bin/env python3
"""Count what a reader of the code has to read, package by package; compare it with budget.toml.

    python tools/count.py [ROOT ...] [--json | --names]
    python tools/count.py --budget       fails where a figure is above its limit

Python 3.11 alone counts so: later versions cut f-strings into parts, and are refused.

tokens     of code, without comments, docstrings, imports and annotations of types. A string of more than 80
           characters counts its words, so that code moved into strings is not free
data       words of data files (TOML, JSON, YAML, CSV), for the same reason
first      docstrings, of attributes too, whose first word says nothing
private    public names of modules, classes, functions, parameters, fields and constants with words of
           words.txt, but for the exceptions of words.toml
long, branches, parameters, wide
           functions above 40 lines, of more than 12 branches (ruff's C901), with more than six parameters;
           lines above 100 columns
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
SHORT, BRANCHES, PARAMETERS, COLUMNS, STRING = 40, 12, 6, 100, 80
DATA = (".toml", ".json", ".yaml", ".yml", ".csv")
FIRST = {
    "Of", "What", "Whether", "Those", "Which", "Where", "As", "By", "From", "With", "In", "When", "Why", "Who", "Whose"
}  # fmt: skip
PRIVATE = {line.strip() for line in (TOOLS / "words.txt").read_text().splitlines() if line.strip() and line[0] != "#"}
EXCEPTIONS = TOOLS / "words.toml"
ALLOWED = set(tomllib.loads(EXCEPTIONS.read_text())["exceptions"] if EXCEPTIONS.is_file() else ())
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Position = tuple[int, int]


def tokens_of(text: str, tree: ast.AST) -> int:
    """Tokens of a module."""
    silent, annotations = _silent(tree), dict(_annotations(tree))
    count, until = 0, (0, 0)
    raw = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in SKIPPED or token.start[0] in silent:
            continue
        at = (token.start[0], len(raw[token.start[0] - 1][: token.start[1]].encode()))  # as ast counts columns
        until = max(until, annotations.get(at, until))
        if at >= until:
            long = token.type == tokenize.STRING and len(token.string) > STRING
            count += len(token.string.split()) if long else 1
    return count


def _silent(tree: ast.AST) -> set[int]:
    """Lines of docstrings and imports."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.Expr) and _text(node) is not None)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _text(node: ast.AST) -> str | None:
    """A statement that is a string."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _annotations(tree: ast.AST) -> Iterator[tuple[Position, Position]]:
    """Begin and end of each."""
    for node in ast.walk(tree):
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(note, ast.expr):
                yield (note.lineno, note.col_offset), (note.end_lineno or 0, note.end_col_offset or 0)


def docstrings(tree: ast.AST) -> list[str]:
    """Docstrings of modules, classes and functions, and strings that stand alone behind an assignment."""
    found = list[str]()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
            found.append(ast.get_docstring(node) or "")
        found += [
            _text(after) or "" for before, after in pairwise(body) if isinstance(before, (ast.Assign, ast.AnnAssign))
        ]
    return [text for text in found if text.strip()]


def says_nothing(docstring: str) -> bool:
    """True where the first word does not tell what is described."""
    word = docstring.split()[0]
    return word in FIRST or (len(word.rstrip(".,")) == 1 and word != "A")


def public_names(body: list[ast.stmt]) -> list[str]:
    """Names of a module's or public class's definitions; parameters of public functions."""
    names = list[str]()
    for node in body:
        public = not getattr(node, "name", "_").startswith("_")
        if isinstance(node, FUNCTIONS) and (public or node.name == "__init__"):
            names += [node.name] * public + [one.arg for one in _parameters(node)]
            names += _fields(node) if node.name == "__init__" else []
        elif isinstance(node, ast.ClassDef) and public:
            names += [node.name, *public_names(node.body)]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _fields(node: ast.AST) -> list[str]:
    """Attributes of ``self`` that a function sets."""
    return [
        each.attr
        for statement in ast.walk(node)
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for each in ast.walk(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    ]


def flagged_names(path: Path, tree: ast.Module) -> list[str]:
    """Public names with words that are no terms of the field."""
    return [
        name
        for name in (path.stem, *public_names(tree.body))
        if PRIVATE & set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())) and name not in ALLOWED
    ]


def counted(root: Path) -> dict[str, int]:
    """All figures of a folder."""
    row = dict.fromkeys(
        ("files", "lines", "tokens", "data", "first", "private", "long", "parameters", "wide", "branches"), 0
    )
    for path in sorted(root.rglob("*")):
        if path.suffix in DATA and path.is_file() and path.name != EXCEPTIONS.name:
            row["data"] += len(re.findall(r"\w+", path.read_text(errors="replace")))
        if path.suffix != ".py":
            continue
        text = path.read_text()
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
        row["files"] += 1
        row["lines"] += text.count("\n")
        row["tokens"] += tokens_of(text, tree)
        row["first"] += sum(map(says_nothing, docstrings(tree)))
        row["private"] += len(flagged_names(path, tree))
        row["long"] += sum((node.end_lineno or 0) - node.lineno >= SHORT for node in functions)
        row["parameters"] += sum(len(_parameters(node)) > PARAMETERS for node in functions)
        row["wide"] += sum(len(line) > COLUMNS for line in text.splitlines())
    row["branches"] = _complex(root)
    return row


def _complex(root: Path) -> int:
    """Functions that ruff's C901 names; 0 where ruff is not installed."""
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.is_file():
        return 0
    options = ["--isolated", "--select", "C901", "--config", f"lint.mccabe.max-complexity={BRANCHES}"]
    found = subprocess.run(
        [ruff, "check", *options, "--output-format", "json", "--exit-zero", str(root)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return len(json.loads(found.stdout))


def over_budget() -> list[str]:
    """A line for each figure above its limit."""
    lines = list[str]()
    for root, limits in tomllib.loads((TOOLS / "budget.toml").read_text()).items():
        row = counted(ROOT / root)
        lines += [
            f"{root}: {row[name]:,} {name}, {row[name] - most:,} above the {most:,} of tools/budget.toml"
            for name, most in limits.items()
            if row[name] > most
        ]
    return lines


def main() -> None:
    """Print figures, or hold them to the budget."""
    if sys.version_info[:2] != (3, 11):
        print("tools/count.py: Python 3.11 alone counts tokens so; nothing was counted")
        return
    options = {word for word in sys.argv[1:] if word.startswith("--")}
    roots = [Path(word) for word in sys.argv[1:] if word not in options]
    if "--budget" in options:
        if lines := over_budget():
            sys.exit("\n".join(lines))
        return
    if not roots:
        packages = sorted(path for path in Path("plait").iterdir() if path.is_dir() and path.name != "__pycache__")
        roots = [Path("plait"), *packages, Path("specs"), Path("tests"), Path("benchmarks"), Path("tools")]
    if "--names" in options:
        for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
            print(*(f"{path}: {name}" for name in flagged_names(path, ast.parse(path.read_text()))), sep="\n")
        return
    rows = {str(root): counted(root) for root in roots}
    if "--json" in options:
        print(json.dumps(rows))
        return
    for root, row in rows.items():
        print(f"{root:22}", *(f"{value:8,} {name}" for name, value in row.items()))


if __name__ == "__main__":
    main()
