"""``plait topology``: shows a cluster's network and the states of its nodes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import terminal
from plait.cli.commands import App, AsJson, Draw, Group, Settings
from plait.core.base.numbers import Count, Natural

if TYPE_CHECKING:
    from plait.api.topologies import TopologyAnswer


class _ShowsFiles(Group):
    """A group of commands that takes any other word as a file to show: ``plait topology FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; put ``show`` before a word that is no command."""
        if args and not {"--help", *self.commands} & {args[0]}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = App(
    "Show, convert or make up a cluster's switches and nodes.\n\n'plait topology FILE' shows one.", cls=_ShowsFiles
)
LevelOption = Annotated[
    str, typer.Option(metavar="LEVEL", help="Down to here: its name, or how far below the top.", show_default="by size")
]


@dataclass(frozen=True)
class TopologyReading(Settings):
    """Settings for the reading of a topology, and for further facts about its nodes."""

    format: Annotated[str, "Format of the file, if not found by its content."] = ""
    name: Annotated[str, "Which of several topologies of a file."] = ""
    levels: Annotated[str, "Kubernetes: labels that name switches, the outermost first, with commas."] = ""
    states: Annotated[tuple[str, ...], "A file that says what nodes are doing: sinfo, squeue, ... Repeatable."] = ()
    tolerate: Annotated[tuple[str, ...], "Kubernetes: a taint that keeps no job of yours away. Repeatable."] = ()


@dataclass(frozen=True, kw_only=True)
class Generated(Settings):
    """Settings of a generated cluster: its size, the share of nodes in use, and the hardware of a
    node and of a leaf."""

    minipods: Annotated[Count, "Switches below the top."]
    nodes: Annotated[Count, "Nodes of all minipods together."]
    nodes_per_leaf: Annotated[Count, "Nodes of a full leaf."] = 16
    uneven: Annotated[float, "How far sizes of minipods are from the mean, as a part of it."] = 0.0
    busy: Annotated[float, "Part of the nodes that jobs hold; minipods differ by Beta."] = 0.0
    down: Annotated[float, "Part of the nodes that are down."] = 0.0
    seed: Annotated[int, "The same makes the same cluster."] = 0
    gpus_per_node: Annotated[Natural, "GPUs of a node."] = 8
    nics_per_node: Annotated[Natural, "NICs of a node, each on a rail of its own."] = 8
    uplinks: Annotated[Natural, "Uplinks of a leaf, on each rail. 0: unknown."] = 0


@dataclass(frozen=True)
class Output:
    """Options for the output of a topology."""

    level: LevelOption = ""
    draw: Draw = None
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="Write it: .toml, .json, .conf (Slurm), .yaml (Slurm), or by --as."
        ),
    ] = None
    convert: Annotated[
        str,
        typer.Option("--as", metavar="FORM", help="Print it as toml, json, topology.conf or topology.yaml instead."),
    ] = ""
    as_json: AsJson = False


@app.command()
def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A file of any format; - for standard input; slurm: or kubernetes: to ask one."
        ),
    ],
    reading: TopologyReading,
    output: Output,
    groups: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON of node to group: colours of --draw, and their spread.")
    ] = None,
) -> None:
    """Show a topology, convert it, or draw it.

    Examples:
        plait topology show topology.conf states=nodes.txt --draw cluster.svg
        plait topology topology.conf --as toml -o cluster.toml
    """
    from plait.api.topologies import TopologyAnswer, read_groups, read_topology

    topology, remarks = read_topology(
        file,
        form=reading.format,
        name=reading.name,
        levels=tuple(word.strip() for word in reading.levels.split(",") if word.strip()),
        states=reading.states,
        tolerated=reading.tolerate,
    )
    placed = read_groups(groups) if groups else {}
    _output(TopologyAnswer(topology, output.level, placed, remarks), output)
    terminal.remarked(remarks.notes, remarks.over)


@app.command()
def generate(cluster: Generated, output: Output) -> None:
    """Make up a cluster, fragmented as real ones are.

    Examples:
        plait topology generate minipods=4 nodes=128
        plait topology generate minipods=11 nodes=1019 busy=0.4 seed=3 -o cluster.toml
    """
    from plait.api.topologies import MinipodSizes, TopologyAnswer, generate_topology
    from plait.core.topology.switches import Hardware

    sizes = MinipodSizes(
        minipods=cluster.minipods, nodes=cluster.nodes, leaf_nodes=cluster.nodes_per_leaf, uneven=cluster.uneven
    )
    hardware = Hardware(gpus=cluster.gpus_per_node, nics=cluster.nics_per_node, rails=cluster.nics_per_node)
    topology = generate_topology(
        sizes, busy=cluster.busy, down=cluster.down, seed=cluster.seed, hardware=hardware,
        uplinks=cluster.uplinks or None,
    )  # fmt: skip
    _output(TopologyAnswer(topology, output.level), output)


def _output(answer: TopologyAnswer, output: Output) -> None:
    """Draw, write, print or show a topology."""
    out, convert, as_json = output.out, output.convert, output.as_json
    for file in output.draw or []:
        with _written(file):
            answer.draw(file)
    if out:
        with _written(out):
            answer.write(out, convert)
    if convert and not out and not as_json:
        typer.echo(answer.to_text(convert), nl=False)
    else:
        terminal.answer(answer, as_json=as_json)


@contextmanager
def _written(file: Path) -> Generator[None]:
    from plait.core.base.errors import JobError

    try:
        yield
    except OSError as error:
        raise JobError(f"cannot be written: {error.strerror or error}", file=str(file)) from None
