"""``plait topology``: what a cluster's network looks like and what its nodes are doing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from plait.cli import terminal

if TYPE_CHECKING:
    from plait.api.topologies import TopologyAnswer


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
    from plait.api.topologies import TopologyAnswer, read_groups, read_topology

    labels = tuple(word.strip() for word in levels.split(",") if word.strip())
    topology, remarks = read_topology(
        file, form=form, name=name, levels=labels, states=states or (), tolerated=tolerate or ()
    )
    placed = read_groups(groups) if groups else {}
    _give(TopologyAnswer(topology, level, placed, remarks), draw or [], out, convert, as_json)
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
    from plait.api.topologies import TopologyAnswer, generate_topology
    from plait.core.topology.switches import Hardware

    topology = generate_topology(
        minipods=minipods, nodes=nodes, leaf_nodes=leaf_nodes, uneven=uneven, busy=busy, down=down, seed=seed,
        hardware=Hardware(gpus=gpus, nics=nics, rails=nics), uplinks=uplinks or None,
    )  # fmt: skip
    _give(TopologyAnswer(topology, level), draw or [], out, convert, as_json)


def _give(found: TopologyAnswer, draw: list[Path], out: Path | None, convert: str, as_json: bool) -> None:
    """Draw, write, print or show a topology."""
    for file in draw:
        with _written(file):
            found.draw(file)
    if out:
        with _written(out):
            found.write(out, convert)
    if convert and not out and not as_json:
        typer.echo(found.written(convert), nl=False)
    else:
        terminal.answer(found, as_json=as_json)


@contextmanager
def _written(file: Path) -> Iterator[None]:
    from plait.core.base.errors import JobError

    try:
        yield
    except OSError as error:
        raise JobError(f"cannot be written: {error.strerror or error}", file=str(file)) from None
