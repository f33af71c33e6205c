"""Level 1 of the planner: seconds of a training step in closed form, for columns of strategies.

``step_seconds`` adds what every part of a step takes on the slowest place of the pipeline. The parts are the
model's forms (``layer_time``, ``pipeline_time``), their constants the cluster's (``rates``). docs/adr/0013
says why they are these, and how far they are off. What many points share is found once (``micro_batch``,
``owners``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.distinct import distinct
from plait.core.step.columns.points import Ints, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import micro_batch, owners, rates
from plait.core.step.seconds.layer_time import HIDE_BACKWARD, HIDE_FORWARD, Layer, Options
from plait.core.step.seconds.micro_batch import MicroBatchSeconds
from plait.core.step.seconds.owners import Owners
from plait.core.step.seconds.pipeline_time import INTERLEAVED, ZB_V, Stages, pipeline
from plait.core.step.seconds.rates import Seconds as Column
from plait.core.step.stages import crossing_bytes

__all__ = ["Options", "Seconds", "step_seconds", "total_seconds"]

BLOCK = 1 << 17
"""Points among which those are found that are alike."""
CHUNK = 8192
"""Points computed at once: their columns stay in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of a step, on the slowest place of the pipeline; columns, one number a point.

    linear, attention, elementwise: computation of the layers, recomputation included. head: embedding, head
    and loss. tp, cp, ep, sharding: what collectives of tensor, context and expert parallelism and of sharded
    parameters add. bubble: waiting for the pipeline to fill and for slower places. transfers: waiting between
    stages. sync: reducing gradients and spreading parameters at the step's end, where nothing hides it.
    straggler: waiting for the slowest node. fixed: the same in every step.
    """

    linear: Column
    attention: Column
    elementwise: Column
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
    asked = _Asked(Shapes.of(model), cluster, sequence, precision, options or Options())
    return Seconds.join(list(asked.seconds(points)))


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
    asked = _Asked(Shapes.of(model), cluster, sequence, precision, options or Options())
    return np.concatenate([part.total for part in asked.seconds(points)])


def _cut(value: Any, which: slice) -> Any:
    """A part of a column, or of a record's columns; numbers as they are."""
    if isinstance(value, Shapes | Options):
        return type(value)(**{f.name: _cut(getattr(value, f.name), which) for f in fields(value)})
    return value[which] if np.ndim(value) else value


@dataclass(frozen=True)
class _Asked:
    """What is the same for all points, unless it has columns."""

    model: Shapes
    cluster: Cluster
    sequence: Any
    precision: Precision
    options: Options

    def seconds(self, points: Points) -> Iterator[Seconds]:
        """Of every point, some at a time."""
        for start in range(0, max(1, len(points)), BLOCK):
            which = slice(start, start + BLOCK)
            yield from self._part(which)._block(points.take(which))

    def _part(self, which: slice) -> _Asked:
        model, sequence, options = (_cut(value, which) for value in (self.model, self.sequence, self.options))
        return _Asked(model, self.cluster, sequence, self.precision, options)

    def _block(self, points: Points) -> Iterator[Seconds]:
        (first, of_batch), (leading, of_owners) = (self._kinds(one.decides(points)) for one in (micro_batch, owners))
        layer = Layer(self.model, points.take(first), self.cluster, self.sequence, self.precision, self.options)
        batch = MicroBatchSeconds.of(layer)
        owned = Owners.of(self.model, points.take(leading), self.cluster, self.options)
        for start in range(0, max(1, len(points)), CHUNK):
            which = slice(start, start + CHUNK)
            here = batch.take(of_batch[which]), owned.take(of_owners[which])
            yield _SharedParts(self._part(which), points.take(which), *here).seconds()

    def _kinds(self, columns: list[Ints]) -> tuple[Ints, Ints]:
        """A point of every kind, and the kind of every point. Where models have columns every point is one of
        its own."""
        varied = (self.sequence, *(getattr(one, f.name) for one in (self.model, self.options) for f in fields(one)))
        if any(np.ndim(value) for value in varied):
            every = np.arange(len(columns[0]))
            return every, every
        return distinct(columns)


@dataclass(frozen=True)
class _SharedParts:
    """Points, and of each what it shares with others."""

    asked: _Asked
    points: Points
    batch: MicroBatchSeconds
    owners: Owners

    def seconds(self) -> Seconds:
        points, cluster, batch, owned = self.points, self.asked.cluster, self.batch, self.owners
        stage = owned.inner / points.virtual
        again = np.where(points.recompute_layers < 0, 1.0, np.minimum(1, points.recompute_layers / stage))
        sent = batch.sent + again * batch.sent_again
        busy = batch.forward + batch.backward + again * batch.again + batch.host
        each = busy + sent
        turns = (points.schedule == ZB_V) & (points.pp > 1)  # the first place has the last stage
        over = np.asarray(self.asked.options.ends_shared) & (points.pp > 1)
        part = np.where(over, (batch.embedding + batch.head) / points.pp, 0)  # of every place
        first = owned.first * each + batch.embedding + np.where(turns, batch.head, 0)
        last = owned.last * each + np.where(turns, 0, batch.head) + np.where(points.pp > 1, 0, batch.embedding)
        stages = Stages(
            first=np.where(over, owned.first * each + part, first),
            inner=owned.inner * each + part,
            last=np.where(over, owned.last * each + part, last),
            forward=batch.forward / each,
            weight_gradient=(batch.three - batch.linear) / 2 / each,
            first_chunk=owned.first_chunk,
        )
        run = pipeline(
            stages,
            points,
            transfer=self._transfer(),
            hidden=self._hidden(),
            steps_overlap=self.asked.options.steps_overlap,
        )
        # While a place waits, others have its part of the processors that they share.
        bubble = np.maximum(0, (run.work + run.bubble) / cluster.crowd - run.work) if cluster.crowd > 1 else run.bubble
        # The slowest place's own work, part by part.
        longest = stages.longest(points.pp)
        ended = np.where(
            longest == stages.last, owned.last, np.where(longest == stages.first, owned.first, owned.inner)
        )
        times = points.num_micro * ended
        rest = points.num_micro * longest - times * each
        linear = times * (batch.three + again * batch.linear_again)
        attention = times * (batch.attention_forward + batch.attention_backward + again * batch.attention_again)
        sync = self._sync()
        spent = run.work + bubble + run.transfers + sync + owned.optimizer
        return Seconds(
            linear=linear,
            attention=attention,
            elementwise=times * busy - linear - attention,
            head=rest,
            tp=times * (batch.tp + again * batch.tp_again),
            cp=times * batch.cp,
            ep=times * (2 * batch.ep + again * batch.ep_again),
            sharding=times * batch.sharding,
            bubble=bubble,
            transfers=run.transfers,
            sync=sync,
            optimizer=owned.optimizer,
            straggler=spent * owned.late * cluster.efficiency.jitter.value,
            fixed=np.full_like(linear, cluster.efficiency.step.value),
        )

    def _hidden(self) -> Any:
        """Whether transfers between stages run beside computation."""
        options, rounds = self.asked.options, self.points.schedule == INTERLEAVED
        return np.asarray(options.transfers_hidden) | (np.asarray(options.rounds_hide_transfers) & rounds)

    def _transfer(self) -> Column:
        """One micro-batch's activations to the next stage; tensor-parallel ranks send a part each."""
        asked, points = self.asked, self.points
        nbytes = crossing_bytes(asked.sequence, points.micro, asked.model.hidden, cut=points.cp, itemsize=2) / points.tp
        return rates.collective(asked.cluster, "send", nbytes, points.pp, points.tp * points.replicas)

    def _sync(self) -> Column:
        """Of gradients and new parameters what is exposed: half of it can run beside the last backward, the
        other half beside the first forward."""
        batch, owned, cluster = self.batch, self.owners, self.asked.cluster
        behind = [owned.inner * batch.backward, owned.inner * batch.forward]
        # What sharding sends for that micro-batch hides there, too.
        others = [owned.inner * batch.reduced, owned.inner * batch.gathered]
        hides = [table[self.points.shard_overlap] for table in (HIDE_BACKWARD, HIDE_FORWARD)]

        def beside(busy: Column, sent: Column) -> Column:
            return rates.together(cluster, busy, sent)

        exposed = [
            np.where(hidden, beside(busy, other + sent) - beside(busy, other), sent)
            for hidden, busy, other, sent in zip(hides, behind, others, (owned.down, owned.up), strict=True)
        ]
        return exposed[0] + exposed[1] + owned.ends
