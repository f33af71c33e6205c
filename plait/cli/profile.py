"""``plait profile``: what this machine, or a cluster, does in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from plait.cli.profile_placement import placement

if TYPE_CHECKING:
    from plait.core.cluster.profile import ModulePhase, Profile

PHASES: tuple[ModulePhase, ...] = ("forward", "input gradient", "weight gradient")


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
    from plait.api.places import place_of
    from plait.api.profiling import profile_machine
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
        status = profile_machine(
            out, job, place_of(on), ranks=ranks, seconds=seconds, nodes_per_minipod=nodes_per_minipod, quiet=as_json
        )
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
