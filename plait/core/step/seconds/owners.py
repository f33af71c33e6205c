"""How a model is shared out, over places of the pipeline and over replicas, and what that costs at a step's
end: gradients to their owners, the optimizer, new parameters back.

None of it depends on micro-batches. So of a space it is found for a few percent of the points (``ALIKE``),
and taken for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.step.columns.distinct import Ints
from plait.core.step.columns.points import Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import muon_time, rates
from plait.core.step.seconds.experts_time import cut_by, of_experts
from plait.core.step.seconds.options import Options
from plait.core.step.seconds.pipeline_time import ZB_V
from plait.core.step.seconds.rates import Seconds as Column

HOST_BYTES, HOST_SHARE = 28, 0.7
"""Bytes of a number whose optimizer runs on a host: weight and two moments read and written, gradient, in
fp32; of its memory's rate, what a loop over them reaches (order of magnitude of STREAM on servers)."""
NORM_BYTES = 24
"""Of all gradients' norm, which every rank needs before it changes a parameter."""
ALIKE = ("pp", "virtual", "tp", "dp", "cp", "ep", "params", "grads", "optim")
"""Columns that owners depend on, besides whether a place has both ends of the model."""


def decides(points: Points) -> list[NDArray[Any]]:
    """Columns that are equal where ``Owners`` is."""
    return [*(getattr(points, name) for name in ALIKE), points.schedule == ZB_V]


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Columns, one number a kind of point.

    first, inner, last: layers of these places. down, up: seconds of gradients to their owners and of new
    parameters back, as if alone, of the rank that has most of them; evenness: what a rank has on average, to
    that. ends: of summing the gradient of tied weights. optimizer: seconds, with the gradients' norm. late:
    by how many standard deviations the slowest node is late.
    """

    first: Column
    inner: Column
    last: Column
    down: Column
    up: Column
    evenness: Column
    ends: Column
    optimizer: Column
    late: Column

    @staticmethod
    def of(
        model: Shapes, points: Points, cluster: Cluster, options: Options, precision: Precision = "bf16-mixed"
    ) -> Owners:
        """Of every point."""
        return _Cut(model, points, cluster, options, precision).owners()

    def take(self, which: Ints) -> Owners:
        """By numbers."""
        return Owners(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


@dataclass(frozen=True)
class _Cut:
    model: Shapes
    points: Points
    cluster: Cluster
    options: Options
    precision: Precision

    def owners(self) -> Owners:
        layers = self._layers()
        down, up = self._sync(layers)
        nodes = -(-self.points.ranks // self.cluster.ranks_per_node)
        return Owners(
            first=layers[0], inner=layers[1], last=layers[2], down=down, up=up,
            evenness=self._mean / self._weights(layers), ends=self._ends(),
            optimizer=self._optimizer(layers), late=_latest(nodes),
        )  # fmt: skip

    def _layers(self) -> tuple[Column, Column, Column]:
        """Of the first, an inner and the last place. Embedding and head take the place of a layer each where
        that makes stages equal; else a remainder goes to inner places, which are most."""
        points, total = self.points, np.asarray(self.model.num_layers, dtype=np.float64)
        parts = points.pp * np.maximum(points.virtual, 1)
        counted = (total % parts > 0) & ((total + 2) % parts == 0) & (points.pp > 1)
        even = np.where(counted, (total + 2) / points.pp, np.where(total % parts == 0, total / points.pp, 0))
        inner = np.where(even > 0, even, np.ceil(total / points.pp))
        outer = np.where(counted, even - 1, np.where(even > 0, even, total / points.pp))
        return outer, inner, np.where(points.pp > 1, outer, total)

    def _weights(self, layers: tuple[Column, Column, Column]) -> Column:
        """Parameters on the rank that has most of them, before sharding over replicas."""
        model, points = self.model, self.points
        single = layers[2] * model.layer_weights + model.words * (2 - np.asarray(model.tied_embeddings))
        outer = layers[0] * model.layer_weights + model.words * np.where(points.schedule == ZB_V, 2, 1)
        inner = np.where(points.pp > 2, layers[1] * model.layer_weights, 0)
        cut = np.where(points.pp > 1, np.maximum(outer, inner), single) / points.tp
        return cut + np.asarray(model.learned_positions) * model.max_sequence * model.hidden

    @property
    def _mean(self) -> Column:
        """Parameters on a rank on average, before sharding."""
        model = self.model
        words = model.words * np.where(self.points.pp > 1, 2, 2 - np.asarray(model.tied_embeddings))
        return (np.asarray(model.num_layers) * model.layer_weights + words) / self.points.tp / self.points.pp

    def _expert_weights(self, layers: tuple[Column, Column, Column]) -> Column:
        """Parameters of routed experts on the rank that has most of them, before sharding."""
        points = self.points
        most = np.maximum(layers[0], np.where(points.pp > 2, layers[1], np.maximum(layers[0], layers[2])))
        return most * self.model.expert_weights / (np.where(self.options.experts_whole, 1, points.tp) * points.ep)

    def _sync(self, layers: tuple[Column, Column, Column]) -> tuple[Column, Column]:
        """Gradients to their owners, over replicas of these, and new parameters back: the chain of
        factors."""
        told = self.options
        each = told.weight_bytes * (1 - (1 - told.quantised) * self._in_layers)
        units = 2 * layers[1] + 2 + np.asarray(self.model.learned_positions)
        down, up = self._moved(self.points, self._weights(layers), units, each)
        if self.model.has_experts:
            each = told.weight_bytes * told.quantised
            more = self._moved(
                of_experts(self.points, told.experts_whole), self._expert_weights(layers), layers[1], each
            )
            some = np.asarray(self.model.expert_weights) > 0
            down, up = down + some * more[0], up + some * more[1]
        return down, up

    @property
    def _in_layers(self) -> Any:
        """Of all parameters but experts', the part that is layers' matrices."""
        model = self.model
        layers = np.asarray(model.num_layers) * model.layer_weights
        return layers / (layers + model.words * (2 - np.asarray(model.tied_embeddings)))

    def _moved(self, points: Points, weights: Column, units: Column, weight: Any) -> tuple[Column, Column]:
        """Gradients of ``weights`` to their owners, and new parameters back, of ``weight`` bytes each."""

        def moved(kind: rates.Kind, itemsize: Any, cut: Any, ranks: Any) -> Column:
            """Unit by unit, as if equally large: attention and MLP of a layer, the embedding or the head,
            vectors, positions."""
            whole = weights * itemsize / cut / units
            return units * rates.collective(self.cluster, kind, whole, ranks, points.tp * cut)

        params, grads, optim = points.params, points.grads, points.optim
        gradient = self.options.gradient_bytes
        down = moved("reduce_scatter", gradient, grads, optim // grads)
        down = down + moved("all_reduce", gradient, optim, points.replicas // optim)
        up = moved("all_gather", weight, grads, optim // grads) + moved("all_gather", weight, params, grads // params)
        return down, up

    def _ends(self) -> Column:
        """The first and the last place each have a copy of tied weights; their gradients are added. In lists
        a rank adds what its optimizer updates."""
        model, points = self.model, self.points
        tied = model.words / points.tp * self.options.gradient_bytes * np.asarray(model.tied_embeddings)
        tied = tied / np.where(self.options.in_lists, points.optim, 1)
        return rates.collective(self.cluster, "all_reduce", tied, np.minimum(points.pp, 2), points.ranks // 2)

    def _optimizer(self, layers: tuple[Column, Column, Column]) -> Column:
        points, cluster = self.points, self.cluster
        owned = self._weights(layers) / points.optim
        among = np.where(self.options.experts_whole, points.tp, 1)
        owned = owned + self._expert_weights(layers) / cut_by(points.optim, points.ep, among)
        told, away = self.options, owned * self.options.states_on_host
        moved = cluster.efficiency.optimizer_bytes.value * told.states_moved
        here = rates.memory_bound(cluster, (owned - away) * moved)
        norm = rates.collective(cluster, "all_reduce", NORM_BYTES, points.ranks, 1)
        return here + self._on_host(away) + self._muon(layers) + np.where(told.in_lists, norm, 0.0)

    def _muon(self, layers: tuple[Column, Column, Column]) -> Column:
        """Seconds of orthogonalising matrices, of the place that has most layers."""
        points, told, model = self.points, self.options, self.model
        if not np.any(told.muon_steps):
            return np.zeros(len(points))
        prices = muon_time.cluster_prices(self.cluster, self.precision, told.muon_steps, told.matrix_itemsize)
        most = np.where(points.pp > 1, np.maximum(layers[0], np.where(points.pp > 2, layers[1], 0)), layers[2])
        group = muon_time.group_of(points.tp, points.replicas, points.optim)
        found = muon_time.muon_seconds(muon_time.kinds_of({"attn": most, "mlp": most}, model.letters), *group, prices)
        if model.has_experts:
            own = most * model.expert_share * model.experts / points.ep
            parts = np.where(told.experts_whole, 1, points.tp) * np.maximum(1, points.optim // points.ep)
            routed = muon_time.kinds_of({"mlp": own}, replace(model.letters, F=model.expert_ffn))
            found = found + muon_time.muon_seconds(routed, parts, parts, prices)
        return found * (np.asarray(told.muon_steps) > 0)

    def _on_host(self, owned: Any) -> Any:
        """Seconds of the optimizer on the host: gradients there, its update, new parameters back, one after
        the other."""
        device, told = self.cluster.device, self.options
        if device.host_rate is None or device.host_memory_rate is None:
            return np.zeros(len(self.points))
        sent = owned * (told.gradient_bytes + told.weight_bytes) / device.host_rate.value
        return sent + owned * HOST_BYTES * told.states_moved / (device.host_memory_rate.value * HOST_SHARE)


def _latest(nodes: Any) -> Column:
    """Expected largest of so many standard normals (Blom 1958), 0 for one."""
    values, where = np.unique(nodes, return_inverse=True)
    normal = NormalDist()
    return np.array([normal.inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in values.tolist()])[where]
