"""Layers of each pp rank, sharding over replicas, and their cost at a step's end: gradient
reduction, optimizer (Muon: see ``muon_seconds``), gathering of new parameters.

None of this depends on micro-batches. So ``ShardingCosts`` is computed once for strategies with
equal ``ALIKE`` columns, a few percent of the space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import ITEMSIZE, Precision, unquantised
from plait.core.model.weights import Dimensions, Sublayer, matrices_of
from plait.core.parallel.sharding import MUON_KINDS, flops, shared_blocks
from plait.core.step.columns.points import StrategyTable, column
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.rates import Seconds as Column
from plait.core.step.seconds.shard_traffic import expert_factor, of_experts
from plait.core.step.step import PipelineRank

Number = Any
"""A number, or an array with one number for each strategy."""


class MatrixKind(NamedTuple):
    """Matrices of one shape on a pp rank."""

    rows: Number
    columns: Number
    count: Number


@dataclass(frozen=True)
class MuonPrices:
    """Prices of Muon. steps: iterations. itemsize: bytes of a number in transit. product: seconds
    of [m, k] x [k, n]. exchange: seconds of an all-to-all over so many neighbouring ranks, each of
    which holds ``bytes`` bytes, most of them for other ranks."""

    steps: Number
    itemsize: Number
    product: Callable[[Number, Number, Number], Number]
    exchange: Callable[[Number, Number], Number]


def kinds_of(sites: Mapping[Sublayer, Number], letters: Dimensions) -> list[MatrixKind]:
    """Return the matrices of ``sites`` (how many attention, MLP and other sublayers); only those
    that the model has."""
    found = [
        MatrixKind(letters.size(weight.shape[0]), letters.size(weight.shape[1]), count * letters.has(weight.when))
        for site, count in sites.items()
        for weight in matrices_of(site)
    ]
    return [kind for kind in found if np.any(np.asarray(kind.rows * kind.columns * kind.count) > 0)]


def group_of(tp: Number, replicas: Number, optim: Number) -> tuple[Number, Number]:
    """Return (number of ranks that share matrices, number of parts each matrix is cut into)."""
    blocks, where = np.unique(np.asarray(replicas) // optim, return_inverse=True)
    shared = np.array([shared_blocks(int(some)) for some in blocks])[where].reshape(np.shape(replicas))
    return tp * optim * shared, tp * optim


def kinds_at(pipeline_rank: PipelineRank) -> list[MatrixKind]:
    """Return the matrices of a pp rank's stages; empty if another optimizer updates them."""
    if pipeline_rank.step.workload.optimizer != "muon":
        return []
    sites = Counter[Sublayer](
        cast("Sublayer", kind) for stage in pipeline_rank.held for kind, _ in stage if kind in MUON_KINDS
    )
    return kinds_of(sites, pipeline_rank.step.model.letters)


def group_at(pipeline_rank: PipelineRank) -> tuple[Number, Number]:
    """Return (number of ranks that share a pp rank's matrices, number of parts each matrix is cut
    into)."""
    return group_of(pipeline_rank.mesh.tp, pipeline_rank.mesh.replicas, pipeline_rank.sharding.optim)


def ways(ranks: Number, parts: Number) -> tuple[Number, Number]:
    """Return (bytes sent to a matrix's owner, bytes sent back by it), as fractions of the matrix.
    ranks: ranks that share matrices. parts: parts each matrix is cut into.

    >>> ways(4, 2)
    (0.5, 1.5)
    """
    return 1 - 1 / parts, (ranks - 1) / parts


def muon_bytes(pipeline_rank: PipelineRank) -> int:
    """Return the bytes that each rank at this pp rank sends for its matrices in a step, on average.
    Shards cut units, not matrices, so some ranks send more."""
    ranks, parts = group_at(pipeline_rank)
    numbers = sum(kind.rows * kind.columns * kind.count for kind in kinds_at(pipeline_rank))
    return round(numbers * sum(ways(ranks, parts)) / ranks) * pipeline_rank.step.workload.matrix_itemsize


def muon_seconds(kinds: list[MatrixKind], ranks: Number, parts: Number, prices: MuonPrices) -> Number:
    """Return the seconds of Muon for a pp rank's matrices. ranks: ranks that share the matrices.
    parts: each rank holds 1 / parts of each matrix.

    Muon orthogonalises whole matrices, in addition to AdamW's work. The closed form, the simulation
    and the per-rank traffic (``muon_bytes``) share this code. In an iteration a matrix of shorter
    side s and longer side l takes 4 s^2 l + 2 s^3 FLOPs: X X^T, its square, and their product with
    X (Jordan 2024, https://kellerjordan.github.io/posts/muon/). Rounds are those of
    ``core.parallel.sharding``: in a round, each of n ranks owns one matrix. Its transfers are

        way in:   (1 - 1 / parts) of a matrix is sent to its owner
        way out:  (n - 1) / parts of a matrix is sent from its owner to all ranks that hold it

    The first way in and the last way out are exposed; transfers between them overlap with products.
    The last way out overlaps with AdamW of embedding and head, but most pp ranks hold neither, so
    it counts in full.
    """
    if not kinds:
        return 0.0
    computed: Number = 0.0
    travelled: Number = 0.0
    before: Number = 0
    each_way = list[tuple[Number, Number]]()
    into, out = (share * ranks / np.maximum(1, np.asarray(ranks) - 1) for share in ways(ranks, parts))
    for rows, columns, count in sorted(kinds, key=lambda kind: -float(np.mean(flops(_sides(kind))))):
        short, long = _sides(MatrixKind(rows, columns, count))
        size = short * long * prices.itemsize
        there, back = prices.exchange(size * into, ranks), prices.exchange(size * out, ranks)
        rounds = np.ceil((before + count) / ranks) - np.ceil(before / ranks)  # that begin with this shape
        each = prices.product(short, long, short) + prices.product(short, short, short)
        computed = computed + rounds * prices.steps * (each + prices.product(short, short, long))
        travelled = travelled + rounds * (there + back)
        before = before + count
        each_way.append((there, back))
    alone = each_way[0][0] + each_way[-1][1]
    return alone + np.maximum(computed, travelled - alone)


def cluster_prices(cluster: Cluster, precision: Precision, steps: Number, itemsize: Number) -> MuonPrices:
    """Return Muon's prices on a cluster. precision: the model's, used if the device has no peak for
    numbers of ``itemsize`` bytes."""
    kind: Precision | None = next(
        (name for name, size in ITEMSIZE.items() if size == itemsize and name in cluster.device.peak), None
    )

    def exchange(nbytes: Number, ranks: Number) -> Number:
        return rates.collective(cluster, "all_to_all", nbytes * ranks, ranks, 1)

    return MuonPrices(steps, itemsize, partial(rates.matmul, cluster, kind or unquantised(precision)), exchange)


def _sides(kind: MatrixKind) -> tuple[Number, Number]:
    return np.minimum(kind.rows, kind.columns), np.maximum(kind.rows, kind.columns)


HOST_BYTES, HOST_SHARE = 28, 0.7
"""Cost of an optimizer on the host. HOST_BYTES: bytes moved per parameter (weight and two moments
read and written, gradient read, in fp32). HOST_SHARE: fraction of the host memory's rate that a
loop over parameters reaches (order of magnitude of STREAM on servers)."""
NORM_BYTES = 24
"""Bytes of the all-reduce of the gradients' norm, which every rank needs before it updates a
parameter."""
ALIKE = ("pp", "virtual", "tp", "dp", "cp", "ep", "params", "grads", "optim")
"""Columns that ``ShardingCosts`` depends on, apart from whether a pp rank holds both ends of the
model."""


def decides(points: StrategyTable) -> list[NDArray[Any]]:
    """Return the arrays that determine ``ShardingCosts``: strategies that agree in them share
    one."""
    return [*(getattr(points, name) for name in ALIKE), column("turns", points.schedule)]


@dataclass(frozen=True, kw_only=True)
class ShardingCosts:
    """Arrays with one number for each distinct combination of the columns in ``decides``.

    first, inner, last: layers of the first, an inner and the last pp rank. down: seconds of
    reducing gradients to their owners, without overlap, on the rank with most parameters. up:
    seconds of gathering new parameters there, without overlap. evenness: a rank's average
    parameters, divided by those of that rank. ends: seconds of summing the gradient of tied
    weights. optimizer: seconds, including the gradients' norm. late: standard deviations by which
    the slowest node is late.
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
        model: Shapes, points: StrategyTable, cluster: Cluster, options: Options, precision: Precision = "bf16-mixed"
    ) -> ShardingCosts:
        """Return the ``ShardingCosts`` of every strategy."""
        return _Cut(model, points, cluster, options, precision).owners()


@dataclass(frozen=True)
class _Cut:
    model: Shapes
    points: StrategyTable
    cluster: Cluster
    options: Options
    precision: Precision

    def owners(self) -> ShardingCosts:
        layers = self._layers()
        down, up = self._sync(layers)
        nodes = -(-self.points.ranks // self.cluster.ranks_per_node)
        return ShardingCosts(
            first=layers[0], inner=layers[1], last=layers[2], down=down, up=up,
            evenness=self._mean / self._weights(layers), ends=self._ends(),
            optimizer=self._optimizer(layers), late=_latest(nodes),
        )  # fmt: skip

    def _layers(self) -> tuple[Column, Column, Column]:
        """Return the layers of the first, an inner and the last pp rank.

        If stages become equal that way, embedding and head each take the place of one layer.
        Otherwise the remainder goes to inner pp ranks, which are the most numerous.
        """
        points, total = self.points, np.asarray(self.model.num_layers, dtype=np.float64)
        parts = points.pp * np.maximum(points.virtual, 1)
        counted = (total % parts > 0) & ((total + 2) % parts == 0) & (points.pp > 1)
        even = np.where(counted, (total + 2) / points.pp, np.where(total % parts == 0, total / points.pp, 0))
        inner = np.where(even > 0, even, np.ceil(total / points.pp))
        outer = np.where(counted, even - 1, np.where(even > 0, even, total / points.pp))
        return outer, inner, np.where(points.pp > 1, outer, total)

    def _weights(self, layers: tuple[Column, Column, Column]) -> Column:
        """Return the parameters on the rank that has most of them, before sharding over
        replicas."""
        model, points = self.model, self.points
        single = layers[2] * model.layer_weights + model.words * (2 - np.asarray(model.tied_embeddings))
        outer = layers[0] * model.layer_weights + model.words * np.where(column("turns", points.schedule), 2, 1)
        inner = np.where(points.pp > 2, layers[1] * model.layer_weights, 0)
        cut = np.where(points.pp > 1, np.maximum(outer, inner), single) / points.tp
        return cut + np.asarray(model.learned_positions) * model.max_sequence * model.hidden

    @property
    def _mean(self) -> Column:
        """Parameters on a rank on average, before sharding over replicas."""
        model = self.model
        words = model.words * np.where(self.points.pp > 1, 2, 2 - np.asarray(model.tied_embeddings))
        return (np.asarray(model.num_layers) * model.layer_weights + words) / self.points.tp / self.points.pp

    def _expert_weights(self, layers: tuple[Column, Column, Column]) -> Column:
        """Return the routed experts' parameters on the rank that has most of them, before sharding
        over replicas."""
        points = self.points
        most = np.maximum(layers[0], np.where(points.pp > 2, layers[1], np.maximum(layers[0], layers[2])))
        return most * self.model.expert_weights / (np.where(self.options.experts_whole, 1, points.tp) * points.ep)

    def _sync(self, layers: tuple[Column, Column, Column]) -> tuple[Column, Column]:
        """Return (seconds of reducing gradients to their owners, seconds of gathering new
        parameters). The sharding factors form a chain: each divides the next."""
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
        """Fraction of the non-expert parameters that are matrices of layers."""
        model = self.model
        layers = np.asarray(model.num_layers) * model.layer_weights
        return layers / (layers + model.words * (2 - np.asarray(model.tied_embeddings)))

    def _moved(self, points: StrategyTable, weights: Column, units: Column, weight: Any) -> tuple[Column, Column]:
        """Return the seconds of reducing gradients of ``weights`` parameters, and of gathering new
        ones. weight: bytes of a gathered parameter."""

        def moved(kind: rates.Kind, itemsize: Any, cut: Any, ranks: Any) -> Column:
            """Return the seconds of collectives that run unit by unit. Units count as equally
            large: attention and MLP of a layer, the embedding or the head, vectors, positions."""
            whole = weights * itemsize / cut / units
            return units * rates.collective(self.cluster, kind, whole, ranks, points.tp * cut)

        params, grads, optim = points.params, points.grads, points.optim
        gradient = self.options.gradient_bytes
        down = moved("reduce_scatter", gradient, grads, optim // grads)
        down = down + moved("all_reduce", gradient, optim, points.replicas // optim)
        up = moved("all_gather", weight, grads, optim // grads) + moved("all_gather", weight, params, grads // params)
        return down, up

    def _ends(self) -> Column:
        """Return the seconds of adding the gradients of tied weights, of which the first and the
        last pp rank each hold a copy. With instruction lists a rank adds only the shard that its
        optimizer updates."""
        model, points = self.model, self.points
        tied = model.words / points.tp * self.options.gradient_bytes * np.asarray(model.tied_embeddings)
        tied = tied / np.where(self.options.in_lists, points.optim, 1)
        return rates.collective(self.cluster, "all_reduce", tied, np.minimum(points.pp, 2), points.ranks // 2)

    def _optimizer(self, layers: tuple[Column, Column, Column]) -> Column:
        points, cluster = self.points, self.cluster
        owned = self._weights(layers) / points.optim
        among = np.where(self.options.experts_whole, points.tp, 1)
        owned = owned + self._expert_weights(layers) / expert_factor(points.optim, points.ep, among)
        told, away = self.options, owned * self.options.states_on_host
        moved = cluster.efficiency.optimizer_bytes.value * told.states_moved
        here = rates.memory_bound(cluster, (owned - away) * moved)
        norm = rates.collective(cluster, "all_reduce", NORM_BYTES, points.ranks, 1)
        return here + self._on_host(away) + self._muon(layers) + np.where(told.in_lists, norm, 0.0)

    def _muon(self, layers: tuple[Column, Column, Column]) -> Column:
        """Return the seconds of orthogonalising matrices, on the pp rank with most layers."""
        points, told, model = self.points, self.options, self.model
        if not np.any(told.muon_steps):
            return np.zeros(len(points))
        prices = cluster_prices(self.cluster, self.precision, told.muon_steps, told.matrix_itemsize)
        most = np.where(points.pp > 1, np.maximum(layers[0], np.where(points.pp > 2, layers[1], 0)), layers[2])
        group = group_of(points.tp, points.replicas, points.optim)
        found = muon_seconds(kinds_of({"attn": most, "mlp": most}, model.letters), *group, prices)
        if model.has_experts:
            own = most * model.expert_share * model.experts / points.ep
            parts = np.where(told.experts_whole, 1, points.tp) * np.maximum(1, points.optim // points.ep)
            routed = kinds_of({"mlp": own}, replace(model.letters, F=model.expert_ffn))
            found = found + muon_seconds(routed, parts, parts, prices)
        return found * (np.asarray(told.muon_steps) > 0)

    def _on_host(self, owned: Any) -> Any:
        """Return the seconds of the optimizer on the host: gradients to the host, update, new
        parameters back, without overlap."""
        device, told = self.cluster.device, self.options
        if device.host_rate is None or device.host_memory_rate is None:
            return np.zeros(len(self.points))
        sent = owned * (told.gradient_bytes + told.weight_bytes) / device.host_rate.value
        return sent + owned * HOST_BYTES * told.states_moved / (device.host_memory_rate.value * HOST_SHARE)


def _latest(nodes: Any) -> Column:
    """Return the expected maximum of ``nodes`` standard normal variables (Blom 1958); 0 for one
    node."""
    values, where = np.unique(nodes, return_inverse=True)
    normal = NormalDist()
    return np.array([normal.inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in values.tolist()])[where]
