"""What ``plait profile placement`` shows and draws."""

from __future__ import annotations

from math import log2
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

from plait.cli import terminal

if TYPE_CHECKING:
    from plait.core.cluster.placement_profile import PlacementProfile

KEPT = {"dp": "DP groups in minipods", "pp": "PP groups in minipods", "random": "random"}


def show(found: PlacementProfile) -> None:
    """Tables of at most 80 columns."""
    machine = found.machine
    pods = machine.ranks // machine.ranks_per_node // found.nodes_per_minipod
    terminal.title(f"{machine.name}: {machine.ranks} ranks in {pods} minipods, {machine.backend}, {found.date}")
    rows = [
        (one.kind, str(one.group.ranks), str(one.group.minipods), f"{one.latency * 1e6:.0f}",
         f"{one.points[-1].bytes / 2**20:.3g}", f"{one.points[-1].seconds * 1e3:.3g}", f"{one.bandwidth / 1e6:.4g}")
        for one in sorted(found.collectives, key=lambda one: (one.kind, one.group.ranks, one.group.minipods))
    ]  # fmt: skip
    terminal.table(("collective", "ranks", "minipods", "us at 4 KiB", "MiB", "ms", "MB/s"), rows)
    if found.interference:
        typer.echo()
        rows = [
            (one.kind, str(one.group.minipods), f"{one.bytes / 2**20:.3g}", f"{one.alone * 1e3:.3g}",
             f"{one.together * 1e3:.3g}", f"{one.slowdown:.2f}x")
            for one in found.interference
        ]  # fmt: skip
        terminal.table(("two jobs side by side", "minipods", "MiB", "ms alone", "both", "takes"), rows)
    if found.job:
        typer.echo()
        job = found.job
        rows = [
            (KEPT[one.order], str(one.dp_spread), str(one.pp_spread), f"{median(one.seconds):.3g}",
             f"{gain:+.1%}" if one.order != "random" and (gain := job.gain(one.order)) is not None else "")
            for one in job.steps
        ]  # fmt: skip
        terminal.table((f"steps of {job.name}"[:30], "dp over", "pp over", "s", "gain"), rows)
    typer.echo()


def draw_profile(found: PlacementProfile, file: Path) -> None:
    """Bandwidth by size, a panel for each kind, a line for each size of groups and spread."""
    from plait.api.pictures import draw_curves
    from plait.core.base.pictures import PlotCurve
    from plait.core.cluster.profile import wire_share

    panels: list[tuple[str, list[PlotCurve]]] = []
    for kind in dict.fromkeys(one.kind for one in found.collectives):
        curves = [
            PlotCurve(
                f"{one.group.ranks} ranks in {one.group.minipods} minipod{'s' * (one.group.minipods > 1)}",
                [
                    (log2(p.bytes), p.bytes * wire_share(one.kind, one.group.ranks) / p.seconds / 1e6)
                    for p in one.points
                ],
            )
            for one in found.collectives
            if one.kind == kind
        ]
        panels.append((f"{kind}, MB/s", curves))
    draw_curves(panels, file, title=f"Collectives by spread: {found.machine.name}", across="log2 of bytes")
