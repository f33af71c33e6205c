"""Measurements of emulated clusters, by the benchmarks that exist: read from ``benchmarks/results``, or made
anew."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.papers.found import ROOT

COMMANDS: dict[str, tuple[str, str, Sequence[str]]] = {
    "domino": ("domino", "domino-2core.json", ("--share", "0.3", "--share", "0.485", "--share", "0.52")),
    "whole step": ("domino", "domino-whole-2core.json", ("--whole", "--share", "0.3", "--rounds", "7")),
    "reshard": ("reshard", "reshard-2core.json", ("--rounds", "7")),
    "alpa": ("reshard", "reshard-alpa-2core.json", (
        "--rounds", "4", "--case", "one(1,2)", "--case", "one(4,2)", "--case", "many3", "--case", "many4",
        "--case", "many7",
    )),
    "pipeline": ("pipeline", "pipeline-2core.json", ("--rounds", "6")),
    "meshes": ("pipeline_meshes", "pipeline-meshes-2core.json", ("--rounds", "5")),
    "interference": ("interference", "interference-2core.json", ("--rounds", "9")),
    "loading": ("sharding", "sharding-loading-2core.json", ("--case", "loading", "--rounds", "9")),
}  # fmt: skip
"""The benchmark, the file that has the result, and what it is asked."""


def shown(name: str) -> str:
    """The command."""
    script, file, words = COMMANDS[name]
    return shlex.join(["python", f"benchmarks/{script}.py", *words, "--save", f"benchmarks/results/{file}"])


def measured(name: str, *, again: bool) -> dict[str, Any]:
    """A benchmark's result. again: measured now, and kept."""
    script, file, words = COMMANDS[name]
    kept = ROOT / "benchmarks" / "results" / file
    if again:
        argv = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *words, "--save", str(kept)]
        subprocess.run(argv, check=True, cwd=ROOT)
    return json.loads(kept.read_text())


def dates(*names: str) -> str:
    """The days of measurement, each once."""
    return " and ".join(sorted({measured(name, again=False)["date"] for name in names}))
