"""Health checks: of this machine (``plait doctor``), and of hosts before a run (``plait check``):
loopback, links, clocks, disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from plait.core.base.text import Column, Part, Shown, Table
from plait.launch.health.links import Limits

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.launch.health.links import Finding
    from plait.launch.health.probes import DoctorFinding


__all__ = ["Examination", "HostCheck", "Limits", "check_hosts", "examine_machine"]

HOST_COLUMNS = ("loopback", "to all at once", "clock", "disk writes", "disk free")
DEFAULT_LIMITS = Limits()
SHOWN = 20
"""The largest number of links shown, the slowest first."""


@dataclass(frozen=True)
class Examination(Shown):
    """The findings of ``plait doctor`` on this machine, in the order of the probes."""

    findings: Sequence[DoctorFinding]

    @property
    def missing(self) -> list[DoctorFinding]:
        """Findings on parts that cannot be used here."""
        return [one for one in self.findings if one.state == "missing"]

    def to_dict(self) -> dict[str, Any]:
        """Return all findings with their values, for a bug report."""
        return {"findings": [asdict(one) for one in self.findings],
                "missing": [one.what for one in self.missing]}  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """Yield the table of findings, then the fixes, which are too long for a column."""
        yield Table("This machine", ("", "what", "found"), [(one.state, one.what, one.found) for one in self.findings])
        yield from (f"{one.state} {one.what}: {one.fix}." for one in self.findings if one.fix)
        looked = sum(one.state == "look" for one in self.findings)
        if self.missing:
            yield f"{len(self.missing)} missing: {', '.join(one.what for one in self.missing)}."
        elif looked:
            yield "Nothing is missing. What is marked look works, or only some jobs need it."
        else:
            yield "Nothing is missing. plait check tries links and disks."


def examine_machine(folder: Path) -> Examination:
    """Run all probes. folder: where runs are to be written. A probe that does not answer costs its
    time limit, no more."""
    from plait.launch.health.doctor import examine_all
    from plait.plan.search.fits import room

    there = room("cpu", 1)
    return Examination(examine_all(folder, there.shared if there else None))


@dataclass(frozen=True)
class HostCheck(Shown):
    """Measurements of hosts and links (``report``, by host; rates in bytes per second), and the
    problems found."""

    report: Mapping[str, Any]
    problems: Sequence[Finding]

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements in bytes per second and seconds, and the problems."""
        return {**self.report, "bad": [asdict(one) for one in self.problems]}

    def parts(self) -> Iterator[Part]:
        """Yield tables of hosts and links, then the problems."""
        from plait.launch.health.links import in_rate

        rates = ("loopback", "to all at once", "disk writes")
        header = ("host", *(Column(head, in_rate if head in rates else "") for head in HOST_COLUMNS))
        yield Table("Hosts", header, [self._host(name, one) for name, one in self.report["hosts"].items()])
        links = sorted(self.report["links"], key=lambda one: one.get("rate", 0.0))
        if links:
            title = f"Links, each way{f': the slowest {SHOWN} of {len(links)}' if len(links) > SHOWN else ''}"
            shown = [(one["from"], one["to"], one["kind"], one.get("rate")) for one in links[:SHOWN]]
            yield Table(title, ("from", "to", "", Column("rate", in_rate)), shown)
        yield from (f"BAD {one.what}: {one.why}" for one in self.problems)
        if not self.problems:
            yield "Nothing is wrong with what was tried."

    def _host(self, name: str, measurement: Mapping[str, Any]) -> tuple[Any, ...]:
        disk: dict[str, Any] = measurement.get("disk") or {}
        clock = measurement.get("clock")
        ahead = None if clock is None else f"{clock[0] * 1e3:+.1f} ms (within {clock[1] * 1e3:.1f})"
        free = f"{disk['free'] / 2**30:,.0f} GiB" if "free" in disk else None
        return name, measurement["loopback"], self.report["all_at_once"].get(name), ahead, disk.get("rate"), free


def check_hosts(
    place: LaunchTarget, folder: Path, *, nodes: int = 1, size: int = 8 << 20, limits: Limits = DEFAULT_LIMITS
) -> HostCheck | int:
    """Measure the hosts of a launch target, with a rank on each; return the result, or the exit
    status if ranks fail.

    folder: files are written to its disk. nodes: the number of hosts, if the target does not fix
    it. size: bytes that each measurement of a link sends. limits: what every host and link must
    reach. Raises JobError and LaunchError."""
    from plait.api.ranks import RankSet
    from plait.core.base import programs
    from plait.core.base.errors import LaunchError
    from plait.core.base.lab_hosts import name
    from plait.launch.health.links import findings

    with TemporaryDirectory(prefix="plait-check-") as kept:
        result = Path(kept)
        status = place.run(
            RankSet(
                module=programs.SELF_CHECK, arguments=[kept, str(folder.absolute()), str(size)],
                world=place.world_size or nodes, logs=result / "logs", timeout=600.0,
            )
        )  # fmt: skip
        if status:
            return status
        try:
            report = json.loads((result / "check.json").read_text())
        except OSError:
            raise LaunchError("the first host ended without a result; its output above says why.") from None
    wanted = [name(host) for host in range(place.lab.hosts)] if place.lab else []
    return HostCheck(report, findings(report, limits, wanted))
