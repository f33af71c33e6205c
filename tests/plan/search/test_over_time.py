"""A predicted step as a picture shows it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.parallel.layout import Layout
from plait.core.record.timeline import Span
from plait.core.step.clock.pipeline import Simulated, Simulation
from plait.plan.answer import Planner
from plait.plan.search.simulate import memory_curves, shown_pp_ranks, step_bars
from tests.plan.machines import cluster

JOB = {
    "model": {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "max_sequence": 64},
    "data": {"sequence_length": 64},
    "train": {"global_batch_size": 16, "micro_batch_size": 2},
    "strategy": {"pp": 4, "tp": 2, "schedule": "1f1b"},
    "cluster": {"preset": "a100-80", "ranks": 8},
}


@pytest.fixture
def simulated() -> Simulated:
    """On devices whose hosts keep up with so small a model."""
    quick = cluster("a100-80", host_layer=0.0, host_collective=0.0)
    return Planner(Job.from_dict(JOB), quick, 256).simulated(Job.from_dict(JOB))


def test_all_places_are_drawn_from_one_simulation(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = list[bool](), Simulation.run

    def counted(simulation: Simulation, *, steady: bool = True) -> object:
        runs.append(steady)
        return run(simulation, steady=steady)

    monkeypatch.setattr(Simulation, "run", counted)
    bars = step_bars(simulated)
    assert runs == [True]
    assert {bar.row for bar in bars} == {f"pp rank {at}{what}" for at in range(4) for what in ("", ", network")}
    assert list(dict.fromkeys(bar.row for bar in bars))[:2] == ["pp rank 0", "pp rank 0, network"]
    for bar in bars:
        assert 0 <= bar.start < bar.end <= simulated.seconds * (1 + 1e-9)
    forwards = [[bar.start for bar in bars if bar.row == f"pp rank {at}" and bar.kind == "forward"] for at in range(4)]
    assert [min(starts) for starts in forwards] == sorted({min(starts) for starts in forwards})


def test_bars_fill_the_row_of_a_processor_and_say_what_it_does(simulated: Simulated) -> None:
    """In the middle of a run: forwards and backwards, what is waited for, and collectives
    beside."""
    bars = step_bars(simulated)
    for at in range(4):
        row = [bar for bar in bars if bar.row == f"pp rank {at}"]
        assert {bar.kind for bar in row} <= {"forward", "backward", "waiting", "optimizer"}
        assert {"forward", "backward"} <= {bar.kind for bar in row}
        assert all(one.end <= other.start + 1e-12 for one, other in itertools.pairwise(row))
        for kind in ("forward", "backward"):
            shown = sum(bar.end - bar.start for bar in row if bar.kind == kind)
            spans = simulated.timeline((1,), (2 * at,)).spans
            took = sum(span.end - span.start for span in spans if (span.kind, span.direction) == ("compute", kind))
            assert shown == pytest.approx(took, rel=0.05)
    beside = {bar.kind for bar in bars if bar.row == "pp rank 1, network"}
    assert beside == {"collective", "transfer"}


def test_what_takes_most_of_a_moment_is_shown_of_it() -> None:
    """Of a step of a thousand moments of a second. One that is idle for half of it or more shows
    nothing."""
    told: list[tuple[Any, Any, float, float]] = [
        ("compute", "forward", 0.0, 2.4), ("wait", "", 2.4, 2.5),
        ("compute", "backward", 3.0, 3.51),
        ("compute", "forward", 4.0, 4.3), ("compute", "backward", 4.3, 4.9),
        ("idle", "", 5.0, 6.0), ("wait", "", 6.0, 7.0),
        ("compute", "forward", 998.9, 1000.5),
        ("comm", "forward", 1.0, 3.0), ("transfer", "forward", 3.0, 4.0), ("comm", "backward", 10.0, 11.0),
    ]  # fmt: skip
    spans = [Span(1, 0, kind, "x", 0, "attn", 0, 0, way, start, end) for kind, way, start, end in told]
    asked = list[object]()

    def timeline(*of: object) -> Any:
        asked.append(of)
        return SimpleNamespace(spans=spans)

    layout = Layout.of(pp=1, tp=1, dp=1)
    simulation = SimpleNamespace(step=SimpleNamespace(layout=layout))
    bars = step_bars(cast("Simulated", SimpleNamespace(simulation=simulation, seconds=1000.0, timeline=timeline)))
    assert asked == [((1,), (0,))]
    assert [(bar.row, bar.start, bar.end, bar.kind) for bar in bars] == [
        ("pp rank 0", 0.0, 2.0, "forward"), ("pp rank 0", 3.0, 5.0, "backward"), ("pp rank 0", 5.0, 7.0, "waiting"),
        ("pp rank 0", 999.0, 1000.0, "forward"), ("pp rank 0, network", 1.0, 3.0, "collective"),
        ("pp rank 0, network", 3.0, 4.0, "transfer"), ("pp rank 0, network", 10.0, 11.0, "collective"),
    ]  # fmt: skip


def test_of_many_places_some_are_shown() -> None:
    assert shown_pp_ranks(2) == [0, 1]
    assert shown_pp_ranks(8) == list(range(8))
    assert shown_pp_ranks(16) == [0, 2, 4, 6, 9, 11, 13, 15]
    assert shown_pp_ranks(9) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert shown_pp_ranks(1) == [0]


def test_memory_over_a_step_is_fullest_where_the_report_says(simulated: Simulated) -> None:
    job = Job.from_dict(JOB)
    planner = Planner(job, Cluster.preset("a100-80"), 256)
    plan = planner.draft(job)
    report = planner.memory(job, plan)
    curves = memory_curves(simulated, plan, report, gpu=True)
    assert [curve.name for curve in curves] == [f"pp rank {at}" for at in range(4)]
    for each, curve in zip(report.pp_ranks, curves, strict=True):
        times, sizes = zip(*curve.points, strict=True)
        lasting = each.total - each.estimate.memory.activations
        assert list(times) == sorted(times)
        assert (times[0], times[-1]) == (0.0, simulated.seconds)
        assert sizes[0] == sizes[-1] == lasting == min(sizes)
        assert max(sizes) == each.total
        assert len(curve.points) == 2 + 3 * 2 * 8
