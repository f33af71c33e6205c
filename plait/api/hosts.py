"""Hosts tried before a run: loopback, links, clocks, disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from plait.core.base.text import Column, Part, Shown, Table
from plait.launch.self_check_verdict import Limits

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.launch.self_check_verdict import Finding


__all__ = ["HostCheck", "Limits", "check_hosts"]

HEADS = ("loopback", "to all at once", "clock", "disk writes", "disk free")
USUAL = Limits()
SHOWN = 20
"""Links that are shown, the slowest."""


@dataclass(frozen=True)
class HostCheck(Shown):
    """Measurements of hosts, by host and by link, and those that are bad."""

    report: Mapping[str, Any]
    bad: Sequence[Finding]

    def to_dict(self) -> dict[str, Any]:
        """The report in bytes per second and seconds, and what is bad."""
        return {"version": 1, **self.report, "bad": [asdict(one) for one in self.bad]}

    def parts(self) -> Iterator[Part]:
        """Tables of hosts and links, then what is wrong."""
        from plait.launch.self_check_verdict import in_rate

        rates = ("loopback", "to all at once", "disk writes")
        header = ("host", *(Column(head, in_rate if head in rates else "") for head in HEADS))
        yield Table("Hosts", header, [self._host(name, one) for name, one in self.report["hosts"].items()])
        links = sorted(self.report["links"], key=lambda one: one.get("rate", 0.0))
        if links:
            title = f"Links, each way{f': the slowest {SHOWN} of {len(links)}' if len(links) > SHOWN else ''}"
            shown = [(one["from"], one["to"], one["kind"], one.get("rate")) for one in links[:SHOWN]]
            yield Table(title, ("from", "to", "", Column("rate", in_rate)), shown)
        yield from (f"BAD {one.what}: {one.why}" for one in self.bad)
        if not self.bad:
            yield "Nothing is wrong with what was tried."

    def _host(self, name: str, one: Mapping[str, Any]) -> tuple[Any, ...]:
        disk, clock = one.get("disk") or {}, one.get("clock")
        ahead = None if clock is None else f"{clock[0] * 1e3:+.1f} ms (within {clock[1] * 1e3:.1f})"
        free = f"{disk['free'] / 2**30:,.0f} GiB" if "free" in disk else None
        return name, one["loopback"], self.report["all_at_once"].get(name), ahead, disk.get("rate"), free


def check_hosts(
    place: LaunchTarget, folder: Path, *, nodes: int = 1, size: int = 8 << 20, limits: Limits = USUAL
) -> HostCheck | int:
    """Try the hosts of a place, with a rank on each; the exit status of ranks that have failed.

    folder: on whose disk files are written. nodes: hosts, where the place does not say. size: bytes of each
    measurement of a link. limits: what every host and link must do. Raises JobError and LaunchError.
    """
    from plait.api.ranks import Ranks
    from plait.core.base import programs
    from plait.core.base.errors import LaunchError
    from plait.core.base.lab_hosts import name
    from plait.launch.self_check_verdict import findings

    with TemporaryDirectory(prefix="plait-check-") as kept:
        result = Path(kept)
        status = place.run(
            Ranks(
                module=programs.SELF_CHECK, arguments=[kept, str(folder.absolute()), str(size)],
                world=place.world or nodes, logs=result / "logs", timeout=600.0,
            )
        )  # fmt: skip
        if status:
            return status
        try:
            report = json.loads((result / "check.json").read_text())
        except OSError:
            raise LaunchError("the first host ended without a result.") from None
    wanted = [name(host) for host in range(place.lab.hosts)] if place.lab else []
    return HostCheck(report, findings(report, limits, wanted))
