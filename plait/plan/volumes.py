"""What a rank of a place holds and sends in a step, along dp, along pp and among experts.

What Muon sends to have matrices whole counts along dp, the part of it between tensor-parallel ranks too.
Everything but experts is counted as of a dense model that is as wide as what every rank has. Of a model with
experts in some layers every layer has its share of what every rank has (docs/adr/0017); its experts are
counted where they are.
"""

from __future__ import annotations

from dataclasses import replace

from plait.core.job.communication import Volume
from plait.core.model.experts import refuse_experts
from plait.core.parallel.sharding import Sharding, Unit
from plait.core.step.memory.estimate import MemoryOfPlace
from plait.core.step.memory.experts_memory import resident
from plait.core.step.seconds.experts_time import cut_by
from plait.core.step.step import Step
from plait.core.step.unit_traffic import step_bytes, unit_traffic


def place_volume(step: Step, index: int) -> Volume:
    """What a rank of a place holds and sends in a step, along dp and along pp. Raises JobError for a model
    with experts, whose volumes are not counted."""
    refuse_experts(step.model, "counted")
    one = MemoryOfPlace(step, index)
    sent = one.sent()
    return Volume(
        weights=sum(one.place.unit_sizes.values()) * step.workload.itemsize,
        dp=sum(sent.get(axis, 0) for axis in ("params", "grads", "optim", "replicas", "secondary", "matrices")),
        pp=sent.get("pp", 0),
    )


def expert_volume(step: Step, index: int, ep: int) -> Volume:
    """Of a rank of a place, as ``place_volume``. ep: ranks that share out the experts of a layer.

    Tokens go to their experts and back, forward and backward, once more where a layer is computed again;
    (ep - 1) / ep of them leave the rank, spread evenly over experts.
    """
    experts = step.model.experts
    dense = place_volume(replace(step, model=resident(step.model)), index)
    if experts is None:
        return dense
    mesh, loads, strategy = step.layout.meshes[index], step.workload, step.strategy
    layers = [layer for stage in step.stages_of(index) for layer in stage.layers if experts.at(layer)]
    own = _of_experts(step.shardings[index], ep)
    numel = own.padded(step.model.routed_parameters // (ep * mesh.tp))
    units: dict[Unit, int] = {("mlp", layer): numel for layer in layers}
    shared = unit_traffic(units, own, mesh.replicas // ep, itemsize=loads.itemsize, gradient_itemsize=loads.reduced)
    sent = step_bytes(shared, micro_batches=loads.num_micro_batches)
    tokens = step.largest_share(index) * loads.sequence // mesh.cp // (mesh.tp if strategy.sequence_parallel else 1)
    rows = round(tokens * experts.load) * step.model.hidden * loads.itemsize
    again = 0
    if strategy.recompute in ("full", "layer"):
        again = len(layers) if strategy.recompute_layers is None else min(len(layers), strategy.recompute_layers)
    times = 2 * (2 * len(layers) + again) * loads.num_micro_batches
    return replace(
        dense,
        weights=dense.weights + numel * len(layers) * loads.itemsize,
        dp=dense.dp + sum(sent.values()),
        ep=float(times * (rows * (ep - 1) // ep)),
    )


def _of_experts(sharding: Sharding, ep: int) -> Sharding:
    """Factors over the replicas that have the same experts."""
    cut = {name: int(cut_by(getattr(sharding, name), ep)) for name in ("params", "grads", "optim")}
    secondary = int(cut_by(sharding.secondary, ep)) if sharding.secondary else 0
    return Sharding(**cut, secondary=secondary if 1 < secondary < cut["params"] else 0)
