"""Level 1 of the planner: seconds of a training step in closed form, for columns of strategies.

``step_seconds`` adds what every part of a step takes on the slowest place of the pipeline. The parts are the
model's forms (``layer_time``, ``pipeline_time``), their constants the cluster's (``rates``). docs/adr/0013
says why they are these, and how far they are off. What many points share is found once (``micro_batch``,
``owners``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.distinct import distinct
from plait.core.step.columns.points import Ints, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import micro_batch, owners, rates
from plait.core.step.seconds.host_time import Late
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.micro_batch import MicroBatchSeconds
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.options import Options
from plait.core.step.seconds.owners import Owners
from plait.core.step.seconds.pipeline_time import INTERLEAVED, SPLIT, ZB_V, Stages, pipeline
from plait.core.step.seconds.rates import Seconds as Column
from plait.core.step.seconds.shard_time import ShardTime
from plait.core.step.seconds.step_end import StepEnd
from plait.core.step.stages import crossing_bytes

__all__ = ["Options", "Seconds", "step_seconds", "total_seconds"]

BLOCK = 1 << 17
"""Points among which those are found that are alike."""
CHUNK = 8192
"""Points computed at once: their columns stay in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of a step, on the slowest place of the pipeline; columns, one number a point.

    linear, attention, elementwise: computation of the layers, recomputation included. host: waiting until it
    has launched them. head: embedding, head and loss. tp, cp, ep, sharding: what collectives of tensor,
    context and expert parallelism and of sharded parameters add. bubble: waiting for the pipeline to fill and
    for slower places. transfers: waiting between stages. sync: reducing gradients and spreading parameters at
    the step's end, where nothing hides it. straggler: waiting for the slowest node. fixed: the same in every
    step.
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
        """Of the whole step."""
        return sum((getattr(self, field.name) for field in fields(self)), np.zeros_like(self.linear))

    @staticmethod
    def join(parts: list[Seconds]) -> Seconds:
        """One after the other."""
        return Seconds(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Seconds)})


def step_seconds(
    model: ModelSpec | Shapes,
    points: Points,
    cluster: Cluster,
    *,
    sequence: Any,
    precision: Precision = "bf16-mixed",
    options: Options | None = None,
) -> Seconds:
    """Of every point. sequence: tokens. Shapes, sequence and options may have columns as long as ``points``.

    Raises JobError where the cluster has no figure for ``precision``.
    """
    asked = Priced(Shapes.of(model), points, cluster, sequence, precision, options or Options())
    return Seconds.join(list(_parts(asked)))


def total_seconds(
    model: ModelSpec,
    points: Points,
    cluster: Cluster,
    *,
    sequence: int,
    precision: Precision,
    options: Options | None = None,
) -> Column:
    """Only the whole step of every point: of a million, the parts would fill a good part of the memory."""
    asked = Priced(Shapes.of(model), points, cluster, sequence, precision, options or Options())
    return np.concatenate([part.total for part in _parts(asked)])


def _parts(asked: Priced) -> Iterator[Seconds]:
    """Of every point, some at a time."""
    for start in range(0, max(1, len(asked.points)), BLOCK):
        yield from _block(asked.take(slice(start, start + BLOCK)))


def _block(asked: Priced) -> Iterator[Seconds]:
    """Of points among which those that are alike are found."""
    points = asked.points
    (first, of_batch), (leading, of_owners) = (_kinds(asked, one.decides(points)) for one in (micro_batch, owners))
    some = asked.take(first)
    batch = MicroBatchSeconds.of(Layer(**{each.name: getattr(some, each.name) for each in fields(Priced)}))
    owned = Owners.of(asked.model, points.take(leading), asked.cluster, asked.options, asked.precision)
    for start in range(0, max(1, len(points)), CHUNK):
        which = slice(start, start + CHUNK)
        yield _SharedParts(asked.take(which), batch.take(of_batch[which]), owned.take(of_owners[which])).seconds()


def _kinds(asked: Priced, columns: list[Ints]) -> tuple[Ints, Ints]:
    """A point of every kind, and the kind of every point. Where models have columns every point is one of its
    own."""
    varied = (asked.sequence, *(getattr(one, f.name) for one in (asked.model, asked.options) for f in fields(one)))
    if any(np.ndim(value) for value in varied):
        every = np.arange(len(columns[0]))
        return every, every
    return distinct(columns)


@dataclass(frozen=True)
class _SharedParts:
    """Points, and of each what it shares with others."""

    asked: Priced
    batch: MicroBatchSeconds
    owners: Owners

    @cached_property
    def again(self) -> Column:
        """Of a stage's layers, the part that is computed again."""
        points = self.asked.points
        stage = self.owners.inner / points.virtual
        return np.where(points.recompute_layers < 0, 1.0, np.minimum(1, points.recompute_layers / stage))

    @cached_property
    def busy(self) -> Column:
        """Computation of one layer."""
        return self.batch.forward + self.batch.backward + self.again * self.batch.again

    @cached_property
    def each(self) -> Column:
        """All of one layer, but for the host."""
        sent = self.batch.sent - self.batch.sharding + self.sharding.exposed
        return self.busy + sent + self.again * self.batch.sent_again

    @cached_property
    def sharding(self) -> ShardTime:
        """Of gathers and sums."""
        return ShardTime(self.asked, self.batch, self.owners, self.again)

    @property
    def _late_weights(self) -> Column:
        return self.batch.late_weights - self._beside_weights

    @property
    def _beside_weights(self) -> Column:
        """What sums add to a list of weight gradients."""
        hidden = np.where(self.sharding.flows, self.sharding.exposed, 0.0)
        return np.where(self.sharding.split, np.where(self.sharding.hides, hidden, self.batch.summed), 0.0)

    @cached_property
    def _turns(self) -> Any:
        """Whether the first place has the last stage."""
        return (self.asked.points.schedule == ZB_V) & (self.asked.points.pp > 1)

    @cached_property
    def ends(self) -> list[Column]:
        """Beside its layers, of the first, an inner and the last place."""
        points, batch, turns = self.asked.points, self.batch, self._turns
        chunks, one = np.maximum(points.virtual, 1), points.pp == 1
        head = batch.head + self.sharding.head(np.where(self.sharding.split, self._late_weights, self._behind))
        outer = (
            batch.embedding + np.where(turns, head, 0) + (chunks - turns) * batch.leave,
            chunks * batch.leave,
            np.where(turns, 0, head) + np.where(one, batch.embedding, (chunks - ~turns) * batch.leave),
        )
        over = np.asarray(self.asked.options.ends_shared) & (points.pp > 1)
        each = (batch.embedding + batch.head) / points.pp + chunks * batch.leave
        return [np.where(over, each, end) for end in outer]

    @cached_property
    def late(self) -> list[Column]:
        """What these places wait for the host, which begins a list with it: so a head's backward gives it
        time."""
        batch, points, turns = self.batch, self.asked.points, self._turns
        chunks, split = np.maximum(points.virtual, 1), SPLIT[points.schedule]
        heads: list[Any] = [turns, False, ~turns]
        embeds: list[Any] = [True, False, points.pp == 1]
        alone = points.ranks == points.tp  # one list has both directions
        found = list[Column]()
        parts = zip(self._layers, heads, embeds, self._late_lists, strict=True)
        for count, head, embed, (ahead, behind, weights) in parts:
            once = embed * np.minimum(ahead.most, batch.embedding_forward)
            begins = batch.head_backward / 2 + ~split * batch.head_weights
            once = once + head * np.minimum(behind.most, begins)
            once = once + head * split * np.minimum(weights.most, batch.head_weights)
            apart: Column = chunks * (ahead.most + behind.most + weights.most) - once
            both: Column = ahead.then(Late(-batch.head)).then(behind).most
            found.append(np.where(alone, both, apart) + count * batch.waits_for_offload)
        return found

    @cached_property
    def _late_lists(self) -> list[list[Late]]:
        """Of a stage at these places: a forward, a backward, weight gradients of a list of their own."""
        batch, chunks = self.batch, np.maximum(self.asked.points.virtual, 1)
        pairs = (
            (batch.late_forward, batch.lead_forward),
            (self._behind - self._late_weights, batch.lead_backward + self.again * batch.lead_again),
            (self._late_weights, batch.lead_weights),
        )
        return [[Late(*pair).times(count / chunks) for pair in pairs] for count in self._layers]

    @property
    def _behind(self) -> Column:
        """By how much the host takes longer to launch a layer's backward than that takes."""
        beside = self.batch.late_backward + self.batch.sharding - self.sharding.exposed
        return beside + self.again * self.batch.late_again

    @property
    def _layers(self) -> list[Column]:
        return [self.owners.first, self.owners.inner, self.owners.last]

    @cached_property
    def stages(self) -> Stages:
        """One micro-batch's seconds at the places."""
        batch, parts = self.batch, zip(self._layers, self.ends, self.late, strict=True)
        first, inner, last = (count * self.each + end + late for count, end, late in parts)
        each = self.owners.inner / np.maximum(self.asked.points.virtual, 1)
        ahead, behind, weights = (late.most / each for late in self._late_lists[1])
        whole = self.each + ahead + behind + weights
        return Stages(
            first=first, inner=inner, last=last,
            forward=(batch.ahead + batch.shard_forward + ahead) / whole,
            weight_gradient=(batch.weight_gradients + weights + self._beside_weights) / whole,
            head_weight=batch.head_weights / batch.head,
        )  # fmt: skip

    def seconds(self) -> Seconds:
        points, cluster, batch, owned = self.asked.points, self.asked.cluster, self.batch, self.owners
        stages, again = self.stages, self.again
        end = StepEnd(self.sharding, self._behind)
        run = pipeline(
            replace(stages, first_sums=end.first_sums, other_sums=end.other_sums),
            points,
            transfer=self._transfer(),
            hidden=self._hidden(),
            steps_overlap=self.asked.options.steps_overlap,
        )
        waits = np.maximum(0, run.bubble)
        # While a place waits, others have its part of the processors that they share.
        bubble = np.maximum(0, (run.work + waits) / cluster.crowd - run.work) if cluster.crowd > 1 else waits
        # The slowest place's own work, part by part.
        longest = stages.longest(points.pp)
        ended, waited = (
            np.where(longest == stages.last, last, np.where(longest == stages.first, first, inner))
            for first, inner, last in (self._layers, self.late)
        )
        times, host = points.num_micro * ended, np.asarray(points.num_micro * waited, dtype=np.float64)
        linear = times * (batch.three + again * batch.linear_again)
        attention = times * (batch.attention_forward + batch.attention_backward + again * batch.attention_again)
        sync = end.seconds() + np.minimum(0, run.bubble)  # zb-v's sums may hide in what is waited for
        spent = run.work + bubble + run.transfers + sync + owned.optimizer
        return Seconds(
            linear=linear,
            attention=attention,
            elementwise=times * self.busy - linear - attention,
            host=host,
            head=points.num_micro * longest - times * self.each - host,
            tp=times * (batch.tp + again * batch.tp_again),
            cp=times * (batch.cp + again * batch.cp_again),
            ep=times * (2 * batch.ep + again * batch.ep_again),
            sharding=times * self.sharding.exposed,
            bubble=bubble,
            transfers=run.transfers,
            sync=sync,
            optimizer=owned.optimizer,
            straggler=spent * owned.late * cluster.efficiency.jitter.value,
            fixed=np.full_like(linear, cluster.efficiency.step.value),
        )

    def _hidden(self) -> Any:
        """Whether transfers between stages run beside computation."""
        options, schedule = self.asked.options, self.asked.points.schedule
        rounds = (schedule == INTERLEAVED) | (schedule == ZB_V)
        return np.asarray(options.transfers_hidden) | (np.asarray(options.rounds_hide_transfers) & rounds)

    def _transfer(self) -> Column:
        """One micro-batch's activations to the next stage, on average over the stages: each node gets a part
        once, over all its links, and shares it out inside."""
        asked, points = self.asked, self.asked.points
        stride, flat = points.tp * points.replicas, points.sequence_parallel > 0
        tile = crossing_bytes(
            asked.sequence, points.micro, asked.model.hidden, cut=points.cp * np.where(flat, points.tp, 1),
            itemsize=asked.itemsize,
        )  # fmt: skip
        inside = flat | (stride < asked.cluster.ranks_per_node)
        copies = np.where(inside, 1, np.minimum(points.tp, asked.cluster.ranks_per_node))
        near, far = (rates.collective(asked.cluster, "send", tile / copies, np.minimum(points.pp, some), stride)
                     for some in (2, 2**20))  # fmt: skip
        each, hops = asked.cluster.ranks_per_node, np.maximum(1, points.pp - 1)
        shares = hops * stride / each
        across = np.where(each % stride == 0, np.floor(shares), np.ceil(shares))
        crossing = np.minimum(1, np.where(points.schedule == INTERLEAVED, shares, across) / hops)
        sent = near + crossing * (far - near)
        return sent + rates.collective(asked.cluster, "all_gather", tile, copies, 1)
