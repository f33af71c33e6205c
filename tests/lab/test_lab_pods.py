"""A lab of several minipods: what crosses shares a slower link, ranks lie as a rank table says, and
know it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.base.errors import JobError, PlacementError
from plait.core.topology.rank_table import RankTable
from plait.lab import Lab, LabSpec, find
from plait.place.topologies import read_topology
from tests.lab.test_lab_network import listen, near, reaches, undisturbed
from tests.support.lab import PlaitLab, wait_until
from tests.support.runs import write_job

pytestmark = pytest.mark.lab
TREE = "4x1@400mbit,2pods@100mbit"
STRATEGY = "tp = 2\nslices = { batch = 2, columns = 1 }"
WHERE = (
    "from plait.core.base.env import RankEnv; from plait.core.base.cluster_env import this_host; "
    "print(this_host(), RankEnv.read().node_rank)"
)


def plait(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "ignore", "-m", "plait.cli.main", *map(str, words)]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def test_the_core_is_slower_than_what_lies_below(needs_lab: None) -> None:
    """Rank 1 of ``goodputs`` is on host 1: beside host 0 in the first lab, across the core in the
    second."""
    with Lab(LabSpec.parse(TREE)) as lab:
        assert near(undisturbed(lab, 4_000_000, "to0", 400e6)[0], 400e6)
    with Lab(LabSpec.parse(TREE), nodes=(0, 2)) as lab:
        assert near(undisturbed(lab, 2_000_000, "to0", 100e6)[0], 100e6)


def test_a_minipod_can_be_cut_slowed_and_healed(plait_lab: PlaitLab) -> None:
    with Lab(LabSpec.parse(TREE)) as lab:
        assert find(lab.name).spec == lab.spec
        listen(lab, 3, "10.77.0.4")
        listen(lab, 1, "10.77.0.2")
        plait_lab("cut", "pod1")
        assert not reaches(lab, 0, "10.77.0.4", 0.5)
        assert reaches(lab, 0, "10.77.0.2"), "a minipod's own hosts still reach each other"
        plait_lab("heal", "pod1")
        wait_until(lambda: reaches(lab, 0, "10.77.0.4"), "the minipod is still cut off", 20)
        plait_lab("slow", "pod0", "50mbit")
        (told,) = json.loads(plait_lab("list", "--json").stdout)["labs"]
        assert [(pod["core"], pod["cut"]) for pod in told["pods"]] == [("50mbit", False), ("100mbit", False)]
        assert "pod1 to core  100mbit" in plait_lab("list").stdout
        assert "no host and no minipod" in plait_lab("cut", "rack1", status=2).stderr
        with pytest.raises(JobError, match="minipod 2"):
            lab.network.cut(2, pod=True)


def test_one_minipod_has_no_core(needs_lab: None) -> None:
    with Lab(LabSpec()) as lab, pytest.raises(JobError, match="no core"):
        lab.network.cut(0, pod=True)


def test_ranks_know_the_host_that_they_are_on(needs_lab: None) -> None:
    with Lab(LabSpec.parse(TREE), nodes=(3, 0, 2)) as lab:
        argv = [sys.executable, "-c", WHERE]
        ranks = [lab.popen(rank, argv, stdout=subprocess.PIPE, text=True) for rank in range(3)]
        said = [rank.communicate(timeout=60)[0].split() for rank in ranks]
        assert lab.environment(1)["MASTER_ADDR"] == "10.77.0.4", "that of rank 0's host"
    assert said == [["host3", "0"], ["host0", "1"], ["host2", "2"]]


def test_a_rank_that_is_not_where_the_table_has_it_is_named(needs_lab: None) -> None:
    check = (
        "from plait.core.base.env import RankEnv; from plait.core.base.cluster_env import this_host; "
        "from plait.core.topology.rank_table import RankTable\n"
        "me = RankEnv.read(); RankTable(('host0', 'host2'), 1).check(me.rank, me.world_size, this_host())"
    )
    with Lab(LabSpec.parse(TREE), nodes=(0, 3)) as lab:
        ranks = [lab.popen(rank, [sys.executable, "-c", check], stderr=subprocess.PIPE, text=True) for rank in range(2)]
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert errors[0] == ""
    assert "Rank 1 runs on host3, and the rank table has it on host2" in errors[1]


def test_a_labs_topology_goes_through_a_file(tmp_path: Path) -> None:
    done = plait("topology", f"lab:{TREE}", "--out", "lab.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    topology, _ = read_topology(str(tmp_path / "lab.toml"))
    assert topology.free() == LabSpec.parse(TREE).as_topology.free()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (RankTable(("host0", "host9"), 1), "names host9"),
        (RankTable(("host0", "host1"), 2), "2 ranks a host"),
        (RankTable(("n1", "n2"), 1), "no host of a lab"),
    ],
)
def test_a_table_that_is_not_the_labs_is_refused(table: RankTable, said: str) -> None:
    from plait.api.places.lab import LabTarget

    with pytest.raises((JobError, PlacementError), match=said):
        LabTarget(LabSpec.parse(TREE), table)


@pytest.mark.slow
def test_a_placed_job_trains_where_it_was_placed(needs_lab: None, tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=2, every=0)
    job.write_text(job.read_text().replace(STRATEGY, "tp = 1\npp = 2\ndp = 2"))
    words = ("--topology", f"lab:{TREE}", "place.alpha=0", "--out", "table.json", "--json")
    placed = plait("place", job, *words, folder=tmp_path)
    assert placed.returncode == 0, placed.stderr
    hosts = json.loads(placed.stdout)["hosts"]
    assert {tuple(sorted(hosts[at::2])) for at in range(2)} == {("host0", "host1"), ("host2", "host3")}
    done = plait("train", job, "--on", f"lab:{TREE}", "--rank-table", "table.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    (kept,) = tmp_path.glob("**/rank_table.json")
    assert RankTable.read(kept).hosts == tuple(hosts)
