"""Switches and hosts of a cluster, lists of hosts, and the hosts of ranks."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["form", "hostlist", "placement", "rank_table", "switches", "wiring"]
