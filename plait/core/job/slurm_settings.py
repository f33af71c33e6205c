"""What a job says of Slurm."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from plait.core.base.codec.data import Count, Natural, Section, Texts
from plait.core.base.errors import JobError
from plait.core.job.one_line import one_line_each

MOUNT = re.compile(r"/[^:,]*(:/[^:,]*(:[\w+]+)?)?")


class SlurmSection(Section):
    """What to ask Slurm for, with ``plait train --on slurm``."""

    partition: str = ""
    """Where to run; ``--on slurm:PARTITION`` does too. The cluster's default if empty."""
    nodes: Natural = 0
    """How many nodes. 0: as many as the job's ranks need, with as many on each as it has GPUs, or one."""
    gpus: Natural | Literal["auto"] = "auto"
    """GPUs of each node to ask for. ``auto``: one for every rank, unless ``run.device`` is ``"cpu"``, nodes
    have none, or ``options`` ask for GPUs. What was asked for is used: ranks that do not find it end."""
    cpus: Natural = 0
    """Processors of each node to ask for where nodes are shared. 0: ``run.threads`` for every rank."""
    mem: str = ""
    """Memory of each node to ask for, such as ``"200G"``. Empty: all of it where nodes are not shared, else
    what the partition gives."""
    gres: Texts = ()
    """Further resources of each node, such as ``"nic:2"``, for the job and for the step that starts ranks."""
    spares: Natural = 0
    """Nodes beside those that ranks need. One takes the place of a node that fails, within the same job."""
    segment: Natural = 0
    """Nodes that have to lie in one block each (``--segment``), where Slurm knows blocks. 0: it is not
    asked."""
    time: str = ""
    """Time limit as Slurm writes it: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``. The partition's if empty."""
    account: str = ""
    """Who pays. Your default account if empty."""
    reservation: str = ""
    """A reservation to run in."""
    signal_time: Count = 60
    """Seconds before the time limit at which ranks save and end, to go on in the job's next start."""
    requeue: bool = True
    """Start again, on other nodes, after a node or a rank has failed or time was up."""
    restarts: Natural = 3
    """Starts in a row that may end without a new checkpoint before the job is given up."""
    exclusive: bool = True
    """Share nodes with no other job: all their processors and memory are the run's."""
    chain: bool = False
    """Have a job of its own go on (``--dependency``), in place of the same one again: for short time limits,
    and where jobs may not be requeued."""
    options: Texts = ()
    """Further options of sbatch, such as ``"--constraint=h100"``."""
    srun_options: Texts = ()
    """Further options of srun, for the step that starts ranks, such as ``"--mpi=none"``."""
    cpu_bind: str = "none"
    """srun's ``--cpu-bind``. ``none``: every rank binds itself to the processors next to its GPU."""
    container: str = ""
    """An image with Plait in it that ranks run in."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """``pyxis``: srun's own ``--container-image``, by enroot. ``apptainer``: ``apptainer exec``, in the
    step."""
    container_mounts: Texts = ()
    """Folders that ranks see, as ``"/data"`` or ``"/on/the/node:/inside"``. The run's own is always among
    them."""
    container_options: Texts = ()
    """Further options of the runtime, such as ``"--no-container-mount-home"`` or ``"--rocm"``."""
    python: str = "python"
    """Python inside of the container."""
    setup: Texts = ()
    """Shell lines to run first, such as ``"module load cuda"``."""

    _lines = field_validator("*")(one_line_each("slurm"))

    @field_validator("container_mounts")
    @classmethod
    def _mounts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if not MOUNT.fullmatch(one):
                fix = "Write /folder, or /on/the/node:/inside"
                raise JobError(f"has '{one}'", key="slurm.container_mounts", fix=fix)
        return value
