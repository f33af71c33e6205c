"""The job step that starts an agent on every node: srun's options, and the container that agents run in.

Flags of pyxis: https://github.com/NVIDIA/pyxis/wiki/Usage; of Apptainer: ``apptainer exec --help`` of 1.3.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from plait.core.base import programs
from plait.core.base.process import command_of
from plait.core.job.slurm_settings import SlurmSection

NOT_BESIDE_HOSTS = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
"""Variables of a job that srun takes for ``--nodes``."""


def srun(settings: SlurmSection, folder: Path, nodes: int, gpus: int) -> list[str]:
    """The command of a step with an agent on each of ``nodes``. folder: of the run. gpus: of each node.

    Of GPUs that came with ``--exclusive`` alone a step gets those only that it asks for. Processors and
    memory it has all without asking; with ``--cpus-per-task`` it would get no others (srun(1) since 22.05,
    --exact). How many nodes there are the list of hosts says alone: srun 24.11 refuses ``--nodes`` beside it,
    and as a variable of the job too (``NOT_BESIDE_HOSTS``)."""
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


def resources(settings: SlurmSection, gpus: int) -> str:
    """Generic resources of a node, as ``--gres`` takes them.

    >>> resources(SlurmSection(gres=("nic:2",)), 8)
    'gpu:8,nic:2'
    """
    return ",".join([*([f"gpu:{gpus}"] if gpus else []), *settings.gres])


def python(settings: SlurmSection) -> str:
    """The interpreter of agents and ranks: this one, or the container's."""
    return settings.python if settings.container else sys.executable


def _in_container(settings: SlurmSection, folder: Path, gpus: int, argv: Sequence[str]) -> list[str]:
    if not settings.container or settings.container_runtime == "pyxis":
        return [*argv]
    own = ["--nv"] if gpus and "--rocm" not in settings.container_options else []
    bind = ["--bind", _mounts(settings, folder)]
    return ["apptainer", "exec", *own, *bind, *settings.container_options, settings.container, *argv]


def _mounts(settings: SlurmSection, folder: Path) -> str:
    """As both runtimes take them: ``FROM:TO``, joined by commas."""
    wanted = [str(folder.absolute()), *settings.container_mounts]
    return ",".join(one if ":" in one else f"{one}:{one}" for one in wanted)
