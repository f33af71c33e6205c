"""What is published as the baseline of resharding: messages to one receiver each, from the least loaded host.

    send_recv         the whole box to every receiver
    local_all_gather  a share of it to each of a host's receivers, which then exchange shares in the host
    alpa              the latter where all receivers of every task are in one host, else the former (the
                      rule in Alpa's code, ``cross_mesh_resharding.py``, before arXiv 2211.05322)

Each message has a sender of its own, so that two receivers of one box may be served by two hosts. Messages
start in the order of tasks: nothing is searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from benchmarks.baselines.reshard_searches import load_balance
from plait.core.parallel.strategy import slice_sizes
from plait.core.reshard.layouts import Box, Reshard, UnitTask, unit_tasks
from plait.core.reshard.plan import Chain, ReshardPlan, ReshardStep
from plait.plan.reshard.boundary import problem
from plait.plan.reshard.cost import Fabric, Option, lower_bound
from plait.plan.reshard.order import Job, Slot, ends

Unicast = Literal["send_recv", "local_all_gather", "alpa"]


class _Single(NamedTuple):
    """A message. task: with the one receiver that it is for. others: those of its host that get it from that
    one."""

    task: UnitTask
    others: tuple[int, ...]
    nbytes: int


def unicast(tasks: Sequence[UnitTask], sizes: Sequence[int], fabric: Fabric, *, way: Unicast) -> int:
    """Nanoseconds of the baseline; the exchange within a host costs nothing. sizes: bytes of every task."""
    jobs, _, _, slots = _balanced(tasks, sizes, fabric, way)
    return ends(jobs, slots)


def unicast_plan(reshard: Reshard, fabric: Fabric, *, way: Unicast) -> ReshardPlan:
    """The baseline as a plan that ranks can carry out, with the seconds that ``unicast`` predicts.

    A receiver of a share passes it on to the others of its host as it comes, which is the exchange.
    """
    source, destination, shape, itemsize = reshard
    tasks = unit_tasks(source, destination, shape)
    sizes = [task.box.elements * itemsize for task in tasks]
    _, singles, found, slots = _balanced(tasks, sizes, fabric, way)
    steps = [_step(singles[slot.job], found[slot.job][slot.choice], slot.start) for slot in slots]
    return ReshardPlan(
        source=source, destination=destination, shape=shape, itemsize=itemsize, hosts=fabric.hosts,
        steps=tuple(sorted(steps, key=lambda step: (step.start, step.task))), order="load_balance",
        lower_bound=lower_bound(list(zip(tasks, sizes, strict=True)), fabric),
    )  # fmt: skip


def _step(single: _Single, option: Option, start: int) -> ReshardStep:
    task = single.task._replace(receivers=(*single.task.receivers, *single.others))
    chain = Chain(option.chains[0].sender, task.receivers)
    way = "broadcast" if single.others else "send_recv"
    return ReshardStep(task, way, (chain,), option.chunks, start, option.duration)


def _balanced(
    tasks: Sequence[UnitTask], sizes: Sequence[int], fabric: Fabric, way: Unicast
) -> tuple[list[Job], list[_Single], list[tuple[Option, ...]], tuple[Slot, ...]]:
    """The messages as jobs, what each is, what its choices stand for, and who sends when."""
    hosts = [{fabric.host(receiver) for receiver in task.receivers} for task in tasks]
    share = way == "local_all_gather" or (way == "alpa" and all(len(each) == 1 for each in hosts))
    singles = [
        one for task, nbytes in zip(tasks, sizes, strict=True)
        for one in (_shares(task, nbytes, fabric) if share else _copies(task, nbytes))
    ]  # fmt: skip
    jobs, found = problem([one.task for one in singles], [one.nbytes for one in singles], fabric, "send_recv")
    return jobs, singles, found, load_balance(jobs)


def _copies(task: UnitTask, nbytes: int) -> Iterator[_Single]:
    for receiver in task.receivers:
        yield _Single(task._replace(receivers=(receiver,)), (), nbytes)


def _shares(task: UnitTask, nbytes: int, fabric: Fabric) -> Iterator[_Single]:
    """A part of the box for each receiver of a host; none for those for whom nothing is left."""
    if not task.box.shape:  # a number has no parts
        yield from _copies(task, nbytes)
        return
    for host in dict.fromkeys(map(fabric.host, task.receivers)):
        group = [receiver for receiver in task.receivers if fabric.host(receiver) == host]
        for receiver, box in zip(group, _parts(task.box, len(group)), strict=True):
            if box.elements:
                others = tuple(one for one in group if one != receiver)
                own = UnitTask(box, task.holders, (receiver,))
                yield _Single(own, others, -(-nbytes * box.elements // task.box.elements))


def _parts(box: Box, count: int) -> Iterator[Box]:
    """The box cut along its first dimension that is divisible, else along its longest."""
    along = next((at for at, size in enumerate(box.shape) if size % count == 0), None)
    along = max(range(len(box.shape)), key=lambda at: box.shape[at]) if along is None else along
    at = box.start[along]
    for size in slice_sizes(box.shape[along], count):
        start, stop = ((*side[:along], edge, *side[along + 1 :])
                       for side, edge in ((box.start, at), (box.stop, at + size)))  # fmt: skip
        yield Box(start, stop)
        at += size
