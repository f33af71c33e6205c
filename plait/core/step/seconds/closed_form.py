"""Level 1 of the planner: seconds of a training step in closed form, for arrays of strategies.

``step_seconds`` adds up the parts of a step on the slowest pp rank. The parts are formulas of the
model (``layer_time``, ``pipeline_time``) with constants of the cluster (``rates``). docs/adr/0013
explains the choice of formulas and their errors. Results that many strategies share are computed
once (``layer_time``, ``sharding_costs``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import Ints, StrategyTable, column, distinct
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.seconds import layer_time, rates, sharding_costs
from plait.core.step.seconds.layer_sums import LaunchLag
from plait.core.step.seconds.layer_time import Gathered, Layer
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.pipeline_time import Stages, pipeline
from plait.core.step.seconds.rates import Seconds as Column
from plait.core.step.seconds.sharding_costs import ShardingCosts
from plait.core.step.seconds.step_end import StepEnd
from plait.core.step.stages import crossing_bytes

__all__ = ["Options", "Seconds", "step_seconds", "total_seconds"]

BLOCK = 1 << 17
"""Number of strategies that are searched together for equal columns."""
CHUNK = 8192
"""Number of strategies computed at once: their arrays stay in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Predicted seconds of a step on the slowest pp rank; arrays with one number per strategy.

    linear, attention, elementwise: computation of the layers, recomputation included. host: waiting
    for the host's launches. head: embedding, head and loss. tp, cp, ep, sharding: exposed
    collectives of tensor, context and expert parallelism, and of sharded parameters. bubble:
    waiting for the pipeline to fill and for slower pp ranks. transfers: waiting for transfers
    between stages. sync: exposed gradient reductions and parameter gathers at the step's end.
    straggler: waiting for the slowest node. fixed: a constant per step.
    """

    linear: Column
    attention: Column
    elementwise: Column
    host: Column
    head: Column
    tp: Column
    cp: Column
    ep: Column
    sharding: Column
    bubble: Column
    transfers: Column
    sync: Column
    optimizer: Column
    straggler: Column
    fixed: Column

    @property
    def total(self) -> Column:
        """Seconds of the whole step."""
        return sum((getattr(self, field.name) for field in fields(self)), np.zeros_like(self.linear))

    @staticmethod
    def join(parts: list[Seconds]) -> Seconds:
        """Return the concatenation of all parts."""
        return Seconds(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Seconds)})


def step_seconds(
    model: ModelSpec | Shapes,
    points: StrategyTable,
    cluster: Cluster,
    *,
    sequence: Any,
    precision: Precision = "bf16-mixed",
    options: Options | None = None,
) -> Seconds:
    """Return the seconds of every strategy. sequence: tokens. Shapes, sequence and options may be
    arrays as long as ``points``.

    Raises JobError if the cluster has no figure for ``precision``.
    """
    asked = Priced(Shapes.of(model), points, cluster, sequence, precision, options or Options())
    return Seconds.join(list(_parts(asked)))


def total_seconds(
    model: ModelSpec,
    points: StrategyTable,
    cluster: Cluster,
    *,
    sequence: int,
    precision: Precision,
    options: Options | None = None,
) -> Column:
    """Return only the whole step's seconds of every strategy: for a million strategies the parts
    would fill much of the memory."""
    asked = Priced(Shapes.of(model), points, cluster, sequence, precision, options or Options())
    return np.concatenate([part.total for part in _parts(asked)])


def _parts(priced: Priced) -> Iterator[Seconds]:
    """Yield the predicted seconds of all strategies, ``CHUNK`` strategies at a time."""
    for start in range(0, max(1, len(priced.points)), BLOCK):
        yield from _block(priced.take(slice(start, start + BLOCK)))


def _block(priced: Priced) -> Iterator[Seconds]:
    """Yield the seconds of up to ``BLOCK`` strategies, of which those with equal columns share
    results."""
    points = priced.points
    (first, of_batch), (leading, of_owners) = (
        _kinds(priced, module.decides(points)) for module in (layer_time, sharding_costs)
    )
    some = priced.take(first)
    batch = Layer(**{each.name: getattr(some, each.name) for each in fields(Priced)})
    owned = ShardingCosts.of(priced.model, points.take(leading), priced.cluster, priced.options, priced.precision)
    for start in range(0, max(1, len(points)), CHUNK):
        which = slice(start, start + CHUNK)
        shared: Any = Gathered(batch, of_batch[which]), Gathered(owned, of_owners[which])
        yield _Parts(priced.take(which), *shared).seconds()


def _kinds(priced: Priced, columns: list[Ints]) -> tuple[Ints, Ints]:
    """Return (index of one strategy of each kind, kind of each strategy). If shapes, sequence or
    options are arrays, each strategy is its own kind."""
    varied = (priced.sequence, *(getattr(one, f.name) for one in (priced.model, priced.options) for f in fields(one)))
    if any(np.ndim(value) for value in varied):
        every = np.arange(len(columns[0]))
        return every, every
    return distinct(columns)


@dataclass(frozen=True)
class _Parts(StepEnd):
    @cached_property
    def chunks(self) -> Any:
        """Number of stages on each pp rank, by strategy."""
        return np.maximum(self.points.virtual, 1)

    @property
    def layers(self) -> list[Column]:
        """Number of layers of the first, an inner and the last pp rank, by strategy."""
        return [self.owners.first, self.owners.inner, self.owners.last]

    @cached_property
    def busy(self) -> Column:
        """Computation of one layer for one micro-batch, in seconds."""
        return self.batch.forward + self.batch.backward + self.again * self.batch.again

    @cached_property
    def each(self) -> Column:
        """Seconds of one layer for one micro-batch, without waiting for the host."""
        sent = self.batch.sent - self.sharding + self.exposed
        return self.busy + sent + self.again * self.batch.sent_again

    @cached_property
    def weight_list_reductions(self) -> Column:
        """Seconds that gradient reductions add to a layer in an instruction list of weight
        gradients."""
        hidden = np.where(self.flows, self.exposed, 0.0)
        return np.where(self.split, np.where(self.hides, hidden, self.batch.summed), 0.0)

    @cached_property
    def ends(self) -> list[Column]:
        """Seconds outside layers on the first, an inner and the last pp rank."""
        points, batch, turns, chunks = self.points, self.batch, self.turns, self.chunks
        late = np.where(self.split, batch.late_weights - self.weight_list_reductions, self.behind)
        head, leave = batch.head + self.head_sums(late), batch.leave
        outer = (
            batch.embedding + np.where(turns, head, 0) + (chunks - turns) * leave,
            chunks * leave,
            np.where(turns, 0, head) + np.where(points.pp == 1, batch.embedding, (chunks - ~turns) * leave),
        )
        over = np.asarray(self.priced.options.ends_shared) & (points.pp > 1)
        each = (batch.embedding + batch.head) / points.pp + chunks * leave
        return [np.where(over, each, end) for end in outer]

    @cached_property
    def late(self) -> list[Column]:
        """Seconds that the first, an inner and the last pp rank wait for the host. The host starts
        launching when an instruction list starts, so a head's backward, which comes first, gives it
        time."""
        batch, points, turns = self.batch, self.points, self.turns
        splits = column("splits", points.schedule)
        heads: list[Any] = [turns, False, ~turns]
        embeds: list[Any] = [True, False, points.pp == 1]
        alone = points.ranks == points.tp  # one instruction list has both directions
        found = list[Column]()
        parts = zip(self.layers, heads, embeds, self.late_lists, strict=True)
        for count, head, embed, (ahead, behind, weights) in parts:
            once = embed * np.minimum(ahead.most, batch.embedding_forward)
            begins = batch.head_backward / 2 + ~splits * batch.head_weights
            once = once + head * np.minimum(behind.most, begins)
            once = once + head * splits * np.minimum(weights.most, batch.head_weights)
            apart: Column = self.chunks * (ahead.most + behind.most + weights.most) - once
            both: Column = ahead.then(LaunchLag(-batch.head)).then(behind).most
            found.append(np.where(alone, both, apart) + count * batch.waits_for_offload)
        return found

    @cached_property
    def late_lists(self) -> list[list[LaunchLag]]:
        """Host lateness of one stage on the first, an inner and the last pp rank: in a forward, in
        a backward, in a separate list of weight gradients."""
        batch, weights = self.batch, self.batch.late_weights - self.weight_list_reductions
        pairs = (
            (batch.late_forward, batch.lead_forward),
            (self.behind - weights, batch.lead_backward + self.again * batch.lead_again),
            (weights, batch.lead_weights),
        )
        return [[LaunchLag(*pair).times(count / self.chunks) for pair in pairs] for count in self.layers]

    def stages(self) -> Stages:
        """Return the seconds of one micro-batch on each pp rank."""
        batch, sums = self.batch, self.turned_sums()
        first, inner, last = (
            count * self.each + end + late for count, end, late in zip(self.layers, self.ends, self.late, strict=True)
        )
        each = self.owners.inner / self.chunks
        ahead, behind, weights = (late.most / each for late in self.late_lists[1])
        whole = self.each + ahead + behind + weights
        return Stages(
            first=first, inner=inner, last=last,
            forward=(batch.forward_total + batch.shard_forward + ahead) / whole,
            weight_gradient=(batch.weight_gradients + weights + self.weight_list_reductions) / whole,
            head_weight=batch.head_weights / batch.head, first_sums=sums[0], other_sums=sums[1],
        )  # fmt: skip

    def seconds(self) -> Seconds:
        points, cluster, batch, again = self.points, self.priced.cluster, self.batch, self.again
        stages = self.stages()
        run = pipeline(
            stages, points, transfer=self._transfer(), hidden=self._hidden(),
            steps_overlap=self.priced.options.steps_overlap,
        )  # fmt: skip
        waits = np.maximum(0, run.bubble)
        # While a pp rank waits, other pp ranks use its part of the shared processors.
        bubble = np.maximum(0, (run.work + waits) / cluster.crowd - run.work) if cluster.crowd > 1 else waits
        # The slowest pp rank's own work, part by part.
        longest = stages.longest(points.pp)
        ended, waited = (
            np.where(longest == stages.last, last, np.where(longest == stages.first, first, inner))
            for first, inner, last in (self.layers, self.late)
        )
        times, host = points.num_micro * ended, np.asarray(points.num_micro * waited, dtype=np.float64)
        linear = times * (batch.linear_both + again * batch.linear_again)
        attention = times * (batch.attention + again * batch.attention_again)
        sync = self.end_seconds() + np.minimum(0, run.bubble)  # zb-v's reductions may hide in the bubble
        optimizer = self.owners.optimizer
        spent = run.work + bubble + run.transfers + sync + optimizer
        return Seconds(
            linear=linear,
            attention=attention,
            elementwise=times * self.busy - linear - attention,
            host=host,
            head=points.num_micro * longest - times * self.each - host,
            tp=times * (batch.tp + again * batch.tp_again),
            cp=times * (batch.cp + again * batch.cp_again),
            ep=times * (2 * batch.ep_forward + again * batch.ep_again),
            sharding=times * self.exposed,
            bubble=bubble,
            transfers=run.transfers,
            sync=sync,
            optimizer=optimizer,
            straggler=spent * self.owners.late * cluster.efficiency.jitter.value,
            fixed=np.full_like(linear, cluster.efficiency.step.value),
        )

    def _hidden(self) -> Any:
        """Return True for strategies whose transfers between stages overlap with computation."""
        options, schedule = self.priced.options, self.points.schedule
        rounds = column("circles", schedule) | column("turns", schedule)
        return np.asarray(options.transfers_hidden) | (np.asarray(options.rounds_hide_transfers) & rounds)

    def _transfer(self) -> Column:
        """Return the seconds of sending one micro-batch's activations to the next stage, averaged
        over stages. Each node receives a part once, over all its links, and gathers the parts
        inside."""
        asked, points, per_node = self.priced, self.points, self.priced.cluster.ranks_per_node
        stride, flat = points.tp * points.replicas, points.sequence_parallel > 0
        tile = crossing_bytes(
            asked.sequence, points.micro, asked.model.hidden, cut=points.cp * np.where(flat, points.tp, 1),
            itemsize=asked.itemsize,
        )  # fmt: skip
        copies = np.where(flat | (stride < per_node), 1, np.minimum(points.tp, per_node))
        near, far = (rates.collective(asked.cluster, "send", tile / copies, np.minimum(points.pp, some), stride)
                     for some in (2, 2**20))  # fmt: skip
        hops = np.maximum(1, points.pp - 1)
        shares = hops * stride / per_node
        across = np.where(per_node % stride == 0, np.floor(shares), np.ceil(shares))
        crossing = np.minimum(1, np.where(column("circles", points.schedule), shares, across) / hops)
        return near + crossing * (far - near) + rates.collective(asked.cluster, "all_gather", tile, copies, 1)
