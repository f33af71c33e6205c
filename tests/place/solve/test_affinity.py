"""Weights from profiled jobs, and predicted seconds."""

from __future__ import annotations

from dataclasses import replace
from math import hypot
from pathlib import Path

import pytest

from benchmarks.baselines.brute import brute_force
from benchmarks.papers.found import job_file
from plait.api.placing import plan_of, volumes_of
from plait.core.base.errors import JobError, PlacementError
from plait.core.cluster.network import Network
from plait.core.job.communication import CommunicationMatrix, Volume
from plait.place.placing import place, placed_by
from plait.place.solve.affinity import Profiled, affinity_of, known_profiled, own_rows, read_profiled
from plait.place.solve.problem import Pool, Problem, seconds_of
from plait.place.solve.program import mip


def matrix(weights: float, dp: float, pp: float, *, heights: tuple[int, ...] = (6, 6)) -> CommunicationMatrix:
    volume = Volume(weights=weights, dp=dp, pp=pp)
    return CommunicationMatrix(heights=heights, ranks_per_node=8, volumes=(volume,) * len(heights))


def job(name: str, weights: float, dp: float, pp: float, *, gain_dp: float, gain_pp: float, gpu: str = "x") -> Profiled:
    return Profiled(
        name=name, gpu=gpu, micro_batch=1, volume=Volume(weights=weights, dp=dp, pp=pp),
        gain_dp=gain_dp, gain_pp=gain_pp, source="here",
    )  # fmt: skip


def test_shipped_jobs_give_the_published_weights() -> None:
    jobs = {one.name: one for one in known_profiled()}
    assert jobs["24B dense"].alpha == 0
    assert jobs["24B mixture of experts"].alpha == pytest.approx(0.3, abs=0.005)
    assert jobs["7B dense"].alpha == 1
    assert all(one.source for one in jobs.values())


@pytest.mark.parametrize(("file", "row"), [("arnold", "24B dense"), ("arnold-experts", "24B mixture of experts")])
def test_the_job_that_a_shipped_row_stands_for_finds_it(file: str, row: str) -> None:
    """Its bytes are those that the planner counts of that job."""
    plan, _, gpu, each = plan_of(job_file(file), [])
    asked = CommunicationMatrix.of(plan, ranks_per_node=each, volumes=volumes_of(plan))
    found = affinity_of(asked, known_profiled(), gpu)
    assert f"as {row} on H800, the nearest profiled job (distance 0.0)" in found.why
    assert found.alpha == next(one.alpha for one in known_profiled() if one.name == row)


def test_neither_ratio_decides_alone() -> None:
    """r1 differs a thousandfold between jobs, r2 twofold: still r2 counts."""
    jobs = [
        job("little computation", 1, 2, 1, gain_dp=0, gain_pp=1),
        job("much computation", 1000, 2, 1, gain_dp=1, gain_pp=1),
        job("much, PP", 1000, 1, 2, gain_dp=1, gain_pp=0),
    ]
    assert affinity_of(matrix(900, 1.05, 1.95), jobs, "x").alpha == 1
    assert affinity_of(matrix(900, 1.95, 1.05), jobs, "x").alpha == 0.5


def test_by_the_papers_distance_the_larger_ratio_decides() -> None:
    """r1 is of hundreds, r2 about one: the job nearest by r1 is taken, whatever r2 says."""
    jobs = [
        job("near by r1", 910, 2, 1, gain_dp=1, gain_pp=0),
        job("near by r2", 1000, 1, 2, gain_dp=0, gain_pp=1),
        job("far", 10, 1, 1, gain_dp=1, gain_pp=1),
    ]
    asked = matrix(900, 1, 2)
    assert affinity_of(asked, jobs, "x", "plain").alpha == 1
    assert affinity_of(asked, jobs, "x").alpha == 0
    apart = hypot(900 / 3 - 910 / 3, 0.5 - 2)
    assert f"plain distance {apart:.1f}" in affinity_of(asked, jobs, "x", "plain").why


def test_guards() -> None:
    jobs = known_profiled()
    assert affinity_of(matrix(1, 1, 0, heights=(12,)), jobs).alpha == 1
    assert affinity_of(matrix(1, 0, 1, heights=(1, 1)), jobs).alpha == 0
    assert affinity_of(matrix(1, 5, 0), jobs).alpha == 1
    assert affinity_of(CommunicationMatrix(heights=(2, 2), ranks_per_node=8), jobs).alpha == 0.5
    assert job("loses", 1, 1, 1, gain_dp=-0.1, gain_pp=-0.2).alpha == 0.5
    assert job("loses", 1, 1, 1, gain_dp=-0.1, gain_pp=0.2).alpha == 0
    other = affinity_of(matrix(1, 1, 1), jobs, "B200")
    assert "none was profiled on B200" in other.why


def test_seconds_grow_with_spread_up_to_the_published_losses() -> None:
    network = Network.read()
    assert network.collective(network.rate, 1) == 1
    assert network.collective(1.0, 2) < network.collective(1.0, 4) < 1 / (network.rate * 0.83)
    assert network.p2p(network.rate, 10**9) == pytest.approx(1 / 0.3)
    assert Network.read(rate=5e9).p2p(5e9, 1) == 1


def test_conflicts_slow_what_crosses_only() -> None:
    network = Network(rate=1.0, collective_loss=0.0, p2p_loss=0.0, conflicts=1.5)
    assert (network.p2p(2.0, 1), network.p2p(2.0, 2)) == (2.0, 3.0)


def test_the_slowest_group_counts() -> None:
    volumes = (Volume(dp=4, pp=1), Volume(dp=1, pp=1))
    network = Network(rate=1.0, collective_loss=0.5, p2p_loss=0.5)
    problem = Problem(
        heights=(2, 2), pools=(Pool.plain("a", 2), Pool.plain("b", 2)), alpha=0.0, volumes=volumes, network=network
    )
    assert seconds_of(problem, (0, 0, 0, 1), 2) == (4, pytest.approx(1 / 0.75), 0)
    placed = place(problem)
    assert (placed.row_spread, placed.seconds) == (1, pytest.approx(4 / 0.75 + 1))


def test_experts_are_counted_where_their_groups_lie() -> None:
    """Two pairs of neighbours of the column share out experts; a border of minipods may cut one."""
    network = Network(rate=1.0, collective_loss=0.5, p2p_loss=0.5)
    pools = (Pool.plain("a", 2), Pool.plain("b", 2))
    problem = Problem(
        heights=(4,), pools=pools, alpha=1.0, volumes=(Volume(dp=4, ep=8),), network=network, expert_cells=2
    )
    assert seconds_of(problem, (0, 0, 1, 1), 1) == (4 / 0.75, 0, 8)
    assert seconds_of(problem, (0, 1, 1, 1), 1) == (4 / 0.75, 0, 8 / 0.75)
    whole = problem.together
    assert whole is not None and (whole.heights, whole.nodes_per_cell, whole.together) == ((2,), 2, None)
    placed = place(whole)
    assert placed.ep_seconds == 8 and placed.seconds == 8 + 4 / 0.75
    assert [placed.minipods[at] for at in (0, 2)] == [placed.minipods[at] for at in (1, 3)]
    assert replace(problem, heights=(3,), expert_cells=2).together is None


@pytest.mark.parametrize("method", ["exact", "cpsat"])
@pytest.mark.parametrize(("dp", "pp"), [(1000.0, 1.0), (1.0, 1000.0), (300.0, 30.0)])
def test_the_least_seconds_by_enumeration(method: str, dp: float, pp: float) -> None:
    network = Network(rate=1.0, collective_loss=0.17, p2p_loss=0.7)
    volumes = (Volume(dp=dp, pp=pp), Volume(dp=dp / 2, pp=pp))
    plain = {"by": "seconds", "volumes": volumes, "network": network}
    problem = Problem.plain(3, 2, [2, 2, 3], **plain)
    best = placed_by(problem, brute_force, "brute-force")
    placed = place(problem, method)
    assert placed.score == pytest.approx(best.score)
    assert placed.gap == pytest.approx(0, abs=1e-4)
    with pytest.raises(PlacementError, match=r"set place.method=cpsat"):
        mip(problem)


ROW = """
[[jobs]]
name = "{name}"
gpu = "H800"
micro_batch = 1
weights = 3.049e9
dp = 7.625e9
pp = 6.443e9
gain_dp = {dp}
gain_pp = 0.02
source = "plait measure placement"
date = "2026-01"
"""


def test_a_users_own_jobs_come_before_those_that_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is as far as the published one of the same shape; of two of its own the newer
    counts."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    shipped = known_profiled()
    own_rows().parent.mkdir(parents=True)
    own_rows().write_text(ROW.format(name="first", dp=0.02) + ROW.format(name="again", dp=0.06))
    assert [one.name for one in known_profiled()] == ["again", "first", *(one.name for one in shipped)]
    found = affinity_of(matrix(3.049e9, 7.625e9, 6.443e9), known_profiled(), "H800")
    assert found.alpha == pytest.approx(0.75)
    assert "as again on H800" in found.why
    own_rows().write_text("[[jobs]]\nname = 3\n")
    with pytest.raises(JobError, match=str(own_rows())):
        known_profiled()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("micro_batch", "true", "True is not a number"), ("micro_batch", "'x'", "'x' is not a number"),
        ("micro_batch", "0", "0 is not positive"), ("weights", "-1.0", "-1.0 is not positive"),
        ("dp", "0.0", "0.0 is not positive"), ("pp", "nan", "nan is not positive"), ("pp", "0", "0 is not positive"),
        ("gain_dp", "false", "False is not a number"), ("gain_dp", "-0.5", ""), ("gain_pp", "0", ""),
        ("name", "3", "3 is not a text"), ("gpu", "[]", "[] is not a text"), ("source", None, "None is not a text"),
        ("date", None, "None is not a text"),
    ],
)  # fmt: skip
def test_what_a_profiled_job_may_say(tmp_path: Path, key: str, value: str | None, says: str) -> None:
    text = ROW.format(name="one", dp=0.02) + ROW.format(name="two", dp=0.02)
    lines = text.splitlines()
    last = max(at for at, line in enumerate(lines) if line.startswith(f"{key} = "))
    lines[last] = "" if value is None else f"{key} = {value}"
    file = tmp_path / "jobs.toml"
    file.write_text("\n".join(lines) + "\n")
    if not says:
        assert [one.name for one in read_profiled(file)] == ["one", "two"]
        return
    with pytest.raises(JobError) as caught:
        read_profiled(file)
    assert (caught.value.key, caught.value.file) == (f"jobs[1].{key}", str(file))
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "jobs = []", "jobs = 3", "[jobs]\nname = 'x'\n"])
def test_a_file_without_profiled_jobs(tmp_path: Path, text: str) -> None:
    (tmp_path / "jobs.toml").write_text(text)
    with pytest.raises(JobError, match="lists no profiled jobs"):
        read_profiled(tmp_path / "jobs.toml")
    (tmp_path / "jobs.toml").write_text("jobs = [3]")
    with pytest.raises(JobError, match="is no table") as caught:
        read_profiled(tmp_path / "jobs.toml")
    assert caught.value.key == "jobs[0]"
