"""``plait doctor``: what this machine has and lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs go: whether it can be written, and its disk.")] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
) -> None:
    """Look what this machine has, what is missing, and what to do: versions, devices, limits, clusters.

    fine: it works. look: it works, and is slow or risky, or only some need it. missing: it does not work; the
    exit status is 1 then. plait check measures links and disks of several hosts.
    """
    from plait.api.doctor import examine_machine
    from plait.cli import terminal

    terminal.aside("looking; importing PyTorch takes longest ...")
    found = examine_machine(folder)
    terminal.answer(found, as_json=as_json)
    raise typer.Exit(1 if found.missing else 0)
