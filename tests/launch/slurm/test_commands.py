"""What Plait writes for Slurm, and reads of it, without a Slurm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plait.api.places.slurm import SlurmTarget
from plait.core.base.errors import JobError, LaunchError
from plait.core.job.cluster_settings import SlurmSection
from plait.core.job.settings import RunSection
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.launch.slurm import commands as slurm
from plait.launch.slurm.commands import Batch, resolve_resources

TIER = "unit"


@pytest.fixture(autouse=True)
def _slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default partition has nodes of eight GPUs, another one none."""
    answer = "gpu*|gpu:h100:8(S:0-1)\ngpu*|gpu:8,nic:2\ncpu|(null)\n"
    monkeypatch.setattr(
        slurm,
        "command",
        lambda *argv: {("-p", "cpu"): "cpu|(null)\n", ("-p", "gpu"): "gpu|gpu:4\n"}.get(argv[4:], answer),
    )


def batch(table: RankTable | None = None, world: int = 4, run: str = "{}", folder: str = "/shared/runs/job",
          **settings: Any) -> str:  # fmt: skip
    section = resolve_resources(
        SlurmSection.model_validate({"nodes": 2} | settings), world, table, RunSection.model_validate_json(run)
    )
    return Batch(folder=Path(folder), name="job", world_size=world, settings=section, table=table).script()


def lines_of(text: str) -> list[str]:
    """What Slurm is asked for."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_the_script_asks_for_what_the_job_says() -> None:
    text = batch(partition="gpu", time="1:00:00", account="me", reservation="night", signal_time=90,
                 options=["--gres=gpu:2"], setup=["module load cuda"])  # fmt: skip
    lines = text.splitlines()
    for line in ("--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--time=1:00:00", "--account=me",
                 "--reservation=night", "--signal=TERM@90", "--requeue", "--exclusive", "--gres=gpu:2"):  # fmt: skip
        assert f"#SBATCH {line}" in lines
    assert lines.index("module load cuda") > lines.index("#SBATCH --gres=gpu:2")
    assert lines[-1].endswith("-m plait.api.in_cluster /shared/runs/job")


def test_a_rank_tables_hosts_are_asked_for_by_name() -> None:
    assert "#SBATCH --nodelist='n[7,2]'" in batch(RankTable(("n7", "n2"), 2), nodes=0)


def test_what_is_not_said_is_not_asked_for() -> None:
    text = batch(requeue=False, exclusive=False)
    assert "--no-requeue" in text
    assert not any(word in text for word in ("--partition", "--time", "--account", "--nodelist", "--exclusive"))


@pytest.mark.parametrize(
    ("world", "nodes", "table", "match"),
    [
        (4, 3, None, "4 ranks do not spread evenly over 3 nodes"),
        (4, 0, RankTable(("a",), 2), "the rank table has 2 ranks, and the job needs 4"),
        (4, 4, RankTable(("a", "b"), 2), "is 4, and the rank table has 2 hosts"),
    ],
)
def test_what_does_not_fit_is_refused(world: int, nodes: int, table: RankTable | None, match: str) -> None:
    with pytest.raises(JobError, match=match):
        resolve_resources(SlurmSection(nodes=nodes), world, table, RunSection())


@pytest.mark.parametrize(
    ("told", "nodes", "gpus"),
    [
        ("p*|gpu:h100:8(S:0-1)\np*|gpu:8,nic:2\n", 4, 8),
        ("p*|gpu:h100:8(S:0-1)\np*|gpu:4\n", 8, 4),  # by the node that has the fewest
        ("p*|gpu:a:2,gpu:b:2(S:1)\n", 8, 4),
        ("p*|gpu:1g.10gb:7,gpu:a100:2\n", 16, 2),  # slices of MIG are no whole GPUs
        ("p*|gpu:8\nlogin|(null)\n", 4, 8),  # other partitions are not asked for
        ("p*|(null)\n", 32, 0),
        ("", 32, 0),
    ],
)
def test_nodes_follow_from_the_gpus_of_a_node(
    monkeypatch: pytest.MonkeyPatch, told: str, nodes: int, gpus: int
) -> None:
    monkeypatch.setattr(slurm, "command", lambda *argv: told)
    found = resolve_resources(SlurmSection(), 32, None, RunSection())
    assert (found.nodes, found.gpus) == (nodes, gpus)


@pytest.mark.parametrize(
    ("settings", "run", "gres"),
    [
        ({}, "{}", ["--gres=gpu:2"]),
        ({"partition": "cpu"}, "{}", []),
        ({}, '{"device": "cpu"}', []),
        ({"partition": "cpu"}, '{"device": "cuda"}', ["--gres=gpu:2"]),  # Slurm refuses it in its own words
        ({"gpus": 3}, "{}", ["--gres=gpu:3"]),
        ({"gpus": 0}, "{}", []),
        ({"gpus": 1}, '{"device": "shared"}', ["--gres=gpu:1"]),
        ({"gpus": 1}, '{"device": "cpu"}', ["--gres=gpu:1"]),
        ({"options": ["--gres=gpu:h100:8"]}, "{}", ["--gres=gpu:h100:8"]),
        ({"options": ["--gpus-per-node=8"]}, "{}", ["--gpus-per-node=8"]),
        ({"options": ["--gpus-per-task 8"]}, "{}", ["--gpus-per-task 8"]),
        ({"options": ["-G16"]}, "{}", ["-G16"]),
        ({"options": ["--tres-per-node=gres:gpu:4"]}, "{}", []),
        ({"gpus": 2, "options": ["--gres=gpu:h100:2"]}, "{}", ["--gres=gpu:2", "--gres=gpu:h100:2"]),
        ({"options": ["--gres=nic:1"]}, '{"device": "cpu"}', ["--gres=nic:1"]),
    ],
)
def test_gpus_are_asked_for(settings: dict[str, Any], run: str, gres: list[str]) -> None:
    """One for every rank, unless the job says otherwise."""
    found = [line for line in lines_of(batch(run=run, **settings)) if line.startswith(("--gres", "--gpus", "-G"))]
    assert found == gres


def test_nodes_of_which_some_have_gpus_are_told_apart_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "command", lambda *argv: "p*|gpu:8\np*|(null)\n")
    for nodes in (0, 2):
        with pytest.raises(JobError, match=r"^slurm\.gpus: some nodes have no GPUs, and others up to 8. Say how many"):
            batch(nodes=nodes)
        assert "--gres=gpu:4" in batch(nodes=nodes, gpus=4)
        assert "--gres" not in batch(nodes=nodes, run='{"device": "cpu"}')


def test_of_a_rank_table_its_own_hosts_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*argv: str) -> str:
        assert argv[-2:] == ("node", "n[7,2]")
        return "NodeName=n7 Gres=gpu:h100:2(S:0) NodeAddr=n7\nNodeName=n2 Gres=gpu:4 NodeAddr=n2\n"

    monkeypatch.setattr(slurm, "command", answer)
    assert "#SBATCH --gres=gpu:2" in batch(RankTable(("n7", "n2"), 2), nodes=0)


@pytest.mark.parametrize(
    ("settings", "run"),
    [({"partition": "gpu"}, "{}"), ({"gpus": 4}, "{}"), ({"gpus": 4}, '{"device": "cuda"}')],
)
def test_ranks_that_would_leave_a_nodes_gpus_aside_are_refused(settings: dict[str, Any], run: str) -> None:
    with pytest.raises(JobError, match=r"^run.device: .* 4 .*, and each runs 16 ranks. Use more nodes"):
        batch(world=32, run=run, **settings)
    advised = json.loads(run)
    assert "--gres=gpu:4" in batch(world=32, run=json.dumps(advised | {"device": "shared"}), **settings)
    assert batch(world=32, run=json.dumps(advised | {"device": "cpu"}), **settings)
    assert "--gres=gpu:4" in batch(world=32, run=run, **{**settings, "nodes": 8})


@pytest.mark.parametrize(
    ("settings", "asked_for"),
    [
        ({}, ["--mem=0", "--exclusive"]),
        ({"exclusive": False}, ["--cpus-per-task=6"]),
        ({"exclusive": False, "cpus": 40}, ["--cpus-per-task=40"]),
        ({"exclusive": False, "options": ["-c 9"]}, ["-c 9"]),
        ({"exclusive": False, "options": ["--cpus-per-gpu=4"]}, ["--cpus-per-gpu=4"]),
        ({"options": ["--mem=100G"]}, ["--exclusive", "--mem=100G"]),
        ({"options": ["--mem-per-cpu", "-A me"]}, ["--exclusive", "--mem-per-cpu"]),
    ],
)
def test_a_node_is_the_runs_with_all_that_it_has_or_a_part_for_its_ranks(
    settings: dict[str, Any], asked_for: list[str]
) -> None:
    told = lines_of(batch(run='{"threads": 3}', **settings))
    assert [line for line in told if line.startswith(("--mem", "--cpus", "-c", "--exclusive"))] == asked_for


@pytest.mark.parametrize("key", ["partition", "time", "account", "reservation", "options", "setup"])
@pytest.mark.parametrize("text", ["a\nrm -r .", "a\r", "a\0", "a\u2028b", "a\x1b[31m"])
def test_a_line_break_in_an_option_is_refused(key: str, text: str) -> None:
    value = [text] if key in ("options", "setup") else text
    with pytest.raises(JobError, match=f"^slurm.{key}: .* holds a line break"):
        SlurmSection.model_validate({key: value})


def test_setup_lines_may_be_indented_and_hold_any_word() -> None:
    line = "\texport A='$B' # caf\u00e9"
    assert SlurmSection.model_validate({"setup": [line]}).setup == (line,)


@pytest.mark.parametrize(("on", "folder", "key"), [("all\n#SBATCH --uid=0", "runs", "--on slurm"),
                                                   ("all", "runs\ntouch x", "run.folder")])  # fmt: skip
def test_a_line_break_never_gets_into_the_script(on: str, folder: str, key: str, tmp_path: Path) -> None:
    job = a_job(tmp_path, folder)
    with pytest.raises(JobError, match=rf"^{key}: .* holds a line break"):
        SlurmTarget(on).preview(job, job.run.path)


def test_a_backslash_in_the_folder_is_refused_since_slurm_drops_it(tmp_path: Path) -> None:
    job = a_job(tmp_path, "back\\slash")
    with pytest.raises(JobError, match=r"^run.folder: .* holds a backslash"):
        SlurmTarget("").preview(job, job.run.path)


def test_a_percent_sign_in_the_folder_is_no_pattern_of_slurms() -> None:
    assert "--output='/shared/50%%n runs/logs/slurm-%j.log'" in lines_of(batch(folder="/shared/50%n runs"))


def test_the_folder_is_called_as_the_user_calls_it(tmp_path: Path) -> None:
    """A link may lead elsewhere on other machines."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    text = batch(folder=str(tmp_path / "link" / "job"))
    assert f"--output={tmp_path}/link/job/logs/slurm-%j.log" in lines_of(text)
    assert text.endswith(f" -m plait.api.in_cluster {tmp_path}/link/job\n")


def test_without_a_slurm_the_script_is_shown_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*argv: str) -> str:
        raise LaunchError("Slurm's command sinfo is not installed here.")

    monkeypatch.setattr(slurm, "command", none)
    job = a_job(tmp_path, "runs", "slurm.nodes=1")
    _, text = SlurmTarget("").preview(job, job.run.path)
    assert text.startswith("# Without a Slurm to ask how many GPUs its nodes have, none are requested: Slurm's command")
    assert "#SBATCH --nodes=1" in text
    known = a_job(tmp_path, "runs", "slurm.nodes=1", "slurm.gpus=1")
    assert SlurmTarget("").preview(known, known.run.path)[1].startswith("#!/bin/bash\n")
    with pytest.raises(LaunchError, match="not installed"):  # how many nodes, nobody knows
        SlurmTarget("").preview(a_job(tmp_path, "runs"), job.run.path)


@pytest.mark.parametrize(
    ("told", "gpus"),
    [
        ("JOB_GRES=gpu:8   Nodes=n[1-2] CPU_IDs=0-63 Mem=0 GRES=gpu:4(IDX:0-3) MinCPUsNode=1", 4),
        ("JOB_GRES=(null)   Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES= MinCPUsNode=1 Features=(null)", 0),
        (
            " Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:h100:8(IDX:0-7)  Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:h100:4(IDX:0-3) M=1",
            4,
        ),
        ("JobId=3", 0),
    ],
)
def test_the_gpus_that_a_job_has_are_those_of_its_poorest_node(
    monkeypatch: pytest.MonkeyPatch, told: str, gpus: int
) -> None:
    monkeypatch.setattr(slurm, "command", lambda *argv: told)
    assert slurm.gpus_of_job("3") == gpus


def a_job(folder: Path, runs: str, *settings: str) -> Job:
    model = {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 2, "max_sequence": 128}
    return Job.from_dict({"model": model, "run": {"folder": str(folder / runs), "name": "job"}}).changed(settings)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """What is run, and with what. It ends as its argument says: a status, what it prints,
    complains."""
    ran = list[tuple[tuple[str, ...], dict[str, Any]]]()

    def run(argv: tuple[str, ...], **more: Any) -> subprocess.CompletedProcess[str]:
        ran.append((argv, more))
        status, out, err = argv[1].split("|")
        return subprocess.CompletedProcess(argv, int(status), out, err)

    monkeypatch.undo()  # the fixture of all others, which asks nothing
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None if name == "sbatch" else f"/bin/{name}")
    monkeypatch.setattr(slurm.subprocess, "run", run)
    return ran


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("1||no such\n  job\n", r"Slurm refused: no such job\.$"),
        ("3||", r"Slurm refused: it ended with status 3\.$"),
        ("-9|partly|\n", r"Slurm refused: it ended with status -9\.$"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(
    programs: list[tuple[tuple[str, ...], dict[str, Any]]], told: str, says: str
) -> None:
    with pytest.raises(LaunchError, match=says):
        slurm.command("sinfo", told)


def test_what_slurm_prints_is_taken_whole(programs: list[tuple[tuple[str, ...], dict[str, Any]]]) -> None:
    assert slurm.command("sinfo", "0|a\nb\n|a warning", data="given") == "a\nb\n"
    ((argv, more),) = programs
    assert argv == ("sinfo", "0|a\nb\n|a warning") and more["input"] == "given" and more["text"]
    with pytest.raises(LaunchError, match=r"Slurm's command sbatch is not installed here.*submits to Slurm"):
        slurm.command("sbatch", "0||")
    assert len(programs) == 1


def test_a_run_that_waits_already_is_not_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    asked, queue = list[tuple[str, ...]](), [f"5|/other/slurm.sh\n6|{tmp_path}/real/slurm.sh\n", "8|\n"]

    def answer(*argv: str) -> str:
        asked.append(argv)
        return queue.pop(0) if argv[0] == "squeue" else "9\n"

    monkeypatch.setattr(slurm, "command", answer)
    table = RankTable(("n1",), 1)
    batch = slurm.Batch(folder=tmp_path / "link", name="x", world_size=1, settings=SlurmSection(nodes=1), table=table)
    with pytest.raises(JobError, match=r"Slurm job 6 is this run, and has not ended.*scancel 6.*run\.name"):
        slurm.submit(batch)
    assert [argv[0] for argv in asked] == ["squeue"]
    submitted = slurm.submit(batch)
    assert (submitted.job, submitted.hosts, submitted.written) == ("9", ("n1",), 0)
    assert RankTable.read(tmp_path / "real" / "placed_ranks.json") == table


def test_nodes_are_reached_at_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "NodeName=n1 NodeAddr=10.0.0.1 Gres=gpu:2\n\nNodeName=n2 Arch=x\nsomething else\n"
    monkeypatch.setattr(slurm, "command", lambda *argv: told if argv[-1] == "n[1-2]" else "")
    assert slurm.node_addresses(["n1", "n2"]) == {"n1": "10.0.0.1", "n2": "n2"}


def test_a_reservation_is_for_the_tables_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, ...]]()
    monkeypatch.setattr(slurm, "command", lambda *argv: asked.append(argv) or "")
    slurm.reserve(RankTable(("n1", "n2"), 1), "night", start="now", duration="2:00:00", users=["a", "b"])
    assert asked == [
        ("scontrol", "create", "reservation", "ReservationName=night", "StartTime=now", "Duration=2:00:00",
         "Nodes=n[1-2]", "Users=a,b", "Flags=STATIC_ALLOC,IGNORE_JOBS"),
    ]  # fmt: skip


def test_a_job_that_is_submitted_finds_all_that_it_needs_in_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, folder = list[tuple[str, ...]](), tmp_path / "new" / "run"

    def command(*argv: str) -> str:
        asked.append(argv)
        return "12;cluster\n" if argv[0] == "sbatch" else "3|/elsewhere/slurm.sh\n4|\n"

    monkeypatch.setattr(slurm, "command", command)
    table = RankTable(("n2", "n1"), 1)
    for placed in (table, None):
        batch = slurm.Batch(folder=folder, name="job", world_size=2, settings=SlurmSection(nodes=2), table=placed)
        submitted = slurm.submit(batch)
        assert submitted == slurm.SubmittedSlurmJob(
            "12", folder / "logs" / "slurm-12.log", 0, placed.hosts if placed else (), folder
        )
        assert (folder / "logs").is_dir(), "Slurm makes no folder for its log"
        assert (folder / "slurm.sh").read_text() == batch.script()
        assert (folder / "placed_ranks.json").exists() == (placed is not None), "no table of a start before is followed"
    assert asked[-1] == ("sbatch", "--parsable", str(folder / "slurm.sh"))
    (folder / "logs" / "slurm-12.log").write_text("of another job")
    assert slurm.submit(batch).written == len("of another job")
