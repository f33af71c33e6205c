"""``plait view``: runs as a page in a browser, live or finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import terminal

if TYPE_CHECKING:
    from plait.core.job.plan import Plan
    from plait.diagnose.reading import Run
    from plait.plan.simulate import Simulated
    from plait.view.store import Hang, Told, Tools

RINGS = 64
"""Rings of a run that goes on that are read to say what its ranks are at, at most: each has megabytes."""
SIGNS = ("plan.json", "job.toml", "rings", "timeline")
"""Of which a run's folder has one as soon as it is started."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def view(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; of several, one can be chosen on the page.")],
    host: Annotated[
        str, typer.Option(help="Address to listen at. Only this machine can reach the default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8050,
) -> None:
    """Show runs as a page in a browser, live or finished: heat map, timeline, the ranks' grid, step time and
    loss, memory, predicted against measured, attempts, and what plait diagnose says.

    Ctrl-C ends it.
    """
    from plait.core.base.errors import DataError
    from plait.view.store import watch

    for run in runs:
        if not run.is_dir():
            raise DataError(f"{run}: no such run folder")
    for run in runs:
        if not any((run / sign).exists() for sign in SIGNS):
            terminal.text(
                f"{run} holds no run yet: no plan.json, no rings, no timeline. The page waits for them; if no run is "
                "to be started there, name another folder."
            )
    watched = watch(runs, tools())
    for one in watched:
        one.look()  # in a thread, while what follows is loaded
    from plait.view.app import make_app, make_server

    server = make_server(make_app(watched, local=host in LOOPBACK), host, port)
    if host not in LOOPBACK:
        terminal.text(f"Whoever reaches {host} can read these runs: there is no password.")
    shown = f"[{host}]" if ":" in host else host
    terminal.say(f"http://{shown}:{server.port}/  (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def tools() -> Tools:
    """What the page needs of other folders of Plait. Simulated plans are kept."""
    from plait.cli.diagnose import predicted_memory
    from plait.view.store import Tools

    simulated: dict[str, Simulated | None] = {}

    def predicted(plan: Plan, ranks: Sequence[int]) -> Any:
        from plait.core.base.errors import PlaitError
        from plait.diagnose.compare import table_of
        from plait.diagnose.recording import grid_of, with_axes
        from plait.plan.simulate import simulate_plan

        if plan.key not in simulated:
            try:
                simulated[plan.key] = simulate_plan(plan)
            except PlaitError:
                simulated[plan.key] = None
        found = simulated[plan.key]
        if found is None:
            return None
        places = {op.stage: place for place, ops in enumerate(plan.schedule.ranks) for op in ops}
        table = table_of(found.timeline((1,), list(ranks)))
        return with_axes(table, grid_of(plan.layout), plan.shardings, places)

    return Tools(explain=_explained, hang=_hang, predicted=predicted, memory=predicted_memory)


def _explained(run: Run) -> Told:
    from plait.cli import diagnose_page
    from plait.cli.diagnose import report_of
    from plait.view.store import Told

    report = report_of(run)
    with terminal.captured() as lines:
        diagnose_page.show(report)
    return Told(text="\n".join(lines), report=report)


def _hang(folder: Path) -> Hang | None:
    """What the launcher found; of a run that goes on, what its rings say."""
    from plait.cli.hang import deadlines_of
    from plait.core.runs.evidence import FILE, read_hang
    from plait.core.runs.ring_calls import RINGS as FOLDER
    from plait.diagnose.hang import localise
    from plait.launch.gather import gather
    from plait.view.store import is_live

    if (folder / FILE).exists():
        return read_hang(folder / FILE)
    if not is_live(folder) or not 0 < len(list((folder / FOLDER).glob("rank-*.ring"))) <= RINGS:
        return None
    gathered = gather(folder)
    world = len(gathered.evidence)
    return localise(gathered.evidence, world=world, **deadlines_of(folder)), gathered.evidence
