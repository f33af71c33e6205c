"""Emulated Slurm clusters of this user: started, found again by other processes, and ended.

A cluster is a folder of files and a keeper, which runs until it is told to end (``plait.lab.slurm.keeper``).
Whoever sets SLURM_CONF to the folder's ``slurm.conf`` speaks to it with Slurm's own commands.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from plait.core.base import programs
from plait.core.base.codec.json_text import read_table
from plait.core.base.env import inherited
from plait.core.base.errors import JobError, LaunchError
from plait.core.base.process import command_of, reserved_port
from plait.lab.environment import runtime_dir
from plait.lab.registry import start_time
from plait.lab.slurm.files import SlurmSpec, cgroup_conf, gres_conf, hosts_file, slurm_conf
from plait.lab.slurm.programs import ask, program, why_not

READY = 30.0
"""Seconds that all nodes have to be idle in."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster that runs. started: the keeper's, in clock ticks since boot: with the pid, one process for
    ever."""

    name: str
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
        """The state of every node, as ``sinfo`` says it; empty if the controller does not answer."""
        said = ask([program("sinfo"), "-h", "-N", "-o", "%N %t"], inherited() | self.variables)
        return dict(line.split() for line in (said or "").splitlines())

    def cut(self, node: str) -> None:
        """Switch a node off: everything that runs on it is killed. Slurm finds out after some seconds."""
        pid = read_table(self.folder / "pids.json").get(self._checked(node))
        if not isinstance(pid, int):
            raise LaunchError(f"{self.folder / 'pids.json'} names no process of {node}: start the cluster anew.")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def heal(self) -> None:
        """Switch on every node that is off."""
        os.kill(self.keeper, signal.SIGHUP)

    def _checked(self, node: str) -> str:
        if node not in self.nodes:
            raise JobError(f"there is no node {node!r}", fix=f"This cluster has {', '.join(self.nodes)}")
        return node


def up(spec: SlurmSpec, name: str = "slurm") -> SlurmCluster:
    """Start a cluster and wait until its nodes are idle. Raises LaunchError where that cannot be."""
    if not _NAME.fullmatch(name):
        raise JobError(f"{name!r} cannot name a cluster", fix="Use small letters, digits, '_' and '-'")
    if any(cluster.name == name for cluster in running()):
        raise JobError(f"a cluster called {name!r} is running already", fix="Choose another with --name")
    if reason := why_not():
        raise LaunchError(reason)
    folder = _folder() / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "state").mkdir(parents=True)
    with ExitStack() as held:
        _write(folder, name, spec, [held.enter_context(reserved_port()) for _ in range(1 + len(spec.nodes))])
        return _started(folder, name, spec)


def _started(folder: Path, name: str, spec: SlurmSpec) -> SlurmCluster:
    """The cluster, once all its nodes are idle."""
    started = subprocess.run(
        command_of(programs.KEEPER, str(folder)),
        check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd="/",
        env=inherited() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    keeper = int(started.stdout)
    cluster = SlurmCluster(name, folder, keeper, start_time(keeper) or 0, spec.nodes)
    note = {"name": name, "keeper": keeper, "started": cluster.started, "nodes": spec.nodes}
    (folder / "cluster.json").write_text(json.dumps(note))
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
    """Remove the control groups that its nodes have left, if they had any; slurmd leaves them where it is
    killed."""
    if not (cluster.folder / "cgroup.conf").read_text():
        return
    for node in cluster.nodes:
        for group in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):  # of another cluster, or of processes that end just now
                    os.rmdir(folder)


def running() -> list[SlurmCluster]:
    """The clusters of this user, by name; what dead ones left is removed."""
    from plait.core.base.codec.data import decode  # pydantic: a lab needs Python alone

    found: list[SlurmCluster] = []
    for file in sorted(_folder().glob("*/cluster.json")):
        try:
            note = read_table(file)
            cluster = decode(SlurmCluster, note | {"folder": file.parent}, others=True)
        except (OSError, ValueError, JobError):  # half written, or none of ours
            continue
        if cluster.alive:
            found.append(cluster)
        elif note["keeper"]:
            shutil.rmtree(file.parent, ignore_errors=True)
    return found


def find(name: str | None = None) -> SlurmCluster:
    """The running cluster of that name, or the only one."""
    clusters = [cluster for cluster in running() if name in (None, cluster.name)]
    if len(clusters) == 1:
        return clusters[0]
    if clusters:
        raise JobError("several clusters are running", fix=f"Name one: {', '.join(one.name for one in clusters)}")
    what = f"no cluster called {name!r} is running" if name else "no emulated cluster is running"
    raise JobError(what, fix="Start one with: plait lab slurm up")


def _write(folder: Path, name: str, spec: SlurmSpec, ports: Sequence[int]) -> None:
    """Its configuration. ports: of the controller, then of every node."""
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    (folder / "slurm.conf").write_text(slurm_conf(folder, name, spec, ports[0], ports[1:]))
    (folder / "gres.conf").write_text(gres_conf(spec))
    (folder / "cgroup.conf").write_text(cgroup_conf(spec))
    (folder / "topology.conf").write_text(spec.topology)
    (folder / "hosts").write_text(hosts_file(spec.nodes))
    (folder / "cluster.json").write_text(json.dumps({"name": name, "keeper": 0, "started": 0, "nodes": spec.nodes}))


def _wait(cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline and cluster.alive:
        states = cluster.states()
        if len(states) == len(cluster.nodes) and set(states.values()) == {"idle"}:
            return
        time.sleep(0.1)
    raise LaunchError(f"the emulated Slurm did not come up within {READY:.0f} s: {_last_words(cluster.folder)}")


def _last_words(folder: Path) -> str:
    for name in ("keeper.out", "munged.out", "slurmctld.out", *(path.name for path in folder.glob("*.out"))):
        lines = (folder / name).read_text(errors="replace").splitlines() if (folder / name).exists() else []
        if wrong := [line for line in lines if "error" in line.lower() and "mpi" not in line.lower()]:
            return f"{name.removesuffix('.out')} says: {wrong[-1]}"
    return "its daemons say nothing"


def _folder() -> Path:
    folder = runtime_dir() / "slurm"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
