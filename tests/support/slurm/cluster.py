"""Emulated Slurm clusters, started and ended.

A cluster is a folder of files and a keeper (``keeper.py``), which runs until it is told to end.
Whoever sets SLURM_CONF to the folder's ``slurm.conf`` speaks to it with Slurm's own commands.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from plait.core.base.process import reserved_port
from plait.lab.registry import start_time
from tests.support.slurm.files import SlurmSpec, cgroup_conf, gres_conf, hosts_file, slurm_conf
from tests.support.slurm.keeper import PACKAGES, program

REPOSITORY = Path(__file__).resolve().parents[3]
READY = 30.0
"""Seconds that all nodes have to be idle in."""


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster that runs. started: the keeper's, in clock ticks since boot: with the pid, one
    process for ever."""

    folder: Path
    keeper: int
    started: int
    nodes: tuple[str, ...]

    @property
    def conf(self) -> Path:
        """The file to which SLURM_CONF must point."""
        return self.folder / "slurm.conf"

    @property
    def variables(self) -> dict[str, str]:
        """What to set so that Slurm's commands, and Plait, speak to this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    @property
    def alive(self) -> bool:
        """Whether its keeper runs."""
        return start_time(self.keeper) == self.started

    def states(self) -> dict[str, str]:
        """The state of every node, as ``sinfo`` says it; empty if the controller does not
        answer."""
        argv = [program("sinfo"), "-h", "-N", "-o", "%N %t"]
        with suppress(subprocess.SubprocessError):
            said = subprocess.run(
                argv, check=True, capture_output=True, text=True, env={**os.environ, **self.variables}, timeout=10.0
            )
            return dict(line.split() for line in said.stdout.splitlines())
        return {}

    def cut(self, node: str) -> None:
        """Switch a node off: everything that runs on it is killed. Slurm finds out after some
        seconds."""
        with suppress(ProcessLookupError):
            os.kill(json.loads((self.folder / "pids.json").read_text())[node], signal.SIGKILL)

    def heal(self) -> None:
        """Switch on every node that is off."""
        os.kill(self.keeper, signal.SIGHUP)


def why_not() -> str | None:
    """Why this machine cannot run an emulated Slurm; None if it can."""
    try:
        for name in PACKAGES:
            program(name)
    except LookupError as error:
        return str(error)
    if os.geteuid() != 0:
        return "an emulated Slurm needs root: its nodes are namespaces, and its daemons start jobs of any user."
    argv = [program("unshare"), "--uts", "--mount", "--pid", "--fork", "--mount-proc", "hostname", "plait-try"]
    tried = subprocess.run(argv, check=False, capture_output=True, text=True)
    return f"an emulated Slurm needs namespaces ({tried.stderr.strip()})." if tried.returncode else None


def up(spec: SlurmSpec) -> SlurmCluster:
    """Start a cluster and wait until its nodes are idle. Raises RuntimeError where they do not
    become so."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket may have 107 bytes
    (folder / "state").mkdir()
    with ExitStack() as held:
        ports = [held.enter_context(reserved_port()) for _ in range(1 + len(spec.nodes))]
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for name, text in {
            "slurm.conf": slurm_conf(folder, spec, ports[0], ports[1:]),
            "gres.conf": gres_conf(spec),
            "cgroup.conf": cgroup_conf(spec),
            "topology.conf": spec.topology,
            "hosts": hosts_file(spec.nodes),
            "nodes.json": json.dumps(spec.nodes),
        }.items():
            (folder / name).write_text(text)
        argv = [sys.executable, "-m", "tests.support.slurm.keeper", str(folder)]
        path = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
        started = subprocess.run(
            argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd="/",
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        keeper = int(started.stdout)
        cluster = SlurmCluster(folder, keeper, start_time(keeper) or 0, spec.nodes)
        try:
            _wait(cluster)
        except BaseException:
            down(cluster)
            raise
        return cluster


def down(cluster: SlurmCluster) -> None:
    """End a cluster, its jobs and everything on its nodes, and remove its files."""
    if cluster.alive:
        handle = os.pidfd_open(cluster.keeper)
        try:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            deadline = time.monotonic() + 10
            while cluster.alive and time.monotonic() < deadline:
                time.sleep(0.02)
            if cluster.alive:  # what it has started dies with it
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    _forget_groups(cluster)
    shutil.rmtree(cluster.folder, ignore_errors=True)


def _forget_groups(cluster: SlurmCluster) -> None:
    """Remove the control groups that its nodes have left, if they had any; slurmd leaves them where
    it is killed."""
    if not (cluster.folder / "cgroup.conf").read_text():
        return
    for node in cluster.nodes:
        for group in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):  # of another cluster, or of processes that end just now
                    os.rmdir(folder)


def _wait(cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline and cluster.alive:
        states = cluster.states()
        if len(states) == len(cluster.nodes) and set(states.values()) == {"idle"}:
            return
        time.sleep(0.1)
    raise RuntimeError(f"the emulated Slurm did not come up within {READY:.0f} s: {_last_words(cluster.folder)}")


def _last_words(folder: Path) -> str:
    for name in ("keeper.out", "munged.out", "slurmctld.out", *(path.name for path in folder.glob("*.out"))):
        lines = (folder / name).read_text(errors="replace").splitlines() if (folder / name).exists() else []
        if wrong := [line for line in lines if "error" in line.lower() and "mpi" not in line.lower()]:
            return f"{name.removesuffix('.out')} says: {wrong[-1]}"
    return "its daemons say nothing"
