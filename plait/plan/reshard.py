"""Planning a reshard: unit tasks, the cheapest way for each, senders and order.

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

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from plait.core.base.errors import ReshardError, nearest
from plait.core.reshard.layouts import Reshard, TensorLayout, UnitTask, unit_tasks
from plait.core.reshard.plan import WAYS, ReshardPlan, ReshardStep, Way
from plait.plan.reshard_cost import Fabric, Option, even_hosts, lower_bound, options
from plait.plan.reshard_order import Choice, Job, Slot, list_order

__all__ = ["ORDERS", "Fabric", "Order", "even_hosts", "mesh_hosts", "plan_reshard", "problem", "search"]

Order = Literal["list", "naive", "load_balance", "greedy", "dfs", "exact"]
ORDERS: tuple[Order, ...] = get_args(Order)


def plan_reshard(reshard: Reshard, fabric: Fabric, *, order: Order = "list", way: Way | None = None) -> ReshardPlan:
    """The plan that moves a tensor from its source's layout to its destination's.

    order: the search for senders and order. way: the same one for every task; by default each task's
    cheapest. A function of its arguments: every rank may compute it for itself. Raises ReshardError for what
    cannot be.
    """
    if order not in ORDERS:
        raise ReshardError(f"'{order}' is no order{nearest(order, ORDERS)}. Use one of {', '.join(ORDERS)}.")
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
    steps = [_step(tasks[slot.job], found[slot.job][slot.choice], slot.start) for slot in search(jobs, order)]
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
    """The host of every rank where each row of a mesh (its last axis) is a host; a rank of neither has a host
    of its own.

    Raises ReshardError if the meshes share ranks, for which rows say nothing.

    >>> mesh_hosts(TensorLayout.parse("(1,2) R"), TensorLayout.parse("(2,2)@2 R"))
    (0, 0, 1, 1, 2, 2)
    """
    if set(source.ranks) & set(destination.ranks):
        raise ReshardError("The meshes share ranks, so their rows do not say what a host is. Give the ranks of a host.")
    named: dict[int, int] = {}
    for layout in (source, destination):
        first = len(set(named.values()))
        named |= {rank: first + at // layout.mesh[-1] for at, rank in enumerate(layout.ranks)}
    others = iter(range(len(set(named.values())), len(named) + max(named)))
    return tuple(named[rank] if rank in named else next(others) for rank in range(max(named) + 1))


def _step(task: UnitTask, option: Option, start: int) -> ReshardStep:
    return ReshardStep(task, option.way, option.chains, option.chunks, start, option.duration)


def problem(
    tasks: Sequence[UnitTask], sizes: Sequence[int], fabric: Fabric, way: Way | None = None
) -> tuple[list[Job], list[tuple[Option, ...]]]:
    """The tasks as jobs to be ordered, and the option that each choice of a job stands for."""
    found = [options(task, nbytes, fabric, way) for task, nbytes in zip(tasks, sizes, strict=True)]
    return [tuple(map(_choice, each)) for each in found], found


def _choice(option: Option) -> Choice:
    """NIC n sends as bit 2n and receives as bit 2n + 1."""
    sends = sum(1 << 2 * nic for nic in option.sends)
    uses = sum(1 << 2 * nic for nic in option.out) + sum(2 << 2 * nic for nic in option.into)
    return Choice(sends, uses, option.duration)


def search(jobs: Sequence[Job], order: Order) -> tuple[Slot, ...]:
    """Senders and starts by the search named."""
    if order == "list":
        return list_order(jobs)
    from plait.plan import reshard_searches as others  # which plans do without

    searches: Mapping[Order, Callable[[Sequence[Job]], tuple[Slot, ...]]] = {
        "naive": others.naive,
        "load_balance": others.load_balance,
        "greedy": others.greedy,
        "dfs": lambda every: others.dfs(every)[0],
        "exact": lambda every: others.exact(every).slots,
    }
    return searches[order](jobs)
