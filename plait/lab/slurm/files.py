"""What an emulated Slurm consists of: its nodes and switches, and the files that its daemons read."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.errors import JobError
from plait.core.hostlist import expand

LOOPBACK = "127.0.0.1"
MOST_NODES = 250
CPUS = 64
"""Processors that a node claims to have, so that never these but the machine's own are the limit."""
CREDENTIALS = 5
"""Seconds that a credential lasts. Slurm waits as long before it starts a requeued job again (else 120)."""
_LEAF = re.compile(r"^\s*SwitchName=\S+.*?\bNodes=(\S+)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class SlurmSpec:
    """nodes: their names. topology: a ``topology.conf`` of Slurm's tree plugin that has just these nodes."""

    nodes: tuple[str, ...]
    topology: str

    @staticmethod
    def tree(nodes: int) -> SlurmSpec:
        """Nodes n1, n2, ... under leaves of two (more where there are more than eight), two leaves to a
        minipod, the minipods to a core switch.

        >>> SlurmSpec.tree(2).topology.splitlines()
        ['SwitchName=leaf1 Nodes=n1,n2', 'SwitchName=pod1 Switches=leaf1', 'SwitchName=core Switches=pod1']
        """
        if not 1 <= nodes <= MOST_NODES:
            fix = f"Choose from 1 to {MOST_NODES}"
            raise JobError(f"an emulated Slurm cannot have {nodes} nodes", key="--nodes", fix=fix)
        names = [f"n{number}" for number in range(1, nodes + 1)]
        leaves = _groups(names, max(2, -(-nodes // 4)))
        pods = _groups([f"leaf{number}" for number in range(1, len(leaves) + 1)], 2)
        lines = [f"SwitchName=leaf{number} Nodes={','.join(leaf)}" for number, leaf in enumerate(leaves, 1)]
        lines += [f"SwitchName=pod{number} Switches={','.join(pod)}" for number, pod in enumerate(pods, 1)]
        lines.append(f"SwitchName=core Switches={','.join(f'pod{n}' for n in range(1, len(pods) + 1))}")
        return SlurmSpec(tuple(names), "\n".join(lines) + "\n")

    @staticmethod
    def read(file: Path, nodes: int | None = None) -> SlurmSpec:
        """The nodes and switches of a ``topology.conf``. Raises JobError for a file that is none, or that has
        another number of nodes than asked for."""
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"cannot be read: {error}", file=str(file)) from None
        try:
            names = tuple(name for leaf in _LEAF.findall(text) for name in expand(leaf))
        except ValueError as error:
            raise JobError(str(error), file=str(file)) from None
        if not names:
            fix = "It needs lines like: SwitchName=leaf1 Nodes=n[1-4]"
            raise JobError("names no nodes, so it is no topology.conf of a tree", file=str(file), fix=fix)
        if len(set(names)) < len(names) or len(names) > MOST_NODES:
            raise JobError(f"names a node twice, or more than {MOST_NODES} nodes", file=str(file))
        if nodes is not None and nodes != len(names):
            raise JobError(f"has {len(names)} nodes, not {nodes}", file=str(file), fix="Leave out --nodes")
        return SlurmSpec(names, text)


def hosts_file(nodes: Sequence[str]) -> str:
    """The ``/etc/hosts`` that the nodes see: everything is on the loopback interface. One address serves all,
    since srun listens where its host's name leads, and is looked for where it calls from."""
    return "".join(f"{LOOPBACK}\t{name}\n" for name in dict.fromkeys(("localhost", socket.gethostname(), *nodes)))


def slurm_conf(folder: Path, name: str, nodes: Sequence[str], controller: int, ports: Sequence[int]) -> str:
    """The cluster's ``slurm.conf``. controller, ports: where slurmctld and the nodes' slurmd
    listen.

    Processes are followed through /proc, not through cgroups, which a container may not change.
    """
    where = "\n".join(
        f"NodeName={node} NodeAddr={LOOPBACK} Port={port} CPUs={CPUS} State=UNKNOWN"
        for node, port in zip(nodes, ports, strict=True)
    )
    return f"""ClusterName={name}
SlurmctldHost=localhost({LOOPBACK})
SlurmctldPort={controller}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge,cred_expire={CREDENTIALS}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5,batch_sched_delay=0,sched_min_interval=100000
TopologyPlugin=topology/tree
SwitchType=switch/none
MpiDefault=none
ReturnToService=1
SlurmdTimeout=4
SlurmdParameters=config_overrides
{where}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _groups(names: Sequence[str], size: int) -> list[Sequence[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]
