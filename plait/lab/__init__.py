"""An emulated cluster on one Linux machine: hosts are network namespaces, joined by links of a
chosen rate."""

from plait.lab.lab import Lab
from plait.lab.network import HostState, LabNetwork
from plait.lab.registry import LabEntry, find, running, stop
from plait.lab.runner import run
from plait.lab.spec import LabSpec

__all__ = [
    "HostState",
    "Lab",
    "LabEntry",
    "LabNetwork",
    "LabSpec",
    "find",
    "run",
    "running",
    "stop",
]
