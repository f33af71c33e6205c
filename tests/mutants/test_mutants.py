"""Faults that are drawn: legal, of each kind, the same from one seed; and tests that reach a
line."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.mutants.draw import draw, mutants_of
from tests.mutants.operators import faults
from tests.mutants.planted import planted as planted_by_name
from tests.mutants.reach import Reach

SOURCE = '''"""A module of é."""

LIMIT = 3


def kept(value: int = 2, *, text: str = "é") -> int:
    """A docstring."""
    assert value, "1 + 1"
    if value < LIMIT and not text:
        raise ValueError(f"{value + 1}")
    total = min(value, 4) - 1
    while True:
        total += 1
        break
    print(total)
    return total if total > 2.5 else value
'''


def planted(file: Path, kind: str) -> set[str]:
    """Lines that a kind of fault makes, stripped."""
    source = file.read_text()
    found = [one.planted(source).splitlines() for one in mutants_of(file) if one.kind == kind]
    return {line.strip() for lines in found for line in lines} - {line.strip() for line in source.splitlines()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "plait" / "core").mkdir(parents=True)
    path = tmp_path / "plait" / "core" / "module.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("boundary", {"if (value <= LIMIT) and not text:", "return total if (total >= 2.5) else value"}),
        ("and is or", {"if (value < LIMIT or not text):"}),
        ("operand dropped", {"if (value < LIMIT):", "if (not text):"}),
        ("not dropped", {"if value < LIMIT and (text):"}),
        ("condition negated", {"if (not (value < LIMIT and (not text))):"}),
        ("raise deleted", {"pass"}),
        ("call deleted", {"pass"}),
        ("update deleted", {"pass"}),
        ("break is continue", {"continue"}),
        ("min is max", {"total = (max)(value, 4) - 1"}),
        ("arithmetic", {"total = (min(value, 4) + 1)"}),
        ("branches exchanged", {"return (value if total > 2.5 else total)"}),
    ],
)
def test_each_kind_of_fault(file: Path, kind: str, lines: set[str]) -> None:
    assert planted(file, kind) == lines


def test_constants_are_changed_but_no_texts_of_errors_annotations_or_docstrings(file: Path) -> None:
    changed = planted(file, "constant")
    assert "LIMIT = (4)" in changed
    assert 'def kept(value: int = (3), *, text: str = "é") -> int:' in changed
    assert not any("ValueError" in line or "assert" in line for line in changed)
    assert all(ast.parse(one.planted(SOURCE)) for one in mutants_of(file))
    assert {type(fault.node) for fault in faults(ast.parse('"""Text."""\nx: int\n'))} == set()


def test_a_mutant_knows_whether_a_test_must_run_it_or_import_it(file: Path) -> None:
    by_line = {one.line: one for one in mutants_of(file) if one.kind == "constant"}
    assert (by_line[3].inside, by_line[6].inside, by_line[11].inside) == (False, False, True)
    assert by_line[11].statement == 11


def test_equal_seeds_draw_equal_mutants(file: Path) -> None:
    root = file.parents[2]
    first = draw(root, 8, 3)
    assert first == draw(root, 8, 3) and first != draw(root, 8, 4)
    assert len({(one.start, one.text) for one in first}) > 4


def test_tests_that_reach_a_line_are_the_quickest_first_and_only_those_that_pass(tmp_path: Path) -> None:
    for worker, lines in (("a", {"3": ["slow", "fails"]}), ("b", {"3": ["quick"], "4": ["other"]})):
        seconds = {"slow": 2.0} if worker == "a" else {"quick": 0.1, "other": 0.2}
        (tmp_path / f"reach-{worker}.json").write_text(json.dumps({"seconds": seconds, "lines": {"/m.py": lines}}))
    found = Reach.read(tmp_path)
    assert found.of(Path("/m.py"), range(3, 4)) == ["quick", "slow"]
    assert found.of(Path("/m.py"), range(2, 5)) == ["quick", "other", "slow"]
    assert found.of(Path("/m.py"), None) == ["quick", "other", "slow"]
    assert found.of(Path("/m.py"), range(9, 10)) == found.of(Path("/n.py"), None) == []


def test_planted_faults_are_found_by_name_and_are_legal() -> None:
    root = Path(__file__).parents[2]
    mutants = planted_by_name(root)
    assert len(mutants) == 60
    for one in mutants:
        assert one.inside
        ast.parse(one.planted(one.file.read_text()))


def test_a_planted_fault_whose_line_is_gone_is_named(file: Path, tmp_path: Path) -> None:
    rows = tmp_path / "planted.toml"
    rows.write_text('[[fault]]\nfunction = "kept"\nwas = "total += 1"\nis = "total += 2"\n')
    (one,) = planted_by_name(file.parents[2], rows)
    assert "        total += 2\n" in one.planted(SOURCE)
    rows.write_text('[[fault]]\nfunction = "kept"\nwas = "total += 9"\nis = "total += 2"\n')
    with pytest.raises(ValueError, match="kept: its line is there 0 times"):
        planted_by_name(file.parents[2], rows)
