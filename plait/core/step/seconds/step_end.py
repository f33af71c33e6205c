"""What a step's end adds in closed form: gradients to their owners and new parameters back, as far as nothing
hides them.

Half of what is sent can run beside the last backward, the other half beside the first forward. Stages that
run lists (``Options.in_lists``) sum gradients within the list of the last backward. There the stages before
wait for what that takes longer, as it sends their gradients last: where nothing is hidden for all sums, else
for computation that is slowed down and for collectives that share their links with sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from plait.core.step.seconds import rates
from plait.core.step.seconds.micro_batch import MicroBatchSeconds
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.owners import Owners
from plait.core.step.seconds.pipeline_time import INTERLEAVED, ZB_V
from plait.core.step.seconds.rates import Seconds
from plait.core.step.seconds.shard_sent import HIDE_BACKWARD, HIDE_FORWARD
from plait.core.step.seconds.shard_time import ShardTime

TINY = 1e-30


@dataclass(frozen=True)
class StepEnd:
    """Of points. late_backward: by how much the host takes longer to launch a layer's backward than that
    takes, with what is computed again."""

    sharding: ShardTime
    late_backward: Seconds

    @property
    def asked(self) -> Priced:
        """The points."""
        return self.sharding.asked

    @property
    def batch(self) -> MicroBatchSeconds:
        """What their micro-batches take."""
        return self.sharding.batch

    @property
    def owners(self) -> Owners:
        """What their ends take."""
        return self.sharding.owners

    def seconds(self) -> Seconds:
        """Exposed in all."""
        apart = self.asked.points.schedule != ZB_V  # whose first place has both ends of the model
        return self._down() + self._up() + self.owners.ends * apart

    @property
    def first_sums(self) -> Seconds:
        """Of zb-v, exposed at the first place: a step does not wait for those that run while backwards of
        others are waited for. 0 of other schedules."""
        return np.where(self._turns & ~self._hides, self.owners.down, 0.0)

    @property
    def other_sums(self) -> Seconds:
        """The same at another place."""
        pp = np.maximum(2, self.asked.points.pp)
        return self.first_sums * np.maximum(0, pp * self.owners.evenness - 1) / (pp - 1)

    @property
    def _late(self) -> Any:
        return np.asarray(self.asked.options.sums_late)

    @property
    def _in_lists(self) -> Any:
        return np.asarray(self.asked.options.in_lists)

    @cached_property
    def _layers(self) -> Seconds:
        """Of how many layers' passes a place computes beside its sums, which end when the last micro-batch
        does. Interleaved stages end one after the other, a round of micro-batches between two."""
        points = self.asked.points
        stages, each = np.maximum(points.virtual, 1), np.minimum(points.pp, points.num_micro)
        rounds = (points.schedule == INTERLEAVED) & ~self._queued
        last = np.where(rounds, (1 + each * (stages - 1)) / stages, 1.0)
        return self.owners.inner * last

    @property
    def _queued(self) -> Any:
        """Whether layers wait for all that was sent before, behind which parameters are gathered for them."""
        return self._in_lists & (self.asked.points.params > 1)

    @property
    def _split(self) -> Any:
        return self.sharding.split

    @cached_property
    def _host(self) -> Seconds:
        """What the host is late in a layer's part of the list with the sums, unless something gives it
        time."""
        return np.maximum(0, np.where(self._split, self.batch.late_weights, self.late_backward))

    def _down(self) -> Seconds:
        """Of gradients."""
        return np.where(self._hides, self._hidden_sums(), self._exposed_sums())

    @property
    def _hides(self) -> Any:
        points = self.asked.points
        return HIDE_BACKWARD[points.shard_overlap] & ~(self._late & ((points.optim == 1) | (points.pp > 1)))

    def _exposed_sums(self) -> Seconds:
        """Waited for: that gives the host time."""
        owned, spare = self.owners, self.owners.inner * self._host
        own = np.maximum(0, owned.down - spare)
        every = self.asked.points.pp * np.maximum(0, owned.down * owned.evenness - spare)
        return np.where(self._chained, np.maximum(own, every), own)

    def _hidden_sums(self) -> Seconds:
        """Beside backwards. For other places' a place waits as long as sums run beside the last ones; all of
        what is exposed, if gathers of parameters wait behind it."""
        batch, owned = self.batch, self.owners
        each = np.where(self._split, batch.weight_gradients, batch.back) + self._host
        busy, last = self._layers * each, owned.inner * each
        more = np.where(self._turns, self._turned(each), self._more(busy, self._layers, owned.down))
        slowed = np.minimum(more, last * (self.asked.cluster.efficiency.slow_computation.value - 1))
        slowed = np.maximum(slowed, self._held(last))
        slowed = np.where(self._queued, more * owned.evenness, slowed)
        met, met_last = (self._met * np.minimum(some, owned.down) for some in (busy, last))
        others = np.maximum(0, slowed + met_last - owned.inner * self._host)
        return more + met + self._others * others

    def _more(self, busy: Seconds, layers: Seconds, sent: Seconds) -> Seconds:
        """What sending adds at the end to what so many layers compute meanwhile."""
        other = layers * self.batch.reduced
        flown = rates.together(self.asked.cluster, busy, other + self.batch.edge + sent) - busy
        flown = np.maximum(0, flown - layers * self.sharding.exposed)
        own, shard = self.batch.reduced, self.sharding
        queued = layers * np.maximum(0, shard.backward(own + sent / layers) - shard.backward(own) - self._host)
        beside = np.where(shard.gathers, queued, self._beside(busy, other, sent))
        return np.where(shard.flows, flown, beside)

    @property
    def _turns(self) -> Any:
        """Whether a place's first stage ends when its second one has long ended."""
        return (self.asked.points.schedule == ZB_V) & (self.asked.points.pp > 1) & self._in_lists

    def _turned(self, each: Seconds) -> Seconds:
        """Of zb-v: sums of the first stage have its last weight gradients beside them; those of both stages
        have what the first one computes until then, too. each: seconds of a layer's list."""
        points, owned, half = self.asked.points, self.owners, self.owners.inner / 2
        behind = self.batch.back + np.maximum(0, self.late_backward)
        meanwhile = half * (each + np.minimum(points.pp, points.num_micro) * behind)
        first = self._more(half * each, half, owned.down / 2)
        return np.maximum(first, self._more(meanwhile, owned.inner, owned.down))

    def _held(self, last: Seconds) -> Seconds:
        """What the last backward of a place takes longer where gradients are whole in buffers: all but those
        that buffers hold are sent before the list ends."""
        owned = self.owners
        sent = owned.down * owned.evenness + owned.inner * self.batch.reduced
        return np.where(self.sharding.flows, np.maximum(0, sent * self.sharding.done - last), 0.0)

    def _up(self) -> Seconds:
        """Of new parameters, with which a forward and its host begin."""
        batch, owned, points = self.batch, self.owners, self.asked.points
        hides = HIDE_FORWARD[points.shard_overlap] & ~(self._late & (points.params == 1))
        hides &= ~self._queued
        busy = self._layers * (batch.ahead + np.maximum(0, batch.late_forward))
        return np.where(hides, self._beside(busy, self._layers * batch.gathered, owned.up), owned.up)

    def _beside(self, busy: Seconds, other: Seconds, sent: Seconds) -> Seconds:
        """What sending adds to what runs beside it. other: what sharding sends there, too."""
        cluster = self.asked.cluster
        return rates.together(cluster, busy, other + sent) - rates.together(cluster, busy, other)

    @property
    def _chained(self) -> Any:
        """Whether sums lengthen the list that hands a gradient on."""
        return self._in_lists & ~self._split & ~self._late

    @property
    def _others(self) -> Any:
        """How many other places' last backwards, with their sums, are waited for."""
        return (self.asked.points.pp - 1) * self._chained

    @property
    def _met(self) -> Seconds:
        """Of a backward, the share of exposed collectives that use the links of sums: both then take twice as
        long."""
        points, batch, cluster = self.asked.points, self.batch, self.asked.cluster
        links = cluster.tier_of(points.tp * points.replicas)
        some: list[tuple[Seconds, Any]] = [(batch.tp, points.tp), (batch.cp, points.tp * points.cp)]
        same = np.sum([sent * (cluster.tier_of(ranks) == links) for sent, ranks in some], axis=0)
        every = np.maximum(batch.tp + batch.cp + batch.ep, TINY)
        met: Seconds = (batch.back - batch.backward) * same / every / np.maximum(batch.back + self._host, TINY)
        return np.where(self._chained, met, 0.0)
