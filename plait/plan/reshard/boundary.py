"""Plans a reshard: unit tasks, the cheapest way for each, senders and order.

>>> from plait.core.reshard.layouts import Reshard, TensorLayout
>>> fabric = Fabric(hosts=even_hosts(16, 4), rate=1.25e9)
>>> source, destination = TensorLayout.parse("(2,4) R S0 R"), TensorLayout.parse("(2,4)@8 S0 R R")
>>> plan = plan_reshard(Reshard(source, destination, (1024, 1024, 512), 4), fabric)
>>> round(plan.predicted / 1e9, 3), round(plan.lower_bound / 1e9, 3)
(0.859, 0.859)
>>> [[chain.sender for chain in step.chains] for step in plan.steps]
[[0], [4], [4], [0]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.core.base.errors import ReshardError, nearest
from plait.core.reshard.layouts import Reshard, TensorLayout, UnitTask, unit_tasks
from plait.core.reshard.plan import WAYS, ReshardPlan, ReshardStep, TransferMethod
from plait.plan.reshard.cost import Fabric, Option, even_hosts, lower_bound, options
from plait.plan.reshard.order import Choice, Job, Slot, list_order

__all__ = ["Fabric", "Search", "even_hosts", "mesh_hosts", "plan_reshard", "problem"]

Search = Callable[[Sequence[Job]], tuple[Slot, ...]]
"""Function that returns, for each job, the chosen option and its start time."""


def plan_reshard(
    reshard: Reshard,
    fabric: Fabric,
    *,
    way: TransferMethod | None = None,
    order: str = "list",
    search: Search = list_order,
) -> ReshardPlan:
    """Return the plan that moves a tensor from its source's layout to its destination's.

    way: use this way for every task; by default each task's cheapest. order: the name of
    ``search``, which chooses senders and order. The result depends on the arguments alone, so every
    rank may compute it by itself. Raises ReshardError for invalid arguments.
    """
    if way is not None and way not in WAYS:
        raise ReshardError(f"'{way}' is no way to reshard{nearest(way, WAYS)}. Use one of {', '.join(WAYS)}.")
    source, destination, shape, itemsize = reshard
    if min(shape, default=1) < 0 or itemsize < 1:
        raise ReshardError(
            f"A tensor of shape {shape} with {itemsize} bytes an element cannot be. "
            "Give sizes from 0 and at least one byte."
        )
    for rank in (max(source.ranks), max(destination.ranks)):
        fabric.host(rank)
    tasks = unit_tasks(source, destination, shape)
    sizes = [task.box.elements * itemsize for task in tasks]
    jobs, found = problem(tasks, sizes, fabric, way)
    steps = [_step(tasks[slot.job], found[slot.job][slot.choice], slot.start) for slot in search(jobs)]
    return ReshardPlan(
        source=source,
        destination=destination,
        shape=shape,
        itemsize=itemsize,
        hosts=fabric.hosts,
        steps=tuple(sorted(steps, key=lambda step: (step.start, step.task))),
        order=order,
        lower_bound=lower_bound(list(zip(tasks, sizes, strict=True)), fabric),
    )


def mesh_hosts(source: TensorLayout, destination: TensorLayout) -> tuple[int, ...]:
    """Return the host of every rank if each row of a mesh (its last axis) is one host. A rank of
    neither mesh has a host of its own.

    Raises ReshardError if the meshes share ranks, since then rows do not define hosts.

    >>> mesh_hosts(TensorLayout.parse("(1,2) R"), TensorLayout.parse("(2,2)@2 R"))
    (0, 0, 1, 1, 2, 2)
    """
    if set(source.ranks) & set(destination.ranks):
        raise ReshardError("The meshes share ranks, so their rows do not say what a host is. Set ranks_per_host.")
    named: dict[int, int] = {}
    for layout in (source, destination):
        first = len(set(named.values()))
        named |= {rank: first + at // layout.mesh[-1] for at, rank in enumerate(layout.ranks)}
    others = iter(range(len(set(named.values())), len(named) + max(named)))
    return tuple(named[rank] if rank in named else next(others) for rank in range(max(named) + 1))


def _step(task: UnitTask, option: Option, start: int) -> ReshardStep:
    return ReshardStep(task, option.way, option.chains, option.chunks, start, option.duration)


def problem(
    tasks: Sequence[UnitTask], sizes: Sequence[int], fabric: Fabric, way: TransferMethod | None = None
) -> tuple[list[Job], list[tuple[Option, ...]]]:
    """Return the tasks as jobs for list scheduling: for each job, its choices, and the options that
    these choices stand for. sizes: bytes of each task."""
    found = [options(task, nbytes, fabric, way) for task, nbytes in zip(tasks, sizes, strict=True)]
    return [tuple(map(_choice, each)) for each in found], found


def _choice(option: Option) -> Choice:
    """Return an option as a choice: NIC n sends as bit 2n and receives as bit 2n + 1."""
    sends = sum(1 << 2 * nic for nic in option.sends)
    uses = sum(1 << 2 * nic for nic in option.out) + sum(2 << 2 * nic for nic in option.into)
    return Choice(sends, uses, option.duration)
