"""Level 1 of the planner: seconds of a training step in closed form, for columns of strategies.

``step_seconds`` adds what every part of a step takes on the slowest place of the pipeline. The parts are the
model's forms (``layer_time``, ``pipeline_time``), their constants the cluster's (``rates``). docs/adr/0013
says why they are these, and how far they are off.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import numpy as np

from plait.core.cluster import Cluster
from plait.core.model import ModelSpec
from plait.plan import rates
from plait.plan.experts_time import cut_by, of_experts
from plait.plan.layer_time import HIDE_BACKWARD, HIDE_FORWARD, Layer, Options
from plait.plan.pipeline_time import ZB_V, Stages, pipeline
from plait.plan.points import Points
from plait.plan.rates import AnyPrecision
from plait.plan.rates import Seconds as Column
from plait.plan.shapes import Shapes

__all__ = ["Options", "Seconds", "step_seconds"]

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
    precision: AnyPrecision = "bf16-mixed",
    options: Options | None = None,
) -> Seconds:
    """Of every point. sequence: tokens. Shapes, sequence and options may have columns as long as ``points``.

    Raises JobError where the cluster has no figure for ``precision``.
    """
    shapes, told = Shapes.of(model), options or Options()
    if len(points) <= CHUNK:
        return _Step(Layer(shapes, points, cluster, sequence, precision, told)).seconds()
    parts: list[Seconds] = []
    for start in range(0, len(points), CHUNK):
        which = slice(start, start + CHUNK)
        part = [_cut(value, which) for value in (shapes, sequence, told)]
        parts.append(
            _Step(
                Layer(part[0], points.take(np.arange(len(points))[which]), cluster, part[1], precision, part[2])
            ).seconds()
        )
    return Seconds.join(parts)


def _cut(value: Any, which: slice) -> Any:
    """A part of a column, or of a record's columns; numbers as they are."""
    if isinstance(value, Shapes | Options):
        return type(value)(**{f.name: _cut(getattr(value, f.name), which) for f in fields(value)})
    return value[which] if np.ndim(value) else value


@dataclass(frozen=True)
class _Step:
    layer: Layer

    def seconds(self) -> Seconds:
        layer, points, cluster = self.layer, self.layer.points, self.layer.cluster
        layers = self._layers()
        again = np.where(points.recompute_layers < 0, 1.0, np.minimum(1, points.recompute_layers / layers[1]))
        ahead = layer.tp_forward + layer.cp_forward + layer.shard_forward + layer.ep_forward
        back = layer.tp_backward + layer.cp_backward + layer.shard_backward + layer.ep_forward
        sent = ahead + back + again * (layer.tp_again + layer.ep_again)
        host = layer.waits_for_host(layer.forward + ahead) + layer.waits_for_host(layer.backward + back)
        busy = layer.forward + layer.backward + again * layer.again + host
        head, embedding = self._head(), self._embedding()
        turns = (points.schedule == ZB_V) & (points.pp > 1)  # the first place has the last stage
        stages = Stages(
            first=layers[0] * (busy + sent) + embedding + np.where(turns, head, 0),
            inner=layers[1] * (busy + sent),
            last=layers[2] * (busy + sent) + np.where(turns, 0, head) + np.where(points.pp > 1, 0, embedding),
            forward=layer.forward / (busy + sent),
            weight_gradient=(layer.three - layer.linear) / 2 / (busy + sent),
            first_chunk=self._first_chunk(),
        )
        run = pipeline(
            stages,
            schedule=points.schedule,
            pp=points.pp,
            micro_batches=points.num_micro,
            chunks=points.virtual,
            transfer=self._transfer(),
            hidden=layer.options.transfers_hidden,
            steps_overlap=layer.options.steps_overlap,
        )
        # While a place waits, others have its part of the processors that they share.
        bubble = np.maximum(0, (run.work + run.bubble) / cluster.crowd - run.work) if cluster.crowd > 1 else run.bubble
        # The slowest place's own work, part by part.
        longest = stages.longest(points.pp)
        ended = np.where(longest == stages.last, layers[2], np.where(longest == stages.first, layers[0], layers[1]))
        times = points.num_micro * ended
        rest = points.num_micro * longest - times * (busy + sent)
        redone = np.where(layer.again >= layer.forward, again, 0.0)
        tp = layer.tp_forward + layer.tp_backward + again * layer.tp_again
        linear = times * (layer.three + redone * layer.linear)
        attention = times * (layer.attention_forward * (1 + redone) + layer.attention_backward)
        sync, optimizer = self._sync(layers), self._optimizer(layers)
        spent = run.work + bubble + run.transfers + sync + optimizer
        nodes = -(-points.ranks // cluster.ranks_per_node)
        return Seconds(
            linear=linear,
            attention=attention,
            elementwise=times * busy - linear - attention,
            head=rest,
            tp=times * tp,
            cp=times * (layer.cp_forward + layer.cp_backward),
            ep=times * (2 * layer.ep_forward + again * layer.ep_again),
            sharding=times * (layer.shard_forward + layer.shard_backward),
            bubble=bubble,
            transfers=run.transfers,
            sync=sync,
            optimizer=optimizer,
            straggler=spent * _latest(nodes) * cluster.efficiency.jitter.value,
            fixed=np.full_like(linear, cluster.efficiency.step.value),
        )

    def _layers(self) -> tuple[Column, Column, Column]:
        """Of the first, an inner and the last place. Embedding and head take the place of a layer each where
        that makes stages equal; else a remainder goes to inner places, which are most."""
        points, total = self.layer.points, np.asarray(self.layer.model.num_layers, dtype=np.float64)
        parts = points.pp * np.maximum(points.virtual, 1)
        counted = (total % parts > 0) & ((total + 2) % parts == 0) & (points.pp > 1)
        even = np.where(counted, (total + 2) / points.pp, np.where(total % parts == 0, total / points.pp, 0))
        inner = np.where(even > 0, even, np.ceil(total / points.pp))
        outer = np.where(counted, even - 1, np.where(even > 0, even, total / points.pp))
        return outer, inner, np.where(points.pp > 1, outer, total)

    def _first_chunk(self) -> Column:
        """Of the layers of zb-v's two stages at a place, the share in the first: earlier stages have more."""
        total, pp = np.asarray(self.layer.model.num_layers), self.layer.points.pp
        return ((total // (2 * pp)) * pp + np.minimum(total % (2 * pp), pp)) / total

    def _head(self) -> Column:
        """Head and loss of one micro-batch, forward and backward: products, and passes over the logits in
        fp32."""
        layer, tp = self.layer, self.layer.points.tp
        words = layer.model.vocab / tp
        named = _unquantised(layer.precision)
        products = rates.three_products(layer.cluster, named, layer.tokens, layer.model.hidden, words)
        passes = rates.memory_bound(layer.cluster, layer.tokens * words * layer.cluster.efficiency.logit_bytes.value)
        return products + passes + self._edge(layer.model.words)

    def _embedding(self) -> Column:
        """Embedding of one micro-batch, forward and backward: rows read, and added to the gradient."""
        layer = self.layer
        moved = layer.tokens * layer.model.hidden * 12
        return rates.memory_bound(layer.cluster, moved) + self._edge(layer.model.words)

    def _edge(self, weights: Any) -> Column:
        """What sharded parameters of the embedding or of the head cost a micro-batch; nothing runs beside
        it."""
        points, layer = self.layer.points, self.layer
        whole = weights / points.tp
        gathered = rates.collective(
            layer.cluster, "all_gather", whole * layer.options.weight_bytes, points.params, points.tp
        )
        reduced = rates.collective(
            layer.cluster, "reduce_scatter", whole * layer.options.gradient_bytes, points.params, points.tp
        )
        return gathered + reduced

    def _transfer(self) -> Column:
        """One micro-batch's activations to the next stage; tensor-parallel ranks send a part each."""
        layer, points = self.layer, self.layer.points
        nbytes = layer.tokens * layer.model.hidden * 2 / points.tp
        return rates.collective(layer.cluster, "send", nbytes, points.pp, points.tp * points.replicas)

    def _weights(self, layers: tuple[Column, Column, Column]) -> Column:
        """Parameters on the rank that has most of them, before sharding over replicas."""
        model, points = self.layer.model, self.layer.points
        words = model.words
        single = layers[2] * model.layer_weights + words * (2 - np.asarray(model.tied_embeddings))
        outer = layers[0] * model.layer_weights + words
        inner = np.where(points.pp > 2, layers[1] * model.layer_weights, 0)
        return np.where(points.pp > 1, np.maximum(outer, inner), single) / points.tp

    def _sync(self, layers: tuple[Column, Column, Column]) -> Column:
        """Gradients to their owners, over replicas of these, and new parameters back: the chain of factors.
        Half of it can run beside the last backward, the other half beside the first forward."""
        layer, points = self.layer, self.layer.points
        down, up = self._owners(points, self._weights(layers), 2 * layers[1] + 1)
        if layer.model.has_experts:
            more = self._owners(of_experts(points), self._expert_weights(layers), layers[1])
            some = np.asarray(layer.model.expert_weights) > 0
            down, up = down + some * more[0], up + some * more[1]
        # The first and the last place each have a copy of tied weights; their gradients are added.
        tied = layer.model.words / points.tp * layer.options.gradient_bytes * np.asarray(layer.model.tied_embeddings)
        ends = rates.collective(layer.cluster, "all_reduce", tied, np.minimum(points.pp, 2), points.ranks // 2)
        behind = [layers[1] * layer.backward, layers[1] * layer.forward]
        # What sharding sends for that micro-batch hides there, too.
        others = [layers[1] * layer.shard_backward_sent, layers[1] * layer.shard_forward_sent]
        hides = [np.isin(points.shard_overlap, which) for which in (HIDE_BACKWARD, HIDE_FORWARD)]

        def beside(busy: Column, sent: Column) -> Column:
            return rates.together(layer.cluster, busy, sent)

        exposed = [
            np.where(hidden, beside(busy, other + sent) - beside(busy, other), sent)
            for hidden, busy, other, sent in zip(hides, behind, others, (down, up), strict=True)
        ]
        return exposed[0] + exposed[1] + ends

    def _owners(self, points: Points, weights: Column, units: Column) -> tuple[Column, Column]:
        """Gradients of ``weights`` to their owners, and new parameters back."""
        layer = self.layer

        def moved(kind: rates.Kind, itemsize: Any, cut: Any, ranks: Any) -> Column:
            """Unit by unit: attention and MLP of a layer, the embedding or the head, as if equally large."""
            whole = weights * itemsize / cut / units
            return units * rates.collective(layer.cluster, kind, whole, ranks, points.tp * cut)

        params, grads, optim = points.params, points.grads, points.optim
        gradient, weight = layer.options.gradient_bytes, layer.options.weight_bytes
        down = moved("reduce_scatter", gradient, grads, optim // grads)
        down = down + moved("all_reduce", gradient, optim, points.replicas // optim)
        up = moved("all_gather", weight, grads, optim // grads) + moved("all_gather", weight, params, grads // params)
        return down, up

    def _expert_weights(self, layers: tuple[Column, Column, Column]) -> Column:
        """Parameters of routed experts on the rank that has most of them, before sharding."""
        points = self.layer.points
        most = np.maximum(layers[0], np.where(points.pp > 2, layers[1], np.maximum(layers[0], layers[2])))
        return most * self.layer.model.expert_weights / (points.tp * points.ep)

    def _optimizer(self, layers: tuple[Column, Column, Column]) -> Column:
        points = self.layer.points
        owned = self._weights(layers) / points.optim
        owned = owned + self._expert_weights(layers) / cut_by(points.optim, points.ep)
        cluster = self.layer.cluster
        return rates.memory_bound(cluster, owned * cluster.efficiency.optimizer_bytes.value)


def _unquantised(precision: AnyPrecision) -> AnyPrecision:
    """Of the head, which fp8 recipes leave as it is."""
    return "bf16-mixed" if precision == "fp8" else precision


def _latest(nodes: Any) -> Column:
    """Expected largest of so many standard normals (Blom 1958), 0 for one."""
    values, where = np.unique(nodes, return_inverse=True)
    normal = NormalDist()
    return np.array([normal.inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in values.tolist()])[where]
