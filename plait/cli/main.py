"""``plait``: every verb, and the form of error messages."""

from __future__ import annotations

import errno
import io
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from plait import __version__
from plait.cli import (
    check,
    data,
    diagnose,
    init,
    lab,
    measure,
    place,
    plan,
    queue,
    reshard,
    runs,
    schedule,
    terminal,
    topology,
    train,
)
from plait.cli.commands import App
from plait.core.base.errors import JobError, PlaitError, naming_extras

_PATH_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of a path that the user named, or of its disk, wherever they are raised."""
REMOVED = {
    r"lab slurm": "Try a run with plait train JOB --on lab:2x1@1gbit, or with plait lab run",
    r"place .*--(compare|literal)": "benchmarks/baselines in Plait's repository has other ways to place",
    r"(place|plan|train) .*place\.method=(mip|brute-force|\w+-fit|gpu-packing|topology-aware)": (
        "Use exact, cpsat or program; benchmarks/baselines has the others"
    ),
    r"\w+ .*recipe\.expert_tensor_parallel_size=1": "Use strategy.etp=1",
    r"export .*--format": "Leave it out; torchtitan reads it with checkpoint.initial_load_in_hf = true",
    r"reshard .*\border=": "Leave it out: benchmarks/reshard.py in Plait's repository compares orders",
    r"queue fit .*--search": "In Plait's repository: python -m benchmarks.forecast_errors TRACE --search N",
    r"diagnose .*(--meta|\.parquet\b)": "In Plait's repository: python -m benchmarks.published_trace TRACE META.yaml",
}
"""Advice by patterns of command lines whose option, setting or command was removed."""

app = App(
    "Plan, place, train and diagnose large-language-model training when the network is what you wait for.",
    completion=True,
)
HEADINGS: dict[str, dict[str, Any]] = {
    "Start": {"init": init.init, "plan": plan.plan, "train": train.train, "diagnose": diagnose.diagnose},
    "Runs": {
        "view": runs.view, "runs": runs.runs, "logs": runs.logs, "stop": runs.stop, "sample": train.sample,
        "export": train.export,
    },
    "Clusters and machines": {
        "doctor": check.doctor, "check": check.check, "measure": measure.app, "calibrate": measure.calibrate,
        "topology": topology.app, "place": place.place, "reserve": place.reserve, "queue": queue.app, "lab": lab.app,
    },
    "Tools": {
        "job": init.job, "data": data.app, "schedule": schedule.schedule, "reshard": reshard.reshard,
        "trace": diagnose.trace,
    },
}  # fmt: skip
"""Commands and groups of commands by their names, under the headings of the first help page."""
for heading, commands in HEADINGS.items():
    for name, command in commands.items():
        if isinstance(command, App):
            app.add_typer(command, name=name, rich_help_panel=heading)
        else:
            app.command(name, rich_help_panel=heading)(command)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def refuse_removed(words: Sequence[str]) -> None:
    """Raise JobError for what was removed. words: the command line behind ``plait``."""
    line = " ".join(words)
    for pattern, instead in REMOVED.items():
        if found := re.match(pattern, line):
            raise JobError("was removed", key=f"plait {found[0]}", fix=instead)


def main() -> None:
    """Run the command line. An error that Plait raises is printed as one paragraph; a bug prints
    its traceback."""
    terminal.prepare()
    try:
        refuse_removed(sys.argv[1:])
        with naming_extras("this command"):
            app(prog_name="plait")
    except PlaitError as error:
        print(terminal.fitted(f"plait: {error}", sys.stderr), file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno in _PATH_ERRNOS and error.filename is not None:
            print(terminal.fitted(f"plait: {error.filename}: {error.strerror}", sys.stderr), file=sys.stderr)
            sys.exit(2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stdout = io.StringIO()  # else Python would try at exit to write the rest
        told = f"plait: what is printed cannot be written: {error.strerror}. Send it elsewhere, or make room."
        print(terminal.fitted(told, sys.stderr), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
