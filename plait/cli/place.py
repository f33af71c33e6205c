"""``plait place``: from a plan and a topology to the host of every rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plait.api.placing import Placing
    from plait.core.topology.placement import Placement
    from plait.place.repair import Repair


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
    method: Annotated[str, typer.Option(help="exact, mip, cpsat; or a baseline that --compare lists.")] = "exact",
    literal: Annotated[bool, typer.Option("--literal", help="Count a group in one minipod as 0, not 1.")] = False,
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
    compare: Annotated[bool, typer.Option("--compare", help="All methods and baselines beside each other.")] = False,
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
    from plait.api.placing import Placing, alpha_of, names_of, spares_of
    from plait.cli import place_tables, terminal
    from plait.core.base.errors import JobError

    asked = Placing(
        job=job, overrides=overrides or [], topology=topology, form=form, states=states or [], level=level,
        avoid=names_of(avoid, "--avoid"), gpus=gpu or [], forbid=forbid or [], preempt=preempt, unit=unit,
        literal=literal, spares=spares_of(spares), gpus_per_node=gpus_per_node, limit=limit, method=method,
        flows=flows, by=by, network=network, tolerated=tolerate or [],
    )  # fmt: skip
    _check_numbers(preempt=preempt, flows=flows, limit=limit, gpus_per_node=gpus_per_node, move_price=move_price)
    if out is not None and not out.name:
        raise JobError(f"'{out}' is no file", key="--out", fix="Give the file for the rank table")
    if draw:
        from plait.api.pictures import check_format

        check_format(draw)
    asked = replace(asked, alpha=alpha_of(alpha, beta))
    asked.read(affinity)
    terminal.remarked(asked.remarks.notes, asked.remarks.over)
    target = out or (repair if repair else job.with_name("rank_table.json"))
    if repair:
        repaired = asked.repaired(repair, names_of(down, "--down"), move_price)
        _finish(asked, repaired.placement, target, draw, as_json, repaired)
        return
    if down:
        _refuse_down()
    if compare:
        placements = asked.all_placements()
        place_tables.show_comparison(placements, asked.remarks.over if as_json else None)
        return
    _finish(asked, asked.placed(), target, draw, as_json, None)


def _check_numbers(**numbers: float | None) -> None:
    """Raise JobError for an option below 0, or that is no finite number."""
    from math import isfinite

    from plait.core.base.errors import JobError

    for name, value in numbers.items():
        if value is not None and not (isfinite(value) and value >= 0):
            raise JobError(f"{value} is not allowed", key=f"--{name.replace('_', '-')}", fix="Use 0 or more")


def _refuse_down() -> None:
    from plait.core.base.errors import PlacementError

    raise PlacementError("--down names nodes that failed under a placement: give that one with --repair.")


def _finish(
    asked: Placing, placement: Placement, target: Path, draw: Path | None, as_json: bool, repaired: Repair | None
) -> None:
    """Draw, check once more, write, tell. Ranks are bound by the table: it comes last, when nothing else can
    fail."""
    from plait.api.placing import beside
    from plait.cli import place_tables, terminal
    from plait.core.base.files import explained

    table = placement.rank_table  # refuses a host that would be two nodes
    asked.check_again(placement)
    if draw:
        with explained(f"{draw} cannot be written", fix="Choose another with --draw"):
            asked.draw(placement, draw)
        asked.check_again(placement)
    target = target if not target.name.endswith("placement.json") else target.with_name("rank_table.json")
    _write(lambda: placement.write(beside(target)), beside(target))
    _write(lambda: table.write(target), target)
    if as_json:
        moves = [{"node_rank": m.node_rank, "old": m.old, "new": m.new} for m in repaired.moves] if repaired else None
        values = placement.to_dict() | {
            "rank_table": str(target), "affinity": asked.why, "moves": moves,
            "notes": asked.remarks.notes, "passed_over": asked.remarks.over.rows(),
        }  # fmt: skip
        terminal.say(json.dumps(values))
        return
    if repaired:
        place_tables.show_moves(repaired, asked.spots)
    place_tables.show(placement, asked.problem, asked.why)
    terminal.text(f"The rank table is in {target}; what repairs need besides is in {beside(target)}.")
    if draw:
        terminal.text(f"The cluster with the job is drawn in {draw}.")


def _write(writes: object, target: Path) -> None:
    from plait.core.base.errors import PlacementError

    try:
        writes()  # type: ignore[operator]
    except OSError as error:
        raise PlacementError(
            f"{target} cannot be written: {error.strerror or error}. Choose another with --out."
        ) from None
