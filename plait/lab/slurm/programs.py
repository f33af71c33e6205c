"""Slurm's programs: where they are, and how to ask them something."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from plait.core.base.errors import LaunchError
from plait.core.base.process import path_of

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "unshare": "util-linux",
}


def program(name: str) -> str:
    """The full path of a program. Raises LaunchError naming the package it comes in."""
    path = path_of(name)
    if path is None:
        raise LaunchError(
            f"an emulated Slurm needs the program {name!r}, which is not installed. Install {PACKAGES[name]} "
            "(Debian and Ubuntu: apt-get install --no-install-recommends munge slurmctld slurmd slurm-client)."
        )
    return path


def why_not() -> str | None:
    """Why this machine cannot run an emulated Slurm; None if it can."""
    try:
        for name in PACKAGES:
            program(name)
    except LaunchError as error:
        return str(error)
    if os.geteuid() != 0:
        return "an emulated Slurm needs root: its nodes are namespaces, and its daemons start jobs of any user."
    tried = subprocess.run(
        [program("unshare"), "--uts", "--mount", "--pid", "--fork", "--mount-proc", "hostname", "plait-try"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if tried.returncode:
        return f"an emulated Slurm needs namespaces, which are not allowed here ({tried.stderr.strip()})."
    return None


def ask(argv: list[str], environ: Mapping[str, str], seconds: float = 10.0) -> str | None:
    """What a program of Slurm prints; None if it fails or takes too long."""
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, env=dict(environ), timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None
