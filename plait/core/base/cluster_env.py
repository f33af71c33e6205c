"""Environment variables of cluster managers and MPI launchers: the identity of this rank, task or
pod. The table of all variables is in ``core.base.env``."""

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
    """A launcher of ranks that does not set torchrun's variables.

    rank, world_size, local_rank, local_world_size: names of the variables that the launcher sets
    for each rank. per_node: the variable with the local world sizes of all nodes, as in
    ``4(x2),2``, in place of local_world_size. node: the variable with this node's index in
    ``per_node``. nodes: the variable with all nodes, as a host list.
    """

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
    # srun(1), OUTPUT ENVIRONMENT VARIABLES: a step's variables are not set in a batch script
    Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", per_node="SLURM_STEP_TASKS_PER_NODE",
            node="SLURM_NODEID", nodes="SLURM_STEP_NODELIST"),
)  # fmt: skip
"""The known launchers, in the order of detection. mpirun comes before srun, whose step may start
mpirun's daemons."""


def starter_of(environ: Mapping[str, str] = os.environ) -> Starter | None:
    """Return the launcher that started this rank; None for torchrun, ``plait train`` or a start by
    hand."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return None
    found = [one for one in STARTERS if one.rank in environ and one.world_size in environ]
    # srun --mpi=pmi2 sets MPICH's rank variables besides its own, but not MPICH's local rank
    return next((one for one in found if one.local_rank in environ), found[0] if found else None)


def started_values(starter: Starter, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the values that a launcher set, keyed by the fields of ``Starter``."""
    names = {name: getattr(starter, name) for name in ("rank", "world_size", "local_rank", "local_world_size",
                                                       "per_node", "node", "nodes")}  # fmt: skip
    return {name: environ[key] for name, key in names.items() if key and key in environ}


def chosen_rank_table(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the rank table that orders ranks of another launcher; None if
    PLAIT_RANK_TABLE is not set."""
    return Path(chosen) if (chosen := environ.get("PLAIT_RANK_TABLE")) else None


def agent_variable(where: str) -> dict[str, str]:
    """Return the variable that gives a node's agent the launcher's address and the word that
    authenticates the agent."""
    return {"PLAIT_AGENT": where}


def gpus_variable(gpus: int) -> dict[str, str]:
    """Return the variable that gives a node's ranks the number of GPUs requested from the cluster
    manager; empty for 0 GPUs."""
    return {"PLAIT_GPUS": str(gpus)} if gpus else {}


def granted_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this node's GPUs requested from the cluster manager; 0 if none, or
    without a cluster manager."""
    return number_in(environ, "PLAIT_GPUS", 0)


def take_agent(environ: MutableMapping[str, str] = os.environ) -> str:
    """Return the launcher's address and remove its variable, so that child processes do not inherit
    it. Raises LaunchError if it is not set."""
    if "PLAIT_AGENT" not in environ:
        raise LaunchError("PLAIT_AGENT is not set: agents are started by a launcher, such as plait train --on slurm.")
    return environ.pop("PLAIT_AGENT")


def this_host(environ: Mapping[str, str] = os.environ) -> str:
    """Return this machine's name: the lab's if this is a lab host, else the cluster manager's if
    there is one, else the host name."""
    if environ.get("PLAIT_LAB") and (host := lab_hosts.here()):
        return host
    if environ.get("PLAIT_RUN"):
        unbound = f"{environ['PLAIT_RUN']}-{task_number(environ)}"
        by_nodes = environ.get("PLAIT_HOSTS") or environ.get("PLAIT_BY_NODES")
        return environ.get("PLAIT_NODE", unbound) if by_nodes else unbound
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def cluster_job(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return (job id of the cluster manager, number of the start, which grows with each start of
    the job: Slurm's restart count or the pod's start time in seconds); ("", 0) outside of a cluster
    job."""
    if run := environ.get("PLAIT_RUN"):
        return f"kubernetes/{run}", number_in(environ, "PLAIT_ATTEMPT", 0)
    if not (job := environ.get("SLURM_JOB_ID")):
        return "", 0
    return f"{environ.get('SLURM_CLUSTER_NAME', 'slurm')}/{job}", number_in(environ, "SLURM_RESTART_COUNT", 0)


def slurm_job(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return (Slurm's job id, its node list); empty texts outside of a Slurm job."""
    return environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")


def sbatch_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the options of sbatch that the user's environment sets (sbatch(1), INPUT ENVIRONMENT
    VARIABLES)."""
    return {name: value for name, value in environ.items() if name.startswith("SBATCH_")}


def forget(names: Iterable[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove some variables from the environment of this process and its future children."""
    for name in names:
        environ.pop(name, None)


def task_number(environ: Mapping[str, str] = os.environ) -> int:
    """Return the index of this node's agent in its cluster job: Slurm's task or Kubernetes' pod
    index; -1 outside of both."""
    return number_in(environ, "SLURM_PROCID", number_in(environ, "JOB_COMPLETION_INDEX", -1))


@dataclass(frozen=True)
class PodEnv:
    """A pod of a run. run: the run's name. hosts: the run's nodes as a host list; empty if the
    cluster chose the nodes. address: this pod's address. files: folder of the files that the
    launcher sent. ended: file for the message of how the run ended."""

    run: str
    hosts: str
    address: str
    files: Path
    ended: Path

    @staticmethod
    def read(environ: MutableMapping[str, str] = os.environ) -> PodEnv:
        """Return the pod's values from the environment, and set PLAIT_ATTEMPT there to the current
        time in seconds, which tells starts of the run apart. Raises LaunchError outside of a
        pod."""
        names = ("PLAIT_RUN", "PLAIT_POD_ADDRESS", "PLAIT_FILES", "PLAIT_ENDED")
        if missing := [name for name in names if not environ.get(name)]:
            raise LaunchError(f"{', '.join(missing)} not set: pods are made by plait train --on kubernetes.")
        environ["PLAIT_ATTEMPT"] = str(int(time.time()))  # a pod begins only after the one before it has ended
        run, address, files, ended = (environ[name] for name in names)
        return PodEnv(run, environ.get("PLAIT_HOSTS", ""), address, Path(files), Path(ended))


def own_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return this pod's address; empty outside of a pod."""
    return environ.get("PLAIT_POD_ADDRESS", "")
