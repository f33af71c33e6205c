"""Roll-ups of what ranks did, their totals, and which rings they were made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.record.columns import Coded, read_columns
from plait.core.record.rollup import (
    BLOCK,
    RollupSource,
    joined,
    last_steps_of_rings,
    rollup_file,
    totals_file,
    totals_of,
    write_rollup,
)

SOURCE = RollupSource(plan="feed", began=7, rings={0: (11, 4), 1: (12, 5)})


def rows(*found: tuple[int, int, str, int, int, int, int]) -> dict[str, Any]:
    """step, rank, kind, n, sum, min, max."""
    steps, ranks, kinds, *numbers = (list(column) for column in zip(*found, strict=True))
    texts = list(dict.fromkeys(kinds))
    nothing = Coded([""], np.zeros(len(found), np.int32))
    return {
        "step": np.array(steps), "rank": np.array(ranks), "site": nothing, "direction": nothing,
        "kind": Coded(texts, np.array([texts.index(kind) for kind in kinds], np.int32)),
        **dict(zip(("n", "sum_ns", "min_ns", "max_ns"), map(np.array, numbers), strict=True)),
    }  # fmt: skip


TWO = rows((3, 0, "wait", 2, 30, 10, 20), (3, 1, "compute", 1, 5, 5, 5), (4, 0, "wait", 3, 60, 8, 40))


def test_totals_add_up_over_steps() -> None:
    found = totals_of(TWO)
    assert {name: found[name].tolist() for name in found} == {
        "rank": [0, 1], "kind": ["wait", "compute"], "site": ["", ""], "direction": ["", ""], "steps": [2, 1],
        "n": [5, 1], "sum_ns": [90, 5], "min_ns": [8, 5], "max_ns": [40, 5],
    }  # fmt: skip


def test_roll_ups_that_know_other_texts_are_joined() -> None:
    other = rows((5, 2, "compute", 1, 7, 7, 7), (5, 2, "comm", 1, 9, 9, 9))
    found = joined([TWO, other])
    assert found["kind"].tolist() == ["wait", "compute", "wait", "compute", "comm"]
    assert found["step"].tolist() == [3, 3, 4, 5, 5]
    assert found["sum_ns"].tolist() == [30, 5, 60, 7, 9]


def test_a_roll_up_and_its_totals_say_whose_they_are(tmp_path: Path) -> None:
    path = rollup_file(tmp_path, range(2), BLOCK + 3)
    assert path == tmp_path / "rollup" / "block=1" / "ranks-00000-00001-step-00001003.parquet"
    assert totals_file(path) == tmp_path / "totals" / "block=1" / path.name
    write_rollup(path, TWO, SOURCE)
    found, told = read_columns(path, "plait.rollup.version")
    assert (found["step"], found["kind"], found["max_ns"]) == ([3, 3, 4], ["wait", "compute", "wait"], [20, 5, 40])
    assert (told["plait.plan"], told["plait.began"], told["plait.rollup.version"]) == ("feed", "7", "1")
    found, told = read_columns(totals_file(path), "plait.totals.version")
    assert (found["steps"], found["n"]) == ([2, 1], [5, 1])
    assert (told["plait.steps"], told["plait.began"]) == ("3 4", "7")


def test_rings_are_known_by_the_files_that_have_any_of_the_ranks(tmp_path: Path) -> None:
    """The newest of each; files of others and of nobody are passed over."""
    write_rollup(rollup_file(tmp_path, range(2), 0), TWO, SOURCE)
    write_rollup(
        rollup_file(tmp_path, range(2), BLOCK), TWO, RollupSource(plan="", began=7, rings={0: (11, 2), 1: (13, 9)})
    )
    write_rollup(rollup_file(tmp_path, range(2, 4), 0), TWO, RollupSource(plan="", began=7, rings={2: (14, 1)}))
    for name in ("ranks-a-00001-step-00000000", "ranks-00000-b-step-00000000", "ranks-00000-00001-step-00000001"):
        os.link(rollup_file(tmp_path, range(2, 4), 0), tmp_path / "rollup" / "block=0" / f"{name}.parquet")
    (tmp_path / "rollup" / "block=0" / "ranks-00000-00001-step-00000001.parquet").unlink()
    (tmp_path / "rollup" / "block=0" / "ranks-00000-00000-step-00000000.parquet").write_bytes(b"no table")
    one = {(0, 11): 4, (1, 12): 5, (1, 13): 9}
    assert last_steps_of_rings(tmp_path, range(1)) == one
    assert last_steps_of_rings(tmp_path, range(1, 2)) == one
    assert last_steps_of_rings(tmp_path, range(1, 3)) == one | {(2, 14): 1}
    assert last_steps_of_rings(tmp_path, range(3, 5)) == {(2, 14): 1}
    assert last_steps_of_rings(tmp_path, range(4, 5)) == {}


@pytest.mark.parametrize("rings", ["[1]", '{"0": 5}', '{"a": [1, 2]}', "nonsense"])
def test_what_says_nothing_of_rings_costs_no_other(rings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rollup(rollup_file(tmp_path, range(2), 0), TWO, SOURCE)
    write_rollup(rollup_file(tmp_path, range(1), BLOCK), TWO, SOURCE)
    monkeypatch.setattr(
        "plait.core.record.rollup.metadata_of",
        lambda path: {"plait.rings": rings if "block=0" in str(path) else '{"0": [11, 4]}'},
    )
    assert last_steps_of_rings(tmp_path, range(2)) == {(0, 11): 4}
    monkeypatch.setattr(
        "plait.core.record.rollup.metadata_of",
        lambda path: {"plait.rings": rings if "block=1" in str(path) else '{"0": [11, 4]}'},
    )
    assert last_steps_of_rings(tmp_path, range(2)) == {(0, 11): 4}


def test_totals_keep_ranks_and_kinds_apart() -> None:
    """Of two ranks with three kinds each, in any order."""
    table = [(step, rank, kind, 1, 10 * rank + at, 1, 1)
             for step in (1, 2) for rank in (1, 0) for at, kind in enumerate(("b", "c", "a"))]  # fmt: skip
    found = totals_of(rows(*table))
    assert list(zip(*(found[name].tolist() for name in ("rank", "kind", "steps", "sum_ns")), strict=True)) == [
        (0, "b", 2, 0), (0, "c", 2, 2), (0, "a", 2, 4), (1, "b", 2, 20), (1, "c", 2, 22), (1, "a", 2, 24)
    ]  # fmt: skip
