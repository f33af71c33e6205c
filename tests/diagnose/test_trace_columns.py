"""What readers of other tools' recordings share."""

from __future__ import annotations

from typing import Any

import pytest

from plait.diagnose.tables import MOST_RANKS
from plait.diagnose.trace_columns import axis_of, bytes_of_dtype, members_of


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
        ([4, 0], "0,4"), ("[4, 0]", "0,4"), (" 4 ,0 ", "0,4"), ([7], "7"), ("10, 9", "9,10"),
        ([MOST_RANKS - 1], str(MOST_RANKS - 1)), ([MOST_RANKS], None), ([0, MOST_RANKS], None), ([1, 1], None),
        ([], None), ("", None),
        (None, None), ([0, "..."], None), ([-1], None), ([1.5], None), ("1234567890", None), ("4 0", None),
    ],
)  # fmt: skip
def test_members_of_groups(ranks: Any, members: str | None) -> None:
    assert members_of(ranks) == members


def test_members_as_they_stand() -> None:
    assert members_of("[4, 0, 2]", in_order=True) == "4,0,2"
