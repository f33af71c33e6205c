"""Whose a recording is: what counts as a rank, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import DataError
from plait.diagnose.tables import MOST_RANKS
from plait.diagnose.whose import LOW, checked_rank, numbered, rank_by_path, rank_in


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        (f"trace_{LOW - 1}.json", LOW - 1), (f"trace_{LOW}.json", None), (f"trace_rank_{LOW}.json", LOW),
        ("RANK=7.json.xz", 7), ("rank.7", 7), ("rank7", 7), ("franks_rank-2_9.json", 2), ("crank-4.txt", None),
        ("local_rank-3_rank-5.json", 5), ("local-rank5_2.json", None), ("rank-1234567890.json", None),
        ("trace_5.pt.trace.json.bz2", 5), ("trace_5.csv", None), ("pid_77.json", None), ("pid-77_5.json", None),
    ],
)  # fmt: skip
def test_ranks_in_names(name: str, rank: int | None) -> None:
    assert rank_in(name) == rank


def test_with_many_files_larger_numbers_are_ranks() -> None:
    assert (rank_in("trace_1999.json", 2000), rank_in("trace_2000.json", 2000)) == (1999, None)


def test_a_files_name_is_asked_before_its_folder() -> None:
    told = {"rank3/trace_rank4.json": 4, "rank3/trace.json": 3, "node_3/trace.json": None, "rank3/x/trace.json": None}
    assert {path: rank_by_path(Path(path)) for path in told} == told
    assert rank_by_path(Path("rank9/trace_5.json"), 5) == 9


@pytest.mark.parametrize("said", [True, "3", 1.0, None, -1, MOST_RANKS])
def test_what_is_no_rank_is_refused(said: Any) -> None:
    with pytest.raises(DataError, match=r"its rank is .+, which is none"):
        checked_rank(said)


def test_the_first_and_the_last_rank_are_ranks() -> None:
    assert [checked_rank(rank) for rank in (0, MOST_RANKS - 1)] == [0, MOST_RANKS - 1]


def test_files_of_which_nobody_knows_get_what_is_free_in_the_order_of_their_numbers() -> None:
    names = ["b1", "a10", "a9", "a9b"]
    found = numbered([Path(name) for name in names], {1: Path("x"), 7: Path("y")})
    assert {path.name: rank for path, rank in found.items()} == {"a9": 0, "a9b": 2, "a10": 3, "b1": 4}
    assert numbered([Path("a")], {0: Path("x"), 1: Path("y")}) == {Path("a"): 2}
