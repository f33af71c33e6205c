"""``plait topology``: what a cluster's network looks like and what its nodes are doing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from plait.core.topology.switches import Topology


class _ShowsFiles(TyperGroup):
    """What is no command is a file to show: ``plait topology FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As ``show FILE``."""
        if args and not {"--help", *self.commands} & {args[0]}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ShowsFiles,
    no_args_is_help=True,
    help="Topologies: switches, nodes and what these are doing. 'plait topology FILE' shows one.",
)
Draw = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Also draw to this file (.svg, .png, .pdf); may be repeated.")
]
LevelOption = Annotated[
    str, typer.Option(metavar="LEVEL", help="Down to here: its name, or how far below the top.", show_default="by size")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON, with minipods and free nodes counted.")]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write it: .toml, .json, .conf (Slurm), .yaml (Slurm), or by --as.")
]
As = Annotated[
    str, typer.Option("--as", metavar="FORM", help="Print it as toml, json, topology.conf or topology.yaml instead.")
]


Tolerate = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="Kubernetes: a taint that keeps no job of yours away. Repeatable."),
]


@app.command()
def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A file of any format; - for standard input; slurm: or kubernetes: to ask one."
        ),
    ],
    form: Annotated[
        str,
        typer.Option("--format", metavar="NAME", help="Of the file.", show_default="found by its content"),
    ] = "",
    name: Annotated[str, typer.Option(metavar="NAME", help="Which of several topologies of a file.")] = "",
    levels: Annotated[
        str, typer.Option(metavar="LABEL,...", help="Kubernetes: labels that name switches, the outermost first.")
    ] = "",
    states: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="What nodes are doing: sinfo, squeue, scontrol show nodes, ... Repeatable."),
    ] = None,
    tolerate: Tolerate = None,
    groups: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON of node to group: colours of --draw, and their spread.")
    ] = None,
    level: LevelOption = "",
    draw: Draw = None,
    out: Out = None,
    convert: As = "",
    as_json: AsJson = False,
) -> None:
    """Show a topology, convert it, or draw it.

    Example: plait topology topology.conf --states nodes.txt --draw cluster.svg
    """
    from plait.api.topologies import read_topology
    from plait.cli import terminal

    labels = tuple(word.strip() for word in levels.split(",") if word.strip())
    topology, remarks = read_topology(
        file, form=form, name=name, levels=labels, states=states or (), tolerated=tolerate or ()
    )
    placed = _groups(groups) if groups else {}
    topology.depth_of(level or None)
    _draw(topology, draw or [], level, placed)
    said = {"notes": remarks.notes, "passed_over": remarks.over.rows()}
    _give(topology, out, convert, said if as_json else None, level, placed)
    terminal.remarked(remarks.notes, remarks.over)


@app.command()
def generate(
    minipods: Annotated[int, typer.Option(min=1, help="Switches below the top.")],
    nodes: Annotated[int, typer.Option(min=1, help="Of all minipods together.")],
    leaf_nodes: Annotated[int, typer.Option(min=1, help="Nodes of a full leaf.")] = 16,
    uneven: Annotated[float, typer.Option(help="How far sizes of minipods are from the mean, as a part of it.")] = 0.0,
    busy: Annotated[float, typer.Option(help="Part of the nodes that jobs hold; minipods differ by Beta.")] = 0.0,
    down: Annotated[float, typer.Option(help="Part of the nodes that are down.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed makes the same cluster.")] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="Of a node.")] = 8,
    nics: Annotated[int, typer.Option(min=0, help="Of a node, each on a rail of its own.")] = 8,
    uplinks: Annotated[int, typer.Option(min=0, help="Of a leaf, on each rail. 0: not told.")] = 0,
    level: LevelOption = "",
    draw: Draw = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to this .toml, .json, .conf or .yaml.")
    ] = None,
    convert: As = "",
    as_json: AsJson = False,
) -> None:
    """Make up a cluster, fragmented as real ones are.

    Example: plait topology generate --minipods 11 --nodes 1019 --busy 0.4 --seed 3 --out cluster.toml
    """
    from plait.core.topology.switches import Hardware
    from plait.place.generate import generate as make

    topology = make(
        minipods=minipods, nodes=nodes, leaf_nodes=leaf_nodes, uneven=uneven, busy=busy, down=down, seed=seed,
        hardware=Hardware(gpus=gpus, nics=nics, rails=nics), uplinks=uplinks or None,
    )  # fmt: skip
    topology.depth_of(level or None)
    _draw(topology, draw or [], level, {})
    _give(topology, out, convert, {} if as_json else None, level, {})


ENDINGS = {".toml": "toml", ".json": "json", ".conf": "topology.conf", ".yaml": "topology.yaml"}
"""Forms by what the name of a file to write ends in."""


def _draw(topology: Topology, files: list[Path], level: str, groups: dict[str, str]) -> None:
    from plait.core.base.errors import JobError

    for file in files:
        from plait.api.topology_picture import draw

        try:
            draw(topology, file, groups=groups, level=level or None, title=topology.name)
        except OSError as error:
            raise JobError(f"cannot be written: {error.strerror or error}", file=str(file)) from None


def _give(
    topology: Topology,
    out: Path | None,
    convert: str,
    said: dict[str, object] | None,
    level: str,
    groups: dict[str, str],
) -> None:
    """Write, print or show it; as JSON with what is said of its reading, unless that is None."""
    from plait.core.base.errors import JobError
    from plait.core.base.files import replacing
    from plait.place.writers import written

    if out:
        form = convert or ENDINGS.get(out.suffix.lower(), "")
        if not form:
            raise JobError(
                f"{out.suffix or 'no ending'} names no form", key="--out", fix="Add --as toml, or end in .toml"
            )
        text = written(topology, form)
        try:
            with replacing(out) as partial:
                partial.write_text(text)
        except OSError as error:
            raise JobError(f"cannot be written: {error.strerror or error}", file=str(out)) from None
    if said is not None:
        typer.echo(json.dumps(_report(topology, level, groups) | said))
    elif convert and not out:
        typer.echo(written(topology, convert), nl=False)
    else:
        _print(topology, level, groups)


def _report(topology: Topology, level: str, groups: dict[str, str]) -> dict[str, object]:
    from plait.core.topology.form import to_dict
    from plait.place.outline import spreads

    free = topology.free(level or None)
    pods = {
        name: {"nodes": len(nodes), "free": sum(map(len, free[name].values())),
               "leaves": {leaf: len(names) for leaf, names in free[name].items()}}
        for name, nodes in topology.minipods(level or None).items()
    }  # fmt: skip
    return {
        "topology": to_dict(topology),
        "key": topology.key,
        "fabric_key": topology.fabric_key,
        "counts": {status: topology.count(status) for status in ("free", "busy", "down")},
        "minipods": pods,
        **({"spread": spreads(topology, groups, level or None)} if groups else {}),
    }


def _print(topology: Topology, level: str, groups: dict[str, str]) -> None:
    from plait.cli import terminal
    from plait.place.outline import HEADER, down_nodes, outline, spreads

    depths, last = Counter[int](), len(topology.levels) - 1
    inner = {switch.parent for switch in topology.switches}
    for place, switch in enumerate(topology.switches):  # a leaf is one wherever it hangs
        depths[switch.depth if place in inner else last] += 1
    levels = ", ".join(f"{name} {depths[depth]}" for depth, name in enumerate(topology.levels))
    terminal.title(f"{topology.name}: {levels}" if topology.name else levels)
    rows = outline(topology, level or None)
    terminal.table(HEADER, [row.cells for row in rows])
    if any(low != high for row in rows for low, high in (row.free, row.busy, row.down)):
        terminal.text(f"Ranges are the least and the most of one; --level {topology.levels[-1]} shows each.")
    if down := down_nodes(topology):
        terminal.text(f"down: {down}")
    if groups:
        spread = spreads(topology, groups, level or None)
        worst = max(spread, key=lambda group: spread[group])
        terminal.text(f"{len(spread)} groups; the widest, {worst}, touches {spread[worst]} minipods")


def _groups(file: Path) -> dict[str, str]:
    from plait.core.base.errors import JobError
    from plait.place.readers.source import Source

    try:
        told = Source.read(str(file)).json
    except JobError as error:
        raise error if error.file else error.in_file(str(file)) from None
    if not isinstance(told, dict) or not told or not all(isinstance(group, (str, int)) for group in told.values()):
        raise JobError("not an object of node to group", file=str(file), fix='Write {"n1": "group 0", ...}')
    return {node: str(group) for node, group in told.items()}
