"""Measurements of emulated clusters, by the benchmarks that exist: read from ``benchmarks/results``, or made
anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.papers.found import ROOT

COMMANDS: dict[str, tuple[str, Sequence[str]]] = {
    "domino": ("domino-2core.json", ("--share", "0.3", "--share", "0.485", "--share", "0.52")),
    "reshard": ("reshard-2core.json", ("--rounds", "7")),
    "pipeline": ("pipeline-2core.json", ("--rounds", "6")),
}
"""The file that has the result, and what the benchmark is asked."""


def shown(name: str) -> str:
    """The command."""
    file, words = COMMANDS[name]
    return " ".join(["python", f"benchmarks/{name}.py", *words, "--save", f"benchmarks/results/{file}"])


def measured(name: str, *, again: bool) -> dict[str, Any]:
    """A benchmark's result. again: measured now, and kept."""
    file, words = COMMANDS[name]
    kept = ROOT / "benchmarks" / "results" / file
    if again:
        argv = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words, "--save", str(kept)]
        subprocess.run(argv, check=True, cwd=ROOT)
    return json.loads(kept.read_text())
