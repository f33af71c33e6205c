"""Host lists: written out as Slurm does, and folded back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.topology.hostlist import MOST_HOSTS, expand, fold

NAMES = st.from_regex(r"[a-z0-9.-]{1,3}([0-9]{1,4}[a-z-]{0,2}){0,3}", fullmatch=True)


@given(st.lists(NAMES, max_size=40))
def test_what_is_folded_is_written_out_again(names: list[str]) -> None:
    assert expand(fold(names)) == names


@given(st.integers(0, 2000), st.integers(1, 300), st.integers(1, 5), st.integers(1, 30))
def test_two_numbers_fold_into_two_brackets(start: int, count: int, racks: int, digits: int) -> None:
    names = [f"r{rack}n{n:0{digits % 6}}" for rack in range(1, racks + 1) for n in range(start, start + count)]
    text = fold(names)
    assert expand(text) == names
    assert len(text) < 60  # a bracket for each number; a second range where digits run out


@pytest.mark.parametrize(
    "text, names",
    [
        ("", []),
        ("a", ["a"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[001-003,020]", ["n001", "n002", "n003", "n020"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[09-10]-ib", ["n09-ib", "n10-ib"]),
        ("m[1-2]x[0-1]", ["m1x0", "m1x1", "m2x0", "m2x1"]),
        (" a , b[1,3] ", ["a", "b1", "b3"]),
        ("a,a", ["a", "a"]),
        ("[1-2][3-4]", ["13", "14", "23", "24"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_written_out(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text, says",
    [
        ("n[1-999999999]", "more than 200000 names"),
        ("a[1-1000]b[1-1000]", "more than 200000 names"),
        (",".join(["n[1-1000]"] * 201), "more than 200000 names"),
        ("n[1-" + "9" * 5000 + "]", "neither a number nor a range"),
        ("n[", "never closed"),
        ("n[1-3", "never closed"),
        ("n]", "at character 2 has no partner"),
        ("n[[1]]", "at character 3 has no partner"),
        ("n[]", "neither a number"),
        ("n[a-b]", "neither a number"),
        ("n[-3]", "neither a number"),
        ("n[5-2]", "does not run upwards"),
        ("n[1-016]", "does not run upwards"),
        ("n[100-20]", "does not run upwards"),
        ("n[٣-٥]", "neither a number"),
        ("a,,b", "a name is missing"),
        ("a b", "'a b' is no name"),
    ],
)
def test_what_is_no_host_list_is_said(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        expand(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a[1]", "n\n"])
def test_names_that_no_list_can_hold(name: str) -> None:
    with pytest.raises(ValueError, match="cannot stand in a host list"):
        fold([name])


def test_a_whole_cluster_is_quick() -> None:
    start = time.process_time()
    names = expand(f"n[1-{MOST_HOSTS}]")
    assert len(names) == MOST_HOSTS
    assert fold(names) == f"n[1-{MOST_HOSTS}]"
    assert time.process_time() - start < 5  # 0.4 s alone
