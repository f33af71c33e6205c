"""Generators against closed forms, the published table, and the steady-state theorem."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steady import steady_period

from plait.core.base.errors import ScheduleError
from plait.core.step.clock.pipeline_clock import PipelineCosts, dry_run, peak_activations, rank_peaks
from plait.core.step.columns.points import pp_rank_ops
from plait.core.step.schedule import Op, with_transfers
from plait.core.step.schedules import (
    LARGEST_FILE,
    Shape,
    closed_form,
    enough_slack,
    find_schedule,
    generate,
)
from plait.core.step.seconds.pipeline_time import FORMS

SHAPES = [(ranks, count, chunks) for ranks in (1, 2, 3, 4, 8) for count in (1, 2, 5, 8, 9) for chunks in (1, 2, 3)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5)], ids=["equal", "unequal"])
def test_bubble_and_memory_are_those_of_the_closed_form(name: str, seconds: tuple[float, float, float]) -> None:
    compared = 0
    for ranks, count, chunks in SHAPES:
        if chunks == {"interleaved": chunks, "zb-v": 2}.get(name, 1):
            shape = Shape(
                ranks=ranks,
                micro_batches=count,
                chunks=chunks,
                slack=(1, 3, 2, 1, 1, 2, 2)[: ranks - 1] * (name == "slack-1f1b"),
            )
            known = closed_form(name, shape, *seconds)
            schedule = generate(name, shape)
            if known:
                compared += 1
                found = dry_run(schedule, PipelineCosts.uniform(schedule.num_stages, *seconds))
                assert found.bubble() == pytest.approx(known.bubble), shape
                assert tuple(rank_peaks(schedule)) == known.peak, shape
    assert compared >= 5 or (name, seconds) == ("zb-v", (1.0, 1.5, 0.5))


# Makespans of 4 stages, 16 micro-batches, F = I = W = 1, by one-way transfer time: gpipe, 1f1b, eager-1f1b,
# slack-1f1b.
MAKESPANS = {
    0.0: (57, 57, 57, 57),
    0.5: (60, 71, 60, 60),
    1.0: (63, 85, 63, 63),
    1.5: (73.5, 99, 66, 66),
    2.0: (84, 113, 75, 69),
}


@pytest.mark.parametrize("transfer", MAKESPANS)
@pytest.mark.parametrize("mode", ["buffered", "rendezvous"])
def test_makespans_of_the_published_comparison(transfer: float, mode: str) -> None:
    slack = enough_slack([3.0] * 4, [transfer] * 3)
    costs = PipelineCosts.uniform(4, transfer=transfer)
    shapes = {name: Shape(ranks=4, micro_batches=16) for name in ("gpipe", "1f1b", "eager-1f1b")}
    shapes["slack-1f1b"] = Shape(ranks=4, micro_batches=16, slack=slack)
    found = tuple(dry_run(generate(name, shape), costs, mode).makespan for name, shape in shapes.items())  # type: ignore[arg-type]
    assert found == pytest.approx(MAKESPANS[transfer])


def test_slack_only_where_a_boundary_is_slow() -> None:
    """8 stages, T = 3, only the middle boundary slow: as fast as eager with 40 live activations
    instead of
    64."""
    transfers = [0.0, 0, 0, 1.2, 0, 0, 0]
    slack = enough_slack([3.0] * 8, transfers)
    costs = PipelineCosts((1.0,) * 8, (1.0,) * 8, (1.0,) * 8, {(3, 4): 1.2})
    found = {}
    for name in ("1f1b", "eager-1f1b", "slack-1f1b"):
        schedule = generate(name, Shape(ranks=8, micro_batches=32, slack=slack if name == "slack-1f1b" else ()))
        found[name] = (round(dry_run(schedule, costs).makespan, 1), sum(peak_activations(schedule).values()))
    assert found == {"1f1b": (153.0, 36), "eager-1f1b": (119.4, 64), "slack-1f1b": (119.4, 40)}


seconds = st.integers(1, 40).map(lambda n: n / 8)


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 5), st.data())
def test_period_is_that_of_the_theorem(stages: int, data: st.DataObject) -> None:
    forward = data.draw(st.lists(seconds, min_size=stages, max_size=stages))
    backward = data.draw(st.lists(seconds, min_size=stages, max_size=stages))
    transfers = data.draw(st.lists(seconds, min_size=stages - 1, max_size=stages - 1))
    slack = tuple(data.draw(st.lists(st.integers(1, 3), min_size=stages - 1, max_size=stages - 1)))
    costs = PipelineCosts(
        tuple(forward), tuple(backward), (0.0,) * stages, {(i, i + 1): c for i, c in enumerate(transfers)}
    )
    first, second = (
        120,
        360,
    )  # a common multiple of every circuit's micro-batches apart, so that the difference is exact
    spans = [
        dry_run(generate("slack-1f1b", Shape(ranks=stages, micro_batches=m, slack=slack)), costs).makespan
        for m in (first, second)
    ]
    compute = [f + b for f, b in zip(forward, backward, strict=True)]
    assert (spans[1] - spans[0]) / (second - first) == pytest.approx(steady_period(compute, transfers, slack), rel=2e-3)


@settings(deadline=None)
@given(st.integers(2, 5), st.sampled_from([0.0, 0.05, 0.3]), st.data())
def test_slack_is_the_least_that_is_enough(stages: int, tolerance: float, data: st.DataObject) -> None:
    compute = data.draw(st.lists(seconds, min_size=stages, max_size=stages))
    transfers = data.draw(st.lists(st.integers(0, 40).map(lambda n: n / 8), min_size=stages - 1, max_size=stages - 1))
    slack = enough_slack(compute, transfers, tolerance)
    allowed = (1 + tolerance) * max(*compute, *transfers) * (1 + 1e-8)

    def alive(choice: tuple[int, ...]) -> int:
        return sum((i + 1) * d for i, d in enumerate(choice))

    assert steady_period(compute, transfers, slack) <= allowed
    cheaper = (c for c in product(range(1, max(slack) + 2), repeat=stages - 1) if alive(c) < alive(slack))
    assert all(steady_period(compute, transfers, choice) > allowed for choice in cheaper)


def test_interleaving_with_one_chunk_is_eager() -> None:
    for ranks, count in product((1, 2, 4, 8), (1, 4, 8, 16)):
        shape = Shape(ranks=ranks, micro_batches=count)
        assert generate("interleaved", shape).ranks == generate("eager-1f1b", shape).ranks


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("1f1p", Shape(ranks=2, micro_batches=2), "unknown schedule '1f1p'.*did you mean '1f1b'"),
        ("1f1b", Shape(ranks=2, micro_batches=2, chunks=2), "1f1b has 1 stage per rank, not 2"),
        ("zb-v", Shape(ranks=2, micro_batches=2), "zb-v has 2 stages per rank, not 1"),
        ("slack-1f1b", Shape(ranks=3, micro_batches=2, slack=(1,)), "needs 2 slacks"),
        ("slack-1f1b", Shape(ranks=2, micro_batches=2, slack=(0,)), "at least 1"),
        ("gpipe", Shape(ranks=2, micro_batches=2, slack=(2,)), "gpipe takes no slack"),
        ("gpipe", Shape(ranks=0, micro_batches=2), "at least one rank"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, shape: Shape, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        generate(name, shape)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"])
def test_a_generated_schedule_need_not_be_checked_again(name: str) -> None:
    schedule = find_schedule(name, Shape(ranks=3, micro_batches=5, chunks=1))[0]
    assert with_transfers(schedule, proven=True) == with_transfers(schedule)


def a(ranks: int, micro_batches: int, **more: Any) -> Shape:
    return Shape(ranks=ranks, micro_batches=micro_batches, **more)


@pytest.mark.parametrize(
    ("name", "shape", "holds"),
    [
        ("1f1b", a(4, 4), True), ("1f1b", a(4, 3), False),
        ("eager-1f1b", a(4, 4), True), ("eager-1f1b", a(4, 3), False),
        ("slack-1f1b", a(2, 2, slack=(1,)), True), ("slack-1f1b", a(2, 1, slack=(1,)), False),
        ("gpipe", a(4, 1), True),
        ("interleaved", a(2, 4, chunks=2), True), ("interleaved", a(2, 2, chunks=2), False),
        ("interleaved", a(2, 5, chunks=2), False), ("interleaved", a(2, 2, chunks=1), True),
        ("zb-h1", a(3, 5), True), ("zb-h1", a(3, 4), False),
        ("zb-h2", a(3, 5), True), ("zb-h2", a(3, 4), False),
        ("zb-v", a(3, 5, chunks=2), True), ("zb-v", a(3, 4, chunks=2), False),
        ("another", a(1, 1), False),
    ],
)  # fmt: skip
def test_where_theory_has_a_formula(name: str, shape: Shape, holds: bool) -> None:
    assert (closed_form(name, shape) is not None) == holds


@pytest.mark.parametrize(
    ("name", "seconds", "holds"),
    [
        ("zb-h1", (1.0, 2.0, 2.0), True), ("zb-h1", (1.0, 2.0, 2.1), False), ("zb-h1", (9.0, 2.0, 1.0), True),
        ("zb-h2", (1.0, 2.0, 2.0), True), ("zb-h2", (1.0, 2.0, 2.1), False),
        ("zb-v", (1.0, 1.0, 1.0), True), ("zb-v", (1.1, 1.0, 1.0), False), ("zb-v", (1.0, 1.0, 1.1), False),
    ],
)  # fmt: skip
def test_for_which_parts_of_a_backward_theory_has_a_formula(
    name: str, seconds: tuple[float, float, float], holds: bool
) -> None:
    shape = a(2, 3, chunks=2 if name == "zb-v" else 1)
    assert (closed_form(name, shape, *seconds) is not None) == holds


def test_a_schedule_that_a_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# mine\nrank 0: 0F0 0B0\n")
    schedule, shape = find_schedule(str(file), Shape(ranks=1, micro_batches=1))
    assert (schedule.name, schedule.ranks, shape) == ("mine", ((Op(0, "F", 0), Op(0, "B", 0)),), None)
    file.write_text("rank 0: 0F0 0B0 0X0")
    with pytest.raises(ScheduleError, match=r"mine\.txt: '0X0' is not a schedule op"):
        find_schedule(str(file), Shape(ranks=1, micro_batches=1))
    file.write_bytes(b"\xff")
    with pytest.raises(ScheduleError, match=r"mine\.txt: cannot be read as a schedule: "):
        find_schedule(str(file), Shape(ranks=1, micro_batches=1))
    file.write_text("#" * (LARGEST_FILE + 1))
    with pytest.raises(ScheduleError, match=r"mine\.txt: .*it has 4194305 bytes; at most 4194304 are read"):
        find_schedule(str(file), Shape(ranks=1, micro_batches=1))
    with pytest.raises(ScheduleError, match="cannot be read as a schedule: "):
        find_schedule(str(tmp_path), Shape(ranks=1, micro_batches=1))
    for name in (tmp_path / "other.txt", file / "inside"):
        with pytest.raises(ScheduleError, match="unknown schedule"):
            find_schedule(str(name), Shape(ranks=1, micro_batches=1))


def test_a_schedule_is_made_with_the_stages_that_it_needs() -> None:
    for name, asked, chunks in (("zb-v", 1, 2), ("1f1b", 1, 1), ("interleaved", 3, 3)):
        schedule, shape = find_schedule(name, Shape(ranks=2, micro_batches=4, chunks=asked))
        assert shape is not None
        assert (shape.chunks, schedule.num_stages) == (chunks, 2 * chunks)


LISTS = {
    "gpipe": [
        "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1F3 1F4 1B0 1B1 1B2 1B3 1B4",
        "2F0 2F1 2F2 2F3 2F4 2B0 2B1 2B2 2B3 2B4",
    ],
    "1f1b": [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ],
    "eager-1f1b": [
        "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ],
    "slack-1f1b": [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ],
    "zb-h1": [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4",
    ],
    "zb-h2": [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4",
    ],
    "zb-v": [
        "0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0I0 0W0 5F3 5I3 5W3 0I1 0W1 5F4 5I4 5W4 "
        "0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1F4 1I0 1W0 4F3 4I2 4W2 1I1 1W1 4F4 4I3 4W3 "
        "1I2 4I4 1I3 1W2 1I4 1W3 4W4 1W4",
        "2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2F4 2I1 2W1 3F4 3I2 3W2 2I2 3I3 "
        "2I3 3I4 2I4 2W2 3W3 3W4 2W3 2W4",
    ],
    "interleaved": [
        "0F0 0F1 0F2 0F3 0F4 3F0 3F1 3F2 3F3 3F4 3B0 3B1 3B2 3B3 3B4 0B0 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1F3 1F4 4F0 4F1 4F2 4B0 4F3 4B1 4F4 4B2 4B3 4B4 1B0 1B1 1B2 1B3 1B4",
        "2F0 2F1 2F2 2F3 2F4 5F0 5B0 5F1 5B1 5F2 5B2 5F3 5B3 5F4 5B4 2B0 2B1 2B2 2B3 2B4",
    ],
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_three_ranks_and_five_micro_batches(name: str) -> None:
    chunks = {"zb-v": 2, "interleaved": 2}.get(name, 1)
    shape = Shape(ranks=3, micro_batches=5, chunks=chunks, slack=(2, 1) if name == "slack-1f1b" else ())
    assert [" ".join(map(str, ops)) for ops in generate(name, shape).ranks] == LISTS[name]
    assert [" ".join(map(str, pp_rank_ops(name, shape, rank))) for rank in range(3)] == LISTS[name]
