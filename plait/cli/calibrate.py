"""``plait calibrate``: what a cluster's constants are, by runs that were recorded on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plait.plan.recorded import Recorded, Refitted


OUT = "Choose another with --out"


def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs on one cluster.")],
    cluster: Annotated[
        str | None,
        typer.Option(help="Whose constants to begin with: a preset or a file.", show_default="the first run's"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the cluster goes.")] = Path("cluster.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Refit a cluster's constants to recorded runs, so that the next plan is nearer to what they took.

    Example: plait calibrate runs/first runs/second; plait plan job.toml cluster.file=cluster.toml
    """
    from plait.api.planning import calibrate_cluster
    from plait.core.base.codec.toml_text import to_toml
    from plait.core.base.files import check_target, explained, replacing

    check_target(out, fix=OUT)
    recorded, found = calibrate_cluster(runs, cluster)
    with explained(f"{out} cannot be written", fix=OUT), replacing(out) as partial:
        partial.write_text(to_toml(found.cluster.model_dump(mode="json", exclude_none=True)))
    _show(recorded, found, out, as_json)


def _show(recorded: list[Recorded], found: Refitted, out: Path, as_json: bool) -> None:
    from plait.cli import terminal

    rows = list(zip(recorded, found.before.tolist(), found.after.tolist(), strict=True))
    if as_json:
        values = [{"run": run.folder, "measured": run.seconds, "before": a, "after": b} for run, a, b in rows]
        terminal.say(json.dumps({"cluster": str(out), "runs": values, "moved": dict(found.moved)}))
        return
    terminal.title("Seconds of a step")
    table = [
        (
            run.folder,
            f"{run.seconds:.4g}",
            f"{a:.4g}",
            f"{a / run.seconds - 1:+.1%}",
            f"{b:.4g}",
            f"{b / run.seconds - 1:+.1%}",
        )
        for run, a, b in rows
    ]
    terminal.table(("run", "measured", "predicted before", "", "after", ""), table)
    terminal.title("Constants that moved")
    terminal.table(("constant", "was", "is"), [(name, f"{a:.4g}", f"{b:.4g}") for name, (a, b) in found.moved.items()])
    terminal.text(f"The cluster is in {out}; plans use it with cluster.file={out}.")
