"""Exposed seconds of sharding in a micro-batch and at a step's end: gradients to their owners, new
parameters back.

Half of the end's traffic can overlap with the last backward, the other half with the first forward.
Stages that run instruction lists (``Options.in_lists``) reduce gradients within the list of the
last backward. It sends the gradients for earlier stages last, so earlier stages wait for its delay.
If nothing is hidden, the delay is all reductions; else slowed computation, and collectives that
share links with reductions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from plait.core.step.columns.points import StrategyTable, column
from plait.core.step.seconds import rates
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.layer_work import FULL
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.rates import Seconds
from plait.core.step.seconds.shard_traffic import HIDE_BACKWARD, HIDE_FORWARD
from plait.core.step.seconds.sharding_costs import ShardingCosts

TINY = 1e-30
BUFFERS = 4
"""Number of buffers for unsharded gradients of layers."""


@dataclass(frozen=True)
class StepEnd:
    """Exposed seconds of sharding. priced: the strategies on their cluster. batch, owners: results
    that strategies share."""

    priced: Priced
    batch: Layer
    owners: ShardingCosts

    @property
    def points(self) -> StrategyTable:
        """The strategies, one element of each array for each."""
        return self.priced.points

    @cached_property
    def again(self) -> Seconds:
        """Fraction of a stage's layers whose activations are recomputed."""
        stage, limit = self.owners.inner / self.points.virtual, self.points.recompute_layers
        return np.where(limit < 0, 1.0, np.minimum(1, limit / stage))

    @cached_property
    def in_lists(self) -> Any:
        """True if stages run instruction lists."""
        return np.asarray(self.priced.options.in_lists)

    @cached_property
    def split(self) -> Any:
        """True if gradients are reduced in an instruction list of weight gradients alone."""
        return column("splits", self.points.schedule) & self.in_lists

    @cached_property
    def turns(self) -> Any:
        """True if the first pp rank holds the last stage."""
        return column("turns", self.points.schedule) & (self.points.pp > 1)

    @cached_property
    def hides(self) -> Any:
        """True if instruction lists hide reductions; only for models that can be trained in
        lists."""
        return self.priced.listed & HIDE_BACKWARD[self.points.shard_overlap]

    @cached_property
    def flows(self) -> Any:
        """True if a list's reductions may overlap with the next list: no parameter gathers are
        queued behind them."""
        return self.hides & (self.points.grads > 1) & (self.points.params == 1)

    # ---- a micro-batch ----

    @property
    def _done(self) -> Seconds:
        """Fraction of a list's reductions that are done, and out of their buffers, when the list
        ends."""
        return 1 - np.minimum(1, BUFFERS / (2 * self.owners.inner))

    @cached_property
    def _backward(self) -> Seconds:
        return self.batch.backward_total + self.again * (self.batch.again + self.batch.sent_again)

    @cached_property
    def _summing(self) -> Seconds:
        """Computation of one layer in the list that reduces gradients, in seconds."""
        return np.where(self.split, self.batch.weight_gradients, self._backward)

    @cached_property
    def exposed(self) -> Seconds:
        """Exposed seconds of one layer's gathers and reductions."""
        batch = self.batch
        listed = self._together(self._summing, batch.reduced * self._done) - self._summing
        whole = batch.reduced - (
            batch.forward_total + batch.backward_total
        )  # no micro-batch is shorter than its communication
        gathered = batch.shard_forward + self._gathering(batch.reduced)
        gathered = np.where(self.hides & (self.points.params > 1), gathered, self.sharding)
        return np.where(self.flows, np.maximum(listed, whole), gathered)

    @property
    def sharding(self) -> Seconds:
        """Seconds of one layer's gathers and reductions that its own forward and backward do not
        hide."""
        return self.batch.shard_forward + self.batch.shard_backward

    def _gathering(self, sent: Seconds) -> Seconds:
        """Return the exposed seconds of gathers and reductions in the backward of a layer whose
        parameters are gathered. sent: seconds of gathers and reductions. A recomputed layer gathers
        attention's parameters first, which waits for less."""
        own = self._backward
        core = self.batch.attention_backward + self.again * self.batch.attention_again
        chain = np.where(self.points.recompute == FULL, 0.0, self.priced.model.mlp_share * (own - core + sent))
        return np.maximum(self._together(own, sent), chain) - own

    def head_sums(self, late: Seconds) -> Seconds:
        """Return the exposed seconds of reducing the head's gradient, which comes first in a
        backward. late: seconds by which the host is late per layer of the list."""
        batch, layers, head = self.batch, self.owners.last, self.batch.head_backward / (1 + self.split)
        more = self._together(layers * self._summing + head, layers * batch.reduced * self._done + batch.edge) - head
        more = more - layers * (self._summing + self.exposed + np.maximum(0, late))
        return np.where(self.flows, np.clip(more, 0, batch.edge), 0.0)

    @cached_property
    def behind(self) -> Seconds:
        """Seconds of launching a layer's backward, with recomputation, beyond the seconds that the
        backward takes."""
        return self.batch.late_backward + self.sharding - self.exposed + self.again * self.batch.late_again

    # ---- the end ----

    def end_seconds(self) -> Seconds:
        """Return all exposed seconds at a step's end. Summing tied weights' gradients costs nothing
        in zb-v, whose first pp rank holds both ends of the model."""
        down = np.where(self._hides_down, self._hidden_sums(), self._exposed_sums())
        return down + self._up() + self.owners.ends * ~column("turns", self.points.schedule)

    def turned_sums(self) -> tuple[Seconds, Seconds]:
        """Return (first pp rank, other pp ranks): zb-v's exposed reductions in seconds; 0 for other
        schedules. A step does not wait for reductions that run while a pp rank waits for other pp
        ranks' backwards."""
        pp = np.maximum(2, self.points.pp)
        first = np.where(self._turned & ~self._hides_down, self.owners.down, 0.0)
        return first, first * np.maximum(0, pp * self.owners.evenness - 1) / (pp - 1)

    @property
    def _late(self) -> Any:
        return np.asarray(self.priced.options.sums_late)

    @property
    def _turned(self) -> Any:
        """True if a pp rank's first stage ends long after its second one."""
        return self.turns & self.in_lists

    @property
    def _queued(self) -> Any:
        """True if layers wait for all earlier transfers, behind which their parameter gathers are
        queued."""
        return self.in_lists & (self.points.params > 1)

    @cached_property
    def _layers(self) -> Seconds:
        """Number of layers whose passes a pp rank computes while its reductions run, which end with
        the last micro-batch. Interleaved stages end one after another, a round of micro-batches
        apart."""
        points = self.points
        stages, each = np.maximum(points.virtual, 1), np.minimum(points.pp, points.num_micro)
        rounds = column("circles", points.schedule) & ~self._queued
        return self.owners.inner * np.where(rounds, (1 + each * (stages - 1)) / stages, 1.0)

    @cached_property
    def _host(self) -> Seconds:
        """Seconds by which the host is late for each layer of the list with reductions, unless
        other waits give it time."""
        return np.maximum(0, np.where(self.split, self.batch.late_weights, self.behind))

    @cached_property
    def _hides_down(self) -> Any:
        points = self.points
        return HIDE_BACKWARD[points.shard_overlap] & ~(self._late & ((points.optim == 1) | (points.pp > 1)))

    @property
    def _chained(self) -> Any:
        """True if reductions lengthen the list whose result the previous stage waits for."""
        return self.in_lists & ~self.split & ~self._late

    def _exposed_sums(self) -> Seconds:
        """Return the seconds of reductions that nothing hides. Waiting for them gives the host
        time."""
        owned, spare = self.owners, self.owners.inner * self._host
        own = np.maximum(0, owned.down - spare)
        every = self.points.pp * np.maximum(0, owned.down * owned.evenness - spare)
        return np.where(self._chained, np.maximum(own, every), own)

    def _hidden_sums(self) -> Seconds:
        """Return the exposed seconds of reductions that overlap with backwards.

        A pp rank also waits for other pp ranks, as long as their reductions overlap with their last
        backwards; or for all of their exposed seconds, if parameter gathers are queued behind
        reductions.
        """
        batch, owned, met = self.batch, self.owners, self._met()
        each = np.where(self.split, batch.weight_gradients, batch.backward_total) + self._host
        busy, last = self._layers * each, owned.inner * each
        more = np.where(self._turned, self._turned_more(each), self._more(busy, self._layers, owned.down))
        slowed = np.minimum(more, last * (self.priced.cluster.efficiency.slow_computation.value - 1))
        # If gradients are unsharded in buffers, all except the buffered ones are sent before the list ends.
        sent = owned.down * owned.evenness + owned.inner * batch.reduced
        slowed = np.maximum(slowed, np.where(self.flows, np.maximum(0, sent * self._done - last), 0.0))
        slowed = np.where(self._queued, more * owned.evenness, slowed)
        others = np.maximum(0, slowed + met * np.minimum(last, owned.down) - owned.inner * self._host)
        return more + met * np.minimum(busy, owned.down) + (self.points.pp - 1) * self._chained * others

    def _more(self, busy: Seconds, layers: Seconds, sent: Seconds) -> Seconds:
        """Return the seconds that reductions at a step's end add to computation. busy, layers: the
        concurrent computation, in seconds and in layers."""
        own = self.batch.reduced
        other = layers * own
        flown = np.maximum(0, self._together(busy, other + self.batch.edge + sent) - busy - layers * self.exposed)
        queued = np.maximum(0, self._gathering(own + sent / layers) - self._gathering(own) - self._host)
        gathers = self.hides & (self.points.params > 1)
        return np.where(self.flows, flown, np.where(gathers, layers * queued, self._slowdown(busy, other, sent)))

    def _turned_more(self, each: Seconds) -> Seconds:
        """Return the seconds that reductions at a step's end add to computation in zb-v. each:
        seconds of one layer's list.

        The first stage's reductions overlap with its last weight gradients. Both stages' reductions
        also overlap with all that the first stage computes until then.
        """
        points, owned, half = self.points, self.owners, self.owners.inner / 2
        behind = self.batch.backward_total + np.maximum(0, self.behind)
        meanwhile = half * (each + np.minimum(points.pp, points.num_micro) * behind)
        first = self._more(half * each, half, owned.down / 2)
        return np.maximum(first, self._more(meanwhile, owned.inner, owned.down))

    def _up(self) -> Seconds:
        """Return the exposed seconds of gathering new parameters, at the beginning of a forward and
        of its launches."""
        batch, owned, points = self.batch, self.owners, self.points
        hides = HIDE_FORWARD[points.shard_overlap] & ~(self._late & (points.params == 1)) & ~self._queued
        busy = self._layers * (batch.forward_total + np.maximum(0, batch.late_forward))
        return np.where(hides, self._slowdown(busy, self._layers * batch.gathered, owned.up), owned.up)

    def _together(self, busy: Seconds, sent: Seconds) -> Seconds:
        return rates.overlapped(self.priced.cluster, busy, sent)

    def _slowdown(self, busy: Seconds, other: Seconds, sent: Seconds) -> Seconds:
        """Return the slowdown of computation while a transfer runs, in seconds. other: seconds that
        sharding sends at the same time."""
        return self._together(busy, other + sent) - self._together(busy, other)

    def _met(self) -> Seconds:
        """Return, by strategy, the fraction of a backward in which exposed collectives share links
        with reductions: both then take twice as long."""
        points, batch, tier_of = self.points, self.batch, self.priced.cluster.tier_of
        links = tier_of(points.tp * points.replicas)
        same = batch.tp * (tier_of(points.tp) == links) + batch.cp * (tier_of(points.tp * points.cp) == links)
        every = np.maximum(batch.tp + batch.cp + batch.ep_forward, TINY)
        met: Seconds = (
            (batch.backward_total - batch.backward) * same / every / np.maximum(batch.backward_total + self._host, TINY)
        )
        return np.where(self._chained, met, 0.0)
