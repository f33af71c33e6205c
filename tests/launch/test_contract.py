"""What every launcher owes: each joins by one row of ``ROWS``.

Ranks start with the right environment, what they print is seen, one that fails ends all, signals
pass, and nothing is left behind. A rank here needs no torch, so that a row costs little more than
the launcher itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.kubernetes.runs import environment as kubernetes_environment
from tests.support.lab import children, wait_until, why_no_lab
from tests.support.ports import own_port
from tests.support.slurm import REPOSITORY, environment

WORLD = 4
TIMEOUT = 60.0
MARK = "PLAIT_CONTRACT"
"""A variable that every process of a test has in its environment."""

RANK = """
import json, os, socket, sys, time
from pathlib import Path
from plait.core.runs.channel import Channel
from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv, take_launcher
from plait.train.machine.control import Control
from plait.train.machine.rank_process import run_and_end

def main():
    folder, kind, rank = Path(sys.argv[1]), sys.argv[2], RankEnv.read()
    line = take_launcher()
    with Control(None if line is None else Channel.inherited(line)) as control:
        control.save_from_now_on()
        control.set_activity("step 1", step=0)
        said = {name: getattr(rank, name) for name in ("world_size", "local_rank", "local_world_size", "node_rank",
                                                       "master_addr", "master_port")}
        task = os.environ.get("SLURM_PROCID")
        said |= {"pid": os.getpid(), "host": this_host()}
        if control.launched:
            control.call_store("set", [f"met/{rank.rank}"], ["aGVsbG8="])
            met = control.call_store("wait", [f"met/{one}" for one in range(rank.world_size)], seconds=60)
            said["met"] = met and list(met.values)
        said |= {"task": None if task is None else int(task), "marked": "MARK" in os.environ}
        draft = folder / f"draft{rank.rank}"
        draft.write_text(json.dumps(said))
        draft.rename(folder / f"rank{rank.rank}")
        print(f"rank {rank.rank} says hello", flush=True)
        if kind == "fail" and rank.rank == 1:
            while len(list(folder.glob("rank*"))) < rank.world_size:
                time.sleep(0.02)
            print("plait-error: rank 1 wants no more", file=sys.stderr, flush=True)
            return 3
        while not control:
            time.sleep(0.02)
        (folder / f"saved{rank.rank}").touch()
        return control.status

if __name__ == "__main__":
    run_and_end(main)
""".replace("MARK", MARK)

LAUNCH = """
import os
import sys
from functools import partial
from pathlib import Path
from plait.core.base.errors import PlaitError
from plait.lab import Lab, LabSpec
from plait.launch.kubernetes import follow as kubernetes
from plait.launch.slurm import job as slurm_job
from plait.launch.local import local as warm
from plait.launch.kubernetes.api import KubernetesNamespace
from plait.launch.local.local import local_start, run_ranks
from tests.support.ports import own_port
from tests.support.kubernetes.runs import pod_run

how, folder, world, timeout, *argv = sys.argv[1:]
folder, world, timeout = Path(folder), int(world), float(timeout)
try:
    if how == "slurm":
        status = slurm_job.run(folder, argv, world, timeout=timeout)
    elif how == "lab":
        with Lab(LabSpec.parse(f"2x{world // 2}@1gbit")) as lab:
            status = run_ranks(partial(lab.popen, argv=argv), world, folder / "logs", timeout=timeout)
    elif how == "kubernetes":
        run = pod_run(
            folder, tuple(argv), world, name=f"plait-{folder.name}".replace("_", "-").lower()[:40],
            more={"nodes": 2, "max_restarts": 0, "env": (f"MARK={folder}",)},
        )
        cluster = KubernetesNamespace()
        kubernetes.submit(cluster, run)
        with kubernetes.queueing_signals(cluster) as signals:
            status = kubernetes.follow(cluster, run, signals)
    elif how == "warm":
        warm.usable_cores = lambda: 1
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(argv[2]).parent), *sys.path[1:]])  # the rank is a module
        with warm.warm_starts(Path(argv[2]).stem, argv[3:], world, own_port()) as starts:
            status = run_ranks(starts(), world, folder / "logs", timeout=timeout)
    else:
        status = run_ranks(local_start(argv, world, own_port()), world, folder / "logs", timeout=timeout)
except PlaitError as error:
    print(f"plait: {error}", file=sys.stderr)
    status = error.exit_status
sys.exit(status)
""".replace("MARK", MARK)


@dataclass(frozen=True)
class Row:
    """A launcher. per_node: ranks of each node. stopped: its exit status after SIGTERM."""

    command: Callable[[Sequence[str], Path], list[str]]
    per_node: int
    stopped: int = 143
    slurm: bool = False
    lab: bool = False
    kubernetes: bool = False


def ours(how: str, *before: str) -> Callable[[Sequence[str], Path], list[str]]:
    def command(argv: Sequence[str], folder: Path) -> list[str]:
        return [*before, sys.executable, "-c", LAUNCH, how, str(folder), str(WORLD), str(TIMEOUT), *argv]

    return command


def torchrun(argv: Sequence[str], folder: Path) -> list[str]:
    """Static ranks: its dynamic rendezvous would number hosts by name."""
    where = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={own_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={WORLD}", *argv[2:]]


SALLOC = ("salloc", "--quiet", "--nodes=2", "--exclusive")
ROWS = {
    "local": Row(ours("local"), per_node=WORLD),
    "warm": Row(ours("warm"), per_node=WORLD),
    "lab": Row(ours("lab"), per_node=2, lab=True),
    "slurm": Row(ours("slurm", *SALLOC), per_node=2, slurm=True),
    "kubernetes": Row(ours("kubernetes"), per_node=2, kubernetes=True),
    "torchrun": Row(torchrun, per_node=WORLD, stopped=1),
}


@dataclass
class Launched:
    """A launcher that runs."""

    row: Row
    folder: Path
    process: subprocess.Popen[str]

    def ended(self, seconds: float = 60.0) -> tuple[int, str, str]:
        """Its exit status, and what it has printed."""
        status = self.process.wait(timeout=seconds)
        return status, (self.folder / "output").read_text(), (self.folder / "errors").read_text()

    def launcher(self) -> int:
        """The process to send signals to: below salloc, which would end the job, it is a child."""
        if not self.row.slurm:
            return self.process.pid
        return children(self.process.pid)[0]

    def watcher(self) -> int:
        """The process that watches the ranks: in Kubernetes it is in a pod."""
        if not self.row.kubernetes:
            return self.launcher()
        heads = [pid for pid in _processes(self.folder) if _variable(pid, "JOB_COMPLETION_INDEX") == "0"
                 and b"plait.api.in_cluster" in Path(f"/proc/{pid}/cmdline").read_bytes()]  # fmt: skip
        return heads[0]

    def ready(self) -> bool:
        return len(list(self.folder.glob("rank[0-9]*"))) == WORLD


@pytest.fixture(params=ROWS)
def launch(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Launched]:
    row = ROWS[request.param]
    env: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_RUNTIME_DIR": str(tmp_path)}
    if row.slurm:
        env = environment(request.getfixturevalue("slurm"))
    if row.kubernetes:
        env = kubernetes_environment(request.getfixturevalue("kubernetes"))
    if row.lab and (reason := why_no_lab()):
        pytest.skip(reason)

    def start(kind: str) -> Launched:
        (tmp_path / "rank.py").write_text(RANK)
        argv = [sys.executable, "-B", str(tmp_path / "rank.py"), str(tmp_path), kind]
        with open(tmp_path / "output", "w") as output, open(tmp_path / "errors", "w") as errors:
            process = subprocess.Popen(
                row.command(argv, tmp_path), env={**env, MARK: str(tmp_path)}, cwd=tmp_path,
                stdout=output, stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip
        request.addfinalizer(lambda: _nothing_is_left(process, tmp_path))
        return Launched(row, tmp_path, process)

    return start


def _nothing_is_left(process: subprocess.Popen[str], folder: Path) -> None:
    if process.poll() is None:
        process.terminate()  # salloc ends its job then
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        wait_until(lambda: not _processes(folder), f"processes are left: {_processes(folder)}", seconds=20)
    finally:
        for pid in _processes(folder):
            os.kill(pid, signal.SIGKILL)


def _processes(folder: Path) -> list[int]:
    """Living processes with the mark of this test."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or not ours
            pass
    return found


def waiting(launch: Callable[[str], Launched]) -> Launched:
    """A launcher all of whose ranks have started."""
    run = launch("wait")
    wait_until(run.ready, "ranks did not start", seconds=60)
    return run


def test_one_that_fails_ends_all_and_is_named(launch: Callable[[str], Launched]) -> None:
    run = launch("fail")
    status, output, errors = run.ended()
    assert status != 0
    assert "rank 1 wants no more" in (output if run.row.kubernetes else errors)  # a pod's log has both
    assert run.row.stopped == 1 or status == 3


def test_ranks_start_with_the_right_environment_are_seen_and_save_at_a_signal(
    launch: Callable[[str], Launched],
) -> None:
    """Runs that end well are seen where jobs train, by every launcher."""
    run = waiting(launch)
    os.kill(run.launcher(), signal.SIGTERM)
    status, output, errors = run.ended()
    assert status == run.row.stopped, errors
    assert len(list(run.folder.glob("saved*"))) == WORLD
    said = [json.loads((run.folder / f"rank{rank}").read_text()) for rank in range(WORLD)]
    for rank, one in enumerate(said):
        assert (one["world_size"], one["local_world_size"]) == (WORLD, run.row.per_node)
        assert (one["node_rank"], one["local_rank"]) == divmod(rank, run.row.per_node)
        assert one["marked"]  # the user's own variables are there too
        assert run.row.stopped == 1 or one["met"] == ["aGVsbG8="] * WORLD  # at the launcher's store
    assert len({(one["master_addr"], one["master_port"]) for one in said}) == 1
    assert "rank 0 says hello" in output
    # what other ranks print is kept
    printed = output if run.row.stopped == 1 else (run.folder / "logs" / "rank-1.log").read_text()
    assert "rank 1 says hello" in printed


def test_a_rank_that_is_killed_is_named(launch: Callable[[str], Launched]) -> None:
    run = waiting(launch)
    os.kill(_rank(run.folder, 1), signal.SIGKILL)
    status, output, errors = run.ended()
    assert status == 1
    errors += output if run.row.kubernetes else ""
    assert "SIGKILL" in errors or "Signal 9" in errors
    assert "rank 1" in errors or "local_rank: 1" in errors


def test_nothing_outlives_a_launcher_that_is_killed(launch: Callable[[str], Launched]) -> None:
    run = waiting(launch)
    os.kill(run.watcher(), signal.SIGKILL)
    # Ranks that train are not ended by a signal here: they see that the line is cut. torchrun's have no line.
    if run.row.stopped == 1:
        for pid in _processes(run.folder):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not _processes(run.folder), "ranks are left", seconds=20)


def _variable(pid: int, name: str) -> str | None:
    """Of a process's environment."""
    pairs = [one.partition(b"=") for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    return next((value.decode() for key, _, value in pairs if key.decode() == name), None)


def _rank(folder: Path, rank: int) -> int:
    """The number by which this machine knows a rank's process."""
    for pid in _processes(folder):
        if _variable(pid, "RANK") == str(rank):
            return pid
    return json.loads((folder / f"rank{rank}").read_text())["pid"]  # forked: not by its first environment
