"""``plait place``: from a plan and a topology to the host of every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal

if TYPE_CHECKING:
    from plait.api.placing import Spares


def place(
    job: Annotated[Path, typer.Argument(help="The plan (plan.json), or a job file (TOML) to plan first.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="SECTION.KEY=VALUE, in place of the file's.")] = None,
    topology: Annotated[str, typer.Option(help="The cluster's switches and nodes, in any form that is read.")] = "",
    form: Annotated[str, typer.Option("--format", help="Of the topology; found by its content.")] = "",
    states: Annotated[list[str] | None, typer.Option(help="Further files that say what nodes are doing.")] = None,
    tolerate: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A taint of nodes that keeps the job not away. Repeatable.")
    ] = None,
    level: Annotated[str, typer.Option(help="Switches to count spread by: a level's name or depth.")] = "",
    alpha: Annotated[float | None, typer.Option(help="Weight of the spread of DP groups, 0 to 1.")] = None,
    beta: Annotated[float | None, typer.Option(help="Weight of the spread of PP groups: 1 - alpha.")] = None,
    affinity: Annotated[
        str,
        typer.Option(help="auto: alpha of the nearest job profiled, by you or as published; or a file of such jobs."),
    ] = "auto",
    by: Annotated[
        str, typer.Option(help="What is to be least: spread, weighted by alpha; or predicted seconds.")
    ] = "spread",
    unit: Annotated[str, typer.Option(help="Groups to keep together first: pp, dp or both.")] = "both",
    method: Annotated[str, typer.Option(help="exact, cpsat.")] = "exact",
    spares: Annotated[
        str, typer.Option(help="Nodes to keep for repairs: N, N/minipod, N/row (of each PP group).")
    ] = "0",
    avoid: Annotated[str, typer.Option(help="Nodes and switches to leave out: n3,leaf07,n[10-14].")] = "",
    gpu: Annotated[
        list[str] | None, typer.Option(help="Type of GPU, or STAGE=TYPE where stages differ; may be repeated.")
    ] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(metavar="STAGE:MINIPOD", help="May not come together; may be repeated.")
    ] = None,
    preempt: Annotated[
        float | None, typer.Option(help="Also take nodes of other jobs, at so much of the score each.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="Where neither topology nor cluster says.")] = 0,
    flows: Annotated[
        int, typer.Option(help="Connections of a NIC: predict what hashing them onto uplinks costs, too.")
    ] = 0,
    network: Annotated[
        Path | None, typer.Option(help="What spreading costs, by plait profile placement; else published figures.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds that a solver may take.")] = 10.0,
    repair: Annotated[
        Path | None, typer.Option(metavar="OLD", help="A rank table or placement, some of whose nodes failed.")
    ] = None,
    down: Annotated[str, typer.Option(help="Nodes that failed: n3,n7.")] = "",
    move_price: Annotated[
        float | None, typer.Option(help="Move further nodes where each gains as much of the score.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the rank table goes: rank_table.json beside the plan.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Draw the cluster with the job's groups: FILE.svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose which host runs which ranks, so that groups that talk spread over few minipods.

    Writes rank_table.json, which every launcher obeys, and says how much better any other placement could be.
    docs/place.md has examples.

    Example: plait place plan.json --topology topology.conf --alpha 0.3
    """
    from plait.api.placed import beside
    from plait.api.placing import Placing, write_placement
    from plait.core.base.errors import JobError

    asked = Placing(
        job=job, overrides=overrides or [], topology=topology, form=form, states=states or [], level=level,
        avoid=_names(avoid, "--avoid"), gpus=gpu or [], forbid=forbid or [], preempt=preempt, unit=unit,
        spares=_spares(spares), gpus_per_node=gpus_per_node, limit=limit, method=method,
        flows=flows, by=by, network=network, tolerated=tolerate or [],
    )  # fmt: skip
    _check_numbers(preempt=preempt, flows=flows, limit=limit, gpus_per_node=gpus_per_node, move_price=move_price)
    if out is not None and not out.name:
        raise JobError(f"'{out}' is no file", key="--out", fix="Give the file for the rank table")
    if draw:
        from plait.api.pictures import check_format

        check_format(draw)
    asked = replace(asked, alpha=_alpha(alpha, beta))
    asked.read(affinity)
    terminal.remarked(asked.remarks.notes, asked.remarks.over)
    target = out or (repair if repair else job.with_name("rank_table.json"))
    target = target if not target.name.endswith("placement.json") else target.with_name("rank_table.json")
    if down and not repair:
        raise JobError("names nodes that failed under a placement", key="--down", fix="Give that one with --repair")
    found = asked.repaired(repair, _names(down, "--down"), move_price) if repair else asked.answer(asked.placed())
    write_placement(asked, found, target, draw)
    terminal.answer(found, as_json=as_json, rank_table=str(target))
    if not as_json:
        terminal.text(f"The rank table is in {target}; what repairs need besides is in {beside(target)}.")
    if draw and not as_json:
        terminal.text(f"The cluster with the job is drawn in {draw}.")


def _check_numbers(**numbers: float | None) -> None:
    """Raise JobError for an option below 0, or that is no finite number."""
    from math import isfinite

    from plait.core.base.errors import JobError

    for name, value in numbers.items():
        if value is not None and not (isfinite(value) and value >= 0):
            raise JobError(f"{value} is not allowed", key=f"--{name.replace('_', '-')}", fix="Use 0 or more")


def _alpha(alpha: float | None, beta: float | None) -> float | None:
    """The weight of DP groups, from either or both. Raises JobError for weights that are none."""
    from plait.core.base.errors import JobError

    for name, value in (("--alpha", alpha), ("--beta", beta)):
        if value is not None and not 0 <= value <= 1:
            raise JobError(f"{value} is no weight", key=name, fix="Use a number from 0 to 1")
    if alpha is not None and beta is not None and alpha + beta > 0:
        return alpha / (alpha + beta)
    return alpha if beta is None else 1 - beta


def _spares(text: str) -> Spares:
    """Spares of ``N``, ``N/minipod`` or ``N/row``."""
    from plait.api.placing import Spares
    from plait.core.base.errors import JobError

    number, _, where = text.partition("/")
    names = {"": "total", "minipod": "per_minipod", "row": "per_row"}
    if not number.isdecimal() or where not in names:
        raise JobError(f"'{text}' is no number of spares", key="--spares", fix="Use N, N/minipod or N/row")
    return Spares(**{names[where]: int(number)})


def _names(text: str, option: str) -> list[str]:
    """Names of a host list. Raises JobError naming the option for text that is none."""
    from plait.core.base.errors import JobError
    from plait.core.topology.hostlist import expand

    try:
        return expand(text) if text else []
    except ValueError as error:
        raise JobError(str(error), key=option, fix="Write names as in n3,leaf07,n[10-14]") from None
