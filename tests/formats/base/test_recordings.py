"""What readers of other tools' recordings share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import DataError
from plait.diagnose.measured.tables import MOST_RANKS
from plait.formats.base.recordings import (
    LOW,
    assign_ranks,
    axis_of,
    bytes_of_dtype,
    checked_rank,
    members_of,
    rank_by_path,
    rank_in,
)


def test_axes_by_what_groups_are_called() -> None:
    labels = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tp", "PIPELINE_MODEL_PARALLEL_GROUP": "pp", "DATA_PARALLEL_GROUP": "dp",
        "CONTEXT_PARALLEL_GROUP": "cp", "mesh_tp": "tp", "mesh_pp": "pp", "mesh_dp_replicate": "dp", "mesh_cp": "cp",
        "default_pg": "dp", "undefined": "other", "": "other",
    }  # fmt: skip
    assert {label: axis_of(label) for label in labels} == labels


def test_bytes_of_dtypes_as_tools_call_them() -> None:
    sizes = {
        16: "ComplexDouble complex128", 8: "Double Long c10::complexfloat complex64 float64 int64",
        4: "Float Int float32 int32", 2: "Half BFloat16 Short float16 int16",
        1: "Float8_e4m3fn Float8_e5m2 e4m3 e5m2 Byte Char Bool int8 uint8", 0: "Quantum ",
    }  # fmt: skip
    for size, names in sizes.items():
        assert {name: bytes_of_dtype(name) for name in names.split(" ")} == dict.fromkeys(names.split(" "), size)


@pytest.mark.parametrize(
    ("ranks", "members"),
    [
        ([4, 0], (4, 0)), ("[4, 0]", (4, 0)), (" 4 ,0 ", (4, 0)), ([7], (7,)), ("10, 9", (10, 9)),
        ([MOST_RANKS - 1], (MOST_RANKS - 1,)), ([MOST_RANKS], None), ([0, MOST_RANKS], None), ([1, 1], None),
        ([], None), ("", None),
        (None, None), ([0, "..."], None), ([-1], None), ([1.5], None), ("1234567890", None), ("4 0", None),
    ],
)  # fmt: skip
def test_members_of_groups(ranks: Any, members: tuple[int, ...] | None) -> None:
    assert members_of(ranks) == members


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
    with pytest.raises(DataError, match=r"its rank .+ is not a whole number from 0 to"):
        checked_rank(said)


def test_the_first_and_the_last_rank_are_ranks() -> None:
    assert [checked_rank(rank) for rank in (0, MOST_RANKS - 1)] == [0, MOST_RANKS - 1]


def test_files_of_which_nobody_knows_get_what_is_free_in_the_order_of_their_numbers() -> None:
    names = ["b1", "a10", "a9", "a9b"]
    found = assign_ranks([Path(name) for name in names], {1: Path("x"), 7: Path("y")})
    assert {path.name: rank for path, rank in found.items()} == {"a9": 0, "a9b": 2, "a10": 3, "b1": 4}
    assert assign_ranks([Path("a")], {0: Path("x"), 1: Path("y")}) == {Path("a"): 2}
