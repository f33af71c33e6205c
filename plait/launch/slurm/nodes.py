"""The nodes of a Slurm job: which ones have ranks, in which order, and which replace failed ones;
and the step that starts an agent on each.

Flags of pyxis: https://github.com/NVIDIA/pyxis/wiki/Usage; of Apptainer: ``apptainer exec --help``
of 1.3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from plait.core.base import programs
from plait.core.base.cluster_env import slurm_job
from plait.core.base.errors import JobError, LaunchError, PlacementError, PlaitError, RankFailure
from plait.core.base.process import command_of
from plait.core.job.cluster_settings import SlurmSection
from plait.core.job.plan import Plan
from plait.core.topology.hostlist import fold
from plait.core.topology.rank_table import NAME, RankTable
from plait.formats.slurm.lines import in_topological_order
from plait.formats.slurm.options import resources
from plait.launch.run_folder import abandoned_hosts
from plait.launch.slurm import commands as slurm
from plait.launch.watch import say

PLACED = "placed_ranks.json"
"""Name of the user's rank table in the run's folder."""
OF_HOSTS = frozenset({"killed", "ended", "crashed", "stopped", "silent", "host code"})
"""Causes of failures for which a rank's machine may be to blame."""


class GrantedNodes(NamedTuple):
    """Nodes that a cluster manager granted to a job. hosts: names of the usable ones. nodes: how
    many of them to use. each: ranks per node."""

    hosts: tuple[str, ...]
    nodes: int
    each: int


Order = Callable[[Plan, GrantedNodes], tuple[Sequence[str], str]]
"""A function that returns the best order of nodes for a plan, and a sentence that explains it. It
raises PlaitError if there is none."""


@dataclass
class JobNodes:
    """The nodes of a Slurm job: nodes with ranks, and spares. granted: their names, in Slurm's
    order. spares: how many are kept without ranks."""

    folder: Path
    granted: Sequence[str]
    world_size: int
    spares: int = 0
    lost: set[str] = field(default_factory=set[str])
    """Names of nodes that have failed and are not used any more."""

    def table(self, plan: Plan | None = None, order: Order | None = None) -> RankTable:
        """Return the rank table. The user's table is used if there is one, with replacements for
        its lost hosts; otherwise, the remaining nodes in the best known order. Raises
        PlacementError if the table does not fit the job."""
        left = [node for node in self.granted if node not in self.lost]
        if (self.folder / PLACED).is_file():
            table = RankTable.read(self.folder / PLACED)
            replaced = self.lost | (abandoned_hosts(self.folder, slurm_job()[0]) - {*self.granted})
            if missing := [host for host in table.hosts if host not in {*self.granted, *replaced}]:
                raise PlacementError(
                    f"The rank table has {', '.join(missing)}, which this Slurm job was not given. Submit the run anew."
                )
            spare = [node for node in left if node not in table.hosts]
            for index, host in enumerate(table.hosts):
                if host in replaced:
                    table = table.with_host(index, spare.pop(0))
                    say(f"{table.hosts[index]} takes the place of {host}, which was lost")
        else:
            count = len(self.granted) - min(self.spares, len(self.granted) - 1)
            if self.world_size % count:
                problem = f"{self.world_size} ranks do not spread evenly over the {count} nodes of this job."
                raise PlacementError(f"{problem} Ask for a number of nodes that divides them.")
            table = self._ordered(left, count, plan, order)
        if table.world_size != self.world_size:
            raise PlacementError(
                f"The rank table has {table.world_size} ranks, and the run needs {self.world_size}. Give its own table."
            )
        table.write(self.folder / NAME)
        return table

    def _ordered(self, left: Sequence[str], count: int, plan: Plan | None, order: Order | None) -> RankTable:
        """Return a table of ``count`` of the remaining nodes, in the placer's order, or else in the
        order of the switches."""
        each = self.world_size // count
        if order and plan and count > 1:
            try:
                hosts, said = order(plan, GrantedNodes(tuple(left), count, each))
                say(said)
                return RankTable(tuple(hosts), each, plan.key)
            except PlaitError as error:
                say(f"nodes are used in the order of the switches, because the placer found no order: {error}")
        ordered = list(left)
        with suppress(LaunchError, JobError, ValueError):  # a cluster without a topology, or with an unreadable one
            ordered = in_topological_order(left, slurm.command("scontrol", "show", "topology"))
        return RankTable(tuple(ordered[:count]), each)

    def mend(self, failure: RankFailure, table: RankTable) -> str:
        """Exclude the nodes that caused ``failure``, and return a description of the change; empty
        if no node failed, or too few nodes are left."""
        if not self.spares:
            return ""
        if failure.cause in OF_HOSTS:
            self.lost |= {table.host_of(rank) for rank in failure.ranks}
        self.lost |= slurm.nodes_down(self.granted)
        bad = [host for host in table.hosts if host in self.lost]
        free = [node for node in self.granted if node not in self.lost and node not in table.hosts]
        return f"without {fold(bad)}" if 0 < len(bad) <= len(free) else ""


CONFLICTING_VARIABLES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
"""Environment variables that srun treats as ``--nodes``."""


def srun(settings: SlurmSection, folder: Path, nodes: int, gpus: int) -> list[str]:
    """Return the srun command of a step with an agent on each of ``nodes``. folder: of the run.
    gpus: per node.

    With ``--exclusive``, a step gets only the GPUs that it requests. It gets all CPUs and memory
    without a request; with ``--cpus-per-task`` it would get no more than that (srun(1) since 22.05,
    --exact). The host list alone gives the number of nodes: srun 24.11 refuses ``--nodes`` with a
    host list, also as a variable of the job (``CONFLICTING_VARIABLES``).
    """
    inside = settings.container and settings.container_runtime == "pyxis"
    return [
        "srun", f"--ntasks={nodes}", "--distribution=arbitrary", "--overlap",
        "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", f"--cpu-bind={settings.cpu_bind}",
        *(["--no-kill"] if settings.spares else []),
        *([f"--gres={gres}"] if (gres := resources(settings, gpus)) else []),
        *([f"--container-image={settings.container}", f"--container-mounts={_mounts(settings, folder)}"]
          if inside else []),
        *(settings.container_options if inside else ()),
        *settings.srun_options,
        *_in_container(settings, folder, gpus, command_of(programs.AGENT, python=python(settings))),
    ]  # fmt: skip


def python(settings: SlurmSection) -> str:
    """Return the interpreter of agents and ranks: this process's, or the container's."""
    return settings.python if settings.container else sys.executable


def _in_container(settings: SlurmSection, folder: Path, gpus: int, argv: Sequence[str]) -> list[str]:
    if not settings.container or settings.container_runtime == "pyxis":
        return [*argv]
    own = ["--nv"] if gpus and "--rocm" not in settings.container_options else []
    bind = ["--bind", _mounts(settings, folder)]
    return ["apptainer", "exec", *own, *bind, *settings.container_options, settings.container, *argv]


def _mounts(settings: SlurmSection, folder: Path) -> str:
    """Return the mounts in the format of both runtimes: ``FROM:TO``, joined by commas."""
    wanted = [str(folder.absolute()), *settings.container_mounts]
    return ",".join(one if ":" in one else f"{one}:{one}" for one in wanted)
