"""Shell scripts as syntax trees, parsed by ``shfmt``; nothing is run.

A value that is unknown before a run stands in texts as an atom: its source in letters of Unicode's
private planes. A shell takes these as ordinary letters, so that a text with atoms can be parsed
again unharmed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

from plait.core.base.errors import JobError

_PRIVATE = 0xF0000
UNKNOWN = chr(_PRIVATE)
"""The letter that begins an atom."""
SEVERAL = "\U00100000"
"""The letter that ends an atom which may be any number of words."""
_BACKSLASH = "\U00100001"
"""Stand-in for a backslash at the end of a comment; shfmt would miss the line's end after a
backslash."""
ATOM = re.compile(f"{UNKNOWN}[{chr(_PRIVATE + 1)}-\U000fffff]*{SEVERAL}?")
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n;|&]*[^<>\n;|&\s]>(?=[\s\\\"'/_.]|\Z)")
"""A placeholder that the user of the script is to fill in."""
_COMMENT = re.compile(r"((?:^|[\s;&|()])#.*)\\$", re.MULTILINE)


class ShellSyntaxError(ValueError):
    """The error for text that is no valid bash, or for a form that Plait does not interpret: line
    and problem."""


def unknown(source: str) -> str:
    """Return the atom of an unknown value by its source text."""
    return UNKNOWN + "".join(chr(_PRIVATE + ord(one)) for one in source_text(source) if ord(one) <= 0xFFFF)


def source_text(text: str) -> str:
    """Return a text with each atom replaced by its source."""
    return "".join(chr(ord(one) - _PRIVATE * (one > UNKNOWN)) for one in text if one not in (UNKNOWN, SEVERAL))


def known_part(text: str) -> str:
    """Return a text without its atoms."""
    return ATOM.sub("", text)


class Node(dict[str, Any]):
    """A node of a script's syntax tree; its fields are those of mvdan.cc/sh/v3/syntax, None if
    missing. line: None in a text that is no file."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    @property
    def text(self) -> str:
        """The node's source text."""
        return self["raw"][self.Pos.Offset : self.End.Offset].decode()


def walk(node: Any) -> Iterator[Node]:
    """Yield a node and its descendants, in order of the text."""
    if isinstance(node, Node):
        yield node
    if isinstance(node, list | Node):
        for inner in node.values() if isinstance(node, Node) else cast("list[Any]", node):
            yield from walk(inner)


@lru_cache(maxsize=256)
def parse(text: str, *, lines: bool = False) -> Node:
    """Return the syntax tree of a text. lines: keep line numbers in the nodes. Raises
    ShellSyntaxError for text that is no valid bash, and JobError if shfmt is not installed.

    >>> parse("a b # c").Stmts[0].Cmd.Args[1].text
    'b'
    """
    rows = _COMMENT.sub(rf"\1{_BACKSLASH}", _PLACEHOLDER.sub(lambda found: unknown(found[0]), text)).split("\n")
    tree = _tree("\n".join(rows), lines)
    inside = [node for node in walk(tree) if node.Type in ("Lit", "SglQuoted") and _BACKSLASH in node.Value]
    for number in {number for node in inside for number in range(node.Pos.Line - 1, node.End.Line)}:
        rows[number] = rows[number].replace(_BACKSLASH, "\\")
    return _tree("\n".join(rows), lines) if inside else tree


def _tree(text: str, lines: bool) -> Node:
    program = shutil.which("shfmt", path=sysconfig.get_path("scripts")) or shutil.which("shfmt")
    if not program:
        raise JobError("shfmt: it reads shell scripts, and is not installed", fix="pip install shfmt-py")
    raw = text.encode()
    done = subprocess.run([program, "--to-json", "-ln", "bash"], input=raw, capture_output=True, check=False)
    if done.returncode:
        line, _, problem = done.stderr.decode().strip().removeprefix("<standard input>:").partition(":")
        raise ShellSyntaxError(f"line {line}: {source_text(problem.partition(': ')[2])}")

    def read(fields: dict[str, Any]) -> Node:
        node = Node(fields)
        if "End" in node:
            node |= {"raw": raw, "line": node.Pos.Line if lines else None, "Value": node.Value or ""}
        return node

    return json.loads(done.stdout, object_hook=read)
