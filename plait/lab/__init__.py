"""An emulated cluster on one Linux machine: hosts are network namespaces, links have the rate you ask for."""

from plait.lab.lab import Lab
from plait.lab.network import HostState, Network
from plait.lab.registry import Entry, find, running
from plait.lab.runner import run
from plait.lab.spec import LabSpec, format_rate, parse_rate

__all__ = ["Entry", "HostState", "Lab", "LabSpec", "Network", "find", "format_rate", "parse_rate", "run", "running"]
