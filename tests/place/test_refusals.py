"""What placing, replaying and their files refuse: each guard once, with what it says to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import comb
from pathlib import Path

import pytest

from benchmarks.baselines import brute
from benchmarks.baselines.brute import MOST, brute_force
from plait.core.base.errors import DataError, JobError, PlacementError
from plait.core.cluster.network import Network
from plait.place.placing import place
from plait.place.queue.jct import load
from plait.place.queue.workload import MOST_JOBS, copies_of
from plait.place.solve.exact import exact
from plait.place.solve.problem import Problem, Spares
from plait.place.solve.program import cpsat
from tests.support.workloads import trace_of

UNEQUAL = Problem(heights=(2, 3), pools=Problem.plain(1, 1, [9]).pools)


def test_what_enumeration_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for problem in (UNEQUAL, Problem.plain(2, 2, [9], spares=Spares(per_row=1)), Problem.plain(2, 2, [9], price=1.0)):
        with pytest.raises(PlacementError, match=r"for plain matrices of equal columns: set place.method=cpsat"):
            brute_force(problem)
    with pytest.raises(PlacementError, match=r"There are 8.5e\+10 ways to place this job, too many to try"):
        brute_force(Problem.plain(9, 3, [9, 9, 9, 9]))
    assert brute_force(Problem.plain(3, 2, [9, 9])).note  # few enough
    assert MOST == 5_000_000
    ways = comb(2**2 + 3 - 1, 3)
    for most, few in ((ways, True), (ways - 1, False)):
        monkeypatch.setattr(brute, "MOST", most)
        if few:
            assert brute_force(Problem.plain(3, 2, [9, 9])).note == "all were tried"
        else:
            with pytest.raises(PlacementError, match="too many to try"):
                brute_force(Problem.plain(3, 2, [9, 9]))
    with pytest.raises(PlacementError, match="No placement has room for all nodes"):
        brute_force(Problem.plain(2, 2, [1, 1]))


def test_what_no_solver_finds() -> None:
    with pytest.raises(PlacementError, match="forbidden pairs leave none"):
        cpsat(Problem.plain(3, 1, [5, 1], forbidden=frozenset({(0, "m000")})))
    many = Problem(heights=(400, 399), pools=Problem.plain(1, 1, [9] * 400).pools)
    with pytest.raises(PlacementError, match=r"799 blocks of nodes and 400 pools.*place.avoid"):
        cpsat(many)
    assert place(replace(many, heights=(3, 2)), "cpsat").hosts
    with pytest.raises(PlacementError, match=r"No placement was found in 1e-09 s. Allow more with place.limit"):
        cpsat(Problem.plain(9, 4, [7, 7, 7, 7, 8, 9], price=1.0, limit=1e-9))
    stopped = cpsat(Problem.plain(9, 4, [7, 7, 7, 7, 8, 9], limit=1e-9))
    assert stopped.cells == exact(Problem.plain(9, 4, [7, 7, 7, 7, 8, 9])).cells, "what there was to begin with"


def test_what_the_closed_form_cannot_say() -> None:
    plain = Problem.plain(2, 2, [4])
    for problem, what in (
        (UNEQUAL, "A job whose stages have unequally many nodes"),
        (replace(plain, forbidden=frozenset({(0, "m000")})), "place.forbid"),
        (replace(plain, price=0.0), "place.preempt"),
        (replace(plain, gpus=("A", "B")), "place.gpu of single stages"),
    ):
        with pytest.raises(PlacementError, match=rf"^{what} is beyond the closed form: set place.method=cpsat"):
            exact(problem)
    with pytest.raises(PlacementError, match="The job has 9 cells, and minipods have room for 8"):
        exact(Problem.plain(3, 3, [5, 3]))
    assert exact(Problem.plain(2, 2, [1, 1, 1, 1])).cells


def test_scores_that_are_none() -> None:
    with pytest.raises(PlacementError, match=r"'cost' is nothing to score by. Use spread or seconds"):
        Problem.plain(2, 2, [4], by="cost")
    with pytest.raises(PlacementError, match="Score by spread"):
        Problem.plain(2, 2, [4], by="seconds")


NUMBERS = {"rate": 1e9, "collective_loss": 0.2, "p2p_loss": 0.3}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rate", "0.5", "0.5 is no rate"), ("rate", "'x'", "'x' is no rate"), ("p2p_loss", "1.0", "1.0 is no p2p_loss"),
        ("p2p_loss", "-0.1", "-0.1 is no p2p_loss"), ("crossing", "0.5", "0.5 is no crossing"),
        ("crossing", "2e6", "2000000.0 is no crossing"), ("crossing", "'x'", "'x' is no crossing"),
    ],
)  # fmt: skip
def test_figures_of_a_network(tmp_path: Path, key: str, value: str, says: str) -> None:
    def text(figures: Mapping[str, object]) -> str:
        return "".join(f"[{name}]\nvalue = {told}\n" for name, told in figures.items())

    file = tmp_path / "network.toml"
    file.write_text(text(NUMBERS | {"crossing": 1.5}))
    assert Network.read(file).conflicts == 1.5
    file.write_text(text({**NUMBERS, key: value}))
    with pytest.raises(JobError, match=says) as caught:
        Network.read(file)
    assert caught.value.key == key
    file.write_text("crossing = 3\n" + text(dict(NUMBERS)))
    with pytest.raises(JobError, match="is no crossing"):
        Network.read(file)


def test_a_model_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.json").mkdir()
    with pytest.raises(DataError, match=r"its model.json is not a regular file"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"holds no model of plait queue fit: .*No such file"):
        load(tmp_path / "nothing")


def test_more_jobs_than_can_be_played_back(tmp_path: Path) -> None:
    found = trace_of("submit,duration_s,gpus\n0,3600,1\n3600,3600,1\n", tmp_path)
    most = MOST_JOBS * found.span / float((found.duration + found.span).sum())
    assert copies_of(found, gpus=8, copies=most * 0.999, load=None, window=None)[2] == most * 0.999
    short = MOST_JOBS * found.span / float((found.duration + found.span / 2).sum())
    assert copies_of(found, gpus=8, copies=short * 0.999, load=None, window=found.span / 2)[2] == short * 0.999
    with pytest.raises(DataError, match="a replay has at most 5,000,000"):
        copies_of(found, gpus=8, copies=short * 1.001, load=None, window=found.span / 2)
    with pytest.raises(DataError, match="a replay has at most 5,000,000"):
        copies_of(found, gpus=8, copies=most * 1.001, load=None, window=None)
