"""Seconds of one micro-batch on one rank: a layer with its sharding and host overhead, and the ends
of the model.

Strategies share a ``Layer`` if they differ only in pipeline, number of micro-batches, number of
recomputed layers or ownership of optimizer states. So it is computed once for strategies with equal
``ALIKE`` columns, a few percent of the space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.step.columns.points import StrategyTable, column
from plait.core.step.ops import Kind
from plait.core.step.schedule import Phase
from plait.core.step.seconds.layer_sums import Pass, Waits, launch_seconds
from plait.core.step.seconds.layer_work import LayerWork
from plait.core.step.seconds.rates import Seconds
from plait.core.step.seconds.shard_traffic import HIDE_BACKWARD, HIDE_FORWARD, ends_of, gather_seconds, sum_seconds

ALIKE = (
    "tp", "cp", "ring", "ep", "micro", "p1", "p2", "overlap", "sequence_parallel", "recompute", "params", "grads",
    "secondary", "shard_overlap", "graphs",
)  # fmt: skip
"""Columns that a micro-batch depends on, apart from whether its backward is split."""
DROPLESS_LAUNCH_SECONDS = 2.8e-3
"""Additional host seconds of one direction of a layer with dropless experts: the host waits for the
number of tokens of each expert. Source: Qwen3-30B-A3B on 8 B200 with micro-batches of one sequence
(Megatron-Bridge
25.11, 26.02): 27 and 28 s for 64 x 48 layers, which devices compute in half of that. CUDA graphs of
whole steps remove this overhead."""


def decides(points: StrategyTable) -> list[NDArray[Any]]:
    """Return the arrays that determine a ``Layer``: strategies that agree in them share one."""
    return [*(getattr(points, name) for name in ALIKE), column("splits", points.schedule)]


@dataclass(frozen=True)
class Layer(LayerWork):
    """One layer on one rank, and the ends of the model. All values are seconds of one
    micro-batch."""

    # ---- the host ----

    @cached_property
    def late_forward(self) -> Seconds:
        """Seconds of launching the forward minus seconds of running it; negative if the host gets
        ahead."""
        return (
            self._launched(self.sums.forward, Kind.COLUMN_FORWARD)
            + self._counts
            - (self.forward_total + self.shard_forward)
        )

    @cached_property
    def late_backward(self) -> Seconds:
        """Seconds of launching the backward minus seconds of running it, without recomputation."""
        return (
            self._launched(self.sums.backward, Kind.COLUMN_DGRAD)
            + self._counts
            - (self.backward_total + self.shard_backward)
        )

    @cached_property
    def late_again(self) -> Seconds:
        """Seconds of launching recomputation minus seconds of running it. The number of launches
        follows the options of other frameworks, too."""
        whole, core = self.sums.forward, self.points.p1 * self.points.ring
        rows = self._repeated(whole.rows, core, self.sums.again.rows)
        one = Pass(rows=rows, calls=self._repeated(whole.calls, 0.0, self.sums.again.calls))
        return self._launched(one, Kind.COLUMN_RECOMPUTE) - (self.again + self.tp_again + self.cp_again + self.ep_again)

    @cached_property
    def late_weights(self) -> Seconds:
        """Seconds of launching weight gradients minus seconds of running them; 0 if they have no
        list of their own."""
        return np.where(self._split, self.sums.late["W"].bare.net, 0.0)

    def _launched(self, ops: Pass, kind: Kind) -> Seconds:
        return launch_seconds(self, kind) * ops.rows + self.cluster.efficiency.host_collective.value * ops.calls

    @property
    def _counts(self) -> Any:
        """Seconds of one direction in which the host waits for the number of tokens of each
        expert."""
        return DROPLESS_LAUNCH_SECONDS * np.asarray(self.model.expert_share) * self.model.dropless

    @cached_property
    def lead_forward(self) -> Seconds:
        """Seconds that one layer's forward waits for a host that starts launching when the forward
        starts."""
        waits = np.where(HIDE_FORWARD[self.points.shard_overlap], 0.0, self.shard_forward)
        return self._lead(self.sums.late["F"], self.late_forward, self.forward_total - self.forward, waits)

    @cached_property
    def lead_backward(self) -> Seconds:
        """Seconds that one layer's backward waits for a host that starts with it, without
        recomputation and without weight gradients in a list of their own."""
        return self._lead_back(self.sums.late, self.late_backward, self.backward_total - self.backward)

    @cached_property
    def lead_again(self) -> Seconds:
        """Seconds by which recomputation increases ``lead_backward``."""
        net, exposed = self.late_backward + self.late_again, self.backward_total - self.backward + self.sent_again
        return self._lead_back(self.sums.late_again, net, exposed) - self.lead_backward

    @cached_property
    def lead_weights(self) -> Seconds:
        """Seconds that weight gradients wait for a host that starts with them; 0 if they have no
        list of their own."""
        return np.where(self._split, self._lead(self.sums.late["W"], self.late_weights, 0.0, self._waits[1]), 0.0)

    @property
    def _split(self) -> Any:
        return column("splits", self.points.schedule) & self.listed

    def _lead_back(self, late: Mapping[Phase, Waits], net: Seconds, exposed: Seconds) -> Seconds:
        gathers, sums = self._waits
        parts = self._lead(late["I"], net - self.late_weights, exposed, gathers)
        return np.where(self._split, parts, self._lead(late["B"], net, exposed, gathers + sums))

    @property
    def _waits(self) -> tuple[Seconds, Seconds]:
        """Exposed (gathers, reductions) of the MLP in a backward, during which the host gets ahead
        for attention."""
        exposed = self.mlp_share * (self.listed & ~HIDE_BACKWARD[self.points.shard_overlap])
        return exposed * self._gathered_again, exposed * self.summed

    def _lead(self, late: Waits, net: Seconds, exposed: Any, waits: Seconds) -> Seconds:
        """Return the seconds that a phase of the layer waits for the host. net: seconds of
        launching minus running. exposed: seconds of the phase's collectives that nothing hides.
        waits: seconds that the device waits about halfway through the layer."""
        sent = late.bare.net - late.sent.net
        share = np.clip(exposed / np.maximum(sent, 1e-30), 0, 1)
        alone = late.bare.most + share * (late.sent.most - late.bare.most)
        most: Seconds = np.maximum(net, alone - np.minimum(waits, alone / 2))
        return np.where(self.listed, most, np.maximum(0, net))

    # ---- sharding, whose links are separate from those of other axes' collectives ----

    @cached_property
    def shard_forward(self) -> Seconds:
        """Exposed seconds of gathering the layer's parameters in a forward."""
        hides = HIDE_FORWARD[self.points.shard_overlap]
        return np.where(hides, self._added(self.forward_total, self.gathered), self._gathered_together)

    @property
    def _gathered_together(self) -> Seconds:
        """Exposed gathers in a forward that hides none. Instruction lists begin a layer with the
        gathers of attention and MLP, so attention overlaps with the MLP's."""
        part = self.mlp_share
        own = self._attention_of(self.forward_total) - self.tp_forward / 2
        apart = (1 - part) * self.gathered + self._added(own, part * self.gathered)
        return np.where(self.listed & (np.asarray(self.model.parallel_block) == 0), apart, self.gathered)

    @cached_property
    def shard_backward(self) -> Seconds:
        """Exposed seconds of gathering parameters and reducing gradients of the layer in a
        backward."""
        beside = self._added(self.backward_total, self.reduced)
        return np.where(HIDE_BACKWARD[self.points.shard_overlap], beside, self.reduced)

    @property
    def sent(self) -> Seconds:
        """Exposed seconds of the layer's collectives, forward and backward together."""
        return (
            self.forward_total
            - self.forward
            + self.backward_total
            - self.backward
            + self.shard_forward
            + self.shard_backward
        )

    @cached_property
    def gathered(self) -> Seconds:
        """Seconds of gathering the layer's parameters in a forward, without overlap."""
        return gather_seconds(self)

    @cached_property
    def reduced(self) -> Seconds:
        """Seconds of gathering parameters and reducing gradients in a backward, without overlap."""
        return self._gathered_again + self.summed

    @cached_property
    def _gathered_again(self) -> Seconds:
        """Seconds of gathering parameters in a backward, without overlap; from the secondary copy
        if there is one."""
        return np.where(self.points.secondary > 0, gather_seconds(self, near=True), self.gathered)

    @cached_property
    def summed(self) -> Seconds:
        """Gradient reductions in a backward, to the shard that a rank accumulates, without
        overlap."""
        return sum_seconds(self)

    # ---- ends ----

    @cached_property
    def _hides(self) -> Any:
        """True if backwards hide the reduction of the head's or the embedding's gradient."""
        return self.listed & (self.points.params == 1) & HIDE_BACKWARD[self.points.shard_overlap]

    @cached_property
    def _ends_sent(self) -> Mapping[str, Seconds]:
        return ends_of(self)

    @property
    def edge(self) -> Seconds:
        """Seconds of reducing the head's or the embedding's gradient, without overlap; 0 if
        backwards do not hide it."""
        return np.where(self._hides, self._ends_sent["head"], 0.0)

    @property
    def head(self) -> Seconds:
        """Seconds of forward and backward of the head and the loss."""
        return self._end("head")

    @property
    def head_backward(self) -> Seconds:
        """Seconds of computation in the head's backward."""
        return self.sums.head_backward.seconds

    @property
    def head_weights(self) -> Seconds:
        """Seconds of the head's weight gradients if they have a list of their own, with their
        reduction."""
        return self.head_backward / 2 + np.where(self._hides, 0.0, self._ends_sent["sums"])

    @property
    def embedding(self) -> Seconds:
        """Seconds of forward and backward of the embedding."""
        return self._end("embed")

    @property
    def embedding_forward(self) -> Seconds:
        """Seconds of the embedding's forward."""
        return self.sums.embed.tp + self.sums.embed.seconds / 2

    @property
    def leave(self) -> Seconds:
        """Seconds of the last addition and norm of a stage without a head, forward and backward."""
        return self._end("leave")

    def _end(self, name: str) -> Seconds:
        one: Pass = getattr(self.sums, name)
        return one.seconds + one.tp + np.where(self._hides, 0.0, self._ends_sent.get(name, 0.0))


class Gathered:
    """View of a layer's or an owner's arrays, expanded to the strategies that share them. which:
    for each strategy, its index in the arrays."""

    def __init__(self, of: object, which: Any) -> None:
        self._of, self._which = of, which

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(self._of, name)[self._which]
        return found
