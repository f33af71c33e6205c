"""Counts the options of every command of ``plait``: at most ``MOST`` each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer

from plait.cli.main import app

MOST = 8


def counts(command: Any, name: str = "plait") -> Iterator[tuple[str, list[str]]]:
    """(name, options) of a command and all below it, ``--help`` left out."""
    for word, inner in getattr(command, "commands", {}).items():
        yield from counts(inner, f"{name} {word}")
    if not hasattr(command, "commands"):
        options = [one.opts[0] for one in command.params if one.param_type_name == "option"]
        yield name, [one for one in options if one != "--help"]


def main() -> None:
    """Print a line for each command, those with the most options first; fail where there are too many."""
    found = sorted(counts(typer.main.get_command(app)), key=lambda one: -len(one[1]))
    for name, options in found:
        print(f"{len(options):4} {name}: {' '.join(options)}")
    if len(found[0][1]) > MOST:
        sys.exit(f"at most {MOST} options a command")


if __name__ == "__main__":
    main()
