"""The command line starts fast and reads well."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from plait.cli.main import app
from tests.support.command import plait

TIER = "unit"
HELP = Path(__file__).parent / "help.txt"


def _of_children() -> float:
    """Processor seconds: others may use the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.system
def test_help_needs_no_torch_and_starts_at_once() -> None:
    code = (
        "import sys; sys.argv = ['plait', '--help']\n"
        "try:\n    from plait.cli.main import main; main()\n"
        "finally:\n    print([m for m in ('torch', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    best = float("inf")
    for _ in range(5):
        start = _of_children()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        best = min(best, _of_children() - start)
        assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
        if best < 0.5:
            break
    assert best < 0.5


@pytest.mark.system
def test_it_is_a_module_too() -> None:
    done = subprocess.run([sys.executable, "-m", "plait", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == plait("--version").stdout


def test_a_command_has_at_most_eight_options() -> None:
    """What describes a thing is a setting behind the command, ``KEY=VALUE``."""
    for words, command in commands():
        options = {one.name for one in command.params if one.param_type_name == "option"} - {"help"}
        assert len(options) <= 8, words


def test_every_page_says_what_words_are_and_has_examples() -> None:
    """Summaries are whole, no type of Python shows, and every command has two examples."""
    for words, command in commands():
        page = page_of(words)
        assert not re.search(r"<\w|\{|\[\[|[a-z]\.\.\.$", page, re.MULTILINE), words
        assert max(map(len, page.splitlines())) <= 80, words
        examples = [line.split() for line in page.partition("Examples:\n")[2].splitlines()]
        assert len(examples) >= 2 and all(words_of[0] == "plait" for words_of in examples), words
        assert examples[0][1 : len(words) + 1] == words or not words or hasattr(command, "commands")


def test_the_first_page_begins_with_what_a_newcomer_needs() -> None:
    headings = re.findall(r"^(\w.*):\n(?:  (\w+) .*\n)", page_of([]), re.MULTILINE)
    assert headings[:4] == [("Start", "init"), ("Runs", "view"), ("Clusters and machines", "doctor"), ("Tools", "job")]


@pytest.mark.system
def test_a_shell_completes_commands() -> None:
    asked = {"_PLAIT_COMPLETE": "complete_bash", "COMP_WORDS": "plait pl", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['plait']; from plait.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["plan", "place"]


def test_all_pages_of_help_stay() -> None:
    """Options, arguments and their words. ``python -m tests.cli.test_help`` writes help.txt
    anew."""
    assert HELP.read_text() == pages_of_help()


def commands() -> Iterator[tuple[list[str], Any]]:
    """Every command and group with its words, in the order of the first page."""
    found = [(list[str](), get_command(app))]
    for words, command in found:
        yield words, command
        found += [([*words, name], one) for name, one in getattr(command, "commands", {}).items()]


def page_of(words: list[str]) -> str:
    return CliRunner().invoke(app, [*words, "--help"], prog_name="plait", terminal_width=80).stdout


def pages_of_help() -> str:
    return "\n".join(page_of(words) for words, _ in commands())


if __name__ == "__main__":
    HELP.write_text(pages_of_help())
