"""What sharded data parallelism sends, in closed form: the counterpart of what the runtime counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Site
from plait.core.parallel.sharding import VECTORS, WHOLE, Sharding, Unit, unit_of
from plait.core.parallel.strategy import Strategy
from plait.core.record.records import sent_bytes
from plait.core.step.segments import Collective
from plait.core.step.stages import Placed, Stage, placed_sites, rows_of


def unit_sizes(model: ModelSpec, strategy: Strategy, stage: Stage, sharding: Sharding) -> dict[Unit, int]:
    """Numbers in every unit of one rank's share of a stage, padding included."""
    sizes, vectors = dict[Unit, int](), 0
    shares = _shares(model, strategy, stage.embeds)
    for at in placed_sites(model, stage):
        for kind, numel in shares[at.site].items():
            if kind == VECTORS[0]:
                vectors += numel
            else:
                sizes[kind, at.number] = numel
    sizes["vectors", stage.index] = vectors
    return {unit: sharding.padded(numel) for unit, numel in sizes.items() if numel}


@cache
def _shares(model: ModelSpec, strategy: Strategy, embeds: bool) -> dict[Site, Counter[str]]:
    """Numbers of one rank by site and kind of unit, the same wherever a stage has the site. embeds: whether
    the stage has the embedding, too."""
    found = dict[Site, Counter[str]]()
    for site, rows in rows_of(model, embeds=embeds).items():
        found[site] = Counter()
        for weight in rows:
            kind, _ = unit_of(Placed(site).prefix + weight.name, len(weight.shape))
            found[site][kind] += strategy.share(model, weight)
    return found


class Sent(NamedTuple):
    """One collective. axis: as the runtime counts it. whole: bytes that are gathered or reduced. stride:
    between neighbours of the group, counted in replicas."""

    axis: str
    kind: Collective
    whole: int
    ranks: int
    stride: int

    @property
    def bytes(self) -> int:
        """What a rank sends."""
        return sent_bytes(self.kind, self.whole, self.ranks)


@dataclass(frozen=True)
class UnitTraffic:
    """The collectives of one unit of ``numel`` numbers, padding included, over ``ranks`` replicas; those over
    one rank are left out. gradient: bytes of a number of its gradient."""

    unit: Unit
    numel: int
    sharding: Sharding
    ranks: int
    itemsize: int
    gradient: int = 4

    @property
    def params(self) -> int:
        """By which factor parameters are cut while they are computed with."""
        return 1 if self.whole else self.sharding.params

    @property
    def grads(self) -> int:
        """By which factor gradients are cut while they are added up."""
        return 1 if self.whole else self.sharding.grads

    @property
    def publishes(self) -> bool:
        """Whether optimizers change parts of what others compute with."""
        return self.sharding.optim > self.params

    @property
    def whole(self) -> bool:
        """Whether only its optimizer states are cut."""
        return self.unit[0] in WHOLE

    def gather(self, *, forward: bool) -> list[Sent]:
        """To compute with it, forward or backward."""
        if self.params == 1:
            return []
        if self.sharding.secondary and not forward:
            return self._sent(Sent("secondary", "all_gather", self.numel * self.itemsize, self.sharding.secondary, 1))
        return self._sent(Sent("params", "all_gather", self.numel * self.itemsize, self.params, 1))

    def reduce(self, *, last: bool) -> list[Sent]:
        """Of its gradient: a micro-batch's to the part that is added up, then the step's ``last``: to the
        part that an optimizer owns, and over replicas."""
        p, g, o = self.sharding.params, self.sharding.grads, self.sharding.optim
        numel, size = self.numel, self.gradient
        found: list[Sent] = []
        if self.grads > 1 or self.whole:
            found += [Sent("params", "reduce_scatter", numel * size, p, 1)]
            found += [Sent("grads", "reduce_scatter", numel // p * size, g // p, p)]
        if last:
            found += [Sent("optim", "reduce_scatter", numel // g * size, o // g, g)]
            found += [Sent("replicas", "all_reduce", numel // o * size, self.ranks // o, o)]
        return self._sent(*found)

    def publish(self) -> list[Sent]:
        """What an optimizer has changed."""
        if not self.publishes:
            return []
        p, g, o = self.sharding.params, self.sharding.grads, self.sharding.optim
        numel, size = self.numel, self.itemsize
        found = [Sent("optim", "all_gather", numel // g * size, o // g, g)]
        found += [Sent("grads", "all_gather", numel // p * size, g // p, p)]
        if self.whole:
            found += [Sent("params", "all_gather", numel * size, p, 1)]
        return self._sent(*found)

    def _sent(self, *found: Sent) -> list[Sent]:
        return [one for one in found if one.ranks > 1]


def unit_traffic(
    units: Mapping[Unit, int], sharding: Sharding, ranks: int, *, itemsize: int, gradient_itemsize: int = 4
) -> list[UnitTraffic]:
    """Of every unit, in order. units: numbers in each, padding included."""
    return [UnitTraffic(unit, numel, sharding, ranks, itemsize, gradient_itemsize) for unit, numel in units.items()]


def step_bytes(units: Sequence[UnitTraffic], *, micro_batches: int, tied: bool = False) -> dict[str, int]:
    """Bytes that one rank sends in a step, by axis, as rings would (over s ranks (s-1)/s of the whole, an
    all-reduce twice that).

    units: of one rank's share of the model. tied: the embedding is also the head of the same stage. For every
    micro-batch a unit is gathered forward and backward and its gradient reduced to the accumulated part;
    after the last one the sum is reduced to what an optimizer owns and summed over replicas, and the new
    parameters go the same way back.
    """
    sent: dict[str, int] = dict.fromkeys(("params", "grads", "optim", "replicas", "secondary"), 0)

    def add(found: Sequence[Sent], times: int = 1) -> None:
        for one in found:
            sent[one.axis] += one.bytes * times

    for each in units:
        kind = each.unit[0]
        add(each.gather(forward=True), micro_batches * (2 if kind == "embedding" and tied else 1))
        # Nobody reads rows of an embedding backward, except as the head's weight.
        read_backward = kind not in ("embedding", "positions") or (kind == "embedding" and tied)
        add(each.gather(forward=False), micro_batches * read_backward)
        if not each.whole:  # whole on every rank until the step's end
            add(each.reduce(last=False), micro_batches - 1)
        add(each.reduce(last=True))
        add(each.publish())
    return sent
