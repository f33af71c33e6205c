"""What an emulated Slurm consists of: its nodes and switches, and the files that its daemons
read."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
CPUS = 64
"""Processors that a node claims to have, so that never these but the machine's own are the
limit."""
CREDENTIALS = 5
"""Seconds that a credential lasts. Slurm waits as long before it starts a requeued job again (else
120)."""
DEVICE = "/dev/tty"
"""What the numbered devices are called that stand for GPUs."""


@dataclass(frozen=True)
class SlurmSpec:
    """nodes: their names. topology: a ``topology.conf`` that has just these nodes, of Slurm's tree
    plugin or, where it begins with a block, of that of blocks (Slurm 23.11 and newer). gpus: that
    each claims to have, to be asked for; there is nothing behind them. constrained: whether a step
    can open the devices alone that it was given, by control groups, which the machine has to allow.
    settings: further lines of ``slurm.conf``."""

    nodes: tuple[str, ...]
    topology: str
    gpus: int = 0
    constrained: bool = False
    settings: str = ""

    @staticmethod
    def tree(nodes: int, gpus: int = 0) -> SlurmSpec:
        """Nodes n1, n2, ... under leaves of two (more where there are more than eight), two leaves
        to a minipod, the minipods to a core switch.

        >>> SlurmSpec.tree(2).topology.splitlines()
        ['SwitchName=leaf1 Nodes=n1,n2', 'SwitchName=pod1 Switches=leaf1', 'SwitchName=core Switches=pod1']
        """
        names = [f"n{number}" for number in range(1, nodes + 1)]
        leaves = _groups(names, max(2, -(-nodes // 4)))
        pods = _groups([f"leaf{number}" for number in range(1, len(leaves) + 1)], 2)
        lines = [f"SwitchName=leaf{number} Nodes={','.join(leaf)}" for number, leaf in enumerate(leaves, 1)]
        lines += [f"SwitchName=pod{number} Switches={','.join(pod)}" for number, pod in enumerate(pods, 1)]
        lines.append(f"SwitchName=core Switches={','.join(f'pod{n}' for n in range(1, len(pods) + 1))}")
        return SlurmSpec(tuple(names), "\n".join(lines) + "\n", gpus)

    @staticmethod
    def blocks(nodes: int, size: int) -> SlurmSpec:
        """Nodes n1, n2, ... in blocks of ``size``, for Slurm's block plugin.

        >>> SlurmSpec.blocks(4, 2).topology.splitlines()
        ['BlockName=b1 Nodes=n1,n2', 'BlockName=b2 Nodes=n3,n4', 'BlockSizes=2']
        """
        names = SlurmSpec.tree(nodes).nodes
        lines = [f"BlockName=b{at} Nodes={','.join(block)}" for at, block in enumerate(_groups(names, size), 1)]
        return SlurmSpec(names, "\n".join([*lines, f"BlockSizes={size}"]) + "\n")

    @property
    def plugin(self) -> str:
        """Of the topology."""
        return "block" if self.topology.startswith("BlockName") else "tree"


def hosts_file(nodes: Sequence[str]) -> str:
    """The ``/etc/hosts`` that the nodes see: everything is on the loopback interface. One address
    serves all, since srun listens where its host's name leads, and is looked for where it calls
    from."""
    return "".join(f"{LOOPBACK}\t{name}\n" for name in dict.fromkeys(("localhost", socket.gethostname(), *nodes)))


def gres_conf(spec: SlurmSpec) -> str:
    """The cluster's ``gres.conf``: a GPU has to have a device, which no program of Slurm's opens
    here."""
    return f"Name=gpu File={DEVICE}[0-{spec.gpus - 1}]\n" if spec.gpus else ""


def cgroup_conf(spec: SlurmSpec) -> str:
    """The cluster's ``cgroup.conf``, which is read where devices are constrained; nothing else
    is."""
    return "CgroupAutomount=no\nConstrainDevices=yes\n" if spec.constrained else ""


def slurm_conf(folder: Path, spec: SlurmSpec, controller: int, ports: Sequence[int]) -> str:
    """The cluster's ``slurm.conf``. controller, ports: where slurmctld and the nodes' slurmd
    listen.

    Processes are followed through /proc, not through cgroups, which a container may not change.
    """
    gres = f" Gres=gpu:{spec.gpus}" if spec.gpus else ""
    where = "\n".join(
        f"NodeName={node} NodeAddr={LOOPBACK} Port={port} CPUs={CPUS}{gres} State=UNKNOWN"
        for node, port in zip(spec.nodes, ports, strict=True)
    )
    return f"""ClusterName=slurm
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
TaskPlugin=task/{"cgroup" if spec.constrained else "none"}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5,batch_sched_delay=0,sched_min_interval=100000
TopologyPlugin=topology/{spec.plugin}
SwitchType=switch/none
GresTypes=gpu
MpiDefault=none
ReturnToService=1
SlurmdTimeout=4
SlurmdParameters=config_overrides
{where}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{spec.settings}"""


def _groups(names: Sequence[str], size: int) -> list[Sequence[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]
