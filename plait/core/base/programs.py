"""Modules that are started as programs, each in a process of its own.

Whoever starts one depends on it as if by an import. These names are the only ones: a test looks for others,
and for names of modules that are not there.
"""

from __future__ import annotations

PLAIT = "plait.cli.main"
"""The command line."""
RANK = "plait.train.worker"
"""A rank that trains."""
PROFILER = "plait.train.profiler"
"""A rank that measures its machine and its links."""
SELF_CHECK = "plait.launch.self_check"
"""A rank that looks whether its host is fit for a run."""
RENDERER = "plait.train.data.rendering"
"""What renders chats by the template of somebody else, within limits."""
TABLES = "plait.train.data.tables"
"""What reads Parquet and Arrow files, within a limit of memory."""
WARM = "plait.train.warm"
"""A process that has imported what ranks import, and is forked for each."""
TORCH_REPORT = "plait.train.machine.torch_report"
"""What PyTorch says of itself and its devices."""
AGENT = "plait.launch.agent"
"""What starts and watches the ranks of a node."""
COLLECTOR = "plait.launch.collect"
"""What collects the records of a node's ranks."""
IN_SLURM = "plait.api.in_slurm"
"""The first process of a Slurm job."""
IN_POD = "plait.api.in_pod"
"""The first process of a pod."""
KEEPER = "plait.lab.slurm.keeper"
"""The parent of an emulated Slurm's daemons."""
