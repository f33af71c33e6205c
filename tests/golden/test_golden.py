"""What Plait computes is what it computed. Where a change is meant, ``python -m tests.golden``
writes the files anew, and the commit says why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.contents import CONTENTS
from tests.golden.files import FOLDER, differences, packed, read, rounded


@pytest.mark.parametrize("name", CONTENTS)
def test_results_are_the_golden_ones(name: str) -> None:
    found = list(differences(read(name), rounded(CONTENTS[name](read("inputs")))))
    assert found == [], f"{len(found)} values of {name} changed; write them anew with python -m tests.golden"


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.xz")) < 3 << 20


def test_every_change_is_found_and_last_bits_are_none() -> None:
    old: Any = {"a": [1.0, {"b": "x"}], "c": 3, "gone": 1}
    new: Any = {"a": [1.0 + 1e-13, {"b": "y"}], "c": 4, "new": None}
    assert list(differences(old, new)) == [
        '/a/1/b: "x" became "y"', "/c: 3 became 4", "/gone is gone", "/new is new",
    ]  # fmt: skip
    assert list(differences([1.0], [1.0 + 1e-10])) == ["/0: 1.0 became 1.0000000001"]
    assert list(differences([1, True], [1])) == [" has 1 entries in place of 2"]
    assert packed({"b": float("inf"), "a": (1, 2)}) == packed({"a": [1, 2], "b": "inf"})
