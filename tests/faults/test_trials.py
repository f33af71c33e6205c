"""Whatever happens to a job on a lab of four hosts is named, soon, and the run ends as if it had
not: each fault twenty times, at random steps. ``python -m tests.faults.score`` prints the same as a
table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.score import clean
from tests.faults.trials import KINDS, trial, undisturbed_in

pytestmark = [pytest.mark.contract, pytest.mark.lab]


@pytest.fixture(scope="module")
def undisturbed(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], str]:
    """Last losses of runs to which nothing happens."""
    return undisturbed_in(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("repeat", range(20))
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_named_and_costs_little(
    kind: str, repeat: int, tmp_path: Path, undisturbed: Callable[[tuple[str, ...]], str]
) -> None:
    found = trial(kind, repeat, tmp_path / "run", undisturbed)
    assert found.right or (found.tie and found.harmless), found


def test_nobody_is_named_in_ten_thousand_clean_steps(tmp_path: Path) -> None:
    assert clean(tmp_path, 10_000) == []
