"""Seconds of Muon at a step's end, beside what AdamW would take: matrices orthogonalised whole, and what
travels for it, in bytes too. Closed form, simulation and what a rank is said to send share these lines.

A matrix of shorter side s and longer side l takes 4 s^2 l + 2 s^3 FLOPs an iteration: X X^T, its square, and
their product with X (Jordan 2024, https://kellerjordan.github.io/posts/muon/). Rounds are those of
``core.parallel.matrices``: of n ranks each owns one matrix. Ranks hold 1 / parts of a matrix each, so

    way in:   (1 - 1 / parts) of a matrix comes to its owner
    way out:  (n - 1) / parts of a matrix goes from its owner to all that hold it

The first way in and the last way out stand alone; what travels between hides behind products, or they behind
it. The last way out runs behind AdamW of embedding and head, which most places have not: it counts whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import ITEMSIZE, Precision, unquantised
from plait.core.model.weights import Letters, Site, matrices_of
from plait.core.parallel.matrices import flops, shared_blocks
from plait.core.parallel.optimizers import HIDDEN
from plait.core.step.seconds import rates
from plait.core.step.step import Place

Number = Any
"""A number, or a column of as many as there are points."""


class MatrixKind(NamedTuple):
    """Matrices of one shape, of a place."""

    rows: Number
    columns: Number
    count: Number


@dataclass(frozen=True)
class MuonPrices:
    """steps: iterations. itemsize: bytes of a number on its way. product: seconds of [m, k] x [k, n];
    exchange: of ``bytes`` that each of so many neighbouring ranks has, most of them for others."""

    steps: Number
    itemsize: Number
    product: Callable[[Number, Number, Number], Number]
    exchange: Callable[[Number, Number], Number]


def kinds_of(sites: Mapping[Site, Number], letters: Letters) -> list[MatrixKind]:
    """Matrices of so many attentions, MLPs and others; those that a model has."""
    found = [
        MatrixKind(letters.size(weight.shape[0]), letters.size(weight.shape[1]), count * letters.has(weight.when))
        for site, count in sites.items()
        for weight in matrices_of(site)
    ]
    return [kind for kind in found if np.any(np.asarray(kind.rows * kind.columns * kind.count) > 0)]


def group_of(tp: Number, replicas: Number, optim: Number) -> tuple[Number, Number]:
    """Ranks that share matrices, and into how many parts these are cut."""
    blocks, where = np.unique(np.asarray(replicas) // optim, return_inverse=True)
    shared = np.array([shared_blocks(int(some)) for some in blocks])[where].reshape(np.shape(replicas))
    return tp * optim * shared, tp * optim


def kinds_at(place: Place) -> list[MatrixKind]:
    """The matrices of a place's stages; none where another optimizer updates them."""
    if place.step.workload.optimizer != "muon":
        return []
    sites = Counter[Site](cast("Site", kind) for stage in place.held for kind, _ in stage if kind in HIDDEN)
    return kinds_of(sites, place.step.model.letters)


def group_at(place: Place) -> tuple[Number, Number]:
    """``group_of`` a place."""
    return group_of(place.mesh.tp, place.mesh.replicas, place.sharding.optim)


def ways(ranks: Number, parts: Number) -> tuple[Number, Number]:
    """The way in and the way out of a matrix, as shares of it.

    >>> ways(4, 2)
    (0.5, 1.5)
    """
    return 1 - 1 / parts, (ranks - 1) / parts


def muon_bytes(place: Place) -> int:
    """What a rank of a place sends for its matrices in a step, in the mean: shards cut units and not
    matrices, so that some send more."""
    ranks, parts = group_at(place)
    numbers = sum(kind.rows * kind.columns * kind.count for kind in kinds_at(place))
    return round(numbers * sum(ways(ranks, parts)) / ranks) * place.step.workload.matrix_itemsize


def muon_seconds(kinds: list[MatrixKind], ranks: Number, parts: Number, prices: MuonPrices) -> Number:
    """Of a place's matrices, which ``ranks`` ranks share that hold 1 / parts of each."""
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
        rounds = np.ceil((before + count) / ranks) - np.ceil(before / ranks)  # that begin with one of these
        each = prices.product(short, long, short) + prices.product(short, short, short)
        computed = computed + rounds * prices.steps * (each + prices.product(short, short, long))
        travelled = travelled + rounds * (there + back)
        before = before + count
        each_way.append((there, back))
    alone = each_way[0][0] + each_way[-1][1]
    return alone + np.maximum(computed, travelled - alone)


def cluster_prices(cluster: Cluster, precision: Precision, steps: Number, itemsize: Number) -> MuonPrices:
    """On a cluster. precision: the model's, where the device has no peak for numbers of ``itemsize``."""
    kind: Precision | None = next(
        (name for name, size in ITEMSIZE.items() if size == itemsize and name in cluster.device.peak), None
    )

    def exchange(nbytes: Number, ranks: Number) -> Number:
        return rates.collective(cluster, "all_to_all", nbytes * ranks, ranks, 1)

    return MuonPrices(steps, itemsize, partial(rates.matmul, cluster, kind or unquantised(precision)), exchange)


def _sides(kind: MatrixKind) -> tuple[Number, Number]:
    return np.minimum(kind.rows, kind.columns), np.maximum(kind.rows, kind.columns)
