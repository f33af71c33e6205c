"""A cluster's constants by name (``matmul``, ``inside.share``): which there are, and clusters with others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from plait.core.cluster.efficiency import Constant, Efficiency, Links
from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import QUANTISED


def constant_of(cluster: Cluster, name: str) -> Constant:
    """One of them."""
    outer, _, inner = name.partition(".")
    found = getattr(cluster.efficiency, outer)
    return getattr(found, inner) if inner else found


def timed_constants(cluster: Cluster) -> Iterator[str]:
    """Names of those that decide how long a step takes."""
    for outer in Efficiency.model_fields:
        found = getattr(cluster.efficiency, outer)
        if isinstance(found, Constant):
            yield outer
        elif isinstance(found, Links):
            yield from (f"{outer}.{inner}" for inner in Links.model_fields)


def lacked_format(cluster: Cluster, name: str) -> str:
    """The format whose products a constant is of, where the cluster's device has none; else nothing.

    >>> h100 = Cluster.preset("h100")
    >>> lacked_format(h100, "matmul_nvfp4"), lacked_format(h100, "matmul_fp8"), lacked_format(h100, "memory")
    ('nvfp4', '', '')
    """
    precision = name.removeprefix("matmul_")
    return precision if precision in QUANTISED and precision not in cluster.device.peak else ""


def taken_from(cluster: Cluster, other: Cluster, names: Iterable[str]) -> Cluster:
    """The cluster with these constants of another one, as they stand there."""
    efficiency = cluster.efficiency
    for name in names:
        outer, _, inner = name.partition(".")
        constant: Any = constant_of(other, name)
        if inner:
            constant = getattr(efficiency, outer).model_copy(update={inner: constant})
        efficiency = efficiency.model_copy(update={outer: constant})
    return cluster.model_copy(update={"efficiency": efficiency})


def with_constants(cluster: Cluster, values: Mapping[str, tuple[float, float]], *, source: str, date: str) -> Cluster:
    """With other constants: value and error, by name."""
    efficiency = cluster.efficiency
    for name, (value, error) in values.items():
        outer, _, inner = name.partition(".")
        constant: Any = Constant(value=value, source=source, date=date, error=error)
        if inner:
            constant = getattr(efficiency, outer).model_copy(update={inner: constant})
        efficiency = efficiency.model_copy(update={outer: constant})
    return cluster.model_copy(update={"efficiency": efficiency})
