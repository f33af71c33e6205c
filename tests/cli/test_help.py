"""The command line starts fast and reads well."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from plait.cli.main import app
from tests.support.command import plait, succeed

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


@pytest.mark.parametrize(
    "verb", ["train", "place", "measure", "sample", "export", "diagnose", "reshard", "topology", "lab", "queue"]
)
def test_every_verb_explains_itself(verb: str) -> None:
    done = succeed(verb, "--help")
    assert "Usage" in done.stdout


def test_a_command_has_at_most_eight_options() -> None:
    """What describes a thing is a setting behind the command, ``KEY=VALUE``."""
    commands, most = [get_command(app)], dict[str, int]()
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        options = {one.name for one in command.params if one.param_type_name == "option"} - {"help"}
        most[str(command.name)] = len(options)
    assert max(most.values()) <= 8, most


def test_all_pages_of_help_stay() -> None:
    """Options, arguments and their words. ``python -m tests.cli.test_help`` writes help.txt
    anew."""
    assert HELP.read_text() == pages_of_help()


def pages_of_help() -> str:
    """The help of every command, in the order of the first page."""
    pages, commands = list[str](), [list[str]()]
    while commands:
        words = commands.pop(0)
        page = CliRunner().invoke(app, [*words, "--help"], prog_name="plait", terminal_width=80).stdout
        pages.append(page)
        listed = page.partition("\nCommands:\n")[2].partition("\n\n")[0]
        commands += [[*words, line.split()[0]] for line in listed.splitlines() if line[2:3].strip()]
    return "\n".join(pages)


if __name__ == "__main__":
    HELP.write_text(pages_of_help())
