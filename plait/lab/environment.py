"""The only file of the lab that reads the process environment: what a rank is told, and where running labs are noted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from plait.core.errors import LaunchError
from plait.lab.network import IFNAME, address
from plait.lab.spec import LabSpec

MASTER_PORT = 29500  # each lab has its own network, so one port serves them all


def rank_environment(spec: LabSpec, name: str, rank: int) -> dict[str, str]:
    """The variables that tell a rank who and where it is: torchrun's, and which link gloo shall use."""
    host = spec.host_of(rank)
    values: dict[str, str | int] = {
        "RANK": rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_RANK": rank % spec.ranks_per_host,
        "LOCAL_WORLD_SIZE": spec.ranks_per_host,
        "NODE_RANK": host,
        "GROUP_RANK": host,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": MASTER_PORT,
        "GLOO_SOCKET_IFNAME": IFNAME if spec.hosts > 1 else "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PLAIT_LAB": name,
    }
    return {key: str(value) for key, value in values.items()}


def inherited() -> dict[str, str]:
    """A copy of this process's own environment."""
    return dict(os.environ)


def runtime_dir() -> Path:
    """The folder where this user's running labs are noted, made if absent; nobody else may write there."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "plait-lab") if base and os.path.isdir(base) else Path(f"/tmp/plait-lab-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise LaunchError(f"{folder} belongs to somebody else. Remove it, or set XDG_RUNTIME_DIR to a folder of your own.")
    return folder
