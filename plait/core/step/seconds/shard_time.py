"""What sharding adds to a layer of every micro-batch: its gathers, and its sums where gradients are summed
for each (``grads`` above 1).

In lists a unit's gradient is whole in a buffer until it is summed: two for attention and two for the MLP. So
what a list sends of its last units is on its way when it ends, and runs beside the next list; of the others
a unit waits for the buffer of an earlier one. Embedding and head have buffers of their own. Where parameters
are gathered, gathers wait in one queue with the sums: the MLP of a layer for the sum of the MLP before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from plait.core.step.seconds import rates
from plait.core.step.seconds.layer_work import FULL
from plait.core.step.seconds.micro_batch import MicroBatchSeconds
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.owners import Owners
from plait.core.step.seconds.pipeline_time import SPLIT
from plait.core.step.seconds.rates import Seconds
from plait.core.step.seconds.shard_sent import HIDE_BACKWARD

BUFFERS = 4
"""For whole gradients of layers."""


@dataclass(frozen=True)
class ShardTime:
    """Points, and what each shares with others. again: the part of a layer's computation that is repeated."""

    asked: Priced
    batch: MicroBatchSeconds
    owners: Owners
    again: Seconds

    @cached_property
    def split(self) -> Any:
        """Whether gradients are sums of a list of weight gradients alone."""
        return SPLIT[self.asked.points.schedule] & np.asarray(self.asked.options.in_lists)

    @cached_property
    def hides(self) -> Any:
        """Whether lists hide sums: of models that are trained."""
        asked = self.asked
        return asked.listed & HIDE_BACKWARD[asked.points.shard_overlap]

    @cached_property
    def flows(self) -> Any:
        """Whether sums of a list may run beside the next one: no gathers of parameters wait behind them."""
        points = self.asked.points
        return self.hides & (points.grads > 1) & (points.params == 1)

    @cached_property
    def gathers(self) -> Any:
        """Whether gathers of parameters wait behind sums."""
        return self.hides & (self.asked.points.params > 1)

    @property
    def done(self) -> Seconds:
        """Of what a list sends, the part that is over when it ends, and no longer in buffers."""
        return 1 - np.minimum(1, BUFFERS / (2 * self.owners.inner))

    @cached_property
    def busy(self) -> Seconds:
        """Of a layer, what a list with sums computes."""
        return np.where(self.split, self.batch.weight_gradients, self._backward)

    @property
    def _backward(self) -> Seconds:
        return self.batch.back + self.again * (self.batch.again + self.batch.sent_again)

    @cached_property
    def exposed(self) -> Seconds:
        """Of a layer, what nothing hides of its gathers and sums."""
        batch, cluster = self.batch, self.asked.cluster
        listed = rates.together(cluster, self.busy, batch.reduced * self.done) - self.busy
        whole = batch.reduced - (batch.ahead + batch.back)  # no micro-batch is shorter than what it sends
        gathered = batch.shard_forward + self.backward(batch.reduced)
        gathered = np.where(self.gathers, gathered, batch.sharding)
        return np.where(self.flows, np.maximum(listed, whole), gathered)

    def backward(self, sent: Seconds) -> Seconds:
        """What is exposed in the backward of a layer whose parameters are gathered. sent: seconds of gathers
        and sums. Of recomputed layers attention is gathered first, which waits for less."""
        model, own = self.asked.model, self._backward
        part = model.mlp_share
        core = self.batch.attention_backward + self.again * self.batch.attention_again
        chain = np.where(self.asked.points.recompute == FULL, 0.0, part * (own - core + sent))
        return np.maximum(rates.together(self.asked.cluster, own, sent), chain) - own

    def head(self, late: Seconds) -> Seconds:
        """What is exposed of the head's sum, with which a backward begins. late: what the host is late in a
        layer of the list."""
        batch, layers, head = self.batch, self.owners.last, self.batch.head_backward / (1 + self.split)
        sent = layers * batch.reduced * self.done + batch.edge
        more = rates.together(self.asked.cluster, layers * self.busy + head, sent) - head
        more = more - layers * (self.busy + self.exposed + np.maximum(0, late))
        return np.where(self.flows, np.clip(more, 0, batch.edge), 0.0)
