"""``plait lab slurm``: a Slurm of one's own to try things on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal

if TYPE_CHECKING:
    from plait.api.labs import SlurmCluster, SlurmSpec

app = typer.Typer(no_args_is_help=True, help="Start a real Slurm of emulated nodes on this machine; switch nodes off.")

Name = Annotated[str | None, typer.Option(help="Name of the Slurm, when several run.")]


@app.command()
def up(
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.", show_default="8, or the topology's")] = None,
    topology: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="As plait topology reads it.", show_default="leaves of two nodes"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the Slurm.")] = "slurm",
) -> None:
    """Start a real Slurm of some nodes on this machine, and say how to reach it.

    Nodes are namespaces with a name and an address of the loopback network each. Needs root, and Slurm's
    programs: apt-get install --no-install-recommends munge slurmctld slurmd slurm-client
    """
    from plait.api.labs import SlurmSpec, start_slurm
    from plait.core.base.text import counted

    spec = _spec(topology, nodes) if topology else SlurmSpec.tree(8 if nodes is None else nodes)
    cluster = start_slurm(spec, name)
    idle = f"{counted(len(cluster.nodes), 'node')} {'is' if len(cluster.nodes) == 1 else 'are'} idle"
    terminal.text(f"{name}: {idle}. To use it, in this shell:")
    _variables(cluster)


def _spec(file: Path, nodes: int | None) -> SlurmSpec:
    """The cluster of a topology in any form that is read, checked as everywhere; a tree."""
    from plait.api.labs import slurm_spec
    from plait.api.topologies import read_topology

    topology, remarks = read_topology(str(file))
    terminal.remarked(remarks.notes, remarks.over)
    return slurm_spec(topology, str(file), nodes)


@app.command()
def down(name: Name = None) -> None:
    """End a cluster and everything that runs on its nodes."""
    from plait.api.labs import end_slurm, find_slurm

    cluster = find_slurm(name)
    end_slurm(cluster)
    typer.echo(f"{cluster.name}: ended")


@app.command("list")
def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the clusters that run here, and the state of their nodes."""
    from plait.api.labs import running_slurms
    from plait.core.base.text import counted

    clusters = running_slurms()
    if as_json:
        shown = [
            {"name": one.name, "pid": one.keeper, "conf": str(one.conf), "nodes": one.states()} for one in clusters
        ]
        typer.echo(json.dumps(shown, indent=2))
        return
    if not clusters:
        typer.echo("no emulated cluster is running")
    for cluster in clusters:
        terminal.say(
            f"{cluster.name}  {counted(len(cluster.nodes), 'node')}  pid {cluster.keeper}  SLURM_CONF={cluster.conf}"
        )
        for node, state in cluster.states().items():
            terminal.say(f"  {node}  {state}")


@app.command()
def env(name: Name = None) -> None:
    """Print what to set to use a cluster: eval "$(plait lab slurm env)"."""
    from plait.api.labs import find_slurm

    _variables(find_slurm(name))


@app.command()
def cut(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Such as n3.")],
    name: Name = None,
) -> None:
    """Switch a node off, with everything that runs on it."""
    from plait.api.labs import find_slurm

    find_slurm(name).cut(node)
    typer.echo(f"{node} is off")


@app.command()
def heal(name: Name = None) -> None:
    """Switch on every node that is off."""
    from plait.api.labs import find_slurm

    find_slurm(name).heal()
    typer.echo("all nodes are on")


def _variables(cluster: SlurmCluster) -> None:
    import shlex

    for key, value in cluster.variables.items():
        typer.echo(f"export {key}={shlex.quote(value)}")
