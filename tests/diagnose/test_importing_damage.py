"""Recordings with values that cannot be: what they cost, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.base.errors import DataError
from plait.diagnose.measured.importing import import_traces
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.tables import MOST_RANKS
from plait.diagnose.report import explain
from tests.support.recordings.theirs import dump, imported, kineto


def odd(content: dict[str, Any], at: int, **values: Any) -> dict[str, Any]:
    """With other values in one event or entry, those of an event's ``args`` among them."""
    one = content["traceEvents" if "traceEvents" in content else "entries"][at]
    for key, value in values.items():
        (one["args"] if key in one.get("args", {}) else one)[key] = value
    return content


HUGE = 10**400
RANKS = (MOST_RANKS, 10**12, -1, True, 1.5)
FILES = {
    "all of them late": kineto(1) | {"baseTimeNanoseconds": 4 * 10**18},
    "all of them early": kineto(1) | {"baseTimeNanoseconds": -4 * 10**18 - 10**9},
    "base": kineto(1) | {"baseTimeNanoseconds": HUGE},
    "half a character": odd(kineto(1), 3, name="gemm \ud800"),
    "half of a label": odd(kineto(1), 5, **{"Process Group Ranks": None, "Process Group Description": "\udfff"}),
    **{f"rank {n}": kineto(1) | {"distributedInfo": {"rank": rank}} for n, rank in enumerate(RANKS)},
    "dump's rank": dump(1) | {"rank": 10**20}, "dump's rank -1": dump(1) | {"rank": -1},
    "dump's rank is true": dump(1) | {"rank": True},
    "no events": kineto(1) | {"traceEvents": []},
}  # fmt: skip
EVENTS = {
    "ts huge": (odd(kineto(1), 3, ts=HUGE), "kernels of which name, time or length cannot be"),
    "dur nan": (odd(kineto(1), 3, dur=float("nan")), "numbers that JSON does not have"),
    "ts inf": (odd(kineto(1), 3, ts=float("inf")), "numbers that JSON does not have"),
    "no name": (odd(kineto(1), 3, name=7), "kernels of which name"),
    "ts of a step": (odd(kineto(1), 2, ts=HUGE), "device ranges of which"),
    "elements": (odd(kineto(1), 5, **{"In msg nelems": 10**30}), "impossible sizes"),
    "seq": (odd(kineto(1), 5, Seq=10**30), "impossible sequence numbers"),
    "step": (odd(kineto(1), 2, name="ProfilerStep#" + "9" * 30), "steps with an impossible number"),
    "long step": (odd(kineto(1), 2, name="ProfilerStep#" + "9" * 5000), "steps with an impossible number"),
    "members": (odd(kineto(1), 5, **{"Process Group Ranks": f"[{'9' * 5000}]"}), "groups with impossible members"),
    "no object": (kineto(1) | {"traceEvents": [*kineto(1)["traceEvents"], 7, [8], None]}, "3 events that are no"),
    "dump's name": (odd(dump(1), 0, profiling_name="\ud800"), "entries that are no objects or name no operation"),
    "sequence": (odd(dump(1), 0, collective_seq_id=10**30), "operations without a sequence number"),
    "late end": (odd(dump(1), 0, time_discovered_completed_ns=10**30), "impossible times"),
    "length": (odd(dump(1), 0, time_discovered_completed_ns=None, duration_ms=HUGE), "impossible times"),
    "length nan": (odd(dump(1), 0, time_discovered_completed_ns=None, duration_ms=float("nan")), "numbers that JSON"),
    "sizes": (odd(dump(1), 0, input_sizes=[[10**10] * 3]), "impossible sizes"),
    "state": (odd(dump(1), 0, state="melted"), "unknown states of operations"),
}  # fmt: skip


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_what_cannot_be_of_a_whole_file_costs_it_and_no_other(tmp_path: Path, content: dict[str, Any]) -> None:
    found, _, said = imported(tmp_path, kineto(0), content, kineto(3))
    assert set(found.spans["rank"]) == {0, 3}
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path / 'trace1.json'} was skipped: ")
    assert len(said[0]) < 400
    said[0].encode()
    with pytest.raises(DataError, match="of 1 file, none could be used"):
        import_traces([tmp_path / "trace1.json"], tmp_path / "none")


@pytest.mark.parametrize(("content", "counted"), EVENTS.values(), ids=EVENTS)
def test_what_cannot_be_of_an_event_is_counted_and_costs_no_more(
    tmp_path: Path, content: dict[str, Any], counted: str
) -> None:
    like = kineto if "traceEvents" in content else dump
    found, what, said = imported(tmp_path, like(0), content, like(3))
    assert said == []
    assert set(found.spans["rank"]) == {0, 1, 3}
    lines = what.over.lines()
    assert any(counted in line and "trace1.json" in line for line in lines), lines
    assert found.spans.filter(pl.col("end") >= 10).is_empty()
    kept = read_run(tmp_path / "run").notes
    assert set(lines) <= set(kept), "whoever reads the folder later is told, too"


def test_the_last_that_a_timeline_holds(tmp_path: Path) -> None:
    content = odd(kineto(1), 2, name=f"ProfilerStep#{2**31 - 1}")
    content["distributedInfo"]["rank"] = MOST_RANKS - 1
    found, _, said = imported(tmp_path, kineto(0), odd(content, 5, **{"In msg nelems": 2**53}))
    assert said == []
    assert set(found.spans["rank"]) == {0, MOST_RANKS - 1}
    assert 2**31 - 1 in found.steps
    explain(found, "run")


@pytest.mark.parametrize("base", ["x", 1.5, True, 4_300_000_000 * 10**9, -(2**62)])
def test_a_base_time_that_cannot_be_is_named(tmp_path: Path, base: Any) -> None:
    _, _, said = imported(tmp_path, kineto(0), kineto(1) | {"baseTimeNanoseconds": base})
    (line,) = said
    assert line.endswith(": baseTimeNanoseconds is out of range")
