"""What a rank of a lab is told through its environment, and the folder where running labs are noted."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from plait.core.base.env import MASTER_PORT, RankEnv, inherited
from plait.core.base.errors import LaunchError
from plait.core.base.files import explained
from plait.core.base.lab_hosts import address, interface, nic_of
from plait.lab.spec import LabSpec


def rank_environment(spec: LabSpec, name: str, rank: int, nodes: Sequence[int]) -> dict[str, str]:
    """The variables that tell a rank who and where it is: torchrun's, and which link gloo shall use. nodes:
    the host of every node."""
    me = RankEnv(
        rank=rank,
        world_size=len(nodes) * spec.ranks_per_host,
        local_rank=rank % spec.ranks_per_host,
        local_world_size=spec.ranks_per_host,
        node_rank=rank // spec.ranks_per_host,
        master_addr=address(nodes[0]),
        master_port=MASTER_PORT,  # each lab has its own network, so one port serves them all
        lab=name,
    )
    threads = inherited().get("OMP_NUM_THREADS", "1")
    link = interface(nic_of(me.local_rank, me.local_world_size, spec.nics)) if len(nodes) > 1 else "lo"
    return {**me.variables(), "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": threads}


def runtime_dir() -> Path:
    """The folder where this user's running labs are noted, made if absent; nobody else may write there.
    Raises LaunchError where there can be none."""
    base = inherited().get("XDG_RUNTIME_DIR")
    folder = (
        Path(base, "plait-lab")
        if base and os.path.isdir(base)
        else Path(tempfile.gettempdir(), f"plait-lab-{os.geteuid()}")
    )
    with explained(f"{folder} cannot hold the list of labs", fix="Remove what is there, or set XDG_RUNTIME_DIR"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise LaunchError(
            f"{folder} belongs to somebody else. Remove it, or set XDG_RUNTIME_DIR to a folder of your own."
        )
    return folder
