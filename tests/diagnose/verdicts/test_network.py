"""A network that is slow for all who share it, in made recordings of several shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.job.plan import Plan
from plait.core.parallel.layout import Layout
from plait.diagnose.measured.recording import Recording
from plait.diagnose.report import explain
from plait.diagnose.verdicts.bottlenecks import slow_network
from plait.diagnose.verdicts.stragglers import Straggler
from tests.support.command import plait
from tests.support.recordings.made import TRANSFER, Job, recording_of, spans_of, write_run

RATE, BYTES = 1e6, 20_000
"""Of a planned link, which gives them in 20 ms."""
SHAPES = {"two hosts": (2, 1, 2), "four hosts": (4, 1, 4), "tp inside": (2, 2, 2), "two ranks a host": (4, 1, 2)}
"""dp, tp, hosts."""
TP = {"kind": "comm", "name": "mlp0.R0", "axis": "tp", "lane": "tp"}
DP = {"kind": "comm", "axis": "dp", "lane": "dp", "bytes": BYTES}


def run(shape: str, slow: dict[int, float], *, compute: float = 0.2, busy: float = 1.0) -> Recording:
    """60 steps with two sums of gradients, each in 21 ms. slow: by step, times as long; busy: times
    as long that computation takes in these. tp's sums stay as they are."""
    dp, tp, hosts = SHAPES[shape]
    rows: list[dict[str, Any]] = []
    lengths: dict[int, float] = {}
    for step in range(60):
        start, taken = 10.0 * step, compute * (busy if step in slow else 1.0)
        sums = [0.021 * slow.get(step, 1.0) * (1 + 0.02 * ((7 * step + n) % 5 - 2)) for n in range(2)]
        for rank in range(dp * tp):
            at = {"step": step, "rank": rank}
            rows.append(at | {"start": start, "end": start + taken * (1 - 0.01 * rank)})
            group = str(rank // tp * tp)
            rows.append(
                at | TP | {"group": group, "start": start, "end": start + 0.001, "meeting": 999 * step + rank // tp}
            )
            begin = start + taken
            for n, seconds in enumerate(sums):
                more = {
                    "name": f"reduce mlp{n}",
                    "group": str(rank % tp),
                    "meeting": 10**6 + 99 * step + 9 * n + rank % tp,
                }
                rows.append(at | DP | more | {"start": begin, "end": begin + seconds})
                begin += seconds
        lengths[step] = taken + sum(sums)
    seen = recording_of(spans_of(*rows), Layout.of(dp=dp, tp=tp), seconds=lengths)
    names = pl.Series([f"h{rank * hosts // (dp * tp)}" for rank in range(dp * tp)], dtype=pl.String)
    return replace(seen, grid=seen.grid.with_columns(host=names))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("steps", "times"), [((30, 59), 8.0), ((1, 25), 3.0), ((20, 40), 8.0), ((50, 59), 2.0)])
def test_it_is_held_against_other_steps(shape: str, steps: tuple[int, int], times: float) -> None:
    """From the middle on, from the beginning, for a while, at the end."""
    seen = run(shape, dict.fromkeys(range(steps[0], steps[1] + 1), times))
    report = explain(seen, "run")
    found = report.network
    assert found is not None and report.stragglers == ()
    assert (found.axis, found.against, found.since, found.until) == ("dp", "other steps", *steps)
    assert found.hosts == tuple(f"h{n}" for n in range(SHAPES[shape][2]))
    assert found.times == pytest.approx(times, rel=0.05) and found.usual == pytest.approx(0.042, rel=0.05)
    assert f"SLOW NETWORK: dp transfers between {', '.join(found.hosts)}, steps {steps[0] + 1} to" in report.text()
    assert "No straggler" not in report.text()


@pytest.mark.parametrize("shape", SHAPES)
def test_one_that_is_slow_all_the_time_is_held_against_the_plan(shape: str) -> None:
    slow, usual = run(shape, dict.fromkeys(range(60), 8.0)), run(shape, {})
    assert slow_network(slow) is None, "nobody knows what it gave before"
    found = slow_network(slow, RATE)
    assert found is not None and (found.axis, found.against, found.since, found.until) == ("dp", "plan", 1, 59)
    assert found.times == pytest.approx(0.336 / (2 * (BYTES / RATE + 0.002)), rel=0.05)
    assert slow_network(usual, RATE) is None


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (run("four hosts", {}), "nothing is slow"),
        (run("four hosts", dict.fromkeys(range(30, 60), 1.3)), "it varies as networks do"),
        (run("four hosts", dict.fromkeys(range(30, 60), 3.0), compute=9.0), "it costs next to nothing"),
        (run("four hosts", dict.fromkeys(range(30, 60), 3.0), busy=3.0), "the machine as a whole is slower"),
        (run("four hosts", dict.fromkeys((7, 20, 33, 46), 8.0)), "single steps are not the network's state"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_none(seen: Recording, why: str) -> None:
    assert slow_network(seen) is None, why


def test_a_rank_that_moves_its_bytes_slowly_is_reason_enough() -> None:
    one = Straggler(
        what="slow processor", ranks=(1,), hosts=("h1",), since=30, until=59, effect=2.0, seconds=0.1, z=9.0,
        recurs=1.0, computing=1.0, where="dp 1",
    )  # fmt: skip
    for times, said in ((2.5, False), (8.0, True)):
        seen = run("two hosts", dict.fromkeys(range(30, 60), times))
        assert (slow_network(seen, named=[one]) is not None) == said
        assert slow_network(seen, named=[replace(one, until=20)]) is not None


@pytest.mark.parametrize("links", [False, True])
def test_the_command_says_it_with_the_status_of_a_finding(tmp_path: Path, links: bool) -> None:
    """Of a pipeline of two hosts: from step 11 on, or, by the plan, all the time."""
    job = Job(
        dp=1, pp=2, steps=40, micro_batches=4,
        transfer=lambda at: TRANSFER * (200 if at.step >= 10 or links else 1),
    )  # fmt: skip
    folder = write_run(tmp_path / "run", job, hosts=2)
    plan = Plan.read(folder / "plan.json")
    assert plan.hosts is not None
    replace(plan, hosts=replace(plan.hosts, rate=10 * 64 / TRANSFER if links else None)).write(folder / "plan.json")
    done = plait("diagnose", folder)
    assert done.returncode == 3 and "SLOW NETWORK: pp transfers between h0, h1, steps" in done.stdout
    assert ("what the links give that were planned" if links else "what they take in the other steps") in done.stdout
    found = json.loads(plait("diagnose", folder, "--json").stdout)["network"]
    assert (found["axis"], found["hosts"], found["since"]) == ("pp", ["h0", "h1"], 2 if links else 11)
