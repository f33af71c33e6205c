"""``plait train --on slurm`` on a real Slurm of eight nodes with a tree of switches: ranks stand
where the rank table has them, and a run outlives its nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from plait.core.runs.attempts import read_attempts
from plait.core.runs.evidence import read_hang
from plait.core.topology.rank_table import NAME, RankTable
from plait.launch.slurm import nodes as slurm_nodes
from tests.support.lab import wait_until
from tests.support.managed import saved_steps, stopped_after, write_job
from tests.support.slurm import SlurmCluster, ask, environment

pytestmark = pytest.mark.slow

# Seen by every Python process of the job: which task of Slurm's, on which host, runs which rank.
WITNESS = """
import os, socket
if "RANK" in os.environ:
    with open({file!r}, "a") as file:
        file.write(" ".join([os.environ["RANK"], os.environ["SLURM_PROCID"], socket.gethostname()]) + "\\n")
"""


def train(job: Path, *options: str) -> list[str]:
    """The command."""
    return [sys.executable, "-m", "plait.cli.main", "train", str(job), *options, "--on", "slurm"]


def begin(cluster: SlurmCluster, job: Path, *options: str, variables: Mapping[str, str] | None = None) -> list[str]:
    """Submit a job; its words, by which it was."""
    argv = train(job, *options)
    env = environment(cluster) | dict(variables or {})
    done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=job.parent, env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def submit(cluster: SlurmCluster, job: Path, *options: str) -> str:
    """Submit a job and do not wait; its number."""
    words = begin(cluster, job, *options, "--no-follow")
    return words[words.index("job") + 1].rstrip(";")


def run_bare(cluster: SlurmCluster, folder: Path, *options: str, world: int) -> tuple[int, str]:
    """Ranks without torch, in an allocation of their own, that say where they are, and as which
    task."""
    code = (
        "import os, socket, sys; "
        "print(os.environ['RANK'], os.environ['SLURM_PROCID'], socket.gethostname(), file=open(sys.argv[1], 'a'))"
    )
    launch = """
import sys
from pathlib import Path
from plait.core.base.errors import PlaitError
from plait.launch.slurm import job
try:
    sys.exit(job.run(Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2]), timeout=60))
except PlaitError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
"""
    rank = [sys.executable, "-I", "-S", "-c", code, str(folder / "seen")]
    argv = ["salloc", "--quiet", *options, sys.executable, "-c", launch, str(folder), str(world), *rank]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment(cluster), timeout=90)
    return done.returncode, done.stderr


def fields(cluster: SlurmCluster, job: str) -> dict[str, str]:
    said = ask(cluster, "scontrol", "--oneliner", "show", "job", job)
    return dict(word.split("=", 1) for word in said.split() if "=" in word)


def pid_of(rank: int, home: Path) -> int:
    """A rank's process, by its number outside of the nodes."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ours = str(home).encode() in (process / "cmdline").read_bytes()
            if ours and f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
    raise AssertionError(f"rank {rank} does not run")


def log(folder: Path, job: str) -> str:
    file = folder / "runs" / "job" / "logs" / f"slurm-{job}.log"
    return file.read_text() if file.is_file() else ""


@contextmanager
def running(cluster: SlurmCluster, folder: Path, *options: str) -> Iterator[str]:
    """The number of a job that trains for hours, once it has saved; it is cancelled in the end.
    What it said is shown where the test fails."""
    number = submit(cluster, write_job(folder, 100_000), *options)
    try:
        wait_until(lambda: saved_steps(folder), "no checkpoint was saved", seconds=120)
        yield number
    finally:
        print(log(folder, number))
        ask(cluster, "scancel", number)
    wait_until(lambda: fields(cluster, number)["JobState"] == "CANCELLED", "the job goes on", seconds=60)


@contextmanager
def followed(cluster: SlurmCluster, job: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command that follows a job; what it says goes to a file."""
    with open(job.parent / "said", "w+") as said:
        following = subprocess.Popen(train(job, *options), cwd=job.parent, env=environment(cluster), stdout=said,
                                     stderr=said, start_new_session=True)  # fmt: skip
        try:
            yield following
        finally:
            following.kill()
            following.wait()
            print((job.parent / "said").read_text())


def goes_on(folder: Path, number: str) -> None:
    """Wait until another attempt has resumed."""
    wait_until(lambda: "resuming after step" in log(folder, number), "the run did not go on", seconds=150)


def test_a_job_trains_on_the_nodes_of_its_table_and_avoids_one_that_is_down(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = write_job(tmp_path, 20, dp=2)
    (tmp_path / "witness").mkdir()
    (tmp_path / "witness" / "sitecustomize.py").write_text(WITNESS.format(file=str(tmp_path / "seen")))
    path = f"{tmp_path / 'witness'}:{environment(cluster)['PYTHONPATH']}"
    ask(cluster, "scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        printed = begin(cluster, job, variables={"PYTHONPATH": path})
    finally:
        ask(cluster, "scontrol", "update", "NodeName=n2", "State=RESUME")
    assert "trained 20 steps" in " ".join(printed)
    table = RankTable.read(tmp_path / "runs" / "job" / "rank_table.json")
    assert "n2" not in table.hosts
    seen = {tuple(line.split()) for line in (tmp_path / "seen").read_text().splitlines()}
    assert seen == {(str(rank), str(rank), table.host_of(rank)) for rank in range(4)}
    [attempt] = read_attempts(tmp_path / "runs" / "job")
    assert (attempt.outcome, attempt.world, attempt.hosts) == ("finished", 4, table.hosts)
    assert (attempt.resumed, attempt.step, attempt.steps) == (0, 20, 20)
    assert attempt.plan
    assert attempt.restart_seconds


def test_a_rank_table_is_obeyed_in_its_own_order(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm itself would number these nodes by name."""
    hosts = ("n7", "n2", "n5")
    RankTable(hosts, ranks_per_node=2).write(tmp_path / slurm_nodes.PLACED)
    status, errors = run_bare(cluster, tmp_path, f"--nodelist={','.join(hosts)}", world=6)
    assert status == 0, errors
    seen = sorted((tmp_path / "seen").read_text().split("\n")[:-1])
    assert seen == [f"{rank} {rank // 2} {hosts[rank // 2]}" for rank in range(6)]


def test_without_a_table_nodes_of_one_switch_are_neighbours(cluster: SlurmCluster, tmp_path: Path) -> None:
    status, errors = run_bare(cluster, tmp_path, "--nodes=4", world=4)
    assert status == 0, errors
    table = RankTable.read(tmp_path / NAME)
    leaf = {node: (int(node[1:]) - 1) // 2 for node in cluster.nodes}
    assert [leaf[host] for host in table.hosts] == sorted(leaf[host] for host in table.hosts)


def test_a_run_outlives_a_node_and_saves_when_it_is_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    home = tmp_path / "runs" / "job"
    with running(cluster, tmp_path) as number:
        first = RankTable.read(home / "rank_table.json").hosts
        cluster.cut(first[1])  # not the node of the batch script
        goes_on(tmp_path, number)
        second = RankTable.read(home / "rank_table.json").hosts
        assert first[1] not in second
        assert int(fields(cluster, number)["Restarts"]) >= 1
        newest = saved_steps(tmp_path)[-1]
        wait_until(lambda: saved_steps(tmp_path)[-1] > newest, "no further checkpoint was saved", seconds=90)
    assert saved_steps(tmp_path)[-1] == stopped_after(tmp_path), "the last checkpoint is the one of the stop"
    assert not (home / "lock.json").exists()
    before, *_, last = read_attempts(home)
    assert before.hosts == first
    assert before.outcome in ("failed", "cut off")
    assert (last.outcome, last.hosts) == ("stopped", second)
    assert 0 < last.resumed <= before.step
    assert last.wait_seconds
    assert (home / "logs" / f"attempt-{before.attempt}" / "rank-0.log").exists()


def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    home = tmp_path / "runs" / "job"
    with running(cluster, tmp_path, "run.hang_deadline=4") as number:
        os.kill(pid_of(1, home), signal.SIGSTOP)
        goes_on(tmp_path, number)
        wait_until(lambda: read_attempts(home)[-1].steps > 0, "it does no steps", seconds=60)
        first, second = read_attempts(home)
        assert (first.outcome, first.cause, first.ranks) == ("failed", "stopped", (1,))
        assert (second.outcome, second.attempt) == ("running", 2)
        assert read_hang(home / "logs" / "attempt-1" / "hang.json")[0].cause == "stopped"


def test_one_ctrl_c_saves_a_followed_run_on_all_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """One that came to the launcher from every node would be taken for a second one, which saves
    nothing."""
    with followed(cluster, write_job(tmp_path, 100_000)) as following:
        wait_until(lambda: saved_steps(tmp_path), "no checkpoint was saved", seconds=90)
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == 130
    printed = (tmp_path / "said").read_text()
    assert "stopping after this step; the run is saved first" in printed, printed
    assert "ending all ranks at once" not in printed
    assert saved_steps(tmp_path)[-1] == stopped_after(tmp_path), "the last checkpoint is the one of the stop"


def test_srun_itself_starts_ranks_in_the_order_of_a_table(cluster: SlurmCluster, tmp_path: Path) -> None:
    """No launcher of ours: ranks are who srun says, then who the table has on their host."""
    job = write_job(tmp_path, 10)
    argv = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-P", "-m", "plait.train.worker", str(job)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment(cluster),
                          timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 10 steps" in done.stdout
    RankTable(("n2", "n1"), ranks_per_node=1).write(tmp_path / "table.json")
    env = environment(cluster) | {"PLAIT_RANK_TABLE": str(tmp_path / "table.json")}
    argv = [*argv[:1], "--nodelist=n1,n2", *argv[1:], "train.steps=20"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 10" in done.stdout and "trained" in done.stdout
    assert saved_steps(tmp_path)[-1] == 20


def test_chained_jobs_go_on_where_a_short_time_limit_ends_one(cluster: SlurmCluster, tmp_path: Path) -> None:
    options = ("slurm.nodes=2", "slurm.chain=true", "slurm.time=1", "slurm.signal_time=30")
    with followed(cluster, write_job(tmp_path, 1_000_000), *options) as following:
        text = tmp_path / "said"
        wait_until(lambda: "resuming after step" in text.read_text(), "no job went on", seconds=180)
        newest = saved_steps(tmp_path)[-1]
        wait_until(lambda: saved_steps(tmp_path)[-1] > newest, "no further checkpoint was saved", seconds=60)
        following.send_signal(signal.SIGINT)
        assert following.wait(90) != 0
    wait_until(lambda: not ask(cluster, "squeue", "-h", "-o", "%A").strip(), "a job is left", seconds=60)
    jobs = {log.name for log in (tmp_path / "runs" / "job" / "logs").glob("slurm-*.log")}
    attempts = read_attempts(tmp_path / "runs" / "job")
    assert len(jobs) == len(attempts) >= 2
    assert [one.outcome for one in attempts] == ["stopped"] * len(attempts)
    trained = [one for one in attempts if one.resumed >= 0]  # on a busy machine a start may take all of its time
    assert len(trained) >= 2
    assert all(later.resumed == one.step for one, later in pairwise(trained)), "nothing is done twice"


def test_trials_are_an_array_of_jobs(cluster: SlurmCluster, tmp_path: Path) -> None:
    """As docs/slurm.md has it."""
    write_job(tmp_path, 10)
    (tmp_path / "trials.sh").write_text(f"""#!/bin/bash
#SBATCH --array=1-2
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive --output=trial-%a.log
exec {sys.executable} -m plait.cli.main train job.toml run.name=trial-$SLURM_ARRAY_TASK_ID \\
    train.seed=$SLURM_ARRAY_TASK_ID --on slurm
""")
    done = subprocess.run(["sbatch", "--wait", "trials.sh"], check=False, capture_output=True, text=True, cwd=tmp_path,
                          env=environment(cluster), timeout=240)  # fmt: skip
    logs = [(tmp_path / f"trial-{task}.log").read_text() for task in (1, 2)]
    assert done.returncode == 0, logs
    first, second = (read_attempts(tmp_path / "runs" / f"trial-{task}") for task in (1, 2))
    assert first[0].outcome == second[0].outcome == "finished"
    assert len(first) == len(second) == 1 and not {*first[0].hosts} & {*second[0].hosts}
    losses = [[line.split("loss ")[1].split()[0] for line in log.splitlines() if "loss" in line] for log in logs]
    assert losses[0] != losses[1] and len(losses[0]) == len(losses[1]) == 2, "seeds are their own"


def test_a_spare_node_takes_a_lost_ones_place_in_the_same_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    home = tmp_path / "runs" / "job"
    with running(cluster, tmp_path, "slurm.nodes=2", "slurm.spares=1") as number:
        first = RankTable.read(home / "rank_table.json").hosts
        batch = fields(cluster, number)["BatchHost"]
        assert len(first) == 2 and int(fields(cluster, number)["NumNodes"]) == 3
        lost = next(host for host in first if host != batch)
        cluster.cut(lost)
        goes_on(tmp_path, number)
        second = RankTable.read(home / "rank_table.json").hosts
        assert lost not in second and len(second) == 2 and set(second) & set(first)
        assert fields(cluster, number)["Restarts"] == "0", "Slurm has not taken it back"
        assert f"without {lost}" in log(tmp_path, number)
        before, after = read_attempts(home)
        assert (before.outcome, before.hosts, after.hosts) == ("failed", first, second)
        assert f"without {lost}" in after.changed or after.changed == ""
