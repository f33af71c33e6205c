"""Probes of what is installed: Python, packages by what needs them, PyTorch with its devices, a compiler, and
the managers of clusters."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plait.core.base import programs
from plait.core.base.env import c_compiler, cpp_compiler, visible_gpus
from plait.core.base.errors import LaunchError, requirements
from plait.core.base.process import command_of
from plait.core.base.text import counted, in_bytes
from plait.launch.doctor import DoctorFinding, answer_of

TORCH_LIMIT = 90.0
"""Seconds that PyTorch may take to be imported and tried: from a slow disk it takes a minute."""
SELDOM = ("dev", "test", "all")
"""Extras of which nothing is told."""
OTHERS = ("transformers", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Packages whose versions a bug report should have where they are there."""
INSTALL_TORCH = "https://pytorch.org/get-started/locally"


def python() -> DoctorFinding:
    """The interpreter, and where Plait lies."""
    from plait import __version__

    where = Path(__file__).parents[1]
    values = {"python": platform.python_version(), "executable": sys.executable, "plait": __version__,
              "folder": str(where), "system": platform.platform()}  # fmt: skip
    return DoctorFinding("plait", f"{__version__} on Python {values['python']}, in {where}", values=values)


def packages() -> DoctorFinding:
    """Whether each package that some part of Plait needs is there, by the extra that brings it."""
    absent, found = dict[str, list[str]](), dict[str, str]()
    for name, extra in _required():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            absent.setdefault(extra, []).append(name)
    told = counted(len(found), "package")
    for name in OTHERS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if not absent:
        return DoctorFinding("packages", f"{told}, all that are asked for", values=found)
    base = absent.pop("", [])
    parts = [f"{', '.join(names)} ({f'plait[{extra}]' if extra else 'plait'})" for extra, names in absent.items()]
    fix = "; ".join(f"pip install 'plait[{extra}]' brings {', '.join(names)}" for extra, names in absent.items())
    if base:
        parts.insert(0, ", ".join(base))
        fix = "; ".join(filter(None, ("Install Plait again, which needs " + ", ".join(base), fix)))
    return DoctorFinding("packages", f"{told}; without {', '.join(parts)}", "missing" if base else "look", fix, found)


def _required() -> list[tuple[str, str]]:
    """Packages once each, with the extra of the shortest name that brings them."""
    found = dict[str, str]()
    for name, extra in requirements():
        if name != "plait" and extra not in SELDOM:
            found[name] = min(found.get(name, extra), extra, key=len)
    return sorted(found.items())


# ---- PyTorch and devices ----


def ask_torch() -> dict[str, Any]:
    """What PyTorch says of itself, from a process of its own; ``error`` where it cannot be imported."""
    if find_spec("torch") is None:
        return {"absent": True}
    try:
        done = subprocess.run(command_of(programs.TORCH_REPORT), capture_output=True, text=True, errors="replace",
                              check=False, timeout=TORCH_LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TORCH_LIMIT:.0f} s"}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        return {"error": lines[-1]}


def torch_finding(told: Mapping[str, Any]) -> DoctorFinding:
    """PyTorch, and gloo, by which ranks on processors speak."""
    if told.get("absent"):
        fix = "pip install 'plait[train]' (or torch by itself): without it Plait plans, places and reads traces alone"
        return DoctorFinding("PyTorch", "not installed", "missing", fix)
    if "error" in told:
        fix = f"Install it again for this Python: {INSTALL_TORCH}"
        return DoctorFinding("PyTorch", f"cannot be used: {told['error']}", "missing", fix, told)
    made = f"CUDA {told['cuda']}" if told["cuda"] else f"ROCm {told['rocm']}" if told["rocm"] else "processors"
    found = f"{told['torch']}, for {made}"
    if told["gloo"]:
        fix = "See to this machine's name in /etc/hosts, or name an interface with run.network_interface"
        return DoctorFinding("PyTorch", f"{found}; gloo does not start: {told['gloo']}", "missing", fix, told)
    return DoctorFinding("PyTorch", f"{found}; gloo works", values=told)


def driver_gpus() -> DoctorFinding:
    """Values ``gpus``: (name, bytes of memory) of each by NVIDIA's own program; ``complaint``: its own."""
    status, told = answer_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", limit=30.0)
    if status == -1:
        return DoctorFinding("driver", "none", values={"gpus": [], "complaint": ""})
    lines = [line.rpartition(",") for line in told.splitlines()]
    found = [(name.strip(), int(size) << 20) for name, _, size in lines if size.strip().isdecimal()]
    complaint = "" if found else " ".join(told.split()) or f"it ended with status {status}"
    return DoctorFinding("driver", counted(len(found), "GPU"), values={"gpus": found, "complaint": complaint})


def gpus(told: Mapping[str, Any], driver: Mapping[str, Any]) -> DoctorFinding:
    """Those that the driver has (``driver_gpus``), against those that PyTorch can use."""
    found, complaint = driver.get("gpus", []), driver.get("complaint", "no answer from nvidia-smi")
    seen = told.get("devices", [])
    values = {"driver": found, "torch": seen}
    files = [path for name in ("nvidia[0-9]*", "kfd", "dxg") for path in Path("/dev").glob(name)]
    if complaint:
        fix = "See to NVIDIA's driver: nvidia-smi must list the GPUs. In a container: --gpus all"
        return DoctorFinding("GPUs", f"nvidia-smi fails: {complaint}", "missing", fix, values)
    if not found and not seen:
        if files:
            fix = "Install the driver's programs; in a container: --gpus all (NVIDIA), --device=/dev/kfd (AMD)"
            return DoctorFinding("GPUs", f"{files[0]} is there, and no GPU can be asked", "look", fix, values)
        return DoctorFinding("GPUs", "none: ranks compute on processors", values=values)
    names = ", ".join(dict.fromkeys(f"{name} with {in_bytes(size)}" for name, size in found or map(tuple, seen)))
    what = f"{len(found) or len(seen)} x {names}"
    if told.get("absent") or "error" in told:
        return DoctorFinding(
            "GPUs", f"{what}, and no PyTorch to use them", "missing", f"Install it: {INSTALL_TORCH}", values
        )
    if not seen:
        why = "is built without CUDA" if not (told["cuda"] or told["rocm"]) else f"sees none: {told.get('why', '')}"
        fix = (
            f"Install PyTorch for your CUDA ({INSTALL_TORCH}), such as pip install --force-reinstall torch=="
            f"{told['torch'].partition('+')[0]} --index-url https://download.pytorch.org/whl/cu130; or train on "
            'processors with run.device = "cpu"'
        )
        return DoctorFinding("GPUs", f"{what}, and PyTorch {told['torch']} {why}".rstrip(": "), "missing", fix, values)
    if found and len(seen) < len(found):
        hidden = visible_gpus()
        fix = f"CUDA_VISIBLE_DEVICES is '{hidden}': unset it to use all" if hidden else "See what PyTorch says of them"
        return DoctorFinding("GPUs", f"{what}; PyTorch sees {len(seen)}", "look", fix, values)
    return DoctorFinding("GPUs", what, values=values)


def nccl(told: Mapping[str, Any]) -> DoctorFinding:
    """By which ranks on GPUs speak."""
    if told.get("nccl"):
        return DoctorFinding("NCCL", told["nccl"], values={"nccl": told["nccl"]})
    if not told.get("devices"):
        return DoctorFinding("NCCL", "not there, and not needed without GPUs")
    fix = f"Install a PyTorch with NCCL (Linux, CUDA): {INSTALL_TORCH}"
    return DoctorFinding("NCCL", "not there", "missing", fix)


# ---- what is compiled ----


def compiler() -> DoctorFinding:
    """The C writer of rings, and what torch.compile needs."""
    writer = find_spec("plait.core.record._ring") is not None
    names = (c_compiler(), cpp_compiler())
    header = Path(sysconfig.get_path("include")) / "Python.h"
    absent = [f"no {name}" for name in names if shutil.which(name) is None]
    absent += [] if header.is_file() else ["no Python.h"]
    values = {"writer": writer, "compilers": names, "headers": header.is_file()}
    found = f"recording in {'C' if writer else 'Python'}; {', '.join(absent) or f'{names[0]}, {names[1]} and Python.h'}"
    fix = "On Debian and Ubuntu: apt-get install gcc g++ libc6-dev python3-dev"
    if not writer:
        fix += ", and install Plait again: recording in Python takes two to four times as long"
        return DoctorFinding("compiler", found, "look", fix, values)
    if absent:
        return DoctorFinding("compiler", found, "look", f"{fix}. strategy.compile alone needs them", values)
    return DoctorFinding("compiler", found, values=values)


# ---- clusters ----


def slurm() -> DoctorFinding:
    """Whether jobs can be submitted from here."""
    status, told = answer_of("scontrol", "version")
    if status == -1:
        return DoctorFinding("Slurm", "not here, which --on slurm alone needs")
    if status:
        fix = "Name your cluster's by SLURM_CONF, or /etc/slurm/slurm.conf. Only --on slurm needs it"
        return DoctorFinding("Slurm", f"its programs know no cluster: {told.splitlines()[-1]}", "look", fix)
    status, said = answer_of("sinfo", "--noheader", "--format=%P %D %G")
    if status:
        fix = "See whether slurmctld runs (scontrol ping), and whether munge does on this machine"
        return DoctorFinding("Slurm", f"{told}; its controller does not answer: {said}", "missing", fix)
    partitions = [line.split() for line in said.splitlines()]
    nodes = ", ".join(f"{one[0]} with {counted(int(one[1]), 'node')}" for one in partitions if len(one) > 1)
    return DoctorFinding(
        "Slurm", f"{told}; {nodes or 'no partition'}", values={"version": told, "partitions": partitions}
    )


def kubernetes() -> DoctorFinding:
    """Whether a cluster can be asked from here."""
    if find_spec("kubernetes") is None:
        return DoctorFinding("Kubernetes", "its client is not installed, which --on kubernetes alone needs")
    from plait.launch.kubernetes_api import KubernetesNamespace

    try:
        cluster = KubernetesNamespace(patience=0.0)
    except LaunchError:
        return DoctorFinding("Kubernetes", "no cluster is known here, which --on kubernetes alone needs")
    try:
        jobsets = cluster.has_jobset()
    except LaunchError as error:
        fix = "See kubectl cluster-info, and which context kubectl config current-context names"
        return DoctorFinding("Kubernetes", str(error), "missing", fix)
    found = f"answers; namespace {cluster.namespace}, {'with' if jobsets else 'without'} JobSets"
    return DoctorFinding("Kubernetes", found, values={"namespace": cluster.namespace, "jobsets": jobsets})
