"""Modules that run as programs, each in its own process.

A module that starts a program depends on it as if by an import. Only the modules named here are
started: a test fails for any other, and for names of modules that do not exist.
"""

from __future__ import annotations

PLAIT = "plait.cli.main"
"""The command line."""
RANK = "plait.train.worker"
"""The process of a training rank."""
PROFILER = "plait.train.profiler"
"""The process of a rank that measures its machine and its links."""
SELF_CHECK = "plait.launch.health.links"
"""The process of a rank that checks if its host is fit for a run."""
RENDERER = "plait.train.data.rendering"
"""The process that renders chats by an untrusted chat template, within limits of time and
memory."""
TABLES = "plait.train.data.tables"
"""The process that reads Parquet and Arrow files, within a memory limit."""
WARM = "plait.train.warm"
"""The process that has imported the ranks' modules and is forked for each rank."""
TORCH_REPORT = "plait.train.machine.torch_report"
"""The process that reports PyTorch's version and devices."""
AGENT = "plait.launch.local.agent"
"""The process that starts and watches the ranks of a node."""
COLLECTOR = "plait.launch.collect.collector"
"""The process that collects the records of a node's ranks."""
IN_CLUSTER = "plait.api.in_cluster"
"""The first process of a Slurm job, which gets the run's folder as an argument, and of a pod."""
