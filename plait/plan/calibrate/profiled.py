"""Fits the constants of ``core.cluster.efficiency`` to a profile, and returns the cluster with
them.

The fitted formulas are those of ``step.seconds.rates``, called as the planner calls them; their
simplifications become part of each constant's error. A fit minimises the relative error of all
points, large and small alike, robustly (Huber). It stays near the cluster's previous constants
where the points do not decide (``plait.plan.calibrate.fit``). Points with scattered samples have
less weight.

``module_seconds`` predicts the modules that a profile has measured (``ModuleTime``): it adds up a
layer's segment ops on a described cluster, as the profile adds up its recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import JobError
from plait.core.cluster.efficiency import Links
from plait.core.cluster.hardware import MEMORY_RATE, Cluster
from plait.core.cluster.profile import AttentionCore, Curve, MemoryPass, ModuleTime, Point, Product, Profile, by_module
from plait.core.model.spec import Family, ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.seconds import rates
from plait.core.step.seconds.costs import cluster_costs
from plait.plan.calibrate.fit import (
    Calibrated,
    FittedConstant,
    Scatter,
    calibrate,
    constant_of,
    with_constants,
)

NOISE = 0.1
"""Relative error up to which a measured time is no outlier, in addition to the spread of its
samples."""
LOOSE = 2.0
"""Standard deviation, in logarithms, of a constant around its previous value: so wide that the
measurements decide."""
SMALLEST = 1e-9
"""Smallest start value of a constant, since the fit is on a logarithmic scale."""
MODULE_CONSTANTS = ("elementwise", "logit_bytes", "matmul", "attention_forward", "attention_backward")
"""Constants that modules measure. The last three are known from plain operations, and stay near
those values."""

Columns = Any
"""A numpy array with an element for each measurement."""
Predict = Callable[[Cluster], Columns]
Measured = Point | Product | AttentionCore | MemoryPass


def with_profile(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with constants fitted to a profile, where it has points for them. Each
    constant names the profile as its source and has the fit's error.

    Raises JobError if the profile is of another kind of device, or of nodes of another size.
    """
    _check(cluster, profile)
    for refit in (_matmul, _attention, _memory, _modules, _links, _overlap):
        cluster = refit(cluster, profile)
    return cluster


def cluster_from_profile(profile: Profile) -> Cluster:
    """Return the cluster that a profile was measured on; its peaks and rates are the best ones
    measured. Raises JobError for a profile without matrix products, e.g. one that only holds logs
    of other tools, or without a device's memory size."""
    machine = profile.machine
    if not profile.products:
        raise JobError(
            "has no matrix products, so it does not say how fast a device is", key="products",
            fix="Measure them with plait measure machine, or name a cluster that is described",
        )  # fmt: skip
    if not machine.memory:
        raise JobError(
            "is 0: the device's memory size is unknown", key="machine.memory",
            fix="Measure it with plait measure machine, or name a cluster that is described",
        )  # fmt: skip
    peaks: dict[str, float] = {}
    for product in profile.products:
        peaks[product.precision] = max(peaks.get(product.precision, 0.0), product.rate)
    memory = max((one.bytes / one.seconds for one in profile.passes), default=MEMORY_RATE)

    def constant(value: float) -> dict[str, Any]:
        return {"value": value, "source": profile.source, "date": profile.date}

    nominal = Cluster.from_dict(
        {
            "name": machine.name or "here",
            "ranks_per_node": machine.ranks_per_node,
            "nodes": -(-machine.ranks // machine.ranks_per_node),
            "crowd": machine.crowd,
            "device": {
                "name": machine.device or machine.kind,
                "kind": machine.kind,
                "memory": constant(float(machine.memory)),
                "memory_rate": constant(memory),
                "peak": {precision: constant(rate) for precision, rate in peaks.items()},
                "measured": True,
            },
            "tiers": [
                {"name": name, "ranks": ranks, "rate": constant(rate), "latency": constant(latency)}
                for name, ranks, rate, latency in _tiers(profile, memory)
            ],
        }
    )
    names = ("inside.share", "inside.latency", "across.share", "across.latency")
    return with_profile(_replaced(nominal, dict.fromkeys(names, (1.0, 0.0)), profile), profile)


def _check(cluster: Cluster, profile: Profile) -> None:
    machine = profile.machine
    if machine.kind != cluster.device.kind:
        problem = f"was measured on {machine.kind}, and the devices of {cluster.name} are {cluster.device.kind}"
        raise JobError(problem, key="machine.kind", fix="Name another cluster, or profile this one")
    across = any(curve.group.nodes > 1 for curve in profile.collectives)
    if across and machine.ranks_per_node != cluster.ranks_per_node:
        raise JobError(
            f"has {machine.ranks_per_node} ranks on a node, and {cluster.name} has {cluster.ranks_per_node}",
            key="machine.ranks_per_node",
            fix="Measure with as many ranks on a node as will train",
        )


# ---- one fit for each part of a profile ----


def _matmul(cluster: Cluster, profile: Profile) -> Cluster:
    points = [one for one in profile.products if one.precision in cluster.device.peak]

    def predict(tried: Cluster) -> Columns:
        return np.array([rates.matmul(tried, one.precision, one.m, one.k, one.n) for one in points])

    names = ("matmul", "matmul_wave", "matmul_depth", "matmul_launch")
    return _fitted(cluster, profile, names, predict, points)


def _attention(cluster: Cluster, profile: Profile) -> Cluster:
    points = [one for one in profile.attention if one.precision in cluster.device.peak]
    told = {"batch", "heads", "queries", "keys", "head_size"}
    shapes = [rates.AttentionShape(**one.model_dump(include=told)) for one in points]

    def predict(tried: Cluster) -> Columns:
        return np.array([
            rates.attention(tried, one.precision, shape, backward=one.backward)
            for one, shape in zip(points, shapes, strict=True)
        ])  # fmt: skip

    names = ("attention_forward", "attention_backward", "attention_short", "attention_launch")
    return _fitted(cluster, profile, names, predict, points)


def _memory(cluster: Cluster, profile: Profile) -> Cluster:
    sizes = np.array([one.bytes for one in profile.passes], dtype=np.float64)
    return _fitted(cluster, profile, ("memory",), lambda tried: rates.memory_bound(tried, sizes), profile.passes)


def _modules(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with fitted constants of elementwise operations and the loss, measured on
    layers in the executor that trains; products and attention, which differ there from isolated
    ones, are adjusted. A module's weight is its share of its layer's time; the whole layer weighs
    as much as all of its modules together."""
    points = [
        one for one in profile.modules if one.seconds and one.site != "embed" and one.precision in cluster.device.peak
    ]
    if not points:
        return cluster
    layers = [layer_of(one) for one in points]
    whole = np.array([[layer == other for other in layers] for layer in dict.fromkeys(layers)], dtype=np.float64)
    measured = np.array([one.seconds for one in points])
    totals = whole @ measured
    share = measured / (whole.T @ totals)

    def predict(tried: Cluster) -> Columns:
        said = module_seconds(tried, points)
        return np.concatenate([said, whole @ said])

    priors = {name: _near(cluster, name) for name in MODULE_CONSTANTS}
    count = len(points) / len(totals)
    found = _fit(
        cluster, profile, priors, predict, np.concatenate([measured, totals]),
        weights=np.concatenate([share * count, np.full(len(totals), count)]),
    )  # fmt: skip
    return _with_result(cluster, profile, found)


def _near(cluster: Cluster, name: str) -> FittedConstant:
    """Return a constant's present value and relative error, as the prior of a fit."""
    known = constant_of(cluster, name)
    loose = LOOSE if name in ("elementwise", "logit_bytes") else max(NOISE, known.error)
    return FittedConstant(value=max(known.value, SMALLEST), error=loose)


def _links(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with fitted constants of links: those inside nodes first, since traffic
    between nodes passes them, too."""
    usable = [curve for curve in profile.collectives if _as_in_training(curve, cluster)] or profile.collectives
    for side, crosses in (("inside", False), ("across", True)):
        curves = [curve for curve in usable if (curve.group.nodes > 1) == crosses]
        names = tuple(f"{side}.{name}" for name in Links.model_fields)
        points = [point for curve in curves for point in curve.points]
        cluster = _fitted(cluster, profile, names, lambda tried, c=curves: _times(tried, c), points)
    return cluster


def _as_in_training(curve: Curve, cluster: Cluster) -> bool:
    """True if all ranks of the curve's nodes communicated at once, as ``rates.collective``
    assumes."""
    group = curve.group
    return group.nodes == 1 or group.per_node * group.at_once * group.nodes >= group.nodes * cluster.ranks_per_node


def _times(cluster: Cluster, curves: Sequence[Curve]) -> Columns:
    found = [
        rates.collective(
            cluster, one.kind, np.array([point.bytes for point in one.points]), one.group.ranks, one.group.stride
        )
        for one in curves
    ]
    return np.concatenate(found)


def _overlap(cluster: Cluster, profile: Profile) -> Cluster:
    """Return the cluster with both slowdown factors of overlap, each the geometric mean of its
    measurements. If any group crosses nodes, only such groups count: most hidden communication
    crosses nodes, and links inside a node may be copies by its CPUs. Factors below 1 are noise and
    become 1."""
    changed: dict[str, tuple[float, float]] = {}
    beside = [one for one in profile.overlaps if one.group.nodes > 1] or profile.overlaps
    for name, values in (
        ("slow_computation", [math.log(one.computation) for one in beside]),
        ("slow_communication", [math.log(one.communication) for one in beside]),
    ):
        if values:
            middle = math.fsum(values) / len(values)
            spread = math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))
            changed[name] = (max(1.0, math.exp(middle)), spread)
    return _replaced(cluster, changed, profile)


# ---- fitting ----


def _fitted(
    cluster: Cluster, profile: Profile, names: Sequence[str], predict: Predict, points: Sequence[Measured]
) -> Cluster:
    """Return the cluster with these constants fitted; the first one must be a share. With very few
    points only the first is fitted, with none nothing is.

    A constant's error combines the fit's residuals (root mean square, of logarithms) with the
    constant's own uncertainty in the fit.
    """
    if not points:
        return cluster
    names = names if len(points) >= len(names) + 2 else names[:1]
    priors = {
        name: FittedConstant(value=max(constant_of(cluster, name).value, SMALLEST), error=LOOSE) for name in names
    }
    measured = np.array([point.seconds for point in points])
    off = float(np.median(predict(cluster) / measured))  # a larger share means shorter times
    found = _fit(
        cluster, profile, priors, predict, measured,
        weights=[(NOISE / (NOISE + point.spread)) ** 2 for point in points],
        start={names[0]: priors[names[0]].value * off},
    )  # fmt: skip
    return _with_result(cluster, profile, found)


def _fit(
    cluster: Cluster,
    profile: Profile,
    priors: Mapping[str, FittedConstant],
    predict: Predict,
    measured: Columns,
    **more: Any,
) -> Calibrated:
    """Return the constants with which ``predict`` comes closest to ``measured``."""

    def predicted(values: Mapping[str, float]) -> Columns:
        return predict(_replaced(cluster, {name: (value, 0.0) for name, value in values.items()}, profile))

    return calibrate(predicted, measured, priors, scatter=Scatter(noise=NOISE), **more)


def _with_result(cluster: Cluster, profile: Profile, result: Calibrated) -> Cluster:
    left = float(np.sqrt(np.mean(result.residuals**2)))
    constants = {name: (one.value, math.hypot(left, one.error)) for name, one in result.constants.items()}
    return _replaced(cluster, constants, profile)


# ---- constants of a cluster ----


def _replaced(cluster: Cluster, values: dict[str, tuple[float, float]], profile: Profile) -> Cluster:
    """Return the cluster with other constants. values: (value, error) by name, as in
    ``inside.share``."""
    return with_constants(cluster, values, source=profile.source, date=profile.date)


def _tiers(profile: Profile, memory: float) -> list[tuple[str, int, float, float]]:
    """Return (name, ranks, bytes per second of a rank, seconds of a message) of each tier,
    innermost first."""
    machine = profile.machine
    inside = [curve for curve in profile.collectives if curve.group.nodes == 1]
    pod = [curve for curve in profile.collectives if curve.group.nodes > 1 and curve.group.minipods == 1]
    beyond = [curve for curve in profile.collectives if curve.group.minipods > 1]
    nodes = max((curve.group.nodes // curve.group.minipods for curve in beyond), default=0)
    found = [("node", machine.ranks_per_node, *_rate(inside, memory))]
    if pod:
        found.append(("network", nodes * machine.ranks_per_node, *_rate(pod, memory)))
    if beyond:
        found.append(("core", 0, *_rate(beyond, memory)))
    name, _, rate, latency = found[-1]
    return [*found[:-1], (name, 0, rate, latency)]


def _rate(curves: Sequence[Curve], memory: float) -> tuple[float, float]:
    """Return (highest rate of large messages in bytes per second, lowest latency of small ones in
    seconds) of a rank; for a single rank its memory's rate. Between nodes, ranks of a group on one
    node share the bandwidth."""
    rate = max(
        (curve.bandwidth / (curve.group.per_node if curve.group.nodes > 1 else 1) for curve in curves), default=memory
    )
    return rate, min((curve.latency / math.log2(curve.group.ranks) for curve in curves), default=0.0)


Seconds = NDArray[np.float64]
Shape = tuple[tuple[str, Any], ...]


def module_seconds(cluster: Cluster, modules: Sequence[ModuleTime]) -> Seconds:
    """Return the predicted seconds of each module, in the order of ``modules``: an array."""
    blocks = {layer_of(one) for one in modules if one.site == "block"}
    said = {
        layer: by_module(_costs(cluster, dict(layer), parallel=layer in blocks).compute)
        for layer in dict.fromkeys(map(layer_of, modules))
    }
    return np.array([said[layer_of(one)][one.site, one.phase] for one in modules])


def layer_of(module: ModuleTime) -> Shape:
    """Return a key that is equal for the modules of one layer."""
    return tuple(module.model_dump(exclude={"site", "phase", "seconds"}).items())


def _costs(cluster: Cluster, layer: dict[str, Any], *, parallel: bool) -> SegmentCosts:
    model = ModelSpec(
        family=cast("Family", layer["family"]), num_layers=1, hidden=layer["hidden"], num_heads=layer["heads"],
        num_kv_heads=layer["kv_heads"], ffn_hidden=layer["ffn"], vocab=layer["vocab"], max_sequence=layer["sequence"],
        parallel_block=parallel,
    )  # fmt: skip
    load = Load(layer["batch"], layer["sequence"])
    return cluster_costs(model, Strategy(tp=layer["tp"], overlap="sync"), load, cluster, precision=layer["precision"])
