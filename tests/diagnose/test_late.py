"""A rank whose host is late: it computes as long as the others, and comes last to what they wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.diagnose.explain import Report, explain
from plait.diagnose.reading import read_run
from tests.diagnose.theirs import dump, entry, imported, kineto


def report(folder: Path, *contents: dict[str, object]) -> Report:
    imported(folder, *contents)
    run = read_run(folder / "run")
    return explain(run.recording, "run", run=run)


def test_a_late_host_is_named(tmp_path: Path) -> None:
    found = report(tmp_path, *(kineto(rank, late=200.0 if rank == 2 else 0.0) for rank in range(4)))
    assert found.stragglers == ()
    assert found.late is not None
    assert (found.late.rank, found.late.axis, found.late.recurs) == (2, "dp", 1.0)
    assert found.late.seconds == pytest.approx(200e-6)
    assert found.late.computing == pytest.approx(0.0, abs=1e-6)


def test_a_clock_that_differs_is_no_lateness(tmp_path: Path) -> None:
    traces = [kineto(rank) for rank in range(4)]
    traces[2]["baseTimeNanoseconds"] += 200_000
    assert report(tmp_path, *traces).late is None


def test_equal_ranks_and_a_straggler_that_is_named_are_not_late(tmp_path: Path) -> None:
    assert report(tmp_path, *(kineto(rank) for rank in range(4))).late is None
    (tmp_path / "slow").mkdir()
    slow = report(tmp_path / "slow", *(kineto(rank, slow=1.3 if rank == 2 else 1.0) for rank in range(4)))
    assert [one.ranks for one in slow.stragglers] == [(2,)]
    assert slow.late is None


def test_another_rank_in_each_step_is_nobody(tmp_path: Path) -> None:
    traces = [kineto(rank) for rank in range(4)]
    for rank, content in enumerate(traces):
        behind = kineto(rank, late=200.0)["traceEvents"]
        content["traceEvents"] = [
            behind[n] if (n // 5) % 4 == rank else one for n, one in enumerate(content["traceEvents"])
        ]
    assert report(tmp_path, *traces).late is None


def test_dumps_have_no_steps_and_tell_who_comes_last(tmp_path: Path) -> None:
    ms = 10**6

    def one(rank: int) -> dict[str, object]:
        start = 6 * ms if rank == 1 else 0
        return dump(
            rank, *(entry(n, 10**12 + 40 * n * ms + start, 10**12 + (40 * n + 9) * ms) for n in range(6)), ended=0
        )

    found = report(tmp_path, one(0), one(1))
    assert (found.steps, found.shares, found.goodput) == (None, (), None)
    assert found.late is not None
    assert (found.late.rank, found.late.in_steps, found.late.seconds) == (1, False, pytest.approx(6e-3))


def test_of_two_ranks_one_is_always_the_last(tmp_path: Path) -> None:
    """Seven of ten steps are no proof."""
    traces = [kineto(rank) for rank in range(2)]
    for rank, content in enumerate(traces):
        behind = kineto(rank, late=200.0)["traceEvents"]
        content["traceEvents"] = [
            behind[n] if ((n // 5) % 10 < 7) == (rank == 0) else one for n, one in enumerate(content["traceEvents"])
        ]
    assert report(tmp_path, *traces).late is None
