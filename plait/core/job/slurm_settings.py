"""What a job says of Slurm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from plait.core.base.codec.data import Count, Natural, Section
from plait.core.job.settings import one_line


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
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further options of sbatch, such as ``"--constraint=h100"``."""
    setup: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Shell lines to run first, such as ``"module load cuda"``."""

    @field_validator("partition", "time", "account", "reservation", "options", "setup")
    @classmethod
    def _lines(cls, value: str | tuple[str, ...], info: Any) -> str | tuple[str, ...]:
        for one in (value,) if isinstance(value, str) else value:
            one_line(one.replace("\t", " "), f"slurm.{info.field_name}")
        return value
