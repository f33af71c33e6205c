"""Planting each fault and running the tests that may see it: those that reach its line, then the
far ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.draw import Mutant
from tests.mutants.reach import VARIABLE, Reach
from tests.mutants.tree import NO_TESTS, Tree

WHOLE = 3600.0
"""Seconds for the unit tier without a fault."""
FAR = {
    "core": ("tests/core", "tests/dist", "tests/cli", "tests/launch", "tests/streams"),
    "plan": ("tests/plan", "tests/dist/test_estimate.py", "tests/cli"),
    "place": ("tests/place", "tests/cli", "tests/launch", "tests/slurm"),
    "diagnose": ("tests/diagnose", "tests/cli", "tests/launch", "tests/view"),
    "train": ("tests/train", "tests/dist", "tests/streams", "tests/cli", "tests/launch"),
    "formats": ("tests/formats", "tests/plan", "tests/cli"),
    "launch": ("tests/launch", "tests/cli", "tests/slurm", "tests/kubernetes", "tests/lab"),
}
"""Tests in processes of their own, whose lines are not recorded, by folder of the package."""


@dataclass(frozen=True)
class Scope:
    """Which tests are run. tests: where unit tests are taken from; near: no others; workers:
    processes of the run without a fault."""

    tests: Sequence[str] = ("tests", "plait")
    near: bool = False
    workers: int = 2


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. reached: how many unit tests execute its line; by: the test that
    failed, or why else it counts as killed; empty for a survivor."""

    mutant: Mutant
    shown: str
    reached: int
    by: str

    @property
    def killed(self) -> bool:
        """Whether a test told it from the sound code."""
        return bool(self.by)

    def line(self, root: Path) -> str:
        """A line for people."""
        where = f"{self.mutant.file.relative_to(root)}:{self.mutant.line}"
        end = f"killed by {self.by}" if self.by else f"SURVIVED (reached by {self.reached} unit tests)"
        return f"{where}  {self.shown}\n    {end}"

    def row(self, root: Path) -> dict[str, Any]:
        """The same for programs."""
        file = str(self.mutant.file.relative_to(root))
        return {"file": file, "line": self.mutant.line, "fault": self.shown, "reached": self.reached, "by": self.by}


def tried(project: Path, folder: Path, mutants: Sequence[Mutant], scope: Scope) -> Iterator[Outcome]:
    """Outcomes in the order of the mutants, made in a copy below ``folder``."""
    tree = Tree(project, folder)
    reach = _reach(tree, folder, [tree.root / one.file.relative_to(project) for one in mutants], scope)
    for mutant in mutants:
        copy = tree.root / mutant.file.relative_to(project)
        source = copy.read_text()
        # Of a statement over several lines, not its first alone: an "if (" is no line that is executed.
        tests = reach.of(copy, range(mutant.statement, mutant.line + 1) if mutant.inside else None)
        copy.write_text(mutant.planted(source))
        try:
            by = _killer(tree, tests, "not contract", sum(reach.seconds[test] for test in tests))
            part = mutant.file.relative_to(project).parts[1]
            for place in () if by or scope.near else FAR[part]:
                by = by or _killer(tree, [place], "not unit and not contract", 90.0)
        finally:
            copy.write_text(source)
        yield Outcome(mutant, mutant.shown(source), len(tests), by)


def _reach(tree: Tree, folder: Path, files: Sequence[Path], scope: Scope) -> Reach:
    """The unit tier without a fault."""
    asked = folder / "reach.json"
    asked.write_text(json.dumps({"files": [str(file) for file in files], "out": str(folder)}))
    status, output = tree.test(
        scope.tests, "-m", "unit and not contract", "-p", "tests.mutants.reach", "-n", str(scope.workers),
        "--dist", "loadfile", timeout=WHOLE, variables={VARIABLE: str(asked)},
    )  # fmt: skip
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            print(f"fails without a fault, so it kills none: {line.split(' ')[1]}", flush=True)
    print(f"without a fault: {output.strip().splitlines()[-1] if output.strip() else status}", flush=True)
    return Reach.read(folder)


def _killer(tree: Tree, tests: Sequence[str], marked: str, seconds: float) -> str:
    """The first test that fails, or what else ended the run; empty where all pass. seconds: what
    they take without a fault, about."""
    if not tests:
        return ""
    options = ("-x", "-p", "no:randomly", "--force-short-summary", "-m", marked)
    status, output = tree.test(tests, *options, timeout=60 + 10 * seconds)
    if status is None:
        return "time: the tests did not end"
    if status in (0, NO_TESTS):
        return ""
    failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else f"pytest's status {status}"
