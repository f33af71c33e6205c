"""``plait view``: runs as a page in a browser, live or finished."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal

SIGNS = ("plan.json", "job.toml", "rings", "timeline")
"""Files and folders, at least one of which a run's folder has as soon as the run is started."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def view(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; of several, one can be chosen on the page.")],
    host: Annotated[
        str, typer.Option(help="Address to listen at. Only this machine can reach the default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for any that is free.")] = 8050,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page of one run to FILE.html, which needs no server, and end."),
    ] = None,
) -> None:
    """Show runs as a page in a browser, live or finished: heat map, timeline, the ranks' grid, step
    time and loss, memory, predicted against measured, attempts, and what plait diagnose says.

    Ctrl-C ends it. Example: plait view runs/quickstart --save page.html
    """
    from plait.core.runs.folder import check_run_folder
    from plait.view.store import watch

    if save:
        _save(runs, save)
        return
    for run in runs:
        check_run_folder(run)
    for run in runs:
        if not any((run / sign).exists() for sign in SIGNS):
            terminal.text(
                f"{run} holds no run yet: no plan.json, no rings, no timeline. The page waits for them; if no run is "
                "to be started there, name another folder."
            )
    watched = watch(runs)
    for one in watched:
        one.look()  # reads in a thread while the modules below load
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


def _save(runs: list[Path], out: Path) -> None:
    """Write the page of a run as one file."""
    from plait.core.base.errors import JobError
    from plait.view.report import report_run

    if len(runs) > 1:
        raise JobError(f"{len(runs)} runs do not fit on one saved page", key="--save", fix="Name one run")
    if out.suffix not in (".html", ".htm"):
        raise JobError(f"'{out.name}' is no name for a page", key="--save", fix="Name it NAME.html")
    size, over = report_run(runs[0], out)
    terminal.passed_over(over)
    terminal.say(f"{out}: {size / 2**20:.1f} MiB")
