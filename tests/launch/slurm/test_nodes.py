"""The nodes of a Slurm job: their order at every start, and spares for those that fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from plait.core.base.errors import LaunchError, PlacementError, RankFailure
from plait.core.job.plan import Plan
from plait.core.topology.rank_table import NAME, RankTable
from plait.launch.run_folder import give_up_hosts
from plait.launch.slurm import commands as slurm
from plait.launch.slurm import nodes as slurm_nodes
from plait.launch.slurm.nodes import PLACED, GrantedNodes, JobNodes

TIER = "unit"
NODES = ("n1", "n2", "n3", "n4")


class APlan:
    key = "sha256:it"


PLAN = cast("Plan", APlan())


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of the nodes, as Slurm tells them."""
    found: dict[str, str] = dict.fromkeys(NODES, "ALLOCATED")

    def command(*argv: str) -> str:
        if "topology" in argv:
            raise LaunchError("Slurm refused: no topology.")
        return "".join(f"NodeName={name} State={state} NodeAddr={name}\n" for name, state in found.items())

    monkeypatch.setattr(slurm, "command", command)
    return found


def backwards(plan: Plan, granted: GrantedNodes) -> tuple[Sequence[str], str]:
    assert plan is PLAN
    return granted.hosts[::-1][: granted.nodes], "by the placer"


def test_the_placer_orders_the_nodes_that_were_granted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = JobNodes(tmp_path, NODES, 8).table(PLAN, backwards)
    assert table == RankTable(("n4", "n3", "n2", "n1"), 2, "sha256:it") == RankTable.read(tmp_path / NAME)
    assert "by the placer" in capsys.readouterr().err


def test_where_the_placer_has_no_order_the_switches_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(plan: Plan, granted: GrantedNodes) -> Any:
        raise PlacementError("no such topology.")

    assert JobNodes(tmp_path, NODES, 4).table(PLAN, refuse).hosts == NODES
    assert "because the placer found no order: no such topology." in " ".join(capsys.readouterr().err.split())
    assert JobNodes(tmp_path, NODES, 4).table(None, refuse).hosts == NODES  # of what is no plan nobody is asked


def test_spares_are_left_to_the_placer(tmp_path: Path) -> None:
    assert JobNodes(tmp_path, NODES, 3, spares=1).table(PLAN, backwards).hosts == ("n4", "n3", "n2")
    assert JobNodes(tmp_path, NODES, 3, spares=1).table().hosts == ("n1", "n2", "n3")
    assert JobNodes(tmp_path, ("n1",), 3, spares=1).table().hosts == ("n1",)  # none was given


@pytest.mark.parametrize(
    ("failure", "down", "lost", "bad"),
    [
        (RankFailure("x", ranks=[2], cause="killed"), {}, set[str](), "n2"),
        (RankFailure("x", ranks=[2], cause="mismatch"), {}, set[str](), ""),  # no machine's fault
        (RankFailure("x", cause="gave up"), {"n3": "DOWN*"}, set[str](), "n3"),
        (RankFailure("x", cause="gave up"), {"n3": "ALLOCATED+DRAIN"}, set[str](), "n3"),
        (RankFailure("x", cause="gave up"), {"n3": "ALLOCATED*"}, set[str](), "n3"),
        (RankFailure("x", cause="gave up"), {}, {"n1"}, "n1"),  # its agent has gone
        (RankFailure("x", cause="gave up"), {"n4": "DOWN"}, {"n1"}, ""),  # the spare is no better
        (RankFailure("x", cause="gave up"), {}, {"n1", "n2"}, ""),  # more than there are spares
        (RankFailure("x", cause="gave up"), {"n4": "DOWN"}, set[str](), ""),
    ],
)
def test_a_spare_takes_the_place_of_a_node_that_fails(
    tmp_path: Path, states: dict[str, str], failure: RankFailure, down: dict[str, str], lost: set[str], bad: str
) -> None:
    nodes = JobNodes(tmp_path, NODES, 6, spares=1)
    table = nodes.table()
    states.update(down)
    nodes.lost |= lost
    assert nodes.mend(failure, table) == (f"without {bad}" if bad else "")
    if bad:
        again = nodes.table()
        assert bad not in again.hosts and len(again.hosts) == 3 and "n4" in again.hosts


def test_in_a_users_table_the_others_keep_their_places(tmp_path: Path) -> None:
    RankTable(("n3", "n1", "n2"), 2).write(tmp_path / PLACED)
    nodes = JobNodes(tmp_path, NODES, 6, spares=1)
    table = nodes.table(PLAN, backwards)
    assert table.hosts == ("n3", "n1", "n2")
    assert nodes.mend(RankFailure("x", ranks=[3], cause="killed"), table) == "without n1"
    assert nodes.table(PLAN, backwards).hosts == ("n3", "n4", "n2")
    assert nodes.mend(RankFailure("x", ranks=[0], cause="killed"), nodes.table()) == ""  # none is left


def test_a_host_of_the_table_that_the_job_was_let_go_from_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    RankTable(("n9", "n1", "n2"), 2).write(tmp_path / PLACED)
    with pytest.raises(PlacementError, match="The rank table has n9, which this Slurm job was not given"):
        JobNodes(tmp_path, ("n1", "n2", "n3"), 6).table()
    give_up_hosts(tmp_path, "7", ["n9"])
    assert JobNodes(tmp_path, ("n1", "n2", "n3"), 6).table().hosts == ("n3", "n1", "n2")
    assert JobNodes(tmp_path, ("n1", "n2", "n9"), 6).table().hosts == ("n9", "n1", "n2"), "it has come back"


def test_without_spares_the_job_itself_is_started_again(tmp_path: Path) -> None:
    nodes = JobNodes(tmp_path, NODES, 8)
    assert nodes.mend(RankFailure("x", ranks=[2], cause="killed"), nodes.table()) == ""


def test_a_controller_that_is_away_is_no_ground_to_leave_out_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = JobNodes(tmp_path, NODES, 3, spares=1)
    table = nodes.table()

    def away(*argv: str) -> str:
        raise LaunchError("Unable to contact.")

    monkeypatch.setattr(slurm, "command", away)
    assert nodes.mend(RankFailure("x", ranks=[1], cause="killed"), table) == "without n2"
    assert slurm_nodes.slurm.nodes_down(NODES) == set()
