"""``plait reserve``: nodes of a real cluster held for a planned job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def reserve(
    rank_table: Annotated[
        Path, typer.Argument(metavar="RANK_TABLE", help="The rank table (rank_table.json) whose hosts are held.")
    ],
    name: Annotated[str, typer.Option(help="Name of the reservation.")],
    duration: Annotated[str, typer.Option(metavar="TIME", help="How long, as Slurm writes it: minutes, D-HH:MM:SS.")],
    start: Annotated[
        str, typer.Option(metavar="TIME", help="When, as Slurm writes it: now+4hours, 2030-01-31T22:00.")
    ] = "now",
    users: Annotated[list[str] | None, typer.Option("--user", help="Who may use it.", show_default="you")] = None,
) -> None:
    """Hold the hosts of a rank table for a planned job: a Slurm reservation whose nodes are never exchanged.

    Jobs that run there now may go on; no job that would last into the reservation is started there. Needs an
    operator of Slurm.

    Then: plait train ... --on slurm --rank-table FILE slurm.reservation=NAME
    """
    from plait.api.labs import reserve_hosts
    from plait.core.base.text import counted

    table = reserve_hosts(rank_table, name, duration, start=start, users=users or [])
    are = "is" if len(table.hosts) == 1 else "are"
    typer.echo(f"{name}: {counted(len(table.hosts), 'node')} {are} reserved")
