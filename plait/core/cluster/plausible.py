"""Plausible values: a check of a cluster's file against the shipped clusters, to find slips of
units.

A value two orders of magnitude beyond every shipped value is refused, with readings that would be
plausible. Half an order of magnitude gives a remark. So does a device or a link that outdoes the
shipped cluster with the same device, or a link that has less than a hundredth of it. A rank on CPUs
may be a core or a whole node: the lab's cores are the least, any device is the most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from math import floor, inf, log10, sqrt
from typing import NamedTuple

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.efficiency import SHARES, Constant
from plait.core.cluster.hardware import Cluster

SLIP, UNUSUAL = 100.0, sqrt(10)
"""Factors beyond the range of shipped values, above which a value is refused and above which it
gives a remark."""
ABOVE, BELOW = 1.5, 1 / 3
"""Largest and smallest ratio to the shipped value of the same device that gives no remark."""
UNITS: Mapping[str, str] = {
    "device.memory": "B", "device.memory_rate": "B/s", "device.host_rate": "B/s", "device.host_memory_rate": "B/s",
    "device.power": "W", "device.tf32": "FLOP/s", "overhead.context": "B", "overhead.communicator": "B",
    **{f"efficiency.{name}": "" for name in (*SHARES, "inside.share", "across.share")},
    **{f"efficiency.{name}": "s" for name in
       ("matmul_launch", "attention_launch", "host_layer", "host_collective", "step")},
}  # fmt: skip
"""Unit of each constant of a cluster's file, by its key."""
USUAL_REASONS: Mapping[tuple[str, int], str] = {
    ("FLOP/s", 2): ", as with sparsity", ("B/s", 2): ", as of both directions together", ("B/s", 8): ", as in bits",
}  # fmt: skip
"""Reason why a value is a multiple of the shipped one, as the end of a message, by (unit,
factor)."""
_PREFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
_MODEL = re.compile(r"[A-Z]{1,3}\d{2,4}")
"""Model of a device, such as H100 or GB200; found alike in ``NVIDIA H100 80GB HBM3`` and
``H100-SXM5-80GB``."""


class _Entry(NamedTuple):
    """A constant of a cluster's file. peers: names of the shipped ranges that it is compared
    with."""

    key: str
    peers: tuple[str, ...]
    unit: str
    constant: Constant

    @property
    def value(self) -> float:
        return self.constant.value

    def shipped(self, kind: str) -> tuple[float, float]:
        """Return (least, largest) value of this constant in the shipped clusters, for a kind of
        device; (0, infinity) if none has it."""
        peers = [(cluster.device.kind, one.value) for cluster, one in _shipped() if set(one.peers) & set(self.peers)]
        alike = [value for own, value in peers if own == kind or not self.key.startswith("device.")]
        most = max((value for _, value in peers) if kind == "cpu" else alike, default=inf)
        return min(alike, default=0.0), most

    def within(self, kind: str, factor: float) -> bool:
        """Return True if the value exceeds the range of the shipped clusters at most by ``factor``
        on either side. Fitted constants, which are shares and seconds of small work, may be as
        small as they are."""
        least, most = self.shipped(kind)
        return self.value <= most * factor and (self.value >= least / factor or self.key.startswith("efficiency."))

    def readings(self, kind: str) -> str:
        """Return the end of a message: values in other units that would lie in the shipped range,
        each with the number to write in the file, and then the range."""
        least, most = self.shipped(kind)
        units = [(self.unit, 1)] if self.unit else []
        units += [(f"bit{self.unit[1:]}", 8)] if self.unit.startswith("B") else []
        found = list[str]()
        for unit, scale in units:
            values = (self.value / scale * 10.0**order for order in range(-15, 16, 3) if order or scale > 1)
            found += [
                f"; {_human(one * scale, unit)} would be {_scaled(one)}" for one in values if least <= one <= most
            ]
        return f"{''.join(found)}. Shipped clusters have {_scaled(least) if least else 0} to {_scaled(most)}"


def check_units(cluster: Cluster) -> None:
    """Raise JobError for a value of a user's cluster that lies two orders of magnitude beyond every
    shipped one."""
    kind = cluster.device.kind
    for entry in _entries(cluster):
        if entry.within(kind, SLIP):
            continue
        fix = "Correct it; or, where it is meant, add outlier = true to it"
        if entry.shipped("cpu")[0] and entry.within("cpu", SLIP):
            fix = f'{fix}; or device.kind = "cpu" where ranks run on processors'
        problem = f"{_human(entry.value, entry.unit)} as written{entry.readings(kind)}"
        raise JobError(problem, key=f"{entry.key}.value", fix=fix)


def unit_remarks(cluster: Cluster) -> list[str]:
    """Return sentences on values of a user's cluster that are unusual for its kind of device or for
    its device."""
    return [one for entry in _entries(cluster) if (one := _beyond(entry, cluster) or _unlike(entry, cluster))]


def device_models(name: str) -> set[str]:
    """Return the models of devices in the name of a device.

    >>> device_models("NVIDIA H100 80GB HBM3") & device_models("H100-SXM5-80GB")
    {'H100'}
    """
    return set(_MODEL.findall(name.upper()))


def _beyond(entry: _Entry, cluster: Cluster) -> str:
    """Return a sentence on a value that lies half an order of magnitude beyond every shipped one;
    else an empty text."""
    kind = cluster.device.kind
    if entry.within(kind, UNUSUAL):
        return ""
    return f"{entry.key}: {_human(entry.value, entry.unit)} is unusual{entry.readings(kind)}"


def _unlike(entry: _Entry, cluster: Cluster) -> str:
    """Return a sentence on a value that differs from the shipped cluster with the same device; else
    an empty text."""
    models, of_device = device_models(cluster.device.name), entry.key.startswith("device.")
    peers = [
        (one.value, other.name, one.constant.source) for other, one in _shipped()
        if models & device_models(other.device.name) and set(one.peers) & set(entry.peers)
    ]  # fmt: skip
    if not peers or not (of_device or entry.key.endswith(".rate")):
        return ""
    value, name, source = max(peers)
    ratio = entry.value / value
    if ratio <= ABOVE and ratio >= (BELOW if of_device else 1 / SLIP):
        return ""
    why = next(
        (why for (unit, times), why in USUAL_REASONS.items() if unit == entry.unit and abs(ratio / times - 1) < 0.1), ""
    )
    return f"{entry.key}: {_human(entry.value, entry.unit)} is {ratio:.3g} times that of {name} ({source}){why}"


@cache
def _shipped() -> list[tuple[Cluster, _Entry]]:
    """Return (cluster, entry) for every constant of every shipped cluster."""
    names = sorted(file.stem for file in (specs_folder() / "clusters").glob("*.toml"))
    return [(cluster, entry) for cluster in map(Cluster.preset, names) for entry in _entries(cluster)]


def _entries(cluster: Cluster) -> Iterator[_Entry]:
    """Yield the constants of a cluster's file that have a unit, without zeros and those marked as
    outliers on purpose."""
    known = [_Entry(key, (key,), unit, one) for key, unit in UNITS.items() if (one := _constant(cluster, key))]
    for precision, peak in cluster.device.peak.items():
        key = f"device.peak.{precision}"
        known.append(_Entry(key, (key,), "FLOP/s", peak))
    for tier in cluster.tiers:
        inner = tier is cluster.tiers[0] and cluster.ranks_per_node > 1
        sides = ("inside",) if inner else ("across",)
        if inner and len(cluster.tiers) == 1:  # it may be a node's links or a network
            sides = ("inside", "across")
        known.append(_Entry(f"tiers.{tier.name}.rate", sides, "B/s", tier.rate))
        known.append(_Entry(f"tiers.{tier.name}.latency", ("latency",), "s", tier.latency))
    return (entry for entry in known if entry.value and not entry.constant.outlier)


def _constant(cluster: Cluster, key: str) -> Constant | None:
    found: object = cluster
    for name in key.split("."):
        found = getattr(found, name)
    return found if isinstance(found, Constant) else None


def _order(value: float) -> int:
    """Return the exponent of ten of ``value``, rounded down to a multiple of 3."""
    return 3 * floor(log10(value) / 3)


def _scaled(value: float) -> str:
    """Return a number as a cluster's file writes it.

    >>> _scaled(5e10), _scaled(2e-6), _scaled(0.62)
    ('50e9', '2e-6', '0.62')
    """
    order = _order(value)
    return f"{value:.4g}" if -3 <= order <= 3 else f"{value / 10.0**order:.4g}e{order}"


def _human(value: float, unit: str) -> str:
    """Return a number with its unit.

    >>> _human(4e11, "bit/s"), _human(400, "B/s"), _human(62.0, "")
    ('400 Gbit/s', '400 B/s', '62')
    """
    order = max(-9, min(15, _order(value)))
    return f"{value / 10.0**order:.4g} {_PREFIXES[order]}{unit}" if unit else _scaled(value)
