"""Hosts tried before a run: loopback, links, clocks, disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.launch.self_check_verdict import Finding


@dataclass(frozen=True)
class HostCheck:
    """What hosts have measured, by host and by link, and what of it is bad."""

    report: Mapping[str, Any]
    bad: Sequence[Finding]


def check_hosts(
    place: LaunchTarget, folder: Path, *, nodes: int = 1, size: int = 8 << 20, least: str | None = None,
    clock: float = 1.0, disk: float = 10e6,
) -> HostCheck | int:  # fmt: skip
    """Try the hosts of a place, with a rank on each; the exit status of ranks that have failed.

    folder: on whose disk files are written. nodes: hosts, where the place does not say. size: bytes of each
    measurement of a link. least: the rate that every link must pass, such as ``900mbit``. clock: seconds that
    clocks may be apart. disk: bytes per second. Raises JobError and LaunchError.
    """
    from plait.api.ranks import Ranks
    from plait.core.base import programs
    from plait.core.base.errors import LaunchError
    from plait.core.base.lab_hosts import name
    from plait.core.base.numbers import to_bits
    from plait.launch.self_check_verdict import Limits, findings

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
    limits = Limits(rate=to_bits(least) / 8 if least else 0.0, clock=clock, disk_rate=disk)
    wanted = [name(host) for host in range(place.lab.hosts)] if place.lab else []
    return HostCheck(report, findings(report, limits, wanted))
