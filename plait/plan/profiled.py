"""From a profile to a cluster: the constants of ``core.cluster.efficiency`` fitted to what was measured.

The forms that are fitted are those of ``step.seconds.rates``, called as the planner calls them, so that
whatever they leave out is part of the error that each constant carries. A fit minimises the relative error
of every point, large and small alike, robustly (Huber), and stays near what the cluster said before where the
points do not decide (``plait.plan.calibrate``). Points whose samples scattered count less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import JobError
from plait.core.cluster.efficiency import Links
from plait.core.cluster.hardware import MEMORY_RATE, Cluster
from plait.core.cluster.profile import AttentionCore, Curve, MemoryPass, Point, Product, Profile
from plait.plan.constants import constant_of, with_constants

if TYPE_CHECKING:
    from plait.plan.calibrate import Calibrated, FittedConstant

NOISE = 0.1
"""Relative error of a point that is no outlier yet, beside the spread of its samples."""
LOOSE = 2.0
"""Standard deviation, as a logarithm, of a constant around what the cluster said before: hardly any hold."""
SMALLEST = 1e-9
"""What is fitted on a logarithmic scale does not begin at nothing."""
MODULE_CONSTANTS = ("elementwise", "logit_bytes", "matmul", "attention_forward", "attention_backward")
"""That modules tell of. The last three are known from plain operations, and stay near what these said."""

Columns = Any
"""A numpy column."""
Predict = Callable[[Cluster], Columns]
Measured = Point | Product | AttentionCore | MemoryPass


def with_profile(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with constants fitted to a profile, where it has points for them; each says so, with the
    fit's error.

    Raises JobError for a profile of another kind of device or of nodes of another size.
    """
    _check(cluster, profile)
    for refit in (_matmul, _attention, _memory, _modules, _links, _overlap):
        cluster = refit(cluster, profile)
    return cluster


def here(profile: Profile) -> Cluster:
    """The cluster that a profile was measured on: peaks and rates are the best that it has. Raises JobError
    for a profile without products, as one that only holds other tools' logs."""
    machine = profile.machine
    if not profile.products:
        raise JobError(
            "has no matrix products, so it does not say how fast a device is", key="products",
            fix="Measure them with plait measure machine, or name a cluster that is described",
        )  # fmt: skip
    if not machine.memory:
        raise JobError(
            "is 0: nobody knows how much memory a device has", key="machine.memory",
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


# ---- what is fitted to what ----


def _matmul(cluster: Cluster, profile: Profile) -> Cluster:
    import numpy as np

    from plait.core.step.seconds import rates

    points = [one for one in profile.products if one.precision in cluster.device.peak]

    def predict(tried: Cluster) -> Columns:
        return np.array([rates.matmul(tried, one.precision, one.m, one.k, one.n) for one in points])

    names = ("matmul", "matmul_wave", "matmul_depth", "matmul_launch")
    return _fitted(cluster, profile, names, predict, points)


def _attention(cluster: Cluster, profile: Profile) -> Cluster:
    import numpy as np

    from plait.core.step.seconds import rates

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
    import numpy as np

    from plait.core.step.seconds import rates

    sizes = np.array([one.bytes for one in profile.passes], dtype=np.float64)
    return _fitted(cluster, profile, ("memory",), lambda tried: rates.memory_bound(tried, sizes), profile.passes)


def _modules(cluster: Cluster, profile: Profile) -> Cluster:
    """What a layer takes in the executor that trains: elementwise operations and the loss, and by how much
    products and attention there differ from such alone. A module is worth as much as its share of its
    layer's time, and the whole layer as all of its modules together."""
    import numpy as np

    from plait.plan.module_times import layer_of, module_seconds

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
    found = _found(
        cluster, profile, priors, predict, np.concatenate([measured, totals]),
        weights=np.concatenate([share * count, np.full(len(totals), count)]),
    )  # fmt: skip
    return _with(cluster, profile, found)


def _near(cluster: Cluster, name: str) -> FittedConstant:
    """A constant as it is known so far."""
    from plait.plan.calibrate import FittedConstant

    known = constant_of(cluster, name)
    loose = LOOSE if name in ("elementwise", "logit_bytes") else max(NOISE, known.error)
    return FittedConstant(value=max(known.value, SMALLEST), error=loose)


def _links(cluster: Cluster, profile: Profile) -> Cluster:
    """Links inside nodes first, since what crosses nodes passes them too."""
    usable = [curve for curve in profile.collectives if _as_in_training(curve, cluster)] or profile.collectives
    for side, crosses in (("inside", False), ("across", True)):
        curves = [curve for curve in usable if (curve.group.nodes > 1) == crosses]
        names = tuple(f"{side}.{name}" for name in Links.model_fields)
        points = [point for curve in curves for point in curve.points]
        cluster = _fitted(cluster, profile, names, lambda tried, c=curves: _times(tried, c), points)
    return cluster


def _as_in_training(curve: Curve, cluster: Cluster) -> bool:
    """Whether all ranks of its nodes communicated at once, which is what ``rates.collective`` is about."""
    group = curve.group
    return group.nodes == 1 or group.per_node * group.at_once * group.nodes >= group.nodes * cluster.ranks_per_node


def _times(cluster: Cluster, curves: Sequence[Curve]) -> Columns:
    import numpy as np

    from plait.core.step.seconds import rates

    found = [
        rates.collective(
            cluster, one.kind, np.array([point.bytes for point in one.points]), one.group.ranks, one.group.stride
        )
        for one in curves
    ]
    return np.concatenate(found)


def _overlap(cluster: Cluster, profile: Profile) -> Cluster:
    """The geometric means, of what crosses nodes where anything does: that is most of what is hidden, and a
    node's own links may be its processors' work. What noise makes faster than alone counts as no
    slow-down."""
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
    """The cluster with these constants fitted, of which the first is a share; with that alone where there are
    hardly any points, and as it is where there are none.

    A constant's error is what the fit leaves (root mean square, of logarithms) and how little the points
    decide this constant, together.
    """
    if not points:
        return cluster
    import numpy as np

    from plait.plan.calibrate import FittedConstant

    names = names if len(points) >= len(names) + 2 else names[:1]
    priors = {
        name: FittedConstant(value=max(constant_of(cluster, name).value, SMALLEST), error=LOOSE) for name in names
    }
    measured = np.array([point.seconds for point in points])
    off = float(np.median(predict(cluster) / measured))  # times fall as a share grows
    found = _found(
        cluster, profile, priors, predict, measured,
        weights=[(NOISE / (NOISE + point.spread)) ** 2 for point in points],
        start={names[0]: priors[names[0]].value * off},
    )  # fmt: skip
    return _with(cluster, profile, found)


def _found(
    cluster: Cluster,
    profile: Profile,
    priors: Mapping[str, FittedConstant],
    predict: Predict,
    measured: Columns,
    **more: Any,
) -> Calibrated:
    """The constants with which ``predict`` comes nearest."""
    from plait.plan.calibrate import Scatter, calibrate

    def predicted(values: Mapping[str, float]) -> Columns:
        return predict(_replaced(cluster, {name: (value, 0.0) for name, value in values.items()}, profile))

    return calibrate(predicted, measured, priors, scatter=Scatter(noise=NOISE), **more)


def _with(cluster: Cluster, profile: Profile, found: Calibrated) -> Cluster:
    import numpy as np

    left = float(np.sqrt(np.mean(found.residuals**2)))
    constants = {name: (one.value, math.hypot(left, one.error)) for name, one in found.constants.items()}
    return _replaced(cluster, constants, profile)


# ---- constants of a cluster ----


def _replaced(cluster: Cluster, values: dict[str, tuple[float, float]], profile: Profile) -> Cluster:
    """With other constants: value and error, by name (``inside.share``)."""
    return with_constants(cluster, values, source=profile.source, date=profile.date)


def _tiers(profile: Profile, memory: float) -> list[tuple[str, int, float, float]]:
    """Name, ranks, bytes per second of a rank and seconds of a message, from the innermost tier outward."""
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
    """The best of large messages and of small ones; of one rank alone, its memory's. Ranks of a group on one
    node share what crosses nodes."""
    rate = max(
        (curve.bandwidth / (curve.group.per_node if curve.group.nodes > 1 else 1) for curve in curves), default=memory
    )
    return rate, min((curve.latency / math.log2(curve.group.ranks) for curve in curves), default=0.0)
