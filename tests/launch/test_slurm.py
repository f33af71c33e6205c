"""What Plait writes for Slurm, and reads of it, without a Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.errors import JobError
from plait.core.rank_table import RankTable
from plait.core.slurm_settings import SlurmSection
from plait.launch import slurm
from plait.launch.slurm import Batch, asked, in_topological_order


def batch(table: RankTable | None = None, **settings: object) -> str:
    section = asked(SlurmSection.model_validate({"nodes": 2} | settings), 4, table)
    return Batch(folder=Path("/shared/runs/job"), name="job", world_size=4, settings=section, table=table).script()


def test_the_script_asks_for_what_the_job_says() -> None:
    text = batch(partition="gpu", time="1:00:00", account="me", reservation="night", grace=90,
                 options=["--gres=gpu:2"], setup=["module load cuda"])  # fmt: skip
    lines = text.splitlines()
    for line in ("--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--time=1:00:00", "--account=me",
                 "--reservation=night", "--signal=TERM@90", "--requeue", "--exclusive", "--gres=gpu:2"):  # fmt: skip
        assert f"#SBATCH {line}" in lines
    assert lines.index("module load cuda") > lines.index("#SBATCH --gres=gpu:2")
    assert lines[-1].endswith("-m plait.cli.in_slurm /shared/runs/job")


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
        asked(SlurmSection(nodes=nodes), world, table)


def test_nodes_follow_from_the_gpus_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "command", lambda *argv: "gpu:h100:8(S:0-1)\ngpu:8,nic:2\n")
    assert asked(SlurmSection(), 32, None).nodes == 4
    monkeypatch.setattr(slurm, "command", lambda *argv: "(null)\n")
    assert asked(SlurmSection(), 32, None).nodes == 32


def test_a_line_break_in_an_option_is_refused() -> None:
    with pytest.raises(JobError, match="line break"):
        SlurmSection(partition="a\nrm -r .")


def test_nodes_that_the_topology_does_not_name_come_last_in_their_own_order() -> None:
    text = "SwitchName=core Level=1 Nodes=n[1-4] Switches=b,a\nSwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\n"
    assert in_topological_order(["n1", "x2", "n2", "x1", "n3", "n4"], text) == ["n3", "n4", "n1", "n2", "x2", "x1"]
    assert in_topological_order(["n2", "n1"], "") == ["n2", "n1"]
    blocks = "BlockName=b1 BlockIndex=0 Nodes=n[3-4] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n[1-2] BlockSize=2\n"
    assert in_topological_order(["n1", "n2", "n3", "n4"], blocks) == ["n3", "n4", "n1", "n2"]
