"""A cluster's switches and hosts, lists of hosts, and which host has which rank."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["form", "hostlist", "placement", "rank_table", "slurm_lines", "switches", "wiring"]
