"""The list of all probes of ``plait doctor``, and the probes of installed software and of clusters.

PyTorch is tried in another process: no probe needs to import it.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plait.core.base import programs
from plait.core.base.env import c_compiler, cpp_compiler, visible_gpus
from plait.core.base.errors import LaunchError, requirements
from plait.core.base.process import command_of
from plait.core.base.text import counted, in_bytes
from plait.launch.health.probes import (
    DoctorFinding,
    Probe,
    ProbeResult,
    answer_of,
    clock,
    examine,
    limits,
    memory,
    namespaces,
    own_name,
    processors,
    run_folder,
    shared_memory,
)

TORCH_LIMIT = 90.0
"""Seconds that PyTorch may take to be imported and tried; from a slow disk, that takes a minute."""
SELDOM = ("dev", "test", "all")
"""Extras that no probe reports."""
OPTIONAL_PACKAGES = ("transformers", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Packages that a bug report should list if they are installed."""
INSTALL_TORCH = "https://pytorch.org/get-started/locally"


def examine_all(folder: Path, free: int | None) -> list[DoctorFinding]:
    """Return the findings of all probes. folder: the folder of runs. free: bytes of free memory,
    None if unknown. A probe that hangs costs its time limit, no more."""
    torch, driver = dict[str, Any](), dict[str, Any]()

    def torch_finding() -> ProbeResult:
        torch.update(query_torch())
        return installed_torch(torch)

    def driver_finding() -> ProbeResult:
        driver.update((found := driver_gpus()).values)
        return found

    first = examine([  # other probes need their results
        Probe("PyTorch", torch_finding, TORCH_LIMIT + 10.0), Probe("driver", driver_finding, 40.0),
    ])[:1]  # fmt: skip
    told = torch or {"error": first[0].found}
    number = len(driver.get("gpus", told.get("devices", [])))
    rest = examine([
        Probe("plait", python),
        Probe("packages", packages),
        Probe("GPUs", lambda: gpus(told, driver)),
        Probe("NCCL", lambda: nccl(told)),
        Probe("compiler", compiler),
        Probe("processors", processors),
        Probe("memory", lambda: memory(free)),
        Probe("/dev/shm", partial(shared_memory, number)),
        Probe(f"folder of runs ({folder})", partial(run_folder, folder)),
        Probe("limits", partial(limits, number)),
        Probe("clock", clock),
        Probe("network", own_name),
        Probe("namespaces", namespaces),
        Probe("Slurm", slurm, 30.0),
        Probe("Kubernetes", kubernetes, 30.0),
    ])  # fmt: skip
    return [*rest[:2], *first, *rest[2:]]


# ---- what is installed ----


def python() -> ProbeResult:
    """Report the interpreter, and Plait's version and folder."""
    from plait import __version__

    where = Path(__file__).parents[2]
    values = {"python": platform.python_version(), "executable": sys.executable, "plait": __version__,
              "folder": str(where), "system": platform.platform()}  # fmt: skip
    return ProbeResult(f"{__version__} on Python {values['python']}, in {where}", values=values)


def packages() -> ProbeResult:
    """Report the installed packages that Plait's parts need, and each missing one with the extra
    that installs it."""
    extras = dict[str, str]()
    for name, extra in requirements():
        if name != "plait" and extra not in SELDOM:
            extras[name] = min(extras.get(name, extra), extra, key=len)
    if not extras:
        return ProbeResult("unknown: Plait is not installed", "look", "Install it, as with pip install FOLDER")
    absent, found = dict[str, list[str]](), dict[str, str]()
    for name in (*sorted(extras), *OPTIONAL_PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in extras:
                absent.setdefault(extras[name], []).append(name)
    told = counted(len(found.keys() & extras.keys()), "package")
    if not absent:
        return ProbeResult(f"{told}, none missing", values=found)
    base = absent.pop("", [])
    parts = [f"{', '.join(names)} (plait[{extra}])" for extra, names in absent.items()]
    fixes = [f"pip install 'plait[{extra}]' brings {', '.join(names)}" for extra, names in absent.items()]
    if base:
        parts.insert(0, ", ".join(base))
        fixes.insert(0, f"Install Plait again, which needs {', '.join(base)}")
    state = "missing" if base else "look"
    return ProbeResult(f"{told}; without {', '.join(parts)}", state, "; ".join(fixes), found)


def query_torch() -> dict[str, Any]:
    """Return PyTorch's report on itself, from a process of its own; with the key ``error`` if
    PyTorch cannot be used, ``absent`` if it is not installed."""
    if find_spec("torch") is None:
        return {"absent": True}
    try:
        done = subprocess.run(command_of(programs.TORCH_REPORT), capture_output=True, text=True, errors="replace",
                              check=False, timeout=TORCH_LIMIT, stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TORCH_LIMIT:.0f} s"}
    with suppress(ValueError, IndexError):
        return json.loads(done.stdout.strip().splitlines()[-1])
    lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    return {"error": lines[-1]}


def installed_torch(report: Mapping[str, Any]) -> ProbeResult:
    """Report PyTorch, and gloo, the backend of CPU ranks. report: the result of ``query_torch``."""
    if report.get("absent"):
        fix = "pip install 'plait[train]' (or torch by itself): without it Plait plans, places and reads traces alone"
        return ProbeResult("not installed", "missing", fix)
    if "error" in report:
        fix = f"Install it again for this Python: {INSTALL_TORCH}"
        return ProbeResult(f"cannot be used: {report['error']}", "missing", fix, report)
    made = f"CUDA {report['cuda']}" if report["cuda"] else f"ROCm {report['rocm']}" if report["rocm"] else "processors"
    found = f"{report['torch']}, for {made}"
    if report["gloo"]:
        fix = "See to this machine's name in /etc/hosts, or name an interface with run.network_interface"
        return ProbeResult(f"{found}; gloo does not start: {report['gloo']}", "missing", fix, report)
    return ProbeResult(f"{found}; gloo works", values=report)


def driver_gpus() -> ProbeResult:
    """Report the GPUs that nvidia-smi lists. Values ``gpus``: (name, bytes of memory) of each;
    ``complaint``: nvidia-smi's error message."""
    status, told = answer_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", limit=30.0)
    if status == -1:
        return ProbeResult("none", values={"gpus": [], "complaint": ""})
    lines = [line.rpartition(",") for line in told.splitlines()]
    found = [(name.strip(), int(size) << 20) for name, _, size in lines if size.strip().isdecimal()]
    complaint = "" if found else " ".join(told.split()) or f"it ended with status {status}"
    return ProbeResult(counted(len(found), "GPU"), values={"gpus": found, "complaint": complaint})


def gpus(report: Mapping[str, Any], driver: Mapping[str, Any]) -> ProbeResult:
    """Compare the GPUs that the driver lists (``driver_gpus``) with those that PyTorch can use."""
    found, complaint = driver.get("gpus", []), driver.get("complaint", "no answer from nvidia-smi")
    seen = report.get("devices", [])
    answer = partial(ProbeResult, values={"driver": found, "torch": seen})
    if complaint:
        fix = "See to NVIDIA's driver: nvidia-smi must list the GPUs. In a container: --gpus all"
        return answer(f"nvidia-smi fails: {complaint}", "missing", fix)
    if not found and not seen:
        files = [path for name in ("nvidia[0-9]*", "kfd", "dxg") for path in Path("/dev").glob(name)]
        fix = "Install the driver's programs; in a container: --gpus all (NVIDIA), --device=/dev/kfd (AMD)"
        if files:
            return answer(f"{files[0]} exists, but no GPU can be queried", "look", fix)
        return answer("none: ranks compute on processors")
    names = ", ".join(dict.fromkeys(f"{name} with {in_bytes(size)}" for name, size in found or map(tuple, seen)))
    what = f"{len(found) or len(seen)} x {names}"
    if report.get("absent") or "error" in report:
        return answer(f"{what}, and no PyTorch to use them", "missing", f"Install it: {INSTALL_TORCH}")
    if not seen:
        why = (
            "is built without CUDA" if not (report["cuda"] or report["rocm"]) else f"sees none: {report.get('why', '')}"
        )
        fix = (
            f"Install PyTorch for your CUDA ({INSTALL_TORCH}), such as pip install --force-reinstall torch=="
            f"{report['torch'].partition('+')[0]} --index-url https://download.pytorch.org/whl/cu130; or train on "
            'processors with run.device = "cpu"'
        )
        return answer(f"{what}, and PyTorch {report['torch']} {why}".rstrip(": "), "missing", fix)
    if found and len(seen) < len(found):
        hidden = visible_gpus()
        fix = (
            f"CUDA_VISIBLE_DEVICES is '{hidden}': unset it to use all"
            if hidden
            else "Check why PyTorch does not see the others (python -m torch.utils.collect_env)"
        )
        return answer(f"{what}; PyTorch sees {len(seen)}", "look", fix)
    return answer(what)


def nccl(report: Mapping[str, Any]) -> ProbeResult:
    """Report NCCL, the backend of GPU ranks. report: the result of ``query_torch``."""
    if report.get("nccl"):
        return ProbeResult(report["nccl"], values={"nccl": report["nccl"]})
    if not report.get("devices"):
        return ProbeResult("not there, and not needed without GPUs")
    return ProbeResult("not there", "missing", f"Install a PyTorch with NCCL (Linux, CUDA): {INSTALL_TORCH}")


def compiler() -> ProbeResult:
    """Report the C extension that writes rings, and the compilers and headers that torch.compile
    needs."""
    writer = find_spec("plait.core.record._ring") is not None
    names = (c_compiler(), cpp_compiler())
    header = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    absent = [f"no {name}" for name in names if shutil.which(name) is None] + ["no Python.h"] * (not header)
    found = f"recording in {'C' if writer else 'Python'}; {', '.join(absent) or f'{names[0]}, {names[1]} and Python.h'}"
    state, fix = "look", "On Debian and Ubuntu: apt-get install gcc g++ libc6-dev python3-dev"
    if not writer:
        fix += ", and install Plait again: recording in Python takes two to four times as long"
    elif absent:
        fix += ". strategy.compile alone needs them"
    else:
        state, fix = "fine", ""
    values = {"writer": writer, "compilers": names, "headers": header}
    return ProbeResult(found, state, fix, values)  # type: ignore[arg-type]


# ---- clusters ----


def slurm() -> ProbeResult:
    """Report whether Slurm jobs can be submitted from this machine."""
    status, told = answer_of("scontrol", "version")
    if status == -1:
        return ProbeResult("not here, which --on slurm alone needs")
    if status:
        fix = "Name your cluster's by SLURM_CONF, or /etc/slurm/slurm.conf. Only --on slurm needs it"
        return ProbeResult(f"its commands find no cluster: {told.splitlines()[-1]}", "look", fix)
    status, said = answer_of("sinfo", "--noheader", "--format=%P %D %G")
    if status:
        fix = "See whether slurmctld runs (scontrol ping), and whether munge does on this machine"
        return ProbeResult(f"{told}; its controller does not answer: {said}", "missing", fix)
    partitions = [line.split() for line in said.splitlines()]
    nodes = ", ".join(f"{one[0]} with {counted(int(one[1]), 'node')}" for one in partitions if len(one) > 1)
    values = {"version": told, "partitions": partitions}
    return ProbeResult(f"{told}; {nodes or 'no partition'}", values=values)


def kubernetes() -> ProbeResult:
    """Report whether a Kubernetes cluster answers this machine."""
    if find_spec("kubernetes") is None:
        return ProbeResult("its client is not installed, which --on kubernetes alone needs")
    from plait.launch.kubernetes.api import KubernetesNamespace

    try:
        cluster = KubernetesNamespace(patience=0.0)
    except LaunchError:
        return ProbeResult("no cluster is known here, which --on kubernetes alone needs")
    try:
        jobsets = cluster.has_jobset()
    except LaunchError as error:
        fix = "See kubectl cluster-info, and which context kubectl config current-context names"
        return ProbeResult(str(error), "missing", fix)
    found = f"answers; namespace {cluster.namespace}, {'with' if jobsets else 'without'} JobSets"
    return ProbeResult(found, values={"namespace": cluster.namespace, "jobsets": jobsets})
