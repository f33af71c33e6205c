"""``plait profile``: what this machine, or a cluster, does in a second."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from plait.cli.profile_placement import placement
from plait.core.base import programs

if TYPE_CHECKING:
    from plait.api.places.base import Place
    from plait.core.cluster.profile import ModulePhase, Profile
    from plait.core.job.spec import Job

LEAST_SECONDS = 5.0
TIMEOUT = 600.0
"""Seconds that a rank may be silent."""
PHASES: tuple[ModulePhase, ...] = ("forward", "input gradient", "weight gradient")
MOST_RANKS, MOST_EACH = 64, 8
"""Ranks that are started here, and on each core."""
MOST_HERE = 8
"""Ranks on a CPU, where nobody says how many."""


class _Measures(TyperGroup):
    """Without ``placement``, everything else: ``plait profile [JOB]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As ``machine [JOB]``."""
        if not args or args[0] not in self.commands:
            args = ["machine", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Measures, help="Measure this machine or a cluster; placement: what spreading over it costs.")
app.command("placement")(placement)


@app.command("machine")
def profile(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="A job file: its layer, precision and device are measured.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="Where: local, or lab:HOSTSxRANKS@RATE for an emulated cluster, such as lab:2x2@1gbit.")
    ] = "local",
    ranks: Annotated[
        int | None, typer.Option(help="How many here.", show_default="the job's; else one for each GPU or core")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the profile goes.")] = Path("profile.json"),
    seconds: Annotated[float, typer.Option(help="How long to measure, at most; more measures larger messages.")] = 60.0,
    nodes_per_minipod: Annotated[
        int, typer.Option(help="Nodes below one leaf switch, to measure across minipods as well.")
    ] = 0,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Measure nothing: read nccl-tests logs, Galvatron's bandwidth files, "
            "profiles. May be repeated; all become one profile.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Measure collectives, matrix products, attention, one layer's modules, and what they lose side by side.

    The result is what plans rest on. On several machines start the ranks with torchrun: docs/profile.md.

    Examples: plait profile; plait profile --on lab:2x2@1gbit; plait profile --import all_reduce.log
    What spreading over minipods costs: plait profile placement --help
    """
    from plait.cli import terminal
    from plait.core.base.files import check_target, explained
    from plait.core.base.passed_over import PassedOver
    from plait.core.cluster.profile import Profile

    over: PassedOver | None = None
    check_target(out, fix="Choose another with --out")
    if files:
        from plait.core.base.errors import JobError
        from plait.plan.profile_import import import_profiles

        if job or ranks or on != "local":
            fix = "Leave out the job, --on and --ranks; or measure first, and import that profile with the other files"
            raise JobError("measures nothing", key="--import", fix=fix)
        over = PassedOver()
        found = import_profiles(files, over)
        with explained(f"{out} cannot be written", fix="Choose another with --out"):
            found.write(out)
    else:
        status = _measure(job, on, ranks, out, seconds, nodes_per_minipod, quiet=as_json)
        if status:
            raise typer.Exit(status)
        found = Profile.read(out)
    if as_json:
        said = {} if over is None else {"passed_over": over.rows()}
        typer.echo(json.dumps({"profile": str(out), "hash": found.hash, **_summary(found), **said}))
    else:
        _print(found, out)
    if over is not None:
        terminal.passed_over(over)


def _measure(
    file: Path | None, on: str, ranks: int | None, out: Path, seconds: float, minipod: int, *, quiet: bool
) -> int:
    """Start the ranks and wait for them; the exit status. Their logs stay where something went wrong."""
    from plait.api.places import place_of
    from plait.api.ranks import Ranks
    from plait.core.base.errors import JobError
    from plait.core.base.files import explained
    from plait.core.job.spec import Job

    if not LEAST_SECONDS <= seconds < 1e6:
        raise JobError(f"{seconds:g} is not allowed", key="--seconds", fix=f"Allowed: at least {LEAST_SECONDS:g}")
    if minipod < 0:
        raise JobError(f"{minipod} is not allowed", key="--nodes-per-minipod", fix="Allowed: at least 0")
    job = Job.read(file) if file else None
    place = place_of(on)
    world = _ranks(ranks, job, place)
    arguments = ["--out", str(out.absolute()), "--seconds", str(seconds)]
    arguments += ["--job", str(file.absolute())] if file else []
    arguments += ["--nodes-per-minipod", str(minipod)] if minipod else []
    arguments += ["--quiet"] if quiet else []
    logs = out.with_name(f"{out.name}.logs")
    with explained(f"{logs} cannot be made", fix="Choose another with --out"):
        logs.mkdir(parents=True, exist_ok=True)
    timeout = job.run.timeout if job else TIMEOUT
    status = place.run(Ranks(module=programs.PROFILER, arguments=arguments, world=world, logs=logs, timeout=timeout))
    shutil.rmtree(logs, ignore_errors=True)
    return status


def _ranks(asked: int | None, job: Job | None, place: Place) -> int:
    from plait.core.base.errors import JobError
    from plait.core.base.process import usable_cores
    from plait.plan.this_machine import ranks_here

    if asked is not None and asked < 1:
        raise JobError(f"{asked} is not allowed", key="--ranks", fix="Allowed: at least 1")
    if place.world is not None:
        if asked not in (None, place.world):
            raise JobError(f"{asked} are not the {place.world} ranks of --on", key="--ranks", fix="Leave it out")
        return place.world
    if asked is not None:
        most = max(MOST_RANKS, MOST_EACH * usable_cores())
        if asked > most:
            fix = "Ranks are processes of this machine; on several, start them with torchrun (docs/profile.md)"
            raise JobError(f"{asked:,} are more than the {most:,} that are started here", key="--ranks", fix=fix)
        return asked
    if job:
        return ranks_here(job.run.device, on_cpu=job.world_size)
    return ranks_here("auto", on_cpu=min(MOST_HERE, usable_cores()))


# ---- what it says ----


def _summary(found: Profile) -> dict[str, Any]:
    """The table as plain values: seconds, bytes per second, FLOP/s."""
    products = sorted(one.rate for one in found.products)
    return {
        "machine": found.machine.model_dump(),
        "date": found.date,
        "collectives": [
            {
                "kind": curve.kind,
                "group": curve.group.model_dump(),
                "layout": str(curve.group),
                "latency": curve.latency,
                "bandwidth": curve.bandwidth,
                "bytes": curve.points[-1].bytes,
            }
            for curve in found.collectives
        ],
        "products": {"slowest": products[0], "fastest": products[-1]} if products else None,
        "memory": max((one.bytes / one.seconds for one in found.passes), default=None),
        "modules": [
            {"site": one.site, "phase": one.phase, "tp": one.tp, "seconds": one.seconds} for one in found.modules
        ],
        "overlaps": [
            {
                "kind": one.kind,
                "layout": str(one.group),
                "computation": one.computation,
                "communication": one.communication,
            }
            for one in found.overlaps
        ],
    }


def _print(found: Profile, out: Path) -> None:
    from plait.cli import terminal

    machine = found.machine
    where = f"{machine.ranks} ranks, {machine.ranks_per_node} on a node" if machine.ranks > 1 else "1 rank"
    terminal.title(f"{machine.device or machine.kind}: {where}, {machine.backend}")
    if found.collectives:
        rows = [
            (one.kind, str(one.group), _time(one.latency), _size(one.points[-1].bytes), f"{one.bandwidth / 1e9:.3g}")
            for one in sorted(found.collectives, key=lambda one: (one.group.nodes, one.group.ranks))
        ]
        terminal.table(("collective", "group", "latency", "largest", "GB/s"), rows)
    if found.overlaps:
        typer.echo()
        beside = [(one.kind, str(one.group), f"{one.computation:.2f}x", f"{one.communication:.2f}x")
                  for one in found.overlaps]  # fmt: skip
        terminal.table(("side by side", "group", "products take", "it takes"), beside)
    if found.modules:
        typer.echo()
        terminal.table(("module, ms", "tp", *PHASES), _modules(found))
    typer.echo()
    if found.products:
        slow, fast = (f(one.rate for one in found.products) for f in (min, max))
        terminal.text(
            f"matrix products: {_flops(slow)} to {_flops(fast)} in {found.products[0].precision}, by shape",
            indent="  ",
        )
    if found.passes:
        best = max(one.bytes / one.seconds for one in found.passes)
        terminal.text(f"memory: {best / 1e9:.3g} GB/s a rank")
    terminal.text(f"{out} holds it all")


def _modules(found: Profile) -> list[tuple[str, ...]]:
    """A row for each module and degree, a column for each phase."""
    taken = {(one.site, one.tp, one.phase): f"{one.seconds * 1e3:.3g}" for one in found.modules}
    rows = dict.fromkeys((one.site, one.tp) for one in found.modules)
    return [(site, str(tp), *(taken.get((site, tp, phase), "") for phase in PHASES)) for site, tp in rows]


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.3g} KiB"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
