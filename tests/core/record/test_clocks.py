"""Clocks that are made up are found again, within the error that is told; no order is claimed below
it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.core.record.clocks import REFERENCE, Clocks, HostClock, Moment, aligned, fit_clock, order
from plait.core.record.ring import Header, RecordKind, Ring, call_of, read_ring
from plait.core.record.ring_writer import RingWriter, this_process

SECOND = 1_000_000_000
offsets = st.integers(-1000 * SECOND, 1000 * SECOND)
drifts = st.floats(-1e-4, 1e-4)
seeds = st.integers(0, 2**32 - 1)


def shown(true: np.ndarray, offset: int, drift: float) -> np.ndarray:
    """What a clock shows at true times."""
    return true + offset + np.round(drift * true).astype(np.int64)


def collectives(rng: np.random.Generator, hosts: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """True begins and ends [count, hosts] over a minute: ranks begin within 2 ms, have the result
    at the earliest 100 us after the last began, and sometimes are held up."""
    at = np.sort(rng.integers(0, 60 * SECOND, count))[:, None]
    began = at + rng.integers(0, 2_000_000, (count, hosts))
    ended = began.max(axis=1, keepdims=True) + 100_000 + rng.integers(0, 30_000, (count, hosts))
    held = rng.random((count, hosts)) < 0.05
    return began, ended + held * rng.integers(1_000_000, 50_000_000, (count, hosts))


@given(offsets, drifts, drifts, seeds)
@settings(max_examples=40, deadline=None)
def test_offset_and_drift_are_found_within_the_error_that_is_told(
    offset: int, drift: float, other: float, seed: int
) -> None:
    began, ended = collectives(np.random.default_rng(seed), 2, 300)
    there, here = (
        np.stack([shown(began[:, i], o, d), shown(ended[:, i], o, d)], axis=1)
        for i, (o, d) in enumerate(((0, other), (offset, drift)))
    )
    clock = fit_clock(there, here)
    assert clock is not None and clock.error < 300_000
    assert clock.drift == pytest.approx(other - drift, abs=1e-6)
    for true in range(0, 60 * SECOND, 5 * SECOND):
        at = np.array([true])
        found = clock.moment(int(shown(at, offset, drift)[0]))
        assert abs(found.at - int(shown(at, 0, other)[0])) <= found.error


@given(offsets, drifts, seeds)
@settings(max_examples=30, deadline=None)
def test_an_order_that_is_claimed_is_the_true_one(offset: int, drift: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    began, ended = collectives(rng, 2, 100)
    there, here = (
        np.stack([shown(began[:, i], o, d), shown(ended[:, i], o, d)], axis=1)
        for i, (o, d) in enumerate(((0, 0.0), (offset, drift)))
    )
    clock = fit_clock(there, here)
    assert clock is not None
    clocks = Clocks({0: "a", 1: "b"}, {"a": REFERENCE, "b": clock})
    claimed = 0
    for true in rng.integers(0, 60 * SECOND, 50):
        for apart in (-10_000_000, -20_000, 0, 20_000, 10_000_000):
            time = int(shown(np.array([true + apart]), offset, drift)[0])
            said = clocks.order((1, time), (0, int(true)))
            assert said in (0, np.sign(apart))
            claimed += said != 0
    assert 50 <= claimed <= 150  # what is 10 ms apart, and not what is 20 us apart both ways


def test_a_host_that_was_not_compared_has_no_order() -> None:
    clocks = Clocks({0: "a", 1: "a", 2: "b"}, {"a": REFERENCE})
    assert clocks.moment(2, 5) is None
    assert clocks.order((0, 1), (2, 10**15)) == 0
    assert clocks.order((0, 1), (1, 2)) == -1  # one host, one clock
    assert order(Moment(100, 3), Moment(106, 3)) == 0 and order(Moment(107, 3), Moment(100, 3)) == 1


def written(folder: Path, rank: int, host: str, clock: tuple[int, float], begins: np.ndarray, ends: np.ndarray,
            groups: dict[int, list[int]]) -> Ring:  # fmt: skip
    """The ring of a rank that was in some of the collectives. groups: by rank, the column of
    ``begins``."""
    path = folder / f"rank-{rank:05d}.ring"
    ring = RingWriter(path, this_process(rank=rank, world=4, capacity=4096))
    for number, ranks in groups.items():
        if rank not in ranks:
            continue
        group = ring.group(ranks, "tp")
        for i in range(number, len(begins), len(groups)):
            begin, end = (int(shown(times[i : i + 1, rank], *clock)[0]) for times in (begins, ends))
            call = call_of("all_reduce", "float32")
            ring.begin(RecordKind.COLLECTIVE, 0, i, begin, begin, end, 4, group, i, call=call)
    found = read_ring(path)
    header = Header(rank=rank, world=4, host=host, pid=1)
    return Ring(header, found.table, found.names, found.groups)


def test_hosts_that_share_no_group_are_compared_through_others(tmp_path: Path) -> None:
    begins, ends = collectives(np.random.default_rng(3), 4, 900)
    clocks = [(0, 0.0), (0, 0.0), (7 * SECOND, 3e-5), (-4 * SECOND, -5e-5)]
    hosts = ["a", "a", "b", "c"]
    groups = {0: [0, 1], 1: [1, 2], 2: [2, 3]}
    rings = [written(tmp_path, i, hosts[i], clocks[i], begins, ends, groups) for i in range(4)]
    found = aligned(rings)
    assert set(found.clocks) == {"a", "b", "c"} and found.clocks["a"] == REFERENCE
    assert 0 < found.clocks["b"].error < found.clocks["c"].error < 1_000_000
    for true in range(0, 60 * SECOND, 10 * SECOND):
        for rank in range(4):
            moment = found.moment(rank, int(shown(np.array([true]), *clocks[rank])[0]))
            assert moment is not None and abs(moment.at - true) <= moment.error
    again = Clocks.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    assert set(aligned([rings[0], rings[3]]).clocks) == {"a"}
    assert aligned([]).clocks == {"": REFERENCE}


@pytest.mark.parametrize(
    "values",
    [
        None,
        {},
        {"version": 2},
        {"version": 1, "hosts": [], "clocks": {}},
        [1],
        {"version": 1, "hosts": {"0": "a"}, "clocks": {"a": {"offset": "5"}}},
        {"version": 1, "hosts": {"0": "a"}, "clocks": {"a": {"drift": None}}},
        {"version": 1, "hosts": {"0": "a"}, "clocks": {"a": [1]}},
    ],
)
def test_what_are_no_clocks_is_told(values: object) -> None:
    with pytest.raises(DataError):
        Clocks.from_dict(values)


def test_a_clock_after_another_leads_to_its_reference() -> None:
    near = HostClock(offset=100, drift=1e-3, origin=1000, error=5, drift_error=1e-6)
    far = HostClock(offset=50, drift=0.0, origin=2000, error=7)
    led = far.after(near)
    assert led.moment(2000).at == near.moment(2050).at == 2151
    assert led.error == 12


def test_of_ranks_of_one_host_the_last_to_begin_and_the_first_to_end_count(tmp_path: Path) -> None:
    """One that is held up, before or after, says nothing of when the others could have ended."""
    begins = np.arange(1, 41)[:, None] * SECOND + np.array([0, 40_000_000, 40_000_000])
    ends = begins.max(axis=1, keepdims=True) + 100_000 + np.array([70_000_000, 0, 0])
    clocks, hosts = [(0, 0.0), (0, 0.0), (5 * SECOND, 0.0)], ["a", "a", "b"]
    rings = [written(tmp_path, i, hosts[i], clocks[i], begins, ends, {0: [0, 1, 2]}) for i in range(3)]
    clock = aligned(rings).clocks["b"]
    assert clock.error <= 100_001
    assert abs(clock.moment(25 * SECOND).at - 20 * SECOND) <= 1


def test_the_error_of_clocks_is_the_largest_and_unknown_where_one_is() -> None:
    near, far = (
        HostClock(offset=0, origin=0, error=5, drift_error=0.0),
        HostClock(offset=0, origin=0, error=9, drift_error=0.0),
    )
    hosts = {0: "a", 1: "b"}
    assert Clocks(hosts, {"a": near, "b": far}).error == 9
    assert Clocks(hosts, {"a": near}).error is None
    assert Clocks({}, {}).error == 0
    assert Clocks({0: "a"}, {"a": near, "other": far}).error == 9


def test_eight_collectives_are_enough() -> None:
    def seen(count: int) -> np.ndarray:
        return np.stack([np.arange(count), np.arange(count) + 1], 1) * 1_000_000

    assert fit_clock(seen(7) + 500, seen(7)) is None
    clock = fit_clock(seen(8) + 500, seen(8))
    assert clock is not None
    assert clock.moment(3_000_000).at == 3_000_500


def test_collectives_at_one_moment_tell_no_drift() -> None:
    here = np.tile(np.array([[1_000, 2_000]]), (9, 1))
    clock = fit_clock(here + 500, here)
    assert clock is not None
    assert (clock.drift, clock.offset) == (0.0, 500)


def test_none_is_left_out_where_too_few_would_stay() -> None:
    here = np.stack([np.arange(8), np.arange(8)], 1) * 1_000_000
    there = here.copy()
    there[-1] += 50_000
    alone = fit_clock(there, here)
    assert alone is not None
    assert alone.drift > 0.001
    more = np.concatenate([here, here + 8_000_000])
    late = more.copy()
    late[7] += 50_000
    many = fit_clock(late, more)
    assert many is not None
    assert (many.drift, many.offset) == (0.0, 0)
