"""``plait measure``: rates of a machine or a cluster, and the cost of spreading groups; ``plait
calibrate``: refits a cluster's constants to recordings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import App, AsJson, Settings
from plait.core.base.numbers import Count, Natural, Positive

if TYPE_CHECKING:
    from plait.api.spreading import SpreadAnswer

app = App("Measure a machine or a cluster, for plans and placements.")


@dataclass(frozen=True)
class MeasurementSettings(Settings):
    """Settings for the ranks that measure, and for the duration."""

    world_size: Annotated[
        Count | None, "How many ranks, on this machine: the job's; else one for each GPU or core."
    ] = None
    nodes_per_minipod: Annotated[Natural, "Nodes below one leaf switch, to measure across minipods as well."] = 0
    seconds: Annotated[Positive, "How long to measure, at most; more measures larger messages."] = 60.0


@dataclass(frozen=True)
class ProfileOptions:
    """Options for the launch target, and for files."""

    on: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Where: local, or lab:HOSTSxRANKS@RATE for an emulated cluster, such as lab:2x2@1gbit.",
        ),
    ] = "local"
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where the profile goes.")] = Path(
        "profile.json"
    )
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Measure nothing: read nccl-tests logs, Galvatron's bandwidth files, profiles. Repeatable; all become "
            "one profile.",
        ),
    ] = None


@app.command("machine")
def machine(
    measured: MeasurementSettings,
    options: ProfileOptions,
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="A job file: its layer, precision and device are measured.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure collectives and computation into a profile.

    Measured are collectives, matrix products, attention, one layer's modules, and what they lose
    side by side. On several machines start the ranks with torchrun: docs/profile.md.

    Examples:
        plait measure machine job.toml
        plait measure machine --on lab:2x2@1gbit seconds=10 -o lab.json
    """
    from plait.api.places import place_of
    from plait.api.profiling import ProfileRequest, import_profile, profile_machine
    from plait.core.base.errors import JobError
    from plait.core.base.files import check_target

    check_target(options.out, fix="Choose another with --out")
    if options.files:
        if job or measured.world_size or options.on != "local":
            fix = "Leave out the job, --on and world_size; or measure first, and import that profile as well"
            raise JobError("measures nothing", key="--import", fix=fix)
        found = import_profile(options.files, options.out)
    else:
        asked = ProfileRequest(job, measured.world_size, measured.seconds, measured.nodes_per_minipod)
        found = profile_machine(options.out, place_of(options.on), asked, quiet=as_json)
        if isinstance(found, int):
            raise typer.Exit(found)
    terminal.answer(found, as_json=as_json)
    if found.ignored is not None:
        terminal.passed_over(found.ignored)


@dataclass(frozen=True)
class NodeOptions:
    """Options for the nodes that measure, and for their minipods."""

    on: Annotated[
        str,
        typer.Option(metavar="PLACE", help="Where: lab:HOSTSxRANKS@RATE,PODSpods@RATE, or slurm inside of a job."),
    ] = "lab:4x1@1gbit,2pods@300mbit"
    topology: Annotated[
        str,
        typer.Option(metavar="FILE", help="The nodes' switches, in any form that is read.", show_default="the lab's"),
    ] = ""


@dataclass(frozen=True)
class TrialSettings(Settings):
    """Settings for the number of ranks, the repetitions and the duration."""

    nodes_per_minipod: Annotated[
        Natural, "Nodes below one leaf switch; ranks fill minipods in order. 0: the lab's."
    ] = 0
    world_size: Annotated[Count | None, "How many ranks, where --on does not say."] = None
    seconds: Annotated[Positive, "How long to measure collectives, at most."] = 60.0
    rounds: Annotated[Count, "How often a job runs in every order, by turns."] = 3
    seed: Annotated[int, "Seed of the random order."] = 0


@dataclass(frozen=True)
class OutputOptions:
    """Options for the files that are written."""

    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where the result goes, as JSON.")] = Path(
        "placement-profile.json"
    )
    affinity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append the job's row, for place.affinity = FILE.",
            show_default="of a cluster, not of a lab: your own file, which plait place knows",
        ),
    ] = None
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what spreading costs, for place.network = FILE.")
    ] = None
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw to this file: .svg, .png or .pdf.")] = None

    def write(self, found: SpreadAnswer) -> None:
        """Write all files but the profile itself."""
        if self.affinity:
            found.append_affinity(self.affinity)
        if self.network:
            found.write_network(self.network)
        if self.draw:
            found.draw(self.draw)

    def lines(self) -> Iterator[str]:
        """Yield a sentence for each file."""
        files = {"all of it": self.out, "the job's row": self.affinity, "the network": self.network}
        for content, file in (files | {"a picture": self.draw}).items():
            if file:
                yield f"{file} has {content}."


@app.command("placement")
def placement(
    nodes: NodeOptions,
    results: OutputOptions,
    trials: TrialSettings,
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="A job file: also time its steps by placement.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what spreading over minipods costs.

    Measured are collectives by how many minipods groups spread over, what two jobs lose that share
    the core, and a job's steps by placement.

    Examples:
        plait measure placement --on lab:4x1@1gbit,2pods@300mbit seconds=20
        plait measure placement job.toml --affinity mine.toml
    """
    from plait.api.pictures import check_format
    from plait.api.places import place_of
    from plait.api.spreading import profile_spread, time_by_placement
    from plait.core.base.errors import JobError

    if results.draw:
        check_format(results.draw)
    if results.affinity and not job:
        raise JobError("needs a job", key="--affinity", fix="Name a job file, whose steps are timed")
    said = None if as_json else terminal.say
    found = profile_spread(
        results.out, place_of(nodes.on), trials.nodes_per_minipod, trials.world_size, trials.seconds, quiet=as_json
    )
    if isinstance(found, int):
        raise typer.Exit(found)
    if job:
        found = found.with_job(
            time_by_placement(job, nodes.on, nodes.topology, rounds=trials.rounds, seed=trials.seed, report=said)
        )
        found.profile.write(results.out)
    if job and not results.affinity and place_of(nodes.on).lab is None:
        results = replace(results, affinity=found.own_affinity)
    results.write(found)
    terminal.answer(found, as_json=as_json)
    for line in () if as_json else results.lines():
        terminal.text(line)


def calibrate(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Folders of runs; logs of Megatron-LM, torchtitan, nccl-tests; traces of PyTorch; profiles; "
            "configurations of logs; section.key=value of logs.",
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Whose constants to begin with: a preset or a file.", show_default="the first run's"
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where the cluster goes.")] = Path(
        "cluster.toml"
    ),
    force: Annotated[
        bool, typer.Option("--force", help="Write the cluster even where its constants explain most runs badly.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Refit a cluster's constants to runs, logs and traces.

    The next plan is then nearer to what steps take.

    Examples:
        plait calibrate runs/first
        plait calibrate train.log nccl.log trace.json --cluster h100 -o ours.toml
    """
    from plait.api.calibrating import calibrate_cluster

    overrides = [one for one in files if "=" in one and not Path(one).exists()]
    paths = [Path(one) for one in files if one not in overrides]
    found = calibrate_cluster(paths, out, cluster, overrides, force=force)
    terminal.answer(found, as_json=as_json)
    terminal.passed_over(found.ignored)
