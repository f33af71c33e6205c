"""What cluster managers and other starters of ranks say in environment variables: who this rank, pod or task
is. The table of all variables is in ``core.base.env``."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from plait.core.base import lab_hosts
from plait.core.base.env import number_in
from plait.core.base.errors import LaunchError


@dataclass(frozen=True)
class Starter:
    """Of ranks, that sets no variables of torchrun's. rank, world_size, local_rank: variables that it sets
    for each. local_world_size: likewise; ``per_node`` has all nodes', as in ``4(x2),2``, of which ``node``
    says which. nodes: those of all, a host list."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""
    per_node: str = ""
    node: str = ""
    nodes: str = ""


STARTERS = (
    # https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    Starter("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # Hydra, of MPICH and Intel MPI: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
    Starter("mpirun (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # srun(1), OUTPUT ENVIRONMENT VARIABLES: those of a step are not set in a batch script
    Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", per_node="SLURM_STEP_TASKS_PER_NODE",
            node="SLURM_NODEID", nodes="SLURM_STEP_NODELIST"),
)  # fmt: skip
"""In the order in which they are looked for: a step of srun's may start mpirun's daemons."""


def starter_of(environ: Mapping[str, str] = os.environ) -> Starter | None:
    """Who has started this rank, if it is not torchrun, ``plait train`` or a person."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return None
    found = [one for one in STARTERS if one.rank in environ and one.world_size in environ]
    # srun --mpi=pmi2 sets MPICH's variables of a rank beside its own, and not those of its place on a node
    return next((one for one in found if one.local_rank in environ), found[0] if found else None)


def started_values(starter: Starter, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a starter has set, by the names of its fields."""
    names = {name: getattr(starter, name) for name in ("rank", "world_size", "local_rank", "local_world_size",
                                                       "per_node", "node", "nodes")}  # fmt: skip
    return {name: environ[key] for name, key in names.items() if key and key in environ}


def chosen_rank_table(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The rank table by which ranks are ordered that somebody else has started."""
    return Path(chosen) if (chosen := environ.get("PLAIT_RANK_TABLE")) else None


def agent_variable(where: str) -> dict[str, str]:
    """The variable that tells a node's agent where the launcher is, and by what word it knows its agents."""
    return {"PLAIT_AGENT": where}


def granted(gpus: int) -> dict[str, str]:
    """The variable that tells a node's ranks of how many GPUs a cluster manager was asked for them."""
    return {"PLAIT_GPUS": str(gpus)} if gpus else {}


def granted_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """For how many GPUs of this node a cluster manager was asked; 0 if for none, or if there is none."""
    return number_in(environ, "PLAIT_GPUS", 0)


def take_agent(environ: MutableMapping[str, str] = os.environ) -> str:
    """Where the launcher is, for this process only."""
    if "PLAIT_AGENT" not in environ:
        raise LaunchError("PLAIT_AGENT is not set: agents are started by a launcher, such as plait train --on slurm.")
    return environ.pop("PLAIT_AGENT")


def this_host(environ: Mapping[str, str] = os.environ) -> str:
    """What this machine is called: by a lab, where we are on one of its hosts, by the cluster manager, where
    one runs us, else by itself."""
    if environ.get("PLAIT_LAB") and (host := lab_hosts.here()):
        return host
    if environ.get("PLAIT_RUN"):
        unbound = f"{environ['PLAIT_RUN']}-{task_number(environ)}"
        by_nodes = environ.get("PLAIT_HOSTS") or environ.get("PLAIT_BY_NODES")
        return environ.get("PLAIT_NODE", unbound) if by_nodes else unbound
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def cluster_job(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """The cluster manager's job that we are in, and how often it was started before; empty outside of one."""
    if run := environ.get("PLAIT_RUN"):
        return f"kubernetes/{run}", number_in(environ, "PLAIT_ATTEMPT", 0)
    if not (job := environ.get("SLURM_JOB_ID")):
        return "", 0
    return f"{environ.get('SLURM_CLUSTER_NAME', 'slurm')}/{job}", number_in(environ, "SLURM_RESTART_COUNT", 0)


def slurm_job(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Slurm's number of the job that we are in, and its nodes; empty outside of one."""
    return environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")


def sbatch_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Options of sbatch that the user's environment says (sbatch(1), INPUT ENVIRONMENT VARIABLES)."""
    return {name: value for name, value in environ.items() if name.startswith("SBATCH_")}


def forget(names: Iterable[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Have this process, and all that it starts, know nothing of some variables."""
    for name in names:
        environ.pop(name, None)


def task_number(environ: Mapping[str, str] = os.environ) -> int:
    """The cluster manager's number of this agent: Slurm's of a task, Kubernetes' of a pod; -1 outside of
    both."""
    return number_in(environ, "SLURM_PROCID", number_in(environ, "JOB_COMPLETION_INDEX", -1))


@dataclass(frozen=True)
class PodEnv:
    """A pod of a run. run: its name. hosts: the run's nodes as a host list; empty where the cluster has
    chosen them. address: this pod's. files: folder of what the launcher has sent. ended: where to say how the
    run has ended."""

    run: str
    hosts: str
    address: str
    files: Path
    ended: Path

    @staticmethod
    def read(environ: MutableMapping[str, str] = os.environ) -> PodEnv:
        """From this process's environment, which from now on says which start of the run this is. Raises
        LaunchError outside of a pod."""
        names = ("PLAIT_RUN", "PLAIT_POD_ADDRESS", "PLAIT_FILES", "PLAIT_ENDED")
        if missing := [name for name in names if not environ.get(name)]:
            raise LaunchError(f"{', '.join(missing)} not set: pods are made by plait train --on kubernetes.")
        environ["PLAIT_ATTEMPT"] = str(int(time.time()))  # a pod begins only after the one before it has ended
        run, address, files, ended = (environ[name] for name in names)
        return PodEnv(run, environ.get("PLAIT_HOSTS", ""), address, Path(files), Path(ended))


def own_address(environ: Mapping[str, str] = os.environ) -> str:
    """Where this pod is reached; empty outside of one."""
    return environ.get("PLAIT_POD_ADDRESS", "")
