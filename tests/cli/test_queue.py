"""``plait queue``, as a user sees it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.topology.rank_table import RankTable
from tests.support.command import plait, values
from tests.support.workloads import heavy_tailed

TIER = "unit"

SMALL = ["nodes=100", "load=0.85", "reserve=60@+6h", "planned_for=2h", "minipod=10"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "jobs.csv"
    file.write_text(heavy_tailed(900) + "later,,1,0\n")
    return file


def queue(*arguments: object) -> subprocess.CompletedProcess[str]:
    return plait("queue", *arguments)


def test_policies_side_by_side(jobs: Path, tmp_path: Path) -> None:
    done = queue("replay", jobs, *SMALL, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert "model 6 of 6" in done.stderr and "%" not in done.stderr
    found = json.loads(done.stdout)
    assert found["dropped"] == {"no submission time": 1} and found["jobs"] == 900
    assert found["offered_load"] == pytest.approx(0.85)
    rows = {row["policy"]: row for row in found["policies"]}
    assert list(rows) == ["fifo", "reserve-and-pack", "no-jct", "jct-mean", "jct-quantile", "oracle"]
    assert rows["jct-quantile"]["retention_at"] == 0 == rows["jct-quantile"]["planned_delay"]
    assert rows["oracle"]["late"] == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["policies"] == found["policies"]
    series = list(csv.DictReader((tmp_path / "out" / "series.csv").read_text().splitlines()))
    own = [row for row in series if row["policy"] == "no-jct"]
    assert [float(row["time_h"]) for row in own[:2]] == pytest.approx([0, 300 / 3600], abs=1e-4)
    assert {row["retention"] == "" for row in own if float(row["time_h"]) < 2} == {True}
    assert own[-1]["retention"] == ""  # 8 h: the planned job has ended
    assert own[-2]["retention"] == "0.00000"  # it runs there itself
    assert all(0 <= float(row["allocation"]) <= 1 for row in series)
    assert b"reserved nodes held" in (tmp_path / "out" / "queue.svg").read_bytes()


def test_a_planned_job_of_a_shape_is_placed_and_its_spares_are_lent(jobs: Path) -> None:
    settings = [*SMALL, "policy=arnold", "shape=15x4", "alpha=0.5", "spares=4", "minipod=20"]
    found = values("queue", "replay", jobs, *settings)
    assert (found["planned"][0]["shape"], found["planned"][0]["spares"]) == ([15, 4], 4)
    (one,) = found["policies"][0]["planned"]
    assert one["dp_spread"] * one["pp_spread"] >= 3, "60 nodes in minipods of 20"
    said = queue("replay", jobs, *settings).stdout
    assert "DP, PP: minipods of the most spread group. lent: preemptible jobs that started on spares." in said


def test_a_trace_as_it_is_without_a_planned_job(jobs: Path) -> None:
    done = queue("replay", jobs, "nodes=4", "policy=fifo", "--json")
    found = json.loads(done.stdout)
    assert found["planned"] == [] and found["running_at_start"] == 0
    assert found["oversize"] and found["arrivals"] + len(found["oversize"]) == 900
    said = queue("replay", jobs, "nodes=4", "policy=fifo").stdout
    assert (
        "% of the GPUs of 4 nodes\n" in said
        and f"Left out, since the cluster has fewer GPUs: {len(found['oversize'])} jobs (" in said
    )


def test_a_model_is_fitted_and_asked(jobs: Path, tmp_path: Path) -> None:
    done = queue("fit", jobs, "--out", tmp_path / "model", "--json")
    found = json.loads(done.stdout)
    assert found["tested"] == 90 and set(found["late"]) == {"online"}
    assert set(found["rmse"]) == {"ln seconds"}
    said = values("queue", "predict", tmp_path / "model", jobs, "--last", 3)
    assert len(said["jobs"]) == 3 and all(row["upper_s"] > 0 for row in said["jobs"])
    told = queue("predict", tmp_path / "model", jobs, "--last", 3)
    table = told.stdout.splitlines()
    assert "90% end within" in table[1] and len(table) == 6
    assert said["passed_over"] == [{"what": "rows (no submission time)", "count": 1, "first": ""}]
    assert "note: passed over 1 rows (no submission time)" in told.stderr


def test_settings_of_a_file_count_less_than_words(jobs: Path, tmp_path: Path) -> None:
    (tmp_path / "zone.json").write_text("[4, 5]")
    text = 'nodes = 4\npolicy = "fifo"\nreserve = "2@9h"\nzone = "zone.json"\n'
    (tmp_path / "replay.toml").write_text(text)
    told = values("queue", "replay", jobs, "--settings", tmp_path / "replay.toml", "nodes=8")
    assert (told["nodes"], [one["nodes"] for one in told["planned"]]) == (8, [2])


@pytest.mark.parametrize("zone", [[4, 5], {"hosts": ["b1", "b0"]}, ["b0", "b1"], None], ids=str)
def test_a_zone_by_names_of_hosts(jobs: Path, tmp_path: Path, zone: object) -> None:
    """What plait place writes, with the topology that says where its hosts are."""
    (tmp_path / "topology.conf").write_text(
        "SwitchName=core Switches=a,b\nSwitchName=a Nodes=a[0-3]\nSwitchName=b Nodes=b[0-3]\n"
    )
    file = tmp_path / "zone.json"
    if zone:
        file.write_text(json.dumps(zone))
    else:
        RankTable(("b1", "b0"), ranks_per_node=8).write(file)
    given = ["nodes=8", "reserve=2@9h", "policy=fifo", f"zone={file}", f"topology={tmp_path / 'topology.conf'}"]
    assert values("queue", "replay", jobs, *given)["planned"][0]["nodes"] == 2


def test_several_planned_jobs_each_with_a_row(jobs: Path) -> None:
    said = queue("replay", jobs, *SMALL, "reserve=30@+10h", "announce=2h", "policy=no-jct,oracle")
    assert said.returncode == 0, said.stderr
    rows = [
        line.split() for line in said.stdout.splitlines() if line.startswith(("no-jct", "oracle")) and " at " in line
    ]
    assert [row[:5] for row in rows] == [
        [policy, nodes, "at", hours, "h"]
        for policy in ("no-jct", "oracle")
        for nodes, hours in (("60", "6"), ("30", "10"))
    ]
    assert all(row[-1] == "0.00" for row in rows)
    table = said.stdout.splitlines()
    assert all(len(line) <= 80 for line in table if line.startswith(("policy", "no-jct", "oracle")))


def test_one_job(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n5,7200,16\n")
    done = queue("replay", tmp_path / "t.csv", "nodes=10", "reserve=6@5h", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["planned_delay"] for row in json.loads(done.stdout)["policies"]} == {0.0}


@pytest.mark.system
def test_the_benchmarks_file_hands_over_the_standard_librarys_module() -> None:
    """Every script of that folder would else import a benchmark in place of the queues of
    threads."""
    code = "import sys; sys.path.insert(0, 'benchmarks'); import queue; from concurrent.futures import thread; "
    code += "assert queue.SimpleQueue and thread.queue is queue and 'benchmarks' not in queue.__file__"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
