"""The command line starts fast and reads well."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.support.command import plait

TIER = "unit"


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
    done = plait(verb, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout
