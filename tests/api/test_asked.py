"""What functions of ``plait.api`` ask of the verbs: numbers of a replay, arguments of ranks, who
may use a reservation, states of ranks in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plait.api.choices import model_notes
from plait.api.diagnosing import HangReport
from plait.api.labs import reserve_hosts
from plait.api.profiling import ProfileRequest, profile_machine
from plait.api.queueing import ClusterShape, Planned, ReplayOptions
from plait.core.base.errors import JobError, PlacementError
from plait.core.runs.evidence import Evidence, Verdict
from plait.core.topology.rank_table import RankTable

CLUSTER = ClusterShape(nodes=10, gpus_per_node=4)
PLANNED = (Planned(nodes=4, arrival=5000.0, notice=100.0, duration=1000.0),
           Planned(nodes=4, arrival=9000.0, notice=100.0, duration=500.0))  # fmt: skip
WEEK = 7 * 24 * 3600.0


@pytest.mark.parametrize(
    ("values", "until"),
    [
        ({}, None),
        ({"planned_jobs": PLANNED}, None),
        ({"copies": 2.0}, WEEK),
        ({"load": 0.9}, WEEK),
        ({"load": 0.9, "planned_jobs": PLANNED}, 9500.0),
        ({"load": 0.9, "planned_jobs": PLANNED, "window": 60.0}, 60.0),
        ({"window": 60.0}, 60.0),
    ],
)
def test_jobs_arrive_until_the_last_planned_one_should_have_ended(values: dict[str, Any], until: float | None) -> None:
    assert ReplayOptions(cluster=CLUSTER, **values).arrival_window == until
    assert ReplayOptions(cluster=CLUSTER, **values).gpus == 40


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"copies": 1.0, "load": 0.5}, "both are given"),
        ({"replan": 59.0}, "59 s is too often"),
        ({"cluster": ClusterShape(nodes=10**9)}, "too many"),
        ({"planned_jobs": [Planned(nodes=11, arrival=500.0, notice=0.0)]}, "the cluster has 10"),
    ],
)
def test_replays_that_cannot_be_are_refused(values: dict[str, Any], match: str) -> None:
    for fine in ({"copies": 1.0}, {"load": 0.5}, {"replan": 60.0}, {"replan": 0.0}):
        ReplayOptions(**cast("Any", {"cluster": CLUSTER} | fine)).check()
    with pytest.raises((JobError, PlacementError), match=match):
        ReplayOptions(**cast("Any", {"cluster": CLUSTER} | values)).check()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"state": "ended"}, "ended"),
        ({"state": "ended", "status": 3}, "ended (3)"),
        ({"state": "runs", "thread": "silent"}, "does not answer"),
        ({"state": "runs", "thread": "waits"}, "waits"),
        ({"state": "stopped", "recorded": True}, "stopped"),
        ({"state": "stopped", "recorded": False}, "no evidence"),
    ],
)
def test_the_state_of_a_rank_is_a_word(values: dict[str, Any], word: str) -> None:
    verdict = Verdict(cause="unknown", why="Nobody knows.", ranks=(1,))
    ranks = [Evidence(rank=0), Evidence(rank=1, **values), Evidence(rank=2)]
    lines = HangReport(verdict, ranks, notes=("a file is damaged",)).text().splitlines()
    assert any(line.split()[:1] == ["1"] and f" {word}" in line for line in lines)
    assert "2 more with --json" in lines and lines[-1] == "note: a file is damaged"


@pytest.mark.parametrize(("users", "held"), [((), ["me"]), (("a", "b"), ["a", "b"])])
def test_a_reservation_is_for_you_unless_others_are_named(
    users: tuple[str, ...], held: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "plait.launch.slurm.commands.reserve", lambda table, name, **how: asked.append((table, name, how))
    )
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    RankTable(("n1", "n2"), 2).write(tmp_path / "table.json")
    assert reserve_hosts(tmp_path / "table.json", "big", "2:00:00", users=users).hosts == ("n1", "n2")
    ((table, name, how),) = asked
    assert (table.hosts, name) == (("n1", "n2"), "big")
    assert {**how, "users": [*how["users"]]} == {"start": "now", "duration": "2:00:00", "users": held}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ProfileRequest(ranks=2), ["--seconds", "60.0"]),
        (ProfileRequest(ranks=2, seconds=5.0, nodes_per_minipod=3), ["--seconds", "5.0", "--nodes-per-minipod", "3"]),
    ],
)
def test_ranks_are_told_what_to_measure_and_their_failure_is_the_answer(
    asked: ProfileRequest, words: list[str], tmp_path: Path
) -> None:
    started: list[Any] = []
    place = SimpleNamespace(world_size=None, is_local=True, run=lambda ranks: started.append(ranks) or 7)
    assert profile_machine(tmp_path / "p.json", cast("Any", place), asked) == 7
    assert started[0].arguments == ["--out", str(tmp_path / "p.json"), *words]
    assert started[0].world == 2
    assert list(tmp_path.iterdir()) == []
    profile_machine(tmp_path / "p.json", cast("Any", place), asked, quiet=True)
    assert started[1].arguments[-1] == "--quiet"


@pytest.mark.parametrize("asked", [ProfileRequest(seconds=4.9), ProfileRequest(nodes_per_minipod=-1)])
def test_measurements_that_cannot_be_are_refused(asked: ProfileRequest) -> None:
    with pytest.raises(JobError, match="is not allowed"):
        asked.check()


def test_a_configuration_that_weights_bring_is_counted_with_them_alone(tmp_path: Path) -> None:
    folder = str(tmp_path)  # no config.json: whoever reads it raises
    same = SimpleNamespace(model={"huggingface": folder}, train=SimpleNamespace(init_from=folder))
    assert model_notes(cast("Any", same)).rows() == []
    other = SimpleNamespace(model={"huggingface": folder}, train=SimpleNamespace(init_from=""))
    with pytest.raises(JobError):
        model_notes(cast("Any", other))
