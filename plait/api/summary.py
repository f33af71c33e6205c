"""A plan in a sentence, as ``plait train`` begins: model, ranks, strategy, tokens of a step, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.core.base.errors import PlaitError
from plait.core.base.text import counted

if TYPE_CHECKING:
    from plait.core.job.plan import Plan
    from plait.plan.fits import Room


def what_runs(plan: Plan, there: Room | None) -> str:
    """A line about a plan. there: the memory of this machine; None if ranks run elsewhere, or none starts."""
    work, model = plan.workload, plan.model
    sequences = work.micro_batch * work.num_micro_batches
    batches = f" in {work.num_micro_batches} micro-batches" if work.num_micro_batches > 1 else ""
    steps = f"{counted(plan.job.train.steps, 'step')} of " if plan.job else ""
    parts = (
        f"{model.family} of {counted(model.num_layers, 'layer')}, hidden {model.hidden}: {model.num_parameters:,} "
        f"parameters ({work.precision}) on {counted(plan.layout.world_size, 'rank')}{_strategy(plan)}",
        f"{steps}{counted(sequences * work.sequence, 'token')} ({counted(sequences, 'sequence')} of {work.sequence:,}"
        f"{batches})",
        _memory(plan, there),
    )
    return "; ".join(parts)


def _strategy(plan: Plan) -> str:
    found = ", ".join([*_degrees(plan), *_slices(plan), *_rest(plan)])
    return f" ({found})" if found else ""


def _degrees(plan: Plan) -> Iterator[str]:
    """Degrees of the axes along which ranks differ; several for stages that differ."""
    places = plan.layout.degrees
    of_places = {"tp": [tp for _, tp in places], "dp": [dp for dp, _ in places]}
    for axis, degrees in (of_places | {"pp": [len(places)], "cp": [plan.layout.cp]}).items():
        if max(degrees) > 1:
            yield f"{axis} {'/'.join(map(str, degrees if len(set(degrees)) > 1 else degrees[:1]))}"


def _slices(plan: Plan) -> Iterator[str]:
    """Means of hiding communication of tensor and context parallelism, where there is any."""
    strategy = plan.strategy
    if strategy.tp == strategy.cp == 1 and plan.layout.uniform:
        return
    if strategy.overlap != "domino":
        yield f"overlap {strategy.overlap}"
    elif len({(one.p1, one.p2) for one in plan.choices.strategies}) > 1:
        yield "slices chosen before training"
    else:
        yield f"slices {strategy.p1} x {strategy.p2}"
    if strategy.sequence_parallel:
        yield "sequence parallel"


def _rest(plan: Plan) -> Iterator[str]:
    """Factors of sharding of the first stage; the schedule; recomputation."""
    first = plan.shardings[0]
    factors = {"parameters": first.params, "gradients": first.grads, "optimizer": first.optim}
    if cut := [f"{name} over {factor}" for name, factor in factors.items() if factor > 1]:
        yield "sharded " + ", ".join(cut)
    if len(plan.layout.degrees) > 1:
        yield plan.schedule.name
    if plan.strategy.recompute != "none":
        yield f"{plan.strategy.recompute} recomputation"


def _memory(plan: Plan, there: Room | None) -> str:
    """Predicted bytes of the rank that needs the most, here or on the cluster's devices. While slices are not
    chosen there are two figures: of the slices that take the least and the most."""
    from plait.api.choose import other_cluster
    from plait.core.base.text import in_bytes
    from plait.plan.fits import estimate_in
    from plait.plan.memory_report import estimate_on

    steps = [replace(plan, strategy=one) for one in plan.choices.strategies or (plan.strategy,)]
    free = ""
    try:
        cluster = other_cluster(plan.job) if plan.job and not there else None
        sizes = [
            estimate_on(one, cluster, traffic=False) if cluster else estimate_in(one, there, traffic=False)
            for one in steps
        ]
    except PlaitError as error:
        return f"memory is not predicted ({error})"
    found = [one.most.memory.total for one in sizes]
    if cluster:
        free = f" on {cluster.device.name}"
    elif there:
        free = f" of {in_bytes(there.each)}" if there.each else f", {in_bytes(there.shared)} free for all"
    least, most = in_bytes(min(found)), in_bytes(max(found))
    return f"tensors take {f'{least} to {most}' if least != most else most} a rank (predicted{free})"
