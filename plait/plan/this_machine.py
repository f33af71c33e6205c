"""The machine that plans, as a cluster, where nothing has been measured on it: as many ranks as it has cores,
each as fast as the lab's description has a core. Good enough to choose by; a profile is better."""

from __future__ import annotations

from plait.core.base.errors import JobError
from plait.core.base.process import usable_cores
from plait.core.cluster.efficiency import Constant
from plait.core.cluster.hardware import Cluster, Hosts
from plait.core.job.spec import Job
from plait.plan.fits import gpus, room

LIKE = "lab"
"""The description that is used."""


def ranks_here(device: str, *, on_cpu: int | None = None) -> int:
    """How many ranks this machine has room for, on ``device`` as in ``run.device``: one for each GPU that is
    not shared, or else ``on_cpu``, one for each core if not given."""
    return (len(gpus()) if device in ("auto", "cuda") else 0) or on_cpu or usable_cores()


def this_machine(job: Job) -> Cluster:
    """Raises JobError where there are GPUs, of which only a description or a profile tells how fast they
    are."""
    found = gpus() if job.run.device != "cpu" else []
    if found or job.run.device in ("cuda", "shared"):
        raise JobError(
            "is a machine with GPUs that nobody has described", key="cluster.preset",
            fix="Name the cluster that they belong to (plait plan lists them), or choose run.device = \"cpu\"",
        )  # fmt: skip
    ranks = job.cluster.ranks or (usable_cores() if job.leaves_ranks_open else job.world_size)
    return _like_the_lab("here", Hosts(ranks_per_host=ranks), hosts=1, device=job.run.device)


def emulated(job: Job, hosts: Hosts, number: int) -> Cluster:
    """``number`` hosts of a lab, which are all this machine."""
    return _like_the_lab("lab", hosts, hosts=number, device=job.run.device)


def _like_the_lab(name: str, given: Hosts, *, hosts: int, device: str) -> Cluster:
    lab, each = Cluster.preset(LIKE), given.ranks_per_host
    there = room(device, each * hosts)
    free = there.total(each * hosts) / (each * hosts) if there else lab.device.memory.value
    memory = lab.device.memory.model_copy(update={"value": free, "source": "free on this machine, shared by all ranks"})
    crowd = max(1.0, each * hosts / usable_cores())
    peak = {precision: _shared(rate, crowd) for precision, rate in lab.device.peak.items()}
    memory_rate = _shared(lab.device.memory_rate, crowd)
    inner, outer = lab.tiers
    tiers = [inner.model_copy(update={"ranks": each if hosts > 1 else 0})]
    if hosts > 1:
        rate = outer.rate
        if given.rank_rate:
            told = {"value": given.rank_rate, "source": "a host's links, shared by its ranks"}
            rate = rate.model_copy(update=told)
        tiers.append(outer.model_copy(update={"ranks": 0, "rate": rate}))
    return lab.model_copy(
        update={
            "name": name,
            "ranks_per_node": each,
            "nodes": hosts,
            "crowd": crowd,
            "tiers": tuple(tiers),
            "device": lab.device.model_copy(update={"memory": memory, "peak": peak, "memory_rate": memory_rate}),
        }
    )


def _shared(rate: Constant, crowd: float) -> Constant:
    """What a rank has of a core's rate while all that share it compute."""
    return rate.model_copy(update={"value": rate.value / crowd})
