"""``plait queue``, as a user sees it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.core.topology.rank_table import RankTable
from tests.support.command import plait
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


def status(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """The exit status of the command in this process, which saves the start of another."""
    monkeypatch.setattr(sys, "argv", ["plait", "queue", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


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


def test_a_table_that_fits(jobs: Path) -> None:
    done = queue("replay", jobs, *SMALL, "policy=arnold,fifo")
    lines = done.stdout.splitlines()
    table = [line for line in lines if line.startswith(("policy", "fifo", "jct-mean"))]
    assert [line.split()[0] for line in table[:3]] == ["policy", "jct-mean", "fifo"]
    assert all(len(line) <= 80 for line in table)
    assert "left out: 1 no submission time" in lines[0]


def test_a_planned_job_of_a_shape_is_placed_and_its_spares_are_lent(jobs: Path) -> None:
    settings = [*SMALL, "policy=arnold", "shape=15x4", "alpha=0.5", "spares=4", "minipod=20"]
    found = json.loads(queue("replay", jobs, *settings, "--json").stdout)
    assert (found["planned"][0]["shape"], found["planned"][0]["spares"]) == ([15, 4], 4)
    (one,) = found["policies"][0]["planned"]
    assert one["dp_spread"] * one["pp_spread"] >= 3, "60 nodes in minipods of 20"
    said = queue("replay", jobs, *settings).stdout
    assert "DP, PP: minipods of the most spread group. lent: preemptible jobs that started on spares." in said
    for word, why in (("shape=15", "no ROWSxSTAGES"), ("shape=7x8", "has 56"), ("zone=z.json", "Leave out shape")):
        others = [one for one in settings if one.partition("=")[0] != word.partition("=")[0]]
        refused = queue("replay", jobs, *others, word)
        assert refused.returncode == 2 and why in refused.stderr, refused.stderr


def test_a_trace_as_it_is_without_a_planned_job(jobs: Path) -> None:
    done = queue("replay", jobs, "nodes=4", "policy=fifo", "--json")
    found = json.loads(done.stdout)
    assert found["planned"] == [] and found["running_at_start"] == 0
    assert found["oversize"] and found["arrivals"] + len(found["oversize"]) == 900
    said = queue("replay", jobs, "nodes=4", "policy=fifo").stdout
    assert f"Left out, since the cluster has fewer GPUs: {len(found['oversize'])} jobs (" in said


def test_a_model_is_fitted_and_asked(jobs: Path, tmp_path: Path) -> None:
    done = queue("fit", jobs, "--out", tmp_path / "model", "--json")
    found = json.loads(done.stdout)
    assert found["tested"] == 90 and set(found["late"]) == {"online", "split", "raw", "constant", "group"}
    assert {"ln seconds", "10-minute buckets, at most 4 h"} <= set(found["rmse"])
    said = json.loads(queue("predict", tmp_path / "model", jobs, "--last", 3, "--json").stdout)
    assert len(said["jobs"]) == 3 and all(row["upper_s"] > 0 for row in said["jobs"])
    told = queue("predict", tmp_path / "model", jobs, "--last", 3)
    table = told.stdout.splitlines()
    assert "90% end within" in table[1] and len(table) == 6
    assert said["passed_over"] == [{"what": "rows (no submission time)", "count": 1, "first": ""}]
    assert "note: passed over 1 rows (no submission time)" in told.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["policy=fivo"], "there is no policy 'fivo' (did you mean 'fifo'?)"),
        (["reserve=1200"], "'1200' is no NODES@TIME"),
        (["reserve=12@noon"], "reserve: 'noon' is no time"),
        (["reserve=3000@9h"], "wants 3,000 nodes; the cluster has 2,000"),
        (["reserve=30@1h"], "Let it arrive later"),
        (["load=0.9", "overlay=2"], "both are given"),
        (["load=1e9"], "copies have"),
        (["replan=1s"], "replan: 1 s is too often"),
        (["reserve=3@9h", "reserve=2@20h", "zone=none.json"], "1 file for 2 planned jobs"),
        (["reserve=1500@9h", "reserve=1500@10h"], "2 planned jobs want 3,000 nodes at one time"),
        (["nodes=0"], "nodes: 0 is not allowed"),
        (["nodes=1000000000000"], "at most 2147483647"),
        (["nodes=2000000"], "2000000 nodes of 8 GPUs are too many"),
        (["window=0s"], "window: '0s' is not allowed. Allowed: more than 0s"),
        (["node=5"], "command line: node: unknown key (did you mean 'nodes'?)"),
        (["fast"], "'fast' is not a setting"),
        (["--settings", "none.toml"], "none.toml: no such file"),
        (["late=wait"], 'Allowed: "preempt" or "delay"'),
        (["level=1.5"], "level: 1.5 is not allowed"),
        (["--columns", "submit=when"], "there is no column 'when'"),
        (["--columns", "submit=submit_time"], "no column is known to hold gpus, duration (or end)"),
        (["reserve=3@9h", "zone=none.json"], "none.json: zone: no JSON list"),
    ],
)
def test_mistakes_are_one_paragraph(
    jobs: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status(monkeypatch, "replay", jobs, *arguments) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.strip().splitlines()) == 1


def test_settings_of_a_file_count_less_than_words(
    jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zone.json").write_text("[4, 5]")
    text = 'nodes = 4\npolicy = "fifo"\nreserve = "2@9h"\nzone = "zone.json"\n'
    (tmp_path / "replay.toml").write_text(text)
    given = ["replay", jobs, "--settings", tmp_path / "replay.toml"]
    assert status(monkeypatch, *given, "nodes=8", "--json") in (0, None)
    told = json.loads(capsys.readouterr().out)
    assert (told["nodes"], [one["nodes"] for one in told["planned"]]) == (8, [2])
    (tmp_path / "replay.toml").write_text(text.replace("4", '"four"', 1))
    assert status(monkeypatch, *given) == 2
    assert 'replay.toml: nodes: "four" is not allowed. Allowed: a whole number' in capsys.readouterr().err


@pytest.mark.parametrize("zone", ["[1.5, 2]", "[true, 2]", '{"a": 1}', '["3"]', "[[1]]", "3"])
def test_a_zone_is_a_list_of_whole_numbers(
    jobs: Path, tmp_path: Path, zone: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zone.json").write_text(zone)
    assert status(monkeypatch, "replay", jobs, "reserve=2@9h", f"zone={tmp_path / 'zone.json'}") == 2
    assert "no JSON list of node numbers" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["numbers", "hosts", "list of names", "rank table"])
def test_a_zone_by_names_of_hosts(
    jobs: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What plait place writes, with the topology that says where its hosts are."""
    (tmp_path / "topology.conf").write_text(
        "SwitchName=core Switches=a,b\nSwitchName=a Nodes=a[0-3]\nSwitchName=b Nodes=b[0-3]\n"
    )
    zone: dict[str, object] = {"numbers": [4, 5], "hosts": {"hosts": ["b1", "b0"]}, "list of names": ["b0", "b1"]}
    if form == "rank table":
        RankTable(("b1", "b0"), ranks_per_node=8).write(tmp_path / "zone.json")
    else:
        (tmp_path / "zone.json").write_text(json.dumps(zone[form]))
    arguments = ["replay", jobs, "nodes=8", "reserve=2@9h", "policy=fifo", "--json"]
    beside = [f"zone={tmp_path / 'zone.json'}", f"topology={tmp_path / 'topology.conf'}"]
    assert status(monkeypatch, *arguments, *beside) in (0, None)
    assert json.loads(capsys.readouterr().out)["planned"][0]["nodes"] == 2
    (tmp_path / "zone.json").write_text(json.dumps(["b0", "c9"]))
    assert status(monkeypatch, *arguments, *beside) == 2
    assert "the topology has no node 'c9'" in capsys.readouterr().err
    assert status(monkeypatch, *arguments, beside[0]) == 2
    assert "is a name: say with topology where it is" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["replay", "fit", "zone", "predict"])
def test_pipes_are_refused_and_not_waited_for(
    jobs: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / ("model.json" if verb == "predict" else "pipe.csv")
    os.mkfifo(pipe)
    arguments: dict[str, list[object]] = {
        "replay": ["replay", pipe],
        "fit": ["fit", pipe],
        "zone": ["replay", jobs, "reserve=2@9h", f"zone={pipe}"],
        "predict": ["predict", tmp_path, jobs],
    }
    assert status(monkeypatch, *arguments[verb]) == 2
    said = capsys.readouterr().err
    assert "no regular file" in said or "is no file" in said


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("submit,duration,gpus\n", "has no job that could be played back: 0 rows"),
        ("submit,duration,gpus\n1,-5,1\n2,,1\n", "2 rows, 1 no duration; 1 negative duration"),
        ("submit,duration,gpus\n1,5,99999\n", "no job fits the cluster"),
    ],
)
def test_traces_with_nothing_in_them(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert status(monkeypatch, "replay", tmp_path / "t.csv", "load=0.9") == 2
    assert says in capsys.readouterr().err


def test_one_job(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n5,7200,16\n")
    done = queue("replay", tmp_path / "t.csv", "nodes=10", "reserve=6@5h", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["planned_delay"] for row in json.loads(done.stdout)["policies"]} == {0.0}


@pytest.mark.system
def test_the_benchmarks_file_hands_over_the_standard_librarys_module() -> None:
    """Every script of that folder would else import a benchmark in place of the queues of threads."""
    code = "import sys; sys.path.insert(0, 'benchmarks'); import queue; from concurrent.futures import thread; "
    code += "assert queue.SimpleQueue and thread.queue is queue and 'benchmarks' not in queue.__file__"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.system
def test_the_benchmark_says_that_it_has_no_trace(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "queue.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("skipped: there is no trace in")


def test_a_cluster_that_no_job_fits_is_refused(tmp_path: Path) -> None:
    """A table of zeros told nothing."""
    (tmp_path / "jobs.csv").write_text("submit,gpus,duration_s\n0,8,60\n5,16,60\n")
    done = plait("queue", "replay", "jobs.csv", "nodes=1", "gpus_per_node=7", folder=tmp_path)
    assert done.returncode == 2 and "every job asks for 8 GPUs or more, and the cluster has 7" in done.stderr
    assert plait("queue", "replay", "jobs.csv", "nodes=1", folder=tmp_path).returncode == 0
