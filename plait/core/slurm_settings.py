"""What a job says of Slurm."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from plait.core.errors import JobError
from plait.core.settings import Count, Natural, Section


class SlurmSection(Section):
    """What to ask Slurm for, with ``plait train --on slurm``."""

    partition: str = ""
    """Where to run; ``--on slurm:PARTITION`` does too. The cluster's default if empty."""
    nodes: Natural = 0
    """How many nodes. 0: as many as the job's ranks need, with as many on each as it has GPUs, or one."""
    time: str = ""
    """Time limit as Slurm writes it: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``. The partition's if empty."""
    account: str = ""
    """Who pays. Your default account if empty."""
    reservation: str = ""
    """A reservation to run in."""
    grace: Count = 60
    """Seconds before the time limit at which ranks save and end, to go on in the job's next start."""
    requeue: bool = True
    """Start again, on other nodes, after a node or a rank has failed or time was up."""
    restarts: Natural = 3
    """Starts in a row that may end without a new checkpoint before the job is given up."""
    exclusive: bool = True
    """Share nodes with no other job."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further options of sbatch, such as ``"--gres=gpu:8"``."""
    setup: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Shell lines to run first, such as ``"module load cuda"``."""

    @field_validator("partition", "time", "account", "reservation", "options", "setup")
    @classmethod
    def _lines(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if any("\n" in one or "\0" in one for one in ([value] if isinstance(value, str) else value)):
            raise JobError("holds a line break", key="slurm", fix="Write one line to each")
        return value
