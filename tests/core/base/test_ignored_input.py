"""Counts of what a reader did not take."""

from __future__ import annotations

import pytest

from plait.cli import terminal
from plait.core.base.ignored_input import IgnoredInput


def test_counts_of_files_are_added_and_the_most_frequent_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    whole, one = IgnoredInput(), IgnoredInput()
    assert not whole
    one.note("kernels without an end", "line 3", 2)
    one.note("kernels without an end", "line 9")
    one.note("events of phase 'q'")
    one.note("nothing", count=0)
    whole.note("events of phase 'q'", count=8)
    whole.add(one, "rank-0.json")
    terminal.passed_over(whole)
    assert capsys.readouterr().err.splitlines() == [
        "note: passed over 9 events of phase 'q'",
        "note: passed over 3 kernels without an end (the first: rank-0.json: line 3)",
    ]
    assert whole.rows()[0] == {"what": "events of phase 'q'", "count": 9, "first": ""}


def test_one_is_told_as_one() -> None:
    over = IgnoredInput()
    over.note("key(s) that nobody reads", "a")
    assert over.lines() == ["passed over 1 key that nobody reads (the first: a)"]
    over.note("key(s) that nobody reads", "b")
    assert over.lines() == ["passed over 2 keys that nobody reads (the first: a)"]
    assert over.rows() == [{"what": "keys that nobody reads", "count": 2, "first": "a"}]
    over.note("nothing", count=-1)
    assert len(over.rows()) == 1
