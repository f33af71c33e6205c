"""A predicted step as a picture shows it."""

from __future__ import annotations

import pytest

from plait.core.cluster import Cluster
from plait.core.job import Job
from plait.plan.answer import Planner
from plait.plan.over_time import step_bars
from plait.plan.simulate import Simulated, Simulation

JOB = {
    "model": {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "max_sequence": 64},
    "data": {"sequence_length": 64},
    "train": {"global_batch_size": 16, "micro_batch_size": 2},
    "strategy": {"pp": 4, "tp": 2, "schedule": "1f1b"},
    "cluster": {"preset": "a100-80", "ranks": 8},
}


@pytest.fixture
def simulated() -> Simulated:
    return Planner(Job.from_dict(JOB), Cluster.preset("a100-80"), 256).simulated(Job.from_dict(JOB))


def test_all_places_are_drawn_from_one_simulation(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = list[bool](), Simulation.run

    def counted(simulation: Simulation, *, steady: bool = True) -> object:
        runs.append(steady)
        return run(simulation, steady=steady)

    monkeypatch.setattr(Simulation, "run", counted)
    bars = step_bars(simulated)
    assert runs == [True]
    assert {bar.row for bar in bars} == {f"place {at}{what}" for at in range(4) for what in ("", ", network")}
    assert list(dict.fromkeys(bar.row for bar in bars))[:2] == ["place 0", "place 0, network"]
    for bar in bars:
        assert 0 <= bar.start < bar.end <= simulated.seconds * (1 + 1e-9)
    forwards = [[bar.start for bar in bars if bar.row == f"place {at}" and bar.kind == "forward"] for at in range(4)]
    assert [min(starts) for starts in forwards] == sorted({min(starts) for starts in forwards})
