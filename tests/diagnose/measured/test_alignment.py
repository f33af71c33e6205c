"""Clocks of hosts, led to each other by the ends of common collectives."""

from __future__ import annotations

import polars as pl
import pytest

from plait.core.parallel.layout import Layout
from plait.diagnose.measured.dependencies import LEAST, aligned
from plait.diagnose.measured.recording import MEETINGS, Recording, grid_of

Ends = dict[int, float]


def recording(hosts: list[str | None], meetings: list[Ends], *, axis: str = "dp", agree: bool = False) -> Recording:
    """meetings: when each rank's clock saw the end."""
    rows = [
        {"step": 0, "rank": rank, "axis": axis, "site": "x", "direction": "", "bytes": 8, "group": "0",
         "meeting": number, "start": 0.0, "end": end}
        for number, ends in enumerate(meetings) for rank, end in ends.items()
    ]  # fmt: skip
    table = pl.DataFrame(rows, schema=MEETINGS)
    grid = grid_of(Layout.of(dp=len(hosts)), hosts)
    return Recording(grid=grid, rollup=table, meetings=table, spans=table, clocks_agree=agree)


def test_hosts_that_never_met_are_led_over_a_third() -> None:
    """b is 5 s ahead of a, c 2 s behind b, of d nothing is known."""
    far = [{0: float(n), 1: n + 5.0} for n in range(LEAST)] + [{1: n + 5.0, 2: n + 3.0} for n in range(LEAST)]
    found = aligned(recording(["a", "b", "c", "d"], far))
    assert found.offsets == pytest.approx({0: 0.0, 1: -5.0, 2: -3.0})
    assert (found.error, found.lost) == (0.0, ("d",))


def test_how_sure_that_is() -> None:
    """Differences of 0, 1, 2 ... 8 ms: 4 ms, and the median distance from that is 2 ms."""
    spread = [{0: float(n), 1: n + n / 1000} for n in range(9)]
    found = aligned(recording(["a", "b"], spread))
    assert found.offsets[1] == pytest.approx(-0.004)
    assert found.error == pytest.approx(3 * 0.002 * 1.4826)
    both = spread + [{1: float(n), 2: n + n / 1000} for n in range(9)]
    assert aligned(recording(["a", "b", "c"], both)).error == pytest.approx(6 * 0.002 * 1.4826)


def test_of_several_ways_the_surest() -> None:
    """From a to c directly 0 to 80 ms, over b without any spread."""
    unsure = [{0: float(n), 2: n + n / 100} for n in range(9)]
    sure = [{0: float(n), 1: n + 1.0} for n in range(9)] + [{1: float(n), 2: n - 1.0} for n in range(9)]
    assert aligned(recording(["a", "b", "c"], unsure + sure)).error == 0.0
    assert aligned(recording(["a", "b", "c"], sure + unsure)).offsets == pytest.approx({0: 0.0, 1: -1.0, 2: 0.0})


def test_a_way_that_is_found_later_replaces_none_that_is_surer() -> None:
    """From a to b without any spread, from there to c 0 to 80 ms; from a to c 0 to 8 ms."""
    sure = [{0: float(n), 1: n + 1.0} for n in range(9)]
    unsure = [{1: float(n), 2: n + n / 100} for n in range(9)]
    direct = [{0: float(n), 2: n + n / 1000} for n in range(9)]
    found = aligned(recording(["a", "b", "c"], sure + unsure + direct))
    assert found.error == pytest.approx(3 * 0.002 * 1.4826)
    assert found.offsets[2] == pytest.approx(-0.004)


@pytest.mark.parametrize(("meetings", "lost"), [(LEAST, ()), (LEAST - 1, ("b",))])
def test_how_many_must_be_common(meetings: int, lost: tuple[str, ...]) -> None:
    assert aligned(recording(["a", "b"], [{0: float(n), 1: float(n)} for n in range(meetings)])).lost == lost


def test_the_last_of_a_host_counts() -> None:
    met = [{0: float(n), 1: n - 0.5, 2: n + 3.0, 3: n + 2.0} for n in range(LEAST)]
    found = aligned(recording(["a", "a", "b", "b"], met))
    assert found.offsets == pytest.approx({0: 0.0, 1: 0.0, 2: -3.0, 3: -3.0})


def test_transfers_and_ranks_of_no_known_host_tell_nothing() -> None:
    met = [{0: float(n), 1: n + 1.0} for n in range(LEAST)]
    assert aligned(recording(["a", "b"], met, axis="pp")).lost == ("b",)
    assert aligned(recording(["a", None], met)).offsets == {0: 0.0}
    assert aligned(recording([None, None], met)) == ({}, 0.0, ())
    assert aligned(recording(["a", "b"], met, agree=True)) == ({}, 0.0, ())
