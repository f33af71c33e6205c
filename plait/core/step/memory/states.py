"""Bytes of a rank that last from the first step to the last, in closed form: parameters, gradients, optimizer
states, the buffers of sharded data parallelism. A sum over units; the counterpart of what the runtime
allocates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.core.model.precision import master_size
from plait.core.model.spec import ModelSpec
from plait.core.parallel.optimizers import OptimizerName, states_of
from plait.core.parallel.sharding import WHOLE, Sharding, Unit, buffer_counts
from plait.core.parallel.strategy import Strategy

WORKSPACE = 32 << 20
"""Bytes of a GPU's allocator that cuBLAS takes for each stream on which products run, those of a graph apart:
on Hopper and later, 8 MiB before (torch 2.11, getChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp)."""


@dataclass(frozen=True)
class States:
    """Bytes that last from step to step. buffers: of gathered parameters and open gradients."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def states(
    units: Mapping[Unit, int], sharding: Sharding, *, itemsize: int, optimizer: OptimizerName = "adamw",
    moment: int | None = None,
) -> States:  # fmt: skip
    """Of one rank's share of the model. units: numbers in each, padding included. itemsize: bytes of a number
    of the model's; moment: of one that the optimizer remembers, as of a master if not given."""
    master = master_size(itemsize)
    parameters = gradients = kept = 0
    for unit, numel in units.items():
        whole = unit[0] in WHOLE
        params, grads = (1, 1) if whole else (sharding.params, sharding.grads)
        parameters += numel // params * itemsize + (
            numel // sharding.secondary * itemsize if sharding.secondary and not whole else 0
        )
        gradients += numel // grads * master
        each = states_of(optimizer, unit) * (moment or master)
        each += master * (master != itemsize)  # masters, where the model's numbers are smaller
        kept += each * (numel // sharding.optim)
    shared = buffer_counts((unit[0], numel) for unit, numel in units.items() if unit[0] not in WHOLE)
    numbers = sum(numel * count for numel, count in shared.items())
    buffers = numbers * (itemsize * (sharding.params > 1) + master * (sharding.grads > 1))
    return States(parameters, gradients, kept, buffers)


def rounding_buffers(units: Mapping[Unit, int], sharding: Sharding, replicas: int) -> int:
    """Numbers of what gradients are rounded in, and their sums come in, where they travel in bf16: the
    largest of each."""
    given, come = [0], [0]
    for unit, numel in units.items():
        whole = unit[0] in WHOLE
        params, grads = sharding.params, sharding.grads
        levels = [(numel, params), (numel // params, grads // params)] if whole or grads > 1 else []
        levels += [(numel // grads, sharding.optim // grads)]
        given += [size for size, ranks in levels if ranks > 1]
        come += [size // ranks for size, ranks in levels if ranks > 1]
        if replicas > sharding.optim:
            given.append(numel // sharding.optim)
    return max(given) + max(come)


def reduction_buffers(units: Mapping[Unit, int], sharding: Sharding, *, itemsize: int) -> int:
    """What gloo's reduce-scatters of gradients keep: one buffer for every size that a level reduces.
    itemsize: bytes of a number of a gradient on its way."""
    found = set[tuple[str, int]]()
    for numel in units.values():
        params, grads, optim = sharding.params, sharding.grads, sharding.optim
        levels = [("params", numel, params), ("grads", numel // params, grads // params)]
        levels.append(("optim", numel // grads, optim // grads))
        found |= {(level, size) for level, size, ranks in levels if ranks > 1}
    return sum(size for _, size in found) * itemsize


def position_tables(spec: ModelSpec, strategy: Strategy, *, sequence: int, itemsize: int) -> int:
    """Cosines and sines of rotary positions, which all layers share: of every position where a rank's are
    scattered."""
    positions = spec.max_sequence if strategy.cp > 1 else sequence
    return 0 if spec.learned_positions else 2 * positions * spec.letters.D * itemsize
