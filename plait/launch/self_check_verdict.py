"""What is wrong with hosts, by what ``plait.launch.self_check`` has measured: a pure function."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLOW = 1 / 4
"""What has less than this share of the median of its kind is named ..."""
LEAST = 3
"""... where there are so many of the kind."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """rate: bytes per second that a link must have; 0: only compared. clock: seconds that clocks may be
    apart. disk_rate, disk_free: bytes per second, and bytes."""

    rate: float = 0.0
    clock: float = 1.0
    disk_rate: float = 10e6
    disk_free: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """what: ``missing``, ``loopback``, ``link``, ``all at once``, ``clock`` or ``disk``. hosts: whose. why:
    in words."""

    what: str
    hosts: tuple[str, ...]
    why: str


def findings(report: Mapping[str, Any], limits: Limits, names: Sequence[str] = ()) -> list[Finding]:
    """Everything that is wrong. names: of all hosts that were to come, by node."""
    found: list[Finding] = []
    for node in map(int, report["missing"]):
        host = names[node] if node < len(names) else f"node {node}"
        why = f"{host} did not reach the first host in time: its link is cut, or nothing answers there"
        found.append(Finding(what="missing", hosts=(host,), why=why))
    hosts: Mapping[str, Any] = report["hosts"]
    loopback = {host: one["loopback"] for host, one in hosts.items()}
    found += [
        Finding(what="loopback", hosts=(host,), why=f"the loopback of {host} {why}")
        for host, why in _slow(loopback).items()
    ]
    found += _links(report["links"], limits)
    found += [
        Finding(what="all at once", hosts=(host,), why=f"while all hosts send to all, {host} {why}")
        for host, why in _slow(report["all_at_once"]).items()
    ]
    for host, one in hosts.items():
        found += _clock(host, one.get("clock"), limits.clock)
        found += _disk(host, one.get("disk"), limits)
    return found


def _links(links: Sequence[Mapping[str, Any]], limits: Limits) -> list[Finding]:
    """Links that do not work or pass too little; hosts whose best link is slower than other hosts', and links
    that are slower than what both ends reach with others."""
    best: dict[str, float] = {}
    for one in links:
        for host in (one["from"], one["to"]):
            best[host] = max(best.get(host, 0.0), one.get("rate", 0.0))
    found = [
        Finding(what="link", hosts=(host,), why=f"the link of {host}, to its best neighbour, {why}")
        for host, why in (_slow(best) if any(best.values()) else {}).items()
    ]
    for one in links:
        ends, rate = (one["from"], one["to"]), one.get("rate")
        usual = min(best[host] for host in ends)
        why = ""
        if rate is None:
            why = f"does not work: {one['error']}"
        elif rate < limits.rate:
            why = f"passes {in_rate(rate)}, less than the {in_rate(limits.rate)} that were asked for"
        elif rate < usual * SLOW:
            why = f"passes {in_rate(rate)}, and with others both pass {in_rate(usual)}"
        if why:
            found.append(Finding(what="link", hosts=ends, why=f"the link from {ends[0]} to {ends[1]} {why}"))
    return found


def _slow(rates: Mapping[Any, float | None]) -> dict[Any, str]:
    """Of rates that should be alike, those that are not."""
    known = {key: rate for key, rate in rates.items() if rate is not None}
    usual = statistics.median(known.values()) if len(known) >= LEAST else 0.0
    found: dict[Any, str] = {key: "gave no answer" for key, rate in rates.items() if rate is None}
    for key, rate in known.items():
        if rate < usual * SLOW:
            found[key] = f"passes {in_rate(rate)}, and the median of all is {in_rate(usual)}"
    return found


def _clock(host: str, clock: Sequence[float] | None, most: float) -> list[Finding]:
    if clock is None:
        return [Finding(what="clock", hosts=(host,), why=f"the clock of {host} could not be read")]
    ahead, error = clock
    if abs(ahead) - error <= most:
        return []
    way = "ahead of" if ahead > 0 else "behind"
    why = f"the clock of {host} is {abs(ahead):.2f} s {way} the first host's (give or take {error * 1e3:.1f} ms)"
    return [Finding(what="clock", hosts=(host,), why=f"{why}: logs and timelines will not match")]


def _disk(host: str, disk: Mapping[str, Any] | None, limits: Limits) -> list[Finding]:
    if disk is None:
        return [Finding(what="disk", hosts=(host,), why=f"{host} said nothing of its disk")]
    why: list[str] = []
    if "error" in disk:
        why.append(f"{host} cannot write: {disk['error']}")
    elif disk["free"] < limits.disk_free:
        why.append(f"{host} sees {disk['free'] / 2**30:.2f} GiB free on the disk, less than "
                   f"{limits.disk_free / 2**30:g} GiB")  # fmt: skip
    elif disk["rate"] < limits.disk_rate:
        why.append(f"{host} writes {in_rate(disk['rate'])} to the disk, less than {in_rate(limits.disk_rate)}")
    return [Finding(what="disk", hosts=(host,), why=one) for one in why]


def in_rate(rate: float) -> str:
    """Bytes per second in words.

    >>> in_rate(1.25e8)
    '125 MB/s'
    """
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.3g} MB/s"
